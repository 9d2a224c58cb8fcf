"""One vLLM on the CPU with a connector, as a context manager."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parents[3]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def connector_config(**changes: Any) -> dict[str, Any]:
    return {
        "kv_connector": "TileRTConnector",
        "kv_connector_module_path": "integration.connector.dumping_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "tilert_profile": "mla",
            "tilert_transport": "mooncake",
            "tilert_protocol": "tcp",
            "tilert_local_host": "127.0.0.1",
            "tilert_allowed_hosts": ["127.0.0.1"],
            "tilert_staging_bytes": 64 << 20,
            "tilert_admission_timeout_s": 2,
            "tilert_send_timeout_s": 20,
        }
        | changes,
    }


@dataclass
class Vllm:
    url: str
    log: Path
    dumps: Path
    process: subprocess.Popen[bytes]

    async def prefill(self, prompt: list[int], **more: Any) -> dict[str, Any]:
        """One prefill as the router asks for it; `more` goes into the body."""
        body = {"model": "small", "prompt": prompt, "max_tokens": 1, "temperature": 0} | more
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.url}/v1/completions", json=body) as answer,
        ):
            assert answer.status == 200, await answer.text()
            return dict(await answer.json())

    async def metrics(self) -> dict[str, float]:
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return {
            name: float(value)
            for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")
        }


@contextlib.contextmanager
def vllm_server(model: Path, work: Path, transfer: dict[str, Any], *flags: str) -> Iterator[Vllm]:
    port, dumps = free_port(), work / "dumps"
    dumps.mkdir()
    log = work / "vllm.log"
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT / 'plugin'}:{ROOT / 'tests'}",
        "TILERT_TEST_DUMPS": str(dumps),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(model), "--served-model-name", "small", "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "float32", "--block-size", "16", "--max-model-len", "2048",
        "--compilation-config", '{"custom_ops":["none"]}', "--enforce-eager",
        "--kv-transfer-config", json.dumps(transfer), *flags,
    ]  # fmt: skip
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(url, process, log)
        yield Vllm(url, log, dumps, process)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(url: str, process: subprocess.Popen[bytes], log: Path, timeout_s: float = 240) -> None:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"vLLM ended with {process.returncode}:\n{log.read_text()[-4000:]}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2):
            return
        time.sleep(0.5)
    raise RuntimeError(f"vLLM did not come up:\n{log.read_text()[-4000:]}")

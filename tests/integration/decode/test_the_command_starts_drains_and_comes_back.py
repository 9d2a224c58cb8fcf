"""`tilertctl decode` tells systemd when it is ready, drains on SIGTERM, and comes back clean after SIGKILL."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from integration.decode.parts import HOST, Prefill, Running, prompt_of, tokens_of
from vllm_tilert.wire import api


def free_ports() -> tuple[int, int]:
    with socket.socket() as a, socket.socket() as b:
        a.bind((HOST, 0))
        b.bind((HOST, 0))
        return a.getsockname()[1], b.getsockname()[1]


class _Remote:
    """Stands where `Running` has its node: a node in another process."""


@contextlib.asynccontextmanager
async def command(
    model_dir: Path,
    tmp_path: Path,
    ports: tuple[int, int],
    transport: tuple[str, str] = ("mooncake", "tcp"),
) -> AsyncIterator[tuple[asyncio.subprocess.Process, Running]]:
    secret = tmp_path / "secret"
    secret.write_text("a shared secret\n")
    path = str(tmp_path / "notify")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(path)
        notify.setblocking(False)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "vllm_tilert.cli", "decode", "--engine", "reference", "--model", "mla"),
            *("--model-weights-dir", str(model_dir), "--max-seq-len", "512", "--host", HOST),
            *("--ctrl-port", str(ports[0]), "--http-port", str(ports[1]), "--transport", transport[0]),
            *("--protocol", transport[1], "--secret-file", str(secret), "--drain-s", "20"),
            env=os.environ | {"PYTHONPATH": ":".join(sys.path), "NOTIFY_SOCKET": path},
        )
        try:
            async with asyncio.timeout(120):
                assert await asyncio.get_running_loop().sock_recv(notify, 64) == b"READY=1"
            headers = {"authorization": "Bearer a shared secret"}
            async with aiohttp.ClientSession(headers=headers) as http:
                yield process, Running(_Remote(), ports[0], f"http://{HOST}:{ports[1]}", http)  # type: ignore[arg-type]
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


@pytest.fixture
def prompt() -> list[int]:
    return prompt_of(21, 60)


async def test_sigterm_lets_the_running_request_end_and_exits_0(
    prefill: Prefill, model_dir: Path, tmp_path: Path, prompt: list[int]
) -> None:
    expected = prefill.oracle.continuation(prompt, 200)
    async with command(model_dir, tmp_path, free_ports()) as (process, node):
        assert (await node.call(api.HEALTH))[0] == 200
        rid = api.new_rid()
        grant = await node.reserve(rid)
        await prefill.hand_off(node, rid, grant["generation"], prompt)
        answer = asyncio.ensure_future(node.stream(rid, expected[0], 200))
        while (await node.call(api.STATUS))[1]["slots"][0]["state"] != "decoding":
            await asyncio.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        while not (await node.call(api.STATUS))[1]["draining"]:
            await asyncio.sleep(0.005)
        status, refusal = await node.call(api.RESERVE, {"rid": api.new_rid(), "ahead": True})
        assert (status, refusal["error"]) == (503, "draining")
        assert tokens_of((await answer)[1]) == expected
        async with asyncio.timeout(15):
            assert await process.wait() == 0


async def test_a_killed_node_comes_back_clean_on_the_same_ports(
    prefill: Prefill, model_dir: Path, tmp_path: Path, prompt: list[int]
) -> None:
    expected = prefill.oracle.continuation(prompt, 32)
    ports = free_ports()
    async with command(model_dir, tmp_path, ports) as (process, node):
        rid = api.new_rid()
        grant = await node.reserve(rid)
        await prefill.hand_off(node, rid, grant["generation"], prompt)
        process.kill()
        await process.wait()
    async with command(model_dir, tmp_path, ports) as (_, node):
        assert (await node.call(api.STATUS))[1]["status"] == "idle"
        status, refusal = await node.call(api.DECODE, {"rid": rid, "first_token_id": 1})
        assert (status, refusal["error"]) == (409, "not_reserved")
        rid = api.new_rid()
        grant = await node.reserve(rid)
        assert await prefill.hand_off(node, rid, grant["generation"], prompt) == {"ok": True}
        assert tokens_of((await node.stream(rid, expected[0], 32))[1]) == expected

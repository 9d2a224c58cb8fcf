"""The router beside the stock one, with vllm-router and nginx as pass-through ceilings: same fakes, one run.

usage: bin/bench router [--only NAME,...] [--nodes 1,4,16,32] [--seconds 5] [--realtime]

The router runs alone on one core, the fakes and clients on another. Answers have 600 tokens at 600 tok/s a node,
accepted in bursts of 1 to 4 and flushed every millisecond; as many clients as nodes ask without pause. `direct` is
the harness talking to its own native fake: what it adds itself. vllm-router and nginx pass one OpenAI stream on;
ours and the stock one reserve or gate, prefill, decode and detokenise. Fetches the stock wheel and vllm-router's
when they are not there yet.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
import yaml

from contract.conftest import CACHE as STOCK
from contract.conftest import stock_path
from fakes.load import Client, Load, Reply, write_tokenizer

ROOT = Path(__file__).parents[2]
RATE, TOKENS = 600, 600
WAITING, ARRIVAL_S = 2000, 0.001
VLLM_ROUTER = "0.1.17"
CORES = sorted(os.sched_getaffinity(0))[:2]
PROBE = """
import socket, sys, time
port, until, worst, count = int(sys.argv[1]), time.time() + float(sys.argv[2]), 0.0, 0
while time.time() < until:
    start = time.perf_counter()
    try:
        with socket.create_connection(("127.0.0.1", port), 10) as s:
            s.settimeout(10)
            s.sendall(b"GET /health HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n")
            assert b" 200" in s.recv(64)
        worst = max(worst, time.perf_counter() - start)
    except (OSError, AssertionError):
        worst = float("inf")
        break
    count += 1
    time.sleep(0.02)
print(1e3 * worst)
"""


@dataclass(frozen=True)
class Ports:
    """Where the fakes listen."""

    prefill: int
    native: int
    nodes: tuple[int, ...]


Command = Callable[[Ports, int, Path], list[str]]


def ours(ports: Ports, port: int, folder: Path, **changes: Any) -> list[str]:
    config = {
        "listen": {"port": port},
        "model": {"name": "small", "tokenizer": str(folder), "max_model_len": 1 << 20},
        "prefill": [{"name": "p", "url": f"http://127.0.0.1:{ports.prefill}"}],
        "decode": [
            {"name": f"d{i}", "url": f"http://127.0.0.1:{p}", "host": "127.0.0.1", "ctrl_port": 5556}
            for i, p in enumerate(ports.nodes)
        ],
        "queue": {"max_waiting": 4096, "timeout_s": 600},
        "logs": {"level": "warning"},
    } | changes
    (folder / "router.yaml").write_text(yaml.safe_dump(config))
    return [sys.executable, "-m", "tilert_router.cli", "serve", str(folder / "router.yaml")]


def stock(ports: Ports, port: int, folder: Path) -> list[str]:
    decode = [f"127.0.0.1:5556:{p}" for p in ports.nodes]
    return [
        *(sys.executable, "-c", f"import sys; sys.path.insert(0, {str(STOCK)!r})\n"),
        *("--vllm-url", f"http://127.0.0.1:{ports.prefill}", "--decode", *decode, "--host", "127.0.0.1"),
        *("--port", str(port), "--model-path", str(folder), "--parser", "none", "--queue-timeout", "600"),
    ]


def vllm_router(ports: Ports, port: int, folder: Path) -> list[str]:
    return [
        *(
            sys.executable,
            "-m",
            "vllm_router.launch_router",
            "--worker-urls",
            f"http://127.0.0.1:{ports.native}",
        ),
        *("--port", str(port), "--policy", "round_robin", "--prometheus-port", str(free_port())),
        *("--max-concurrent-requests", "4096", "--log-level", "error"),
    ]


def nginx(ports: Ports, port: int, folder: Path) -> list[str]:
    (folder / "nginx.conf").write_text(f"""
daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/nginx.log;
events {{ worker_connections 8192; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s; client_body_buffer_size 1m;
  upstream native {{ server 127.0.0.1:{ports.native}; keepalive 64; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096; keepalive_requests 1000000;
    location / {{
      proxy_pass http://native; proxy_buffering off; proxy_http_version 1.1; proxy_set_header Connection "";
    }}
  }}
}}
""")
    return ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "nginx.log")]


SYSTEMS: dict[str, Command | None] = {
    "direct": None, "ours": ours, "stock": stock, "vllm-router": vllm_router, "nginx": nginx,
}  # fmt: skip
QUEUES = ("ours", "stock")
"""Those that hold requests back; the others pass them on."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fetch_vllm_router() -> Path:
    folder = ROOT / ".cache" / f"vllm-router-{VLLM_ROUTER}"
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
        subprocess.run([*command, f"vllm-router=={VLLM_ROUTER}"], check=True)
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            wheel.extractall(folder)
        (folder / "done").touch()
    return folder


class Process:
    """A router process and its children, on a core of their own."""

    def __init__(self, command: Sequence[str], env: dict[str, str], log: Path) -> None:
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                ["taskset", "-c", str(CORES[0]), *command], env=env, stdout=out, stderr=out
            )
        self._log = log

    def _pids(self) -> list[int]:
        pids = [self._process.pid]
        for pid in pids:
            with suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    pids += map(int, (task / "children").read_text().split())
        return pids

    def cpu_s(self) -> tuple[float, float]:
        """Seconds on the core so far, and seconds ready to run while something else had it; all threads."""
        ran = waited = 0
        for pid in self._pids():
            for task in Path(f"/proc/{pid}/task").iterdir():
                with suppress(OSError):
                    on, off = (task / "schedstat").read_text().split()[:2]
                    ran, waited = ran + int(on), waited + int(off)
        return ran / 1e9, waited / 1e9

    def rss_mb(self) -> float:
        found = 0
        for pid in self._pids():
            status = Path(f"/proc/{pid}/status").read_text()
            found += int(status.split("VmRSS:")[1].split()[0])
        return found / 1024

    def check(self) -> None:
        if self._process.poll() is not None:
            raise SystemExit(f"the router ended:\n{self._log.read_text(errors='replace')[-2000:]}")

    def stop(self) -> None:
        pids = self._pids()
        self._process.terminate()
        try:
            self._process.wait(3)
        except subprocess.TimeoutExpired:
            for pid in pids:
                with suppress(OSError):
                    os.kill(pid, 9)
            self._process.wait()


@dataclass
class Window:
    """What was seen in one stretch of time."""

    seconds: float
    tokens: int
    bursts: int
    cpu_s: float
    waited_s: float
    """The router was ready to run and something else had its core."""
    first_ms: list[float]
    lags_ms: list[float]
    ended: int
    failed: list[str]


def quantile(values: list[float], q: float) -> float:
    return statistics.quantiles(values, n=1000)[round(q * 1000) - 1] if len(values) > 1 else float("nan")


class Bench:
    """One system with its fakes and clients."""

    def __init__(self, name: str, load: Load, ports: Ports, port: int, process: Process | None) -> None:
        self.name, self.load, self.ports, self.port, self.process = name, load, ports, port, process
        self._serial = 0

    async def client(self) -> Client:
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(lambda: Client(self.load), "127.0.0.1", self.port)
        return client

    async def ask_on(self, tokens: int, replies: list[Reply]) -> None:
        """Ask without pause until cancelled; each answer, begun or whole, is in `replies`."""
        client = await self.client()
        while True:
            self._serial += 1
            name = f"#{self._serial}"
            over = client.ask(name, tokens)
            replies.append(self.load.replies[name])
            await over
            if replies[-1].failed:
                client.transport.abort()
                await asyncio.sleep(0.05)
                client = await self.client()

    async def window(self, clients: int, tokens: int, warm_s: float, seconds: float) -> Window:
        """Let `clients` ask without pause; what is seen after `warm_s`."""
        replies: list[Reply] = []
        tasks = [asyncio.create_task(self.ask_on(tokens, replies)) for _ in range(clients)]
        if tokens * clients / RATE > 1:
            # Not all in step: answers begin spread over the length of one.
            for _ in tasks[1:]:
                await asyncio.sleep(min(warm_s / 2, 1) / clients)
        await asyncio.sleep(warm_s)
        before = sum(r.received for r in replies)
        ran, waited = self.process.cpu_s() if self.process else (0.0, 0.0)
        bursts, start = self.load.bursts, time.perf_counter()
        await asyncio.sleep(seconds)
        end = time.perf_counter()
        if self.process:
            self.process.check()
            after = self.process.cpu_s()
            ran, waited = after[0] - ran, after[1] - waited
        seen = Window(
            seconds=end - start,
            tokens=sum(r.received for r in replies) - before,
            bursts=self.load.bursts - bursts,
            cpu_s=ran,
            waited_s=waited,
            first_ms=[1e3 * (r.first - r.asked) for r in replies if r.asked >= start and r.first],
            lags_ms=[1e3 * lag for r in replies for at, lag in r.lags if start <= at <= end],
            ended=sum(start <= r.ended <= end for r in replies),
            failed=[r.failed for r in replies if r.failed],
        )
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return seen

    async def crowd(self, streams: int, waiting: int) -> tuple[float, float]:
        """MB and the slowest /health in ms while `streams` run and `waiting` wait."""
        clients = [await self.client() for _ in range(streams)]
        for client in clients:
            self._serial += 1
            client.ask(f"#{self._serial}", 1 << 19)
        await asyncio.sleep(1)
        probe = await asyncio.create_subprocess_exec(
            *(sys.executable, "-S", "-c", PROBE, str(self.port), "12"), stdout=asyncio.subprocess.PIPE
        )
        for _ in range(waiting):
            await asyncio.sleep(ARRIVAL_S)
            client = await self.client()
            self._serial += 1
            client.ask(f"#{self._serial}", 100)
            clients.append(client)
        await asyncio.sleep(1)
        assert self.process is not None
        out, _ = await probe.communicate()
        rss = self.process.rss_mb()
        for client in clients:
            client.transport.abort()
        return rss, float(out)


@asynccontextmanager
async def running(name: str, nodes: int, rate: float, prefill_s: float = 0.0):
    """The system `name` in front of `nodes` fakes."""
    load = Load(rate, prefill_s)
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        ports = Ports(
            await load.listen(load.prefill),
            await load.listen(load.native),
            tuple(node.port for node in await load.nodes(nodes)),
        )
        ticking = asyncio.create_task(load.tick())
        command, process, port = SYSTEMS[name], None, ports.native
        if command is not None:
            port = free_port()
            argv = command(ports, port, Path(folder))
            if name == "stock":
                argv[2] += "from tilert.pd_vllm.pd_router import main; main()"
            env = os.environ | {"PYTHONPATH": f"{ROOT}/plugin:{ROOT}/router", "HF_HUB_OFFLINE": "1"}
            if name == "vllm-router":
                env["PYTHONPATH"] = str(fetch_vllm_router())
            process = Process(argv, env, Path(folder) / "log")
        try:
            if process:
                await answering(process, port)
            yield Bench(name, load, ports, port, process)
        finally:
            ticking.cancel()
            if process:
                process.stop()
            load.close()


@contextmanager
def before_others(realtime: bool = False):
    """Whatever else this machine does gets what is left of the two cores, where we may ask for that."""
    if realtime:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    group = Path("/proc/self/autogroup")
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    try:
        with suppress(OSError):
            group.write_text("-20")
        yield
    finally:
        with suppress(OSError):
            group.write_text("0")


async def answering(process: Process, port: int) -> None:
    """Wait until the router listens and has seen its nodes."""
    for _ in range(600):
        process.check()
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            await asyncio.sleep(2)
            return
        await asyncio.sleep(0.1)
    raise SystemExit("the router does not listen")


async def measure(name: str, counts: Sequence[int], seconds: float) -> dict[str, Any]:
    """All numbers of one system."""
    found: dict[str, Any] = {"name": name, "failed": []}
    short = full = None
    for count in counts:
        async with running(name, count, RATE) as bench:
            seen = await bench.window(count, TOKENS, 2, seconds)
            full = seen
            found["failed"] += seen.failed
            found[count] = {
                "tok_s": seen.tokens / seen.seconds,
                "first_ms": quantile(seen.first_ms, 0.5),
                "lag50_ms": quantile(seen.lags_ms, 0.5),
                "lag99_ms": quantile(seen.lags_ms, 0.99),
                "busy": seen.cpu_s / seen.seconds,
                "robbed": seen.waited_s / seen.seconds,
            }
            print(f"  {name} N={count}: {found[count]}", file=sys.stderr, flush=True)
    async with running(name, max(counts), 4 * RATE) as bench:
        seen = await bench.window(max(counts), 4 * TOKENS, 2, seconds)
        found["saturated"] = seen.tokens / seen.seconds
        found["saturated_busy"] = seen.cpu_s / seen.seconds
        found["failed"] += seen.failed
    if name != "direct":
        async with running(name, 4, RATE) as bench:
            short = await bench.window(4, 1, 1, seconds)
            found["failed"] += short.failed
        # Two runs, two unknowns: CPU = requests * a + bursts * b.
        assert full is not None
        det = full.ended * short.bursts - short.ended * full.bursts
        with suppress(ZeroDivisionError):
            found["request_ms"] = 1e3 * (full.cpu_s * short.bursts - short.cpu_s * full.bursts) / det
            found["chunk_us"] = 1e6 * (full.ended * short.cpu_s - short.ended * full.cpu_s) / det
        found["requests_s"] = short.ended / short.seconds
    if name in QUEUES:
        async with running(name, max(counts), RATE) as bench:
            waiting = WAITING if name == "ours" else 41
            found["waiting"] = waiting
            found["rss_mb"], found["health_ms"] = await bench.crowd(max(counts), waiting)
    print(f"  {name}: {found}", file=sys.stderr, flush=True)
    return found


def table(results: list[dict[str, Any]], counts: Sequence[int]) -> str:
    """The results as Markdown; what the router adds is against `direct` of the same run."""
    direct = next((r for r in results if r["name"] == "direct"), None)

    def number(value: float | None, digits: int = 1) -> str:
        return "" if value is None else "no answer" if value == float("inf") else f"{value:,.{digits}f}"

    def added(result: dict[str, Any], count: int, key: str) -> str:
        base = direct[count][key] if direct and result is not direct else 0.0
        return number(max(0.0, result[count][key] - base), 2)

    names = [r["name"] for r in results]
    rows: list[list[str]] = []
    for count in counts:
        offered = count * RATE
        rows.append([f"N={count}: tok/s of {offered:,}", *(number(r[count]["tok_s"], 0) for r in results)])
        for key, text in (("first_ms", "time to first chunk p50"), ("lag50_ms", "chunk latency p50"),
                          ("lag99_ms", "chunk latency p99")):  # fmt: skip
            rows.append([f"N={count}: added {text}, ms", *(added(r, count, key) for r in results)])
        rows.append([f"N={count}: core busy", *(f"{r[count]['busy']:.0%}" for r in results)])
        rows.append([f"N={count}: core taken by others", *(f"{r[count]['robbed']:.1%}" for r in results)])
    rows.append(["CPU per request, ms", *(number(r.get("request_ms"), 2) for r in results)])
    rows.append(["CPU per chunk, us", *(number(r.get("chunk_us")) for r in results)])
    rows.append(["one-token requests/s", *(number(r.get("requests_s"), 0) for r in results)])
    most = max(counts)
    rows.append(
        [
            f"tok/s of {4 * most * RATE:,} at N={most}, 4 times the rate",
            *(number(r["saturated"], 0) for r in results),
        ]
    )
    rows.append(["its core busy", *(f"{r['saturated_busy']:.0%}" for r in results)])
    rows.append(["waiting beside 32 streams", *(str(r.get("waiting", "")) for r in results)])
    rows.append(["its RSS, MB", *(number(r.get("rss_mb"), 0) for r in results)])
    rows.append(["its /health max, ms", *(number(r.get("health_ms")) for r in results)])
    rows.append(["failed answers", *(str(len(r["failed"])) for r in results)])
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(SYSTEMS), help="systems, comma-separated")
    parser.add_argument("--nodes", default="1,4,16,32")
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument(
        "--realtime",
        action="store_true",
        help="before every other process of this machine, which all but stop while a router saturates its core",
    )
    parser.add_argument("--json", type=Path, help="write the raw numbers there")
    arguments = parser.parse_args()
    counts = [int(n) for n in arguments.nodes.split(",")]
    if len(CORES) < 2:
        raise SystemExit("needs two cores: one for the router, one for fakes and clients")
    os.sched_setaffinity(0, {CORES[1]})
    names = arguments.only.split(",")
    if "stock" in names:
        stock_path.__wrapped__()
    if "nginx" in names and not shutil.which("nginx"):
        print("nginx is not installed: left out", file=sys.stderr)
        names.remove("nginx")
    with before_others(arguments.realtime):
        results = [uvloop.run(measure(name, counts, arguments.seconds)) for name in names]
    print(table(results, counts))
    for result in results:
        for fault in result["failed"][:3]:
            print(f"{result['name']}: {fault[:300]}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1, default=str))


if __name__ == "__main__":
    main()

"""What prefill-ahead gives on the local cluster: requests/s of one decode node with a queue, with it over without it.

usage: bin/bench cluster_ahead [--prompt 1100] [--tokens 8,32,96] [--answers 16]

Needs a deployed cluster (bin/demo --up). One decode node serves, the others are drained; four clients ask without
pause. With prefill time P and decode time D the ratio can be (P + D) / max(P, D) where prefill and decode have machines
of their own. Here they share this machine's cores, so P and D are printed for both ways, from the router's own phases.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from cluster import Cluster, until

CLIENTS = 4
SKIPPED = 2
"""Answers that find no queue yet."""
CONFIG = "/etc/tilert/router.yaml"
UNIT = "tilert-router"
ADMIN = "http://127.0.0.1:8081"


@dataclass(frozen=True)
class Pace:
    """What one way gave: requests/s, and the mean seconds of prefill (until its answer) and of decode."""

    requests_s: float
    prefill_s: float
    decode_s: float


class Router:
    """The cluster's router: its setting, its nodes, its clock of phases."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        (self.host,) = cluster.hosts("router")

    def run(self, command: str) -> str:
        return self.cluster.run(self.host, command)

    @contextmanager
    def only_one_node(self, ahead: bool) -> Iterator[None]:
        """The router with or without prefill-ahead, every decode node but the first drained; then as it was."""
        self.run(f"cp -p {CONFIG} {CONFIG}.bench && sed -i '/^prefill_ahead:/d' {CONFIG}")
        try:
            self.run(f"echo 'prefill_ahead: {str(ahead).lower()}' >>{CONFIG} && systemctl restart {UNIT}")
            self._known()
            for node in self.cluster.hosts("decode")[1:]:
                self.run(f"curl -sS -f -X POST {ADMIN}/nodes/{node}/drain")
            yield
        finally:
            self.run(f"mv {CONFIG}.bench {CONFIG} && systemctl restart {UNIT}")
            self._known()
            for node in self.cluster.hosts("decode")[1:]:
                self.run(f"curl -sS -f -X POST {ADMIN}/nodes/{node}/undrain")

    def _known(self) -> None:
        until("nodes are known", lambda: not {n["state"] for n in self.nodes()} & {"UNKNOWN", "DOWN"}, 60)

    def nodes(self) -> list[dict[str, str]]:
        return list(json.loads(self.run(f"curl -sS {ADMIN}/nodes"))["nodes"])

    def phases(self) -> dict[str, tuple[float, int]]:
        """phase -> seconds and count since the router's start."""
        sums, counts = {}, {}
        for line in self.run(f"curl -sS {ADMIN}/metrics").splitlines():
            for kind, into in (("sum", sums), ("count", counts)):
                if line.startswith(f"tilert_router_phase_seconds_{kind}{{"):
                    into[line.split('phase="')[1].split('"')[0]] = float(line.split()[-1])
        return {phase: (sums[phase], int(counts[phase])) for phase in sums}


async def asked(cluster: Cluster, prompt: int, tokens: int, answers: int) -> float:
    """Requests/s over `answers` answers, from the end of the one before, as four clients see them."""
    ended: list[float] = []
    clock = asyncio.get_running_loop().time

    async def ask_on(client: httpx.AsyncClient, number: int) -> None:
        turn = 0
        while True:
            turn += 1
            # Different from the first letter on: nothing of it is in the prefix cache.
            text = f"{number}.{turn}.{tokens} " + "x" * prompt
            answer = await client.post(
                f"{cluster.url}/v1/chat/completions", json=cluster.chat(text, tokens, stream=False)
            )
            if answer.status_code != 200:
                raise SystemExit(f"an answer failed: {answer.status_code} {answer.text[:300]}")
            ended.append(clock())

    async with httpx.AsyncClient(timeout=300) as client:
        clients = [asyncio.create_task(ask_on(client, n)) for n in range(CLIENTS)]
        while len(ended) <= SKIPPED + answers:
            await asyncio.sleep(0.02)
            for task in clients:
                if task.done():
                    task.result()
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    ended.sort()
    return answers / (ended[SKIPPED + answers] - ended[SKIPPED])


def pace(router: Router, ahead: bool, prompt: int, tokens: int, answers: int) -> Pace:
    cluster = router.cluster
    with router.only_one_node(ahead):
        before = router.phases()
        requests_s = asyncio.run(asked(cluster, prompt, tokens, answers))
        after = router.phases()
        node = sorted(cluster.hosts("decode"))[0]
        cluster.wait_idle(node)

    def mean(phase: str) -> float:
        seconds, count = before.get(phase, (0.0, 0))
        return (after[phase][0] - seconds) / (after[phase][1] - count)

    return Pace(requests_s, mean("prefill"), mean("decode"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompt", type=int, default=1100, help="letters of a prompt, each a token")
    parser.add_argument("--tokens", default="8,32,96", help="tokens of an answer: several runs")
    parser.add_argument("--answers", type=int, default=16, help="answers counted in each run")
    arguments = parser.parse_args()
    router = Router(Cluster())
    print(
        "| tokens | P, D without, ms | P, D with, ms | requests/s without | with | ratio "
        "| (P + D) / max(P, D), P and D without | with slower P and D |\n|---|---|---|---|---|---|---|---|"
    )
    for tokens in map(int, arguments.tokens.split(",")):
        without, ahead = (
            pace(router, on, arguments.prompt, tokens, arguments.answers) for on in (False, True)
        )
        p, d = without.prefill_s, without.decode_s
        print(
            f"| {tokens} | {1e3 * p:.0f}, {1e3 * d:.0f} | {1e3 * ahead.prefill_s:.0f}, {1e3 * ahead.decode_s:.0f} "
            f"| {without.requests_s:.2f} | {ahead.requests_s:.2f} | {ahead.requests_s / without.requests_s:.2f} "
            f"| {(p + d) / max(p, d):.2f} | {(p + d) / max(ahead.prefill_s, ahead.decode_s):.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()

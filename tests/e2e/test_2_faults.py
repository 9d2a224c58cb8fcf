"""Things break while people are served: nobody gets a wrong answer, and the pool comes back by itself."""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import httpx
import pytest
from cluster import ROOT, Cluster, until

pytestmark = pytest.mark.timeout(1800)

LONG = 1200  # tokens: long enough that a stream is still running when something happens to it


def test_a_client_that_leaves_midway_frees_its_node_for_the_next(cluster: Cluster) -> None:
    prompts = [f"left behind {i}" for i in range(2)]
    expected = cluster.own("who comes next", 32)
    with cluster.streaming(prompts[0], LONG) as a, cluster.streaming(prompts[1], LONG) as b:
        until("both streams run", lambda: len(a.token_ids) > 3 and len(b.token_ids) > 3, 60)
        assert {cluster.holder(a.rid), cluster.holder(b.rid)} == set(cluster.hosts("decode"))
    left = time.monotonic()
    with cluster.streaming("who comes next", 32) as c:
        until("the next request's first token", lambda: c.token_ids, 10)
        assert c.times[0] - left < 2.0
        until("its end", lambda: c.ended, 30)
    assert c.token_ids == expected


def test_a_decode_node_killed_midway_gives_an_error_event_and_rejoins(cluster: Cluster) -> None:
    expected = cluster.own("after the crash", 32)
    with cluster.streaming("cut short", LONG) as a:
        until("the stream runs", lambda: len(a.token_ids) > 3, 60)
        victim = cluster.holder(a.rid)
        assert victim
        killed = time.monotonic()
        cluster.run(victim, "systemctl kill -s KILL tilert-decode.service")
        until("the stream ends", lambda: a.ended, 10)
    assert a.ended - killed < 5.0
    assert a.error, "the client was not told"
    assert isinstance(a.error, dict), f"the connection broke instead of an error event: {a.error}"
    assert a.finish_reason is None
    assert not a.done
    # The next request is served at once, by the other node.
    with cluster.streaming("after the crash", 32) as b:
        until("the next request", lambda: b.ended, 30)
    assert b.token_ids == expected
    # The killed one comes back without anybody's help and serves again: two long streams need both.
    until("the killed node is back", lambda: _healthy(cluster, victim), 90, pause=1)
    deadline = time.monotonic() + 60
    while True:
        with cluster.streaming("one", LONG) as c, cluster.streaming("two", LONG) as d:
            until("both streams run", lambda: c.token_ids and d.token_ids, 60)
            both = {cluster.holder(c.rid), cluster.holder(d.rid)} == set(cluster.hosts("decode"))
        if both:
            break
        assert time.monotonic() < deadline, "the killed node serves nothing"
    with cluster.streaming("after the crash", 32) as e:
        until("a last request", lambda: e.ended, 30)
    assert e.token_ids == expected


def _healthy(cluster: Cluster, host: str) -> bool:
    address = cluster.nodes[host]["address"]
    command = f"curl -s -o /dev/null -m 2 -w '%{{http_code}}' http://{address}:5557/health"
    return cluster.run(cluster.hosts("router")[0], command, check=False).strip() == "200"


def test_a_restarted_router_does_not_book_a_node_twice(cluster: Cluster) -> None:
    prompts = [f"across the restart {i}" for i in range(6)]
    expected = {p: cluster.own(p, 48) for p in prompts}
    with cluster.streaming("a decode under way", LONG) as a, cluster.streaming("another", LONG) as b:
        until("both streams run", lambda: len(a.token_ids) > 3 and len(b.token_ids) > 3, 60)
        # Killed: it had no time to hand anything back, so the nodes still decode for nobody.
        cluster.run(
            cluster.hosts("router")[0],
            "systemctl kill -s KILL tilert-router.service; sleep 0.2; "
            "systemctl restart tilert-router.service",
        )
        until("the router answers", lambda: _ingress_health(cluster) is not None, 60)
        with ThreadPoolExecutor(6) as pool:
            got = list(pool.map(lambda p: _whole(cluster, p, 48), prompts))
    assert dict(zip(prompts, got, strict=True)) == expected


def _whole(cluster: Cluster, prompt: str, max_tokens: int) -> list[int]:
    answer = httpx.post(
        f"{cluster.url}/v1/chat/completions", json=cluster.chat(prompt, max_tokens, stream=False), timeout=120
    )
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])


def _ingress_health(cluster: Cluster) -> float | None:
    """Seconds /health takes through the ingress, None when it does not answer 200."""
    start = time.perf_counter()
    try:
        ok = httpx.get(f"{cluster.url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return None
    return time.perf_counter() - start if ok else None


def test_a_hundred_waiting_clients_are_served_in_order_and_health_stays_fast(cluster: Cluster) -> None:
    clients, tokens = 100, 24
    prompt = "in the queue"
    expected = cluster.own(prompt, tokens)
    router = cluster.hosts("router")[0]
    with HealthProbe(router) as probe, ThreadPoolExecutor(1) as pool:
        with cluster.streaming("first in line", LONG) as a, cluster.streaming("first in line too", LONG) as b:
            until("both nodes decode", lambda: len(a.token_ids) > 3 and len(b.token_ids) > 3, 60)
            queue = pool.submit(asyncio.run, _a_queue(cluster, prompt, tokens, clients))
            time.sleep(4)  # all of them wait
        # The two leave; the queue moves.
        results = queue.result()
    assert all(ids == expected for _, ids in results)
    slowest = max(own or 5 for _, own in probe.times)
    print(
        f"/health: {len(probe.times)} answers, slowest {slowest:.3f} s, {max(probe.beyond_nginx()):.3f} s of it ours"
    )
    assert len(probe.times) >= 20
    assert all(own is not None for _, own in probe.times)
    assert max(probe.beyond_nginx()) < 0.1
    # In the order in which they came to the router, by its own log: nodes take turns side by side, so neighbours may
    # swap; nobody is overtaken by more than the pool's slots.
    came_and_went = _router_times(cluster, {rid for rid, _ in results})
    assert len(came_and_went) == clients
    came = sorted(came_and_went, key=lambda rid: came_and_went[rid][0])
    went = sorted(came_and_went, key=lambda rid: came_and_went[rid][1])
    assert max(abs(went.index(rid) - place) for place, rid in enumerate(came)) <= 4


def _router_times(cluster: Cluster, rids: set[str]) -> dict[str, tuple[float, float]]:
    """When each of these requests came to the router and when it ended, in seconds, from the router's log."""
    script = "journalctl -u tilert-router -o cat --no-pager --since -10min"
    found = {}
    for line in cluster.run(cluster.hosts("router")[0], script).splitlines():
        if line.startswith("{"):
            entry = json.loads(line)
            if entry.get("event") == "request ended" and entry.get("rid") in rids:
                ended = datetime.fromisoformat(entry["time"]).timestamp()
                found[entry["rid"]] = (ended - entry["seconds"], ended)
    return found


class HealthProbe:
    """Asks the ingress for /health every 100 ms, on the router's host: the test's own work is not in the times.

    Before each it asks for a path that nginx answers alone: what that takes is this machine's doing, not the router's.
    `times`: pairs of seconds (nginx alone, /health), None for an answer of /health that was not 200 within 5 s.
    """

    SCRIPT = """
import http.client, select, sys, time
def ask(path, status):
    start = time.perf_counter()
    try:
        connection = http.client.HTTPConnection("127.0.0.1", 80, timeout=5)
        connection.request("GET", path)
        ok = connection.getresponse().status == status
        connection.close()
    except OSError:
        ok = False
    return time.perf_counter() - start if ok else "none"
while not select.select([sys.stdin], [], [], 0.1)[0]:
    print(ask("/", 404), ask("/health", 200), flush=True)
"""

    def __init__(self, host: str) -> None:
        self.host = host
        self.times: list[tuple[float, float | None]] = []

    def __enter__(self) -> HealthProbe:
        command = shlex.join(["podman", "exec", "-i", self.host, "python3", "-c", self.SCRIPT])
        self._process = subprocess.Popen(
            ["bash", "-c", f'. "{ROOT}/bin/lib.sh"; . "$STACK/scripts/podman-env.sh"; exec {command}'],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        out, _ = self._process.communicate(timeout=30)  # it ends when its input does
        pairs = [line.split() for line in out.splitlines()]
        self.times = [(float(alone), None if own == "none" else float(own)) for alone, own in pairs]

    def beyond_nginx(self) -> list[float]:
        """Seconds that each /health took beyond the slower of the two answers of nginx alone around it."""
        alone = [pair[0] for pair in self.times]
        return [
            own - max(alone[i], alone[min(i + 1, len(alone) - 1)])
            for i, (_, own) in enumerate(self.times)
            if own is not None
        ]


async def _a_queue(cluster: Cluster, prompt: str, tokens: int, clients: int) -> list[tuple[str, list[int]]]:
    """`clients` streams, 20 ms apart: the rid and the tokens of each."""

    async def one(number: int) -> tuple[str, list[int]]:
        await asyncio.sleep(0.02 * number)
        ids: list[int] = []
        body = cluster.chat(prompt, tokens)
        async with client.stream("POST", f"{cluster.url}/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    for choice in event["choices"]:
                        ids += choice.get("token_ids") or []
        return answer.headers["x-tilert-rid"], ids

    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        return await asyncio.gather(*(one(i) for i in range(clients)))

"""Readers that do not read, routers that die, several routers on the same nodes: nodes stay one person's at a time
and come back, and memory stays bounded."""

from __future__ import annotations

import asyncio
import resource
import socket
from pathlib import Path

import aiohttp
import orjson
import pytest

from integration.router.parts import CHAT, Up, settled
from integration.router.test_operators_see_and_steer_it import process


async def test_a_reader_who_does_not_read_costs_bounded_memory_and_time(up: Up) -> None:
    bench = await up(1)
    timeouts = {"client_s": 1, "cancel_s": 2, "handoff_s": 2, "stall_s": 30}
    url = await bench.router(timeouts=timeouts, model=bench.config()["model"] | {"max_model_len": 1 << 28})
    node = bench.nodes[0]
    node.burst, node.max_seq_len = 1 << 14, 1 << 28
    wanted = 100_000_000  # as many bytes of text
    body = orjson.dumps(CHAT | {"stream": True, "max_tokens": wanted})
    loop = asyncio.get_running_loop()
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.setblocking(False)
        await loop.sock_connect(reader, ("127.0.0.1", int(url.rsplit(":", 1)[1])))
        before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        await loop.sock_sendall(reader, head + body)
        async with asyncio.timeout(5):
            while not node.running:
                await asyncio.sleep(0.01)
        await settled(node, within_s=20)
    assert node.sent < wanted / 2  # the rest was never asked of the node
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 30_000
    node.burst = 1
    assert (await bench.post(url, CHAT))[0] == 200


async def test_a_slow_reader_gets_all_of_it(up: Up) -> None:
    bench = await up(1)
    url = await bench.router(model=bench.config()["model"] | {"max_model_len": 1 << 24})
    bench.nodes[0].burst, bench.nodes[0].max_seq_len = 4096, 1 << 24
    wanted = 2_000_000
    got = 0
    body = CHAT | {"stream": True, "max_tokens": wanted}
    async with bench.http.post(url + "/v1/chat/completions", json=body) as answer:
        last = b""
        async for data in answer.content.iter_chunked(1 << 16):
            await asyncio.sleep(0.002)
            got += len(data)
            last = (last + data)[-2000:]
    assert last.endswith(b"data: [DONE]\n\n")
    assert b'"finish_reason":"length"' in last
    assert got > wanted


async def test_a_killed_router_leaves_its_nodes_to_the_others(up: Up, tmp_path: Path) -> None:
    bench = await up(2)
    for node in bench.nodes:
        node.token_s = 0.02
    survivor = await bench.router()
    async with process(bench.config(), tmp_path / "router.yaml") as (running, url):
        lost = [
            asyncio.create_task(bench.post(url, CHAT | {"stream": True, "max_tokens": 500})) for _ in "ab"
        ]
        await asyncio.sleep(0.6)
        assert all(node.running for node in bench.nodes)
        waiting = [asyncio.create_task(bench.post(survivor, CHAT)) for _ in range(6)]
        await asyncio.sleep(0.2)
        running.kill()
        for each in lost:
            with pytest.raises(aiohttp.ClientError):
                await each
        async with asyncio.timeout(20):
            assert {status for status, _, _ in await asyncio.gather(*waiting)} == {200}
    for node in bench.nodes:
        assert node.most_running == 1
        assert len(set(node.decoded)) == len(node.decoded)


async def test_three_routers_share_two_nodes_and_everybody_is_served(up: Up) -> None:
    bench = await up(2)
    urls = [await bench.router() for _ in range(3)]
    for node in bench.nodes:
        node.token_s = 0.002
    answers = await asyncio.gather(*(bench.post(urls[i % 3], CHAT) for i in range(45)))
    assert {status for status, _, _ in answers} == {200}
    assert sum(len(node.decoded) for node in bench.nodes) == 45
    assert [node.most_running for node in bench.nodes] == [1, 1]
    rids = {headers["x-tilert-rid"] for _, headers, _ in answers}
    assert rids == {rid for node in bench.nodes for rid in node.decoded}

"""In front of the real stock decode server, which reserves nothing: our gate, and fakes that answer as it does."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from contract.conftest import stock_path
from fakes.nodes import FakeDecode
from integration.router.parts import CHAT, Bench, Up, events
from integration.router.stock import StockNode, stock_node
from vllm_tilert.wire import api

__all__ = ["stock_path"]


@pytest.fixture
def node(stock_path: Path) -> Iterator[StockNode]:
    level = logging.getLogger().level
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with stock_node(stock_path, port) as running:
        logging.getLogger().setLevel(level)  # importing tilert turns everything to DEBUG
        yield running


class Shape:
    """What of an answer a client depends on: status, keys and types, lines."""

    @staticmethod
    def of(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: Shape.of(v) for k, v in value.items() if k not in ("timing_ms", "message", "slots")}
        return "list" if isinstance(value, list) else type(value).__name__


@pytest.fixture
async def both(node: StockNode) -> AsyncIterator[list[tuple[Any, str]]]:
    fake = FakeDecode(5001)
    async with fake.site:
        yield [(node, node.url), (fake, fake.site.url)]


async def ask(url: str, path: str, body: Any = None) -> tuple[int, list[Any]]:
    async with aiohttp.ClientSession() as http:
        call = http.get(url + path) if body is None else http.post(url + path, json=body)
        async with call as answer:
            return answer.status, [json.loads(line) for line in (await answer.read()).splitlines()]


def decode(rid: str, **more: Any) -> dict[str, Any]:
    body = {"rid": rid, "first_token_id": 65, "max_tokens": 5, "stream": True, "timeout_s": 0.3}
    return body | {"sampling": {"temperature": 0.0, "top_p": 1.0, "top_k": 1}} | more


async def arrived(node: Any, url: str, rid: str) -> None:
    generation = 0
    if isinstance(node, FakeDecode):
        _, (granted,) = await ask(url, api.RESERVE, {"rid": rid})
        generation = granted["generation"]
    node.receive(rid, generation)


async def test_a_fakes_whole_stream_is_the_stock_servers(both: list[tuple[Any, str]]) -> None:
    seen = []
    for node, url in both:
        rid = api.new_rid()
        await arrived(node, url, rid)
        status, lines = await ask(url, api.DECODE, decode(rid))
        tokens = [t for line in lines for t in line.get("t", [])]
        last = {k: v for k, v in lines[-1].items() if k not in ("timing_ms", "handoff")}
        seen.append((status, tokens, last, {frozenset(line) for line in lines[:-1]}))
    assert seen[0] == seen[1]
    assert seen[0][2] == {"done": True, "n": 5, "seq_len": 7, "finish_reason": "length"}


async def test_a_fakes_refusals_are_the_stock_servers(both: list[tuple[Any, str]]) -> None:
    seen = []
    for node, url in both:
        found = [await ask(url, api.STATUS)]
        found.append(await ask(url, api.CANCEL, {"rid": api.new_rid()}))
        if isinstance(node, FakeDecode):
            rid = api.new_rid()
            await ask(url, api.RESERVE, {"rid": rid})
            found.append(await ask(url, api.DECODE, decode(rid)))
        else:
            found.append(await ask(url, api.DECODE, decode(api.new_rid())))
        seen.append([(status, lines[0].get("status") or lines[0]["error"]) for status, lines in found])
    (idle, (cancel, _), late), (fake_idle, (fake_cancel, _), fake_late) = seen
    assert (idle, cancel, late) == ((200, "idle"), 404, (504, "kv_transfer_timeout"))
    assert (fake_idle, fake_cancel, fake_late) == (idle, cancel, late)


async def test_a_running_fake_shows_and_cancels_as_the_stock_server_does(both: list[tuple[Any, str]]) -> None:
    seen = []
    for node, url in both:
        (node if isinstance(node, FakeDecode) else node.engine).token_s = 0.05
        rid = api.new_rid()
        await arrived(node, url, rid)
        running = asyncio.create_task(ask(url, api.DECODE, decode(rid, max_tokens=200)))
        await asyncio.sleep(0.4)
        _, (status,) = await ask(url, api.STATUS)
        cancelled = await ask(url, api.CANCEL, {"rid": rid})
        async with asyncio.timeout(5):
            _, lines = await running
        assert lines[-1].get("finish_reason", "cancelled") == "cancelled"
        assert sum(len(line.get("t", [])) for line in lines) < 200
        seen.append(
            (status["status"], status["current_rid"] == rid, cancelled == (200, [{"cancelled": rid}]))
        )
        async with asyncio.timeout(5):
            while (await ask(url, api.STATUS))[1][0]["status"] != "idle":
                await asyncio.sleep(0.02)
    assert seen == [("busy", True, True)] * 2


# ---- the gate


async def gated(bench: Bench, node: StockNode) -> tuple[str, str]:
    bench.prefill._decodes[node.ctrl_port] = node  # type: ignore[assignment]
    decode = [{"name": "s", "url": node.url, "host": "127.0.0.1", "ctrl_port": node.ctrl_port, "stock": True}]
    model = bench.config()["model"]
    _, url, admin = await bench.whole_router(decode=decode, only_router=True, model=model)
    return url, admin


async def state(bench: Bench, admin: str) -> str:
    async with bench.http.get(admin + "/nodes") as answer:
        return str((await answer.json())["nodes"][0]["state"])


async def test_a_busy_stock_server_stays_unknown_until_it_says_idle(up: Up, node: StockNode) -> None:
    bench = await up(0)
    node.engine.token_s = 0.05
    before = api.new_rid()
    node.receive(before, 0)
    foreign = asyncio.create_task(ask(node.url, api.DECODE, decode(before, max_tokens=40)))
    await asyncio.sleep(0.5)
    url, admin = await gated(bench, node)
    asked = asyncio.create_task(bench.post(url, CHAT))
    await asyncio.sleep(0.6)
    assert await state(bench, admin) == "UNKNOWN"
    assert bench.prefill.bodies == []  # not one byte towards a server that decodes for somebody else
    assert not foreign.done()
    status, lines = await foreign
    assert lines[-1]["n"] == 40
    status, _, raw = await asked
    assert (status, json.loads(raw)["usage"]["completion_tokens"]) == (200, 5)


async def test_requests_follow_each_other_and_each_has_its_own_answer(up: Up, node: StockNode) -> None:
    bench = await up(0)
    url, admin = await gated(bench, node)
    answers = await asyncio.gather(*(bench.post(url, CHAT | {"stream": i % 2 == 0}) for i in range(6)))
    assert {status for status, _, _ in answers} == {200}
    assert all(events(raw)[-1] == "[DONE]" for i, (_, _, raw) in enumerate(answers) if i % 2 == 0)
    async with asyncio.timeout(3):
        while await state(bench, admin) != "FREE":
            await asyncio.sleep(0.02)


async def test_a_client_that_leaves_a_stock_server_closes_the_gate_until_it_is_idle(
    up: Up, node: StockNode
) -> None:
    bench = await up(0)
    url, _ = await gated(bench, node)
    node.engine.token_s = 0.05
    leaving = asyncio.create_task(bench.post(url, CHAT | {"stream": True, "max_tokens": 57}))
    await asyncio.sleep(0.8)
    leaving.cancel()
    prefills = len(bench.prefill.bodies)
    asked = asyncio.create_task(bench.post(url, CHAT))
    async with asyncio.timeout(5):
        while len(bench.prefill.bodies) == prefills:
            await asyncio.sleep(0.005)
    assert node.engine.ended == 1  # the decode that was left had ended when the next prefill began
    assert (await asked)[0] == 200


def test_a_stock_server_is_refused_beside_a_second_router(up: Up) -> None:
    from tilert_router.config import ConfigError, parse

    text = """
model: {name: m, tokenizer: /t, max_model_len: 2048}
prefill: [{name: p, url: "http://127.0.0.1:8000"}]
decode: [{name: s, url: "http://127.0.0.1:5557", host: 127.0.0.1, stock: true}]
"""
    with pytest.raises(ConfigError, match="only_router"):
        parse(text)
    assert parse(text + "only_router: true").decode[0].stock

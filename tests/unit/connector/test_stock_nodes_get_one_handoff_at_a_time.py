"""A stock node cannot refuse in time: what our sender does about it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from integration.connector.fake_node import FakeNode
from unit.connector.loop import LoopTransport, Sending
from unit.profiles.caches import nsa_caches
from vllm_tilert.connector import sender
from vllm_tilert.profiles import stock
from vllm_tilert.profiles.base import get_profile
from vllm_tilert.profiles.layout import Layout
from vllm_tilert.wire import control

GLM5: Layout = get_profile("glm5").layout_from_caches(nsa_caches(79, 1, "fp8_ds_mla"))
LIMIT = 128


class StockNode(FakeNode):
    """Speaks without the extension: no answer is consent."""

    def __init__(self) -> None:
        super().__init__(GLM5, max_seq_len=LIMIT, transport=LoopTransport())
        self.accept = lambda _: {}
        bases = stock.hello_bases(GLM5, LIMIT, self.buffer.data_ptr())
        self.hello = {"ext": None, "layout": None, "nonce": None, **bases}


def sending_to(node: FakeNode, **link: Any) -> Sending:
    return Sending(node, seq_len=100, layout=GLM5, pool_bytes=64 << 20, **link)


async def over(sending: Sending) -> str | None:
    assert await asyncio.to_thread(sending.handoff.join, 10.0)
    return sending.reason


async def test_without_a_refusal_the_state_is_written_and_done_said() -> None:
    async with StockNode() as node:
        sending = sending_to(node)
        sending.handoff.start()
        first, second = sending.put(0, 64), sending.put(64, 36)
        assert await over(sending) is None
        assert (await node.ended())["done"] is True
        for start, segment, tokens in ((0, first, 64), (64, second, 36)):
            for part in stock.parts(GLM5, node.hello | {"max_seq_len": LIMIT}, start, tokens):
                at = part.target - node.buffer.data_ptr()
                written = node.buffer[at : at + part.length]
                assert written.equal(segment[part.source : part.source + part.length])


async def test_a_refusal_is_listened_for_before_the_first_byte() -> None:
    async with StockNode() as node:
        node.accept = lambda _: {"error": "busy", "busy_rid": "another"}
        sending = sending_to(node)
        sending.put(0, 100)
        sending.handoff.start()
        assert await over(sending) == "busy"
        assert node.untouched
        assert sending.pool.in_use == 0


async def test_a_late_refusal_stops_the_writing() -> None:
    async with StockNode() as node:

        async def refuse_late(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            async with asyncio.timeout(5):
                while node.untouched:
                    await asyncio.sleep(0.002)
            writer.write(control.pack({"error": "busy", "busy_rid": "another"}))

        node.on_accept = refuse_late
        sending = sending_to(node)
        sending.put(0, 64)
        sending.handoff.start()
        async with asyncio.timeout(5):
            while not sending.handoff.failed:
                await asyncio.sleep(0.002)
        writes = len(sending.transport.writes)
        sending.put(64, 36)
        assert await over(sending) == "busy"
        assert len(sending.transport.writes) == writes
        assert "done" not in await node.ended()


async def test_a_second_handoff_waits_for_the_first_to_end() -> None:
    async with StockNode() as node:
        first, second = sending_to(node), sending_to(node)
        first.handoff.start()
        first.put(0, 64)
        async with asyncio.timeout(5):
            while not first.transport.writes:
                await asyncio.sleep(0.002)
        second.put(0, 100)
        second.handoff.start()
        await asyncio.sleep(0.3)
        assert second.transport.writes == []
        assert len(node.requests) == 1
        first.put(64, 36)
        assert await over(first) is None
        assert await over(second) is None


async def test_a_write_that_has_not_ended_keeps_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes may still land: the next handoff there would be mixed with them."""
    async with StockNode() as node:
        stuck = sending_to(node)
        stuck.transport.hold = True
        stuck.put(0, 100)
        stuck.handoff.start()
        async with asyncio.timeout(5):
            while not stuck.reports:
                await asyncio.sleep(0.002)
        other = sending_to(node, admission_timeout_s=0.3)
        other.put(0, 100)
        other.handoff.start()
        assert await over(other) == "busy"
        assert other.transport.writes == []
        stuck.transport.held.set()
        assert await over(stuck) == "write_outstanding"
        again = sending_to(node)
        again.put(0, 100)
        again.handoff.start()
        assert await over(again) is None


async def test_one_that_never_ends_closes_the_node_to_us_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "SETTLE_S", 0.1)
    async with StockNode() as node:
        stuck = sending_to(node)
        stuck.transport.hold = True
        stuck.put(0, 100)
        stuck.handoff.start()
        assert await over(stuck) == "write_outstanding"
        other = sending_to(node, admission_timeout_s=0.3)
        other.handoff.start()
        assert await over(other) == "busy"

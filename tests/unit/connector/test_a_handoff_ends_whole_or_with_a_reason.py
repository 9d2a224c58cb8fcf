"""One handoff against a node with every way to disagree: it ends whole or with a reason, and nothing is lost."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from integration.connector.fake_node import FakeNode
from unit.connector.loop import LAYOUT, LoopTransport, Sending
from vllm_tilert.checksum import plane_checksums
from vllm_tilert.connector import sender
from vllm_tilert.wire import control


def node_of(**behaviour: Any) -> FakeNode:
    return FakeNode(LAYOUT, max_seq_len=64, transport=LoopTransport(), **behaviour)


@pytest.fixture
async def node() -> AsyncIterator[FakeNode]:
    async with node_of() as node:
        yield node


async def over(sending: Sending, within_s: float = 5.0) -> str | None:
    """Wait for the handoff's thread; its reason. All staging must have been given back."""
    assert await asyncio.to_thread(sending.handoff.join, within_s), "the handoff has not ended"
    assert sending.pool.in_use == 0
    return sending.reason


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


async def test_segments_arrive_in_place_and_done_is_said_once(node: FakeNode) -> None:
    sending = Sending(node)
    sending.handoff.start()
    first = sending.put(0, 24)
    await until(lambda: len(sending.transport.writes) == 1)  # long before the second one is there
    second = sending.put(24, 16)
    assert await over(sending) is None
    done = await node.ended()
    assert done["segments"] == [24, 16]
    assert [bytes(s) for s in node.segments([24, 16])] == [bytes(first), bytes(second)]
    assert done["checksums"] == [plane_checksums(first, LAYOUT, 24), plane_checksums(second, LAYOUT, 16)]
    assert node.ends.empty()
    assert node.said == []  # this node did not ask to be told
    (report,) = sending.reports
    assert (report.nbytes, report.segments) == (LAYOUT.segment_bytes(40), 2)


@pytest.mark.parametrize("checksum", [True, False])
async def test_a_node_that_asks_is_told_of_each_segment_once_it_is_written(
    node: FakeNode, checksum: bool
) -> None:
    node.accept = lambda answer: answer | {"segments": True, "checksums": checksum}
    sending = Sending(node, checksum=checksum)
    sending.transport.hold = True
    sending.handoff.start()
    sending.put(0, 24)
    await asyncio.sleep(0.2)
    assert node.said == []  # nothing before it is there
    sending.transport.held.set()
    assert await over(sending) == "write_outstanding"
    sending = Sending(node, checksum=checksum)
    sending.handoff.start()
    first, second = sending.put(0, 24), sending.put(24, 16)
    assert await over(sending) is None
    assert (await node.ended())["abort"] == "write_outstanding"
    done = await node.ended()
    sums = [plane_checksums(first, LAYOUT, 24), plane_checksums(second, LAYOUT, 16)]
    assert node.said == [{"segment": 24, "checksums": sums[0] if checksum else None}]
    assert (done["segments"], done["checksums"]) == ([24, 16], sums if checksum else None)


async def test_given_up_before_it_is_admitted_it_ends_at_once(node: FakeNode) -> None:
    node.accept = lambda _: {}  # the node does not answer
    sending = Sending(node, admission_timeout_s=30.0)
    sending.put(0, 40)
    sending.handoff.start()
    await until(lambda: bool(node.requests))
    sending.handoff.abort("cancelled", "gone")
    assert await over(sending) == "cancelled"
    assert node.untouched
    # Told, since the node may have admitted it meanwhile: else it would keep the slot for a lost writer.
    assert (await node.ended())["abort"] == "cancelled"


async def test_given_up_between_chunks_it_tells_the_node(node: FakeNode) -> None:
    sending = Sending(node)
    sending.handoff.start()
    sending.put(0, 24)
    await until(lambda: len(sending.transport.writes) == 1)
    sending.handoff.abort("cancelled", "gone")
    assert await over(sending) == "cancelled"
    assert (await node.ended())["abort"] == "cancelled"
    assert len(sending.transport.writes) == 1
    late = sending.pool.try_take(LAYOUT.segment_bytes(16))
    assert late is not None
    late.release()
    sending.put(24, 16)  # what comes after the end is given back, not kept
    assert sending.pool.in_use == 0


async def test_the_node_is_told_and_memory_given_back_only_when_no_write_is_outstanding(
    node: FakeNode,
) -> None:
    sending = Sending(node)
    sending.transport.hold = True
    sending.put(0, 40)
    sending.handoff.start()
    await until(lambda: bool(sending.reports))
    assert sending.reason == "write_outstanding"
    await asyncio.sleep(0.2)
    assert sending.pool.in_use > 0
    assert node.ends.empty()
    sending.transport.held.set()
    assert await over(sending) == "write_outstanding"
    assert (await node.ended())["abort"] == "write_outstanding"


async def test_a_write_that_never_ends_keeps_its_memory_and_is_never_said_to_have_ended(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "SETTLE_S", 0.1)
    sending = Sending(node)
    sending.transport.hold = True
    sending.put(0, 40)
    sending.handoff.start()
    assert await asyncio.to_thread(sending.handoff.join, 5.0)
    assert sending.pool.in_use > 0
    assert await node.ended() == {"closed": True}


async def test_after_the_nodes_deadline_nothing_is_written(node: FakeNode) -> None:
    node.deadline_s = 0.3
    sending = Sending(node)
    sending.handoff.start()
    assert await over(sending) == "deadline"
    assert (await node.ended())["abort"] == "deadline"
    assert node.untouched


async def test_the_deadline_counts_from_the_asking_not_from_the_answer(node: FakeNode) -> None:
    """Else a slow answer would let a write start after the node has stopped waiting for it."""
    node.deadline_s = 0.5

    def answer_late(answer: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.4)  # Accept leaves when most of the time it grants has gone by
        return answer

    node.accept = answer_late
    sending = Sending(node)
    sending.handoff.start()
    await until(lambda: bool(node.requests))
    await asyncio.sleep(0.3)  # 0.7 s after the asking, 0.3 s after the answer
    sending.put(0, 40)
    assert await over(sending) == "deadline"
    assert node.untouched


async def test_our_own_time_limit_holds_however_long_the_node_allows(node: FakeNode) -> None:
    node.deadline_s = 1000.0
    sending = Sending(node, send_timeout_s=0.3)
    sending.handoff.start()
    assert await over(sending) == "deadline"


async def test_the_nodes_abort_stops_the_writing_and_is_answered(node: FakeNode) -> None:
    async def give_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(control.pack({"abort": "cancelled", "message": "the client went away"}))

    node.on_accept = give_up
    sending = Sending(node)
    sending.handoff.start()
    assert (await node.ended())["abort"] == "cancelled"
    sending.put(0, 40)
    assert await over(sending) == "cancelled"
    assert node.untouched


async def test_a_failed_write_is_told(node: FakeNode) -> None:
    sending = Sending(node)
    sending.transport.fail = True
    sending.put(0, 40)
    sending.handoff.start()
    assert await over(sending) == "write_failed"
    assert (await node.ended())["abort"] == "write_failed"


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [
        ({"error": "checksum_mismatch", "message": "plane kv"}, "checksum_mismatch"),
        ({"error": "made_up_by_a_peer"}, "protocol_error"),
        ({"error": 7}, "protocol_error"),
        ({"ok": "yes"}, "protocol_error"),
        ({}, "protocol_error"),
    ],
)
async def test_only_a_good_verdict_is_a_success(node: FakeNode, verdict: dict[str, Any], reason: str) -> None:
    node.verdict = verdict
    sending = Sending(node)
    sending.put(0, 40)
    sending.handoff.start()
    assert await over(sending) == reason


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        ({"magic": "tilert"}, "protocol_error"),
        ({"ext": 2}, "protocol_error"),
        ({"ext": "1"}, "protocol_error"),
        ({"transport": "nixl"}, "protocol_error"),
        ({"max_seq_len": 39}, "seq_len_exceeded"),
        ({"max_seq_len": "64"}, "seq_len_exceeded"),
        ({"max_seq_len": True}, "seq_len_exceeded"),
        ({"layout": None}, "layout_mismatch"),
        ({"layout": LAYOUT.describe() | {"layers": 4}}, "layout_mismatch"),
        ({"layout": LAYOUT.describe() | {"page": 64}}, "layout_mismatch"),
        ({"layout": LAYOUT.describe() | {"dtype": "bfloat16"}}, "layout_mismatch"),
        ({"layout": LAYOUT.describe() | {"version": 71}}, "layout_mismatch"),
        ({"layout": LAYOUT.describe() | {"planes": [["kv", 1, 1152]]}}, "layout_mismatch"),
        # Without the extension it is a stock node, and this layout is none of stock's.
        ({"ext": None}, "layout_mismatch"),
        ({"ext": None, "layout_version": 10}, "layout_mismatch"),
    ],
)
async def test_a_node_that_does_not_fit_is_asked_for_nothing(
    node: FakeNode, hello: dict[str, Any], reason: str
) -> None:
    node.hello = hello
    sending = Sending(node)
    sending.put(0, 40)
    sending.handoff.start()
    assert await over(sending) == reason
    assert node.untouched
    assert node.requests == []


@pytest.mark.parametrize(
    "changed",
    [
        {"address": 0},
        {"address": -4096},
        {"address": "4096"},
        {"address": None},
        {"bytes": LAYOUT.segment_bytes(39)},
        {"bytes": None},
        {"deadline_s": None},
        {"deadline_s": "9"},
        {"generation": 8},
        {"generation": None},
        {"accept": 1},
        {"accept": False},
    ],
)
async def test_an_answer_that_does_not_hold_lets_nothing_be_written(
    node: FakeNode, changed: dict[str, Any]
) -> None:
    node.accept = lambda answer: answer | changed
    sending = Sending(node)
    sending.put(0, 40)
    sending.handoff.start()
    assert await over(sending) == "protocol_error"
    assert sending.transport.writes == []


@pytest.mark.parametrize("code", ["busy", "draining", "not_reserved", "rid_reused", "unauthorized"])
async def test_a_refusal_is_the_reason(node: FakeNode, code: str) -> None:
    node.accept = lambda _: {"error": code, "message": "no"}
    sending = Sending(node)
    sending.put(0, 40)
    sending.handoff.start()
    assert await over(sending) == code
    assert sending.transport.writes == []


def frame(body: bytes, size: int | None = None) -> bytes:
    return struct.pack("!I", len(body) if size is None else size) + body


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "protocol_error"),
        (b"\0\0", "protocol_error"),
        (frame(b'{"magic":', 400), "protocol_error"),
        (frame(b"", control.MAX_MESSAGE + 1), "protocol_error"),
        (frame(b"", 0xFFFFFFFF), "protocol_error"),
        (frame(b"not json"), "protocol_error"),
        (frame(b"[1, 2]"), "protocol_error"),
        (frame(b"[" * 100_000), "protocol_error"),
        (frame(b"\xff\xfe"), "protocol_error"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "protocol_error"),
    ],
    ids=lambda value: repr(value[:12]) if isinstance(value, bytes) else value,
)
async def test_a_peer_that_is_no_node_is_named_as_such(raw: bytes, reason: str) -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        node = node_of(port=server.sockets[0].getsockname()[1])
        sending = Sending(node)
        sending.put(0, 40)
        sending.handoff.start()
        assert await over(sending) == reason


@pytest.mark.parametrize("trickle", [False, True])
async def test_a_peer_that_says_nothing_or_trickles_is_left_in_time(trickle: bool) -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frame(b"{", 1000))
        while trickle:
            await asyncio.sleep(0.05)
            writer.write(b" ")
        await asyncio.sleep(60)

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        node = node_of(port=server.sockets[0].getsockname()[1])
        sending = Sending(node, admission_timeout_s=0.4)
        sending.handoff.start()
        assert await over(sending, within_s=2.0) == "connect_failed"


async def test_a_port_where_nobody_listens_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        sending = Sending(node_of(port=taken.getsockname()[1]))
        sending.handoff.start()
        assert await over(sending) == "connect_failed"


async def test_the_secret_is_proven_and_never_sent(node: FakeNode) -> None:
    sending = Sending(node, secret=b"s3cret")
    sending.put(0, 40)
    sending.handoff.start()
    assert await over(sending) is None
    (request,) = node.requests
    assert control.proof_holds(b"s3cret", "00ff", request["rid"], 0, request["proof"])
    assert not control.proof_holds(b"another", "00ff", request["rid"], 0, request["proof"])
    assert "s3cret" not in str(request)


@pytest.mark.parametrize("nonce", [None, "", 7])
async def test_a_node_without_a_nonce_gets_no_proof(node: FakeNode, nonce: object) -> None:
    node.hello = {"nonce": nonce}
    sending = Sending(node, secret=b"s3cret")
    sending.put(0, 40)
    sending.handoff.start()
    assert await over(sending) == "unauthorized"
    assert node.requests == []


@pytest.mark.parametrize(
    ("here", "wanted", "sent"),
    [
        (True, True, True),
        (True, False, True),
        (None, True, True),
        (None, False, False),
        (False, False, False),
    ],
)
async def test_checksums_are_sent_where_either_end_wants_them(
    node: FakeNode, here: bool | None, wanted: bool, sent: bool
) -> None:
    node.accept = lambda answer: answer | {"checksums": wanted}
    sending = Sending(node, checksum=here)
    sums = [plane_checksums(sending.put(0, 40), LAYOUT, 40)]
    sending.handoff.start()
    assert await over(sending) is None
    assert (await node.ended())["checksums"] == (sums if sent else None)
    assert node.requests[0]["checksums"] is (here is not False)


async def test_who_sends_no_checksums_writes_nothing_where_they_are_wanted(node: FakeNode) -> None:
    node.accept = lambda answer: answer | {"checksums": True}
    sending = Sending(node, checksum=False)
    sending.put(0, 40)
    sending.handoff.start()
    assert await over(sending) == "layout_mismatch"
    assert sending.transport.writes == []


async def test_a_node_that_dies_half_way_is_a_reason(node: FakeNode) -> None:
    async def die(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await until(lambda: not node.untouched)
        writer.transport.abort()

    node.on_accept = die
    sending = Sending(node)
    sending.put(0, 24)
    sending.handoff.start()
    assert await over(sending) in ("connect_failed", "protocol_error")

"""Corrupted, missing, late, duplicate and unknown state is refused with a reason; the next request is right."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from integration.decode.parts import (
    HOST,
    LAYOUT,
    MAX_SEQ_LEN,
    Prefill,
    Running,
    Sender,
    engine_of,
    prompt_of,
    running,
    tokens_of,
)
from vllm_tilert.checksum import plane_checksums
from vllm_tilert.decode.slots import Limits
from vllm_tilert.wire import api, control

SHORT = Limits(reserve=1.0, transfer=1.0, grace=0.5, claim=1.0)


async def next_request_is_right(node: Running, prefill: Prefill) -> None:
    prompt = prompt_of(99, 33)
    expected = prefill.oracle.continuation(prompt, 12)
    rid = api.new_rid()
    grant = await node.reserve(rid)
    assert await prefill.hand_off(node, rid, grant["generation"], prompt) == {"ok": True}
    assert tokens_of((await node.stream(rid, expected[0], 12))[1]) == expected
    await node.idle()


@pytest.mark.parametrize("byte", [0, 2304 * 17 + 5, 3 * 2304 * 50 - 1])
async def test_one_changed_byte_is_never_decoded(prefill: Prefill, model_dir: Path, byte: int) -> None:
    prompt, rid = prompt_of(1, 50), api.new_rid()
    async with running(engine_of(model_dir)) as node:
        grant = await node.reserve(rid)
        decode = asyncio.ensure_future(node.stream(rid, 1, 8))
        sender = prefill.sender(node, prompt)
        await sender.admit(rid, grant["generation"], 50)
        assert sender.accept["checksums"] is True
        await sender.write()
        slot = node.node.memory[grant["slot"]]
        slot[byte] ^= 1
        verdict = await sender.done(rid, 50)
        assert verdict["error"] == "checksum_mismatch"
        status, lines = await decode
        assert (status, lines[0]["error"]) == (502, "checksum_mismatch")
        await sender.close()
        await next_request_is_right(node, prefill)


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"rid": "f" * 32}, "not_reserved"),
        ({"rid": "job-42"}, "bad_request"),
        ({"generation": 7}, "not_reserved"),
        ({"generation": True}, "bad_request"),
        ({"rank": 1}, "bad_request"),
        ({"ext": None}, "bad_request"),
        ({"ext": 2}, "bad_request"),
        ({"seq_len": MAX_SEQ_LEN + 1}, "seq_len_exceeded"),
        ({"seq_len": 0}, "bad_request"),
        ({"seq_len": "9"}, "bad_request"),
        ({"last_prompt_token": -1}, "bad_request"),
        ({"proof": "0" * 64}, "unauthorized"),
        ({"proof": None}, "unauthorized"),
        ({"checksums": False}, "layout_mismatch"),
        ({"layout": None}, "layout_mismatch"),
        ({"layout": LAYOUT.describe() | {"layers": 4}}, "layout_mismatch"),
        ({"layout": LAYOUT.describe() | {"dtype": "bfloat16"}}, "layout_mismatch"),
        ({"layout": LAYOUT.describe() | {"version": 10}}, "layout_mismatch"),
    ],
)
async def test_a_wrong_request_is_refused_before_a_byte_is_written(
    prefill: Prefill, model_dir: Path, changed: dict[str, Any], code: str
) -> None:
    rid = api.new_rid()
    async with running(engine_of(model_dir)) as node:
        grant = await node.reserve(rid)
        sender = prefill.sender(node, prompt_of(2, 9))
        await sender.connect()
        request = sender.request(rid, grant["generation"], 9, **changed)
        if "rid" in changed:
            request["proof"] = control.proof(b"a shared secret", sender.hello["nonce"], request["rid"], 0)
        answer = await sender.tell(request)
        assert (answer["error"], "address" in answer) == (code, False)
        await sender.close()
        # The reservation is untouched: its own sender is still welcome.
        assert await prefill.hand_off(node, rid, grant["generation"], prompt_of(2, 9)) == {"ok": True}


async def test_second_late_and_reused_writers_are_refused(prefill: Prefill, model_dir: Path) -> None:
    rid, prompt = api.new_rid(), prompt_of(3, 9)
    async with running(engine_of(model_dir)) as node:
        grant = await node.reserve(rid)
        first = prefill.sender(node, prompt)
        await first.admit(rid, grant["generation"], 9)
        second = prefill.sender(node, prompt)
        await second.connect()
        answer = await second.tell(second.request(rid, grant["generation"], 9))
        assert answer["error"] == "rid_reused"
        status, answer = await node.call(api.RESERVE, {"rid": rid})
        assert (status, answer["error"]) == (409, "rid_reused")
        await first.write()
        assert await first.done(rid, 9) == {"ok": True}
        assert (await node.stream(rid, 65, 4))[0] == 200
        late = prefill.sender(node, prompt)
        await late.connect()
        answer = await late.tell(late.request(rid, grant["generation"], 9))
        assert answer["error"] == "rid_reused"


@pytest.mark.parametrize(
    ("segments", "sums"),
    [([8], None), ([9, 1], None), ([0, 9], None), ([-1, 10], None), ("9", None), ([9], [[1, 2]]), ([9], [])],
)
async def test_a_done_that_does_not_add_up_is_refused(
    prefill: Prefill, model_dir: Path, segments: Any, sums: Any
) -> None:
    rid, prompt = api.new_rid(), prompt_of(4, 9)
    async with running(engine_of(model_dir)) as node:
        grant = await node.reserve(rid)
        sender = prefill.sender(node, prompt)
        await sender.admit(rid, grant["generation"], 9)
        await sender.write()
        answer = await sender.tell(
            {"done": True, "rid": rid, "rank": 0, "segments": segments, "checksums": sums}
        )
        assert answer["error"] in ("bad_request", "checksum_mismatch")
        status, lines = await node.stream(rid, 1, 4)
        assert status == 502
        assert lines[0]["error"] == "handoff_failed"
        await next_request_is_right(node, prefill)


def cut(prefill: Prefill, node: Running, prompt: list[int], at: int) -> tuple[Sender, list[list[int]]]:
    """A sender that holds a prompt's state as two segments, and their checksums."""
    sender = prefill.sender(node, prompt)
    whole = plane_views(sender.segment.clone(), len(prompt))
    parts = [torch.cat([view[:, rows].flatten() for view in whole]) for rows in (slice(at), slice(at, None))]
    sender.segment.copy_(torch.cat(parts))
    lengths = (at, len(prompt) - at)
    return sender, [plane_checksums(part, LAYOUT, n) for part, n in zip(parts, lengths, strict=True)]


def plane_views(segment: torch.Tensor, tokens: int) -> list[torch.Tensor]:
    """Each plane as [layers, tokens, bytes]."""
    bounds = [*LAYOUT.plane_offsets(tokens), segment.numel()]
    spans = itertools.pairwise(bounds)
    return [segment[low:high].view(LAYOUT.layers, tokens, -1) for low, high in spans]


async def test_a_prompt_in_segments_is_looked_at_as_they_come(prefill: Prefill, model_dir: Path) -> None:
    prompt, rid = prompt_of(21, 50), api.new_rid()
    expected = prefill.oracle.continuation(prompt, 12)
    async with running(engine_of(model_dir)) as node:
        grant = await node.reserve(rid)
        sender, sums = cut(prefill, node, prompt, 30)
        await sender.admit(rid, grant["generation"], 50)
        assert sender.accept["segments"] is True
        await sender.write(0, LAYOUT.segment_bytes(30))
        await sender.say(30, sums[0])
        async with asyncio.timeout(5):
            await node.node.signal.until(lambda: node.node.slots.find(rid).arrived == (30,))
        await sender.write(LAYOUT.segment_bytes(30))
        done = {"done": True, "rid": rid, "rank": 0, "segments": [30, 20], "checksums": sums}
        assert await sender.tell(done) == {"ok": True}
        assert tokens_of((await node.stream(rid, expected[0], 12))[1]) == expected
        await sender.close()


async def test_one_changed_byte_ends_it_before_the_rest_has_come(prefill: Prefill, model_dir: Path) -> None:
    prompt, rid = prompt_of(22, 50), api.new_rid()
    async with running(engine_of(model_dir)) as node:
        grant = await node.reserve(rid)
        sender, sums = cut(prefill, node, prompt, 30)
        await sender.admit(rid, grant["generation"], 50)
        await sender.write(0, LAYOUT.segment_bytes(30))
        node.node.memory[grant["slot"]][1234] ^= 1
        await sender.say(30, sums[0])
        async with asyncio.timeout(5):
            assert (await control.read(sender.reader))["abort"] == "checksum_mismatch"
        status, lines = await node.stream(rid, 1, 4)
        assert (status, lines[0]["error"]) == (502, "checksum_mismatch")
        assert not node.node.slots.idle  # until the sender has stopped
        sender.writer.write(control.pack({"abort": "checksum_mismatch", "message": "stopped"}))
        await node.idle(2.0)
        await sender.close()
        await next_request_is_right(node, prefill)


@pytest.mark.parametrize(
    ("tokens", "sums"),
    [
        (0, [1]),
        (-1, [1]),
        (True, [1]),
        ("9", [1]),
        (50, [1]),
        (51, [1]),
        (9, None),
        (9, [1, 2]),
    ],
)
async def test_a_segment_that_cannot_be_keeps_the_slot_from_others(
    prefill: Prefill, model_dir: Path, tokens: Any, sums: Any
) -> None:
    """Who says such a thing may be writing anything: it is refused, and its slot quarantined."""
    rid = api.new_rid()
    async with running(engine_of(model_dir), limits=SHORT, slots=1) as node:
        grant = await node.reserve(rid)
        sender = prefill.sender(node, prompt_of(23, 50))
        await sender.admit(rid, grant["generation"], 50)
        await sender.say(tokens, sums)
        async with asyncio.timeout(5):
            assert await sender.reader.read() == b""
        assert (await node.stream(rid, 1, 4))[1][0]["error"] == "handoff_failed"
        assert (await node.call(api.STATUS))[1]["slots"][0]["state"] == "quarantined"
        await sender.close()
        await node.idle(3.0)
        await next_request_is_right(node, prefill)


@pytest.mark.parametrize("segments", [[50], [20, 30], [31, 19]], ids=str)
async def test_a_done_of_other_segments_than_were_said_is_refused(
    prefill: Prefill, model_dir: Path, segments: list[int]
) -> None:
    prompt, rid = prompt_of(24, 50), api.new_rid()
    async with running(engine_of(model_dir)) as node:
        grant = await node.reserve(rid)
        sender, sums = cut(prefill, node, prompt, 30)
        await sender.admit(rid, grant["generation"], 50)
        await sender.write()
        await sender.say(30, sums[0])
        sums = sums[: len(segments)]
        done = {"done": True, "rid": rid, "rank": 0, "segments": segments, "checksums": sums}
        assert (await sender.tell(done))["error"] == "bad_request"
        assert (await node.stream(rid, 1, 4))[1][0]["error"] == "handoff_failed"
        await sender.close()
        await next_request_is_right(node, prefill)


async def test_the_slot_of_a_sender_that_vanished_mid_write_is_quarantined(
    prefill: Prefill, model_dir: Path
) -> None:
    rid = api.new_rid()
    async with running(engine_of(model_dir), limits=SHORT, slots=1) as node:
        grant = await node.reserve(rid)
        sender = prefill.sender(node, prompt_of(5, 200))
        await sender.admit(rid, grant["generation"], 200)
        await sender.write(0, 4096)
        await sender.close()
        status, lines = await node.stream(rid, 1, 4)
        assert (status, lines[0]["error"]) == (502, "handoff_failed")
        state = (await node.call(api.STATUS))[1]
        assert (state["status"], state["slots"][0]["state"]) == ("busy", "quarantined")
        status, refusal = await node.call(api.RESERVE, {"rid": api.new_rid(), "ahead": True})
        assert (status, refusal["error"]) == (429, "busy")
        await node.idle(3.0)
        await next_request_is_right(node, prefill)


async def test_a_sender_that_stays_silent_is_told_to_stop(prefill: Prefill, model_dir: Path) -> None:
    rid = api.new_rid()
    async with running(engine_of(model_dir), limits=SHORT) as node:
        grant = await node.reserve(rid)
        sender = prefill.sender(node, prompt_of(6, 20))
        await sender.admit(rid, grant["generation"], 20)
        assert sender.accept["deadline_s"] <= SHORT.transfer
        async with asyncio.timeout(5):
            assert (await control.read(sender.reader))["abort"] == "kv_transfer_timeout"
        sender.writer.write(control.pack({"abort": "kv_transfer_timeout", "message": "stopped"}))
        await node.idle(0.3)  # at once: the sender said that nothing is outstanding
        await sender.close()


async def test_state_that_never_comes_ends_in_a_timeout(prefill: Prefill, model_dir: Path) -> None:
    rid = api.new_rid()
    async with running(engine_of(model_dir)) as node:
        await node.reserve(rid)
        body = {"rid": rid, "first_token_id": 1, "max_tokens": 4, "timeout_s": 0.2, "stream": True}
        status, answer = await node.call(api.DECODE, body)
        assert (status, answer["error"]) == (504, "kv_transfer_timeout")
        await next_request_is_right(node, prefill)


@pytest.mark.parametrize("state", ["reserved", "receiving", "ready", "waiting", "decoding"])
async def test_a_cancel_in_any_state_leaves_the_node_to_the_next(
    prefill: Prefill, model_dir: Path, state: str
) -> None:
    rid, prompt = api.new_rid(), prompt_of(8, 20)
    async with running(engine_of(model_dir)) as node:
        grant = await node.reserve(rid)
        decode: asyncio.Future[Any] | None = None
        sender = prefill.sender(node, prompt)
        if state == "waiting":
            decode = asyncio.ensure_future(node.stream(rid, 65, 900))
            await asyncio.sleep(0.05)
        if state == "receiving":
            await sender.admit(rid, grant["generation"], 20)
        if state in ("ready", "decoding"):
            await prefill.hand_off(node, rid, grant["generation"], prompt)
        if state == "decoding":
            decode = asyncio.ensure_future(node.stream(rid, 65, 900))
            async with asyncio.timeout(20):
                while (engine := node.node.slots.engine) is None or node.node.remaining(engine) == 900:
                    await asyncio.sleep(0.01)  # until the first token has left
        assert await node.call(api.CANCEL, {"rid": rid}) == (200, {"cancelled": rid})
        assert (await node.call(api.CANCEL, {"rid": rid}))[0] == 200
        if state == "receiving":
            assert (await control.read(sender.reader))["abort"] == "cancelled"
            assert not node.node.slots.idle
            sender.writer.write(control.pack({"abort": "cancelled", "message": ""}))
            await sender.close()
        if decode is not None:
            status, lines = await decode
            assert lines[-1]["error"] == "cancelled"
            assert status == (200 if state == "decoding" else 409)
        await node.idle(2.0)
        assert (await node.call(f"{api.HISTORY}/{rid}"))[1]["outcome"] == "cancelled"
        await next_request_is_right(node, prefill)


async def test_an_unknown_rid_is_unknown_everywhere(model_dir: Path) -> None:
    rid = api.new_rid()
    async with running(engine_of(model_dir)) as node:
        assert (await node.call(api.CANCEL, {"rid": rid}))[0] == 404
        assert (await node.call(f"{api.HISTORY}/{rid}"))[0] == 404
        assert (await node.call(api.DECODE, {"rid": rid, "first_token_id": 1}))[0] == 409


async def test_without_the_secret_only_health_and_metrics_answer(model_dir: Path) -> None:
    async with running(engine_of(model_dir)) as node:
        node.http.headers.clear()  # type: ignore[attr-defined]
        assert (await node.call(api.STATUS))[0] == 401
        assert (await node.call(api.RESERVE, {"rid": api.new_rid()}))[0] == 401
        assert (await node.call(api.HEALTH))[0] == 200
        async with node.http.get(node.url + api.METRICS) as answer:
            assert 'tilert_decode_slots{state="free"} 2.0' in await answer.text()


async def test_a_first_token_outside_the_vocabulary_fails_that_request_alone(
    prefill: Prefill, model_dir: Path
) -> None:
    rid = api.new_rid()
    async with running(engine_of(model_dir)) as node:
        grant = await node.reserve(rid)
        await prefill.hand_off(node, rid, grant["generation"], prompt_of(9, 9))
        _, lines = await node.stream(rid, 5000, 4)
        assert lines[-1]["error"] == "engine_failed"
        await next_request_is_right(node, prefill)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ["ext", "rid", "rank", "generation", "seq_len", "last_prompt_token", "sampling", "layout", "proof"]


async def test_no_bytes_on_the_control_port_upset_the_node(prefill: Prefill, model_dir: Path) -> None:
    async with running(engine_of(model_dir)) as node:

        async def say(data: bytes) -> None:
            reader, writer = await asyncio.open_connection(HOST, node.control_port)
            await control.read(reader)
            writer.write(data)
            writer.write_eof()
            async with asyncio.timeout(5):
                answer = await reader.read()
            assert b'"accept"' not in answer
            writer.close()

        messages: list[bytes] = []

        @settings(max_examples=200, database=None, suppress_health_check=list(HealthCheck))
        @given(
            st.binary(max_size=64)
            | st.dictionaries(st.sampled_from(FIELDS), JSON).map(control.pack)
            | JSON.map(lambda value: control.pack(value))  # type: ignore[arg-type]
        )
        def collect(data: bytes) -> None:
            messages.append(data)

        collect()
        for data in messages:
            await say(data)
        assert node.node.slots.idle
        await next_request_is_right(node, prefill)

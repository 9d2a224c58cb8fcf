"""Whatever does not fit is refused in words at the node, counted by its reason, and not one byte of it is let in."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from integration.decode.parts import (
    HOST,
    LAYOUT,
    SECRET,
    Prefill,
    Running,
    engine_of,
    prompt_of,
    running,
)
from unit.connector.loop import LoopTransport
from unit.profiles.caches import nsa_caches
from vllm_tilert.decode.engines.base import Decoded
from vllm_tilert.decode.node import Node
from vllm_tilert.decode.receiver import MAX_DONE, Receiver
from vllm_tilert.decode.slots import Limits
from vllm_tilert.profiles.base import get_profile
from vllm_tilert.wire import api, control


async def refusals(node: Running) -> dict[str, float]:
    """How many senders were refused, by reason."""
    async with node.http.get(node.url + api.METRICS) as answer:
        lines = (await answer.text()).splitlines()
    name = "tilert_decode_refused_total{"
    return {
        line.split('reason="')[1].split('"')[0]: float(line.split()[-1])
        for line in lines
        if line.startswith(name)
    }


LAYOUTS: list[dict[str, Any]] = [
    {"profile": "glm5"},
    {"version": 10},
    {"dtype": "bfloat16"},
    {"dtype": "int3"},
    {"layers": 4},
    {"page": 64},
    {"planes": [["kv", 1, 1152]]},
    {"planes": [["kv", 64, 2304]]},
    {"planes": [["kv", 1, 2304], ["pe", 1, 128]]},
    {"planes": "kv"},
]


@pytest.mark.parametrize("changed", LAYOUTS, ids=str)
async def test_a_layout_that_differs_in_any_field_is_named(
    prefill: Prefill, model_dir: Path, changed: dict[str, Any]
) -> None:
    rid = api.new_rid()
    async with running(engine_of(model_dir)) as node:
        node.node.memory.fill_(0xEE)
        grant = await node.reserve(rid)
        sender = prefill.sender(node, prompt_of(2, 9))
        await sender.connect()
        layout = LAYOUT.describe() | changed
        answer = await sender.tell(sender.request(rid, grant["generation"], 9, layout=layout))
        (field,) = changed
        assert answer["error"] == "layout_mismatch"
        assert answer["message"].startswith(f"layout.{field}: here ")
        assert await refusals(node) == {"layout_mismatch": 1}
        assert bool((node.node.memory == 0xEE).all())
        await sender.close()


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (struct.pack("!I", control.MAX_REQUEST + 1), "exceeds the limit"),
        (struct.pack("!I", 0xFFFFFFFF), "exceeds the limit"),
        (struct.pack("!I", 100) + b'{"ext": 1', "closed after 9 bytes"),
        (b"\0\0", "closed after 2 bytes"),
        (struct.pack("!I", 4) + b"nope", "not JSON"),
        (struct.pack("!I", 2) + b"[]", "not an object"),
        (struct.pack("!I", 60_000) + b"[" * 60_000, "not JSON"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_broken_message_is_counted_and_named_in_the_log(
    prefill: Prefill, model_dir: Path, raw: bytes, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(engine_of(model_dir)) as node:
        reader, writer = await asyncio.open_connection(HOST, node.control_port)
        await control.read(reader)
        writer.write(raw)
        writer.write_eof()
        async with asyncio.timeout(5):
            assert await reader.read() == b""
        writer.close()
        assert await refusals(node) == {"protocol": 1}
        assert words in caplog.text


async def test_an_oversized_done_is_no_done(prefill: Prefill, model_dir: Path) -> None:
    rid = api.new_rid()
    async with running(engine_of(model_dir), limits=Limits(transfer=1.0, grace=0.3)) as node:
        grant = await node.reserve(rid)
        sender = prefill.sender(node, prompt_of(2, 9))
        await sender.admit(rid, grant["generation"], 9)
        await sender.write()
        sender.writer.write(struct.pack("!I", MAX_DONE + 1))
        async with asyncio.timeout(5):
            assert await sender.reader.read() == b""
        assert await refusals(node) == {"protocol": 1}
        status, lines = await node.stream(rid, 1, 4)
        assert (status, lines[0]["error"]) == (502, "handoff_failed")
        await node.idle(5.0)
        await sender.close()


async def test_a_done_after_the_deadline_is_too_late(prefill: Prefill, model_dir: Path) -> None:
    rid = api.new_rid()
    async with running(engine_of(model_dir), limits=Limits(transfer=0.3, grace=5.0)) as node:
        grant = await node.reserve(rid)
        sender = prefill.sender(node, prompt_of(2, 9))
        await sender.admit(rid, grant["generation"], 9)
        await sender.write()
        async with asyncio.timeout(5):
            await node.node.signal.until(lambda: node.node.slots.find(rid).over)  # type: ignore[union-attr]
        assert (await control.read(sender.reader))["abort"] == "kv_transfer_timeout"
        verdict = await sender.done(rid, 9)
        assert verdict["error"] == "kv_transfer_timeout"
        assert await refusals(node) == {"kv_transfer_timeout": 1}
        status, lines = await node.stream(rid, 1, 4)
        assert (status, lines[0]["error"]) == (504, "kv_transfer_timeout")
        await node.idle(5.0)
        await sender.close()


DONE_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 70) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=6,
)
FIELDS = ["done", "rid", "rank", "segments", "checksums", "abort", "error"]


async def test_no_done_but_the_right_one_makes_state(prefill: Prefill, model_dir: Path) -> None:
    """Half of the state is written each time; no message a sender can end with gets it decoded."""
    messages: list[dict[str, Any]] = []

    @settings(max_examples=60, database=None, suppress_health_check=list(HealthCheck))
    @given(st.dictionaries(st.sampled_from(FIELDS), DONE_JSON), st.booleans(), st.booleans())
    def collect(message: dict[str, Any], done: bool, segments: bool) -> None:
        message = message | ({"done": True} if done else {}) | ({"segments": [9]} if segments else {})
        messages.append(message)

    collect()
    async with running(engine_of(model_dir), limits=Limits(transfer=2.0, grace=0.1)) as node:
        for message in messages:
            rid = api.new_rid()
            grant = await node.reserve(rid)
            sender = prefill.sender(node, prompt_of(2, 9))
            await sender.admit(rid, grant["generation"], 9)
            await sender.write(0, 9000)
            if message.get("done") is True:
                message["rid"] = rid
            sender.writer.write(control.pack(message))
            await sender.writer.drain()
            async with asyncio.timeout(5):
                await node.node.signal.until(lambda rid=rid: node.node.slots.find(rid).over)
            handoff = node.node.slots.find(rid)
            assert handoff is not None
            assert handoff.outcome in ("handoff_failed", "checksum_mismatch"), (message, handoff.message)
            await sender.close()
            await node.idle(5.0)


BODIES = st.one_of(
    st.binary(max_size=200),
    DONE_JSON.map(lambda value: control.json.dumps(value).encode()),
    st.just(b"[" * 50_000),
    st.just(b'{"rid": "' + b"0" * 70_000 + b'"}'),
    st.dictionaries(
        st.sampled_from(
            [
                "rid",
                "first_token_id",
                "max_tokens",
                "sampling",
                "timeout_s",
                "stream",
                "ttl_s",
                "ahead",
                "seq_len",
            ]
        ),
        DONE_JSON | st.just("a" * 32) | st.just({"temperature": float("nan")}) | st.just({"top_k": 1 << 80}),
    ).map(lambda value: control.json.dumps(value).encode()),
)
PATHS = [
    api.RESERVE,
    api.DECODE,
    api.CANCEL,
    api.DRAIN,
    api.UNDRAIN,
    api.STATUS,
    api.HEALTH,
    "/pd/history/x",
    "/",
]


async def test_no_http_request_breaks_the_node(prefill: Prefill, model_dir: Path) -> None:
    requests: list[tuple[str, str, str, bytes]] = []

    @settings(max_examples=250, database=None, suppress_health_check=list(HealthCheck))
    @given(
        st.sampled_from(["POST", "POST", "POST", "GET", "PUT", "DELETE"]),
        st.sampled_from(PATHS),
        st.sampled_from(["application/json", "text/plain", "", "application/x-www-form-urlencoded"]),
        BODIES,
    )
    def collect(method: str, path: str, kind: str, body: bytes) -> None:
        requests.append((method, path, kind, body))

    collect()
    async with running(engine_of(model_dir)) as node:
        for method, path, kind, body in requests:
            headers = {"content-type": kind} if kind else {}
            async with node.http.request(method, node.url + path, data=body, headers=headers) as answer:
                text = await answer.text()
                assert answer.status < 500 or (answer.status, path) == (503, api.RESERVE), (path, body, text)
                if answer.status != 200:
                    assert set((await answer.json()).keys()) >= {"error", "message"}
        status, state = await node.call(api.STATUS)
        assert status == 200
        await node.call(api.UNDRAIN, {})
        for slot in state["slots"]:
            if slot["rid"] is not None:
                await node.call(api.CANCEL, {"rid": slot["rid"]})
        await node.idle(5.0)
        rid = api.new_rid()
        grant = await node.reserve(rid)
        assert await prefill.hand_off(node, rid, grant["generation"], prompt_of(4, 9)) == {"ok": True}
        assert (await node.stream(rid, 65, 4))[0] == 200


class Idle:
    """An engine for a node that never decodes."""

    max_seq_len = 64
    takes_bytes = False

    def inject(self, state: Any, last_prompt_token: int) -> None:
        raise AssertionError

    def decode(self, *_: Any) -> Decoded:
        raise AssertionError

    def reset(self) -> None:
        pass

    def self_check(self) -> None:
        pass


async def test_no_bytes_upset_a_node_that_takes_stock_senders() -> None:
    """Nor do they keep the landing zone for good, or let anybody into a slot."""
    messages: list[bytes] = []

    @settings(max_examples=150, database=None, suppress_health_check=list(HealthCheck))
    @given(
        st.binary(max_size=40)
        | st.dictionaries(
            st.sampled_from(["ext", "rid", "rank", "seq_len", "last_prompt_token", "done"]),
            DONE_JSON | st.just("a" * 32) | st.just(0) | st.just(9) | st.just(True),
        ).map(control.pack)
    )
    def collect(data: bytes) -> None:
        messages.append(data)

    collect()
    profile = get_profile("glm5")
    layout = profile.layout_from_caches(nsa_caches(79, 1, "fp8_ds_mla"))
    node = Node(
        slots=2,
        max_seq_len=64,
        layout=layout,
        profile=profile,
        engine=Idle,
        transport=LoopTransport(),
        limits=Limits(transfer=0.02, grace=0.01),
        allow_stock_senders=True,
    )
    await node.start()
    receiver = Receiver(node, SECRET.encode())
    port = await receiver.start(HOST, 0)
    node.memory.fill_(0xEE)
    node.slots.reserve("a" * 32)
    assert node.landing is not None
    for data in messages:
        reader, writer = await asyncio.open_connection(HOST, port)
        await control.read(reader)
        writer.write(data)
        writer.write_eof()
        async with asyncio.timeout(5):
            await reader.read()
        writer.close()
    async with asyncio.timeout(5):
        while (lease := node.landing.lend()) is None:
            await asyncio.sleep(0.01)
    lease.end()
    assert torch.all(node.memory == 0xEE)
    await receiver.close()
    node.close()

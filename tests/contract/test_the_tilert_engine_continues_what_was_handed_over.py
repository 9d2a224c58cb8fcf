"""Engine `tilert` on TileRT's own Python: every device of the engine gets the request's state, by either way.

See `tilert_on_cpu` for what is real there.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import replace

import pytest
import torch

from contract.tilert_on_cpu import (
    DEVICES,
    ROWS,
    VOCABULARY,
    OnCpu,
    digest,
    next_token,
    tilert_on_cpu,
    write_tokenizer,
)
from unit.profiles.caches import nsa_caches
from vllm_tilert.decode.engines.base import Decoded, ReceivedState, Sampling
from vllm_tilert.decode.engines.tilert import TileRTEngine
from vllm_tilert.decode.node import Decode, End, Node
from vllm_tilert.profiles.base import ConvertedState, get_profile

LAYERS = {"glm5": 79, "dsv32": 62}
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module", params=[("glm5", True), ("dsv32", True), ("dsv32", False)], ids=str)
def setting(request):
    return request.param


@pytest.fixture(scope="module")
def engine(setting, stock_path, tmp_path_factory):
    """One engine a setting: building it takes seconds."""
    model, with_mtp = setting
    folder = tmp_path_factory.mktemp("weights")
    write_tokenizer(folder)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(str(stock_path))
        with tilert_on_cpu(model, monkeypatch):
            yield TileRTEngine(layout_of(model), folder, ROWS, with_mtp)


def layout_of(model: str):
    return get_profile(model).layout_from_caches(nsa_caches(LAYERS[model], 1, "fp8_ds_mla"))


def received(model: str, seed: int, segments: tuple[int, ...]) -> ReceivedState:
    """A request's bytes in a slot that holds another's behind them."""
    profile = get_profile(model)
    generator = torch.Generator().manual_seed(seed)
    caches = nsa_caches(LAYERS[model], 3, "fp8_ds_mla", generator=generator)
    layout = profile.layout_from_caches(caches)
    slot = torch.full((layout.segment_bytes(ROWS),), 0x3C, dtype=torch.uint8)
    gatherer, at = profile.gatherer(caches, layout), 0
    for tokens in segments:
        out = slot[layout.offset(at) :][: layout.segment_bytes(tokens)]
        gatherer.gather([2, 0, 1], at, at + tokens, out).wait()
        at += tokens
    return ReceivedState(slot, layout, segments)


def converted(state: ReceivedState) -> ConvertedState:
    profile = get_profile(state.layout.profile)
    return profile.convert(state.slot, state.layout, state.segments)


def expected(state: ReceivedState, setting, first: int, count: int) -> list[int]:
    """What the stand-in predicts over exactly this state, worked out from the converted planes."""
    model, with_mtp = setting
    layers = converted(state).layers[: None if with_mtp else -1]
    if model == "glm5":  # the index on the first device, the rest on the others
        number = digest(layer[0] for layer in layers)
        number += (DEVICES - 1) * digest(plane for layer in layers for plane in layer[1:])
    else:
        number = DEVICES * digest(plane for layer in layers for plane in layer)
    tokens = [first]
    while len(tokens) < count:
        tokens.append(next_token(tokens[-1], state.seq_len + len(tokens) - 1, number))
    return tokens


def put(engine: TileRTEngine, given: ReceivedState | ConvertedState) -> None:
    """As a node does."""
    if isinstance(given, ReceivedState):
        engine.land(given)
    engine.inject(given, 17)


def decode(engine: TileRTEngine, first: int, count: int, cancel: threading.Event | None = None):
    tokens: list[int] = []
    end = engine.decode(first, count, GREEDY, tokens.extend, cancel or threading.Event())
    engine.reset()
    return tokens, end


@pytest.mark.parametrize("segments", [(1,), (63,), (64, 1), (64, 64, 2)], ids=str)
def test_bytes_and_planes_give_the_tokens_of_this_request(engine, setting, segments) -> None:
    assert engine.takes_bytes
    state = received(setting[0], len(segments), segments)
    want = expected(state, setting, 5, 20)
    for given in (state, converted(state)):
        put(engine, given)
        tokens, end = decode(engine, 5, 20)
        assert tokens == want
        assert (end.tokens, end.finish_reason) == (20, "length")
    assert len(set(want)) > 10  # the comparison above could fail


def test_one_wrong_byte_gives_other_tokens(engine, setting) -> None:
    state = received(setting[0], 9, (64, 30))
    want = expected(state, setting, 5, 20)
    last_layer = -2 if not setting[1] else -1  # without MTP the draft layer's state is not used
    planes = dict(converted(state).planes)
    planes["pe"] = planes["pe"].clone()
    planes["pe"][last_layer, -1, -1] += 1
    engine.inject(ConvertedState(state.seq_len, planes, ("index", "kv", "pe")), 17)
    assert decode(engine, 5, 20)[0] != want


def test_a_shorter_request_after_a_longer_one_is_its_own(engine, setting) -> None:
    put(engine, received(setting[0], 1, (128, 40)))
    decode(engine, 3, 4)
    state = received(setting[0], 2, (30,))
    put(engine, state)
    assert decode(engine, 5, 12)[0] == expected(state, setting, 5, 12)


def test_landed_segment_by_segment_it_is_the_same_request(engine, setting) -> None:
    state = received(setting[0], 5, (64, 64, 7))
    engine.land(replace(state, segments=(64,)))
    engine.settle()
    engine.land(replace(state, segments=(64, 64)), 1)
    engine.land(state, 2)
    engine.inject(state, 17)
    assert decode(engine, 5, 12)[0] == expected(state, setting, 5, 12)


def test_what_was_landed_of_a_request_given_up_is_nobodys(engine, setting) -> None:
    gone, state = received(setting[0], 6, (64, 64, 9)), received(setting[0], 7, (64, 20))
    engine.land(replace(gone, segments=(64, 64)))
    put(engine, state)
    assert decode(engine, 5, 12)[0] == expected(state, setting, 5, 12)


def test_half_or_other_state_than_was_landed_is_never_injected(engine, setting) -> None:
    state, other = received(setting[0], 8, (64, 9)), received(setting[0], 8, (64, 9))
    half = replace(state, segments=(64,))
    with pytest.raises(ValueError, match="has not been landed whole"):
        engine.inject(state, 17)
    engine.land(half)
    with pytest.raises(ValueError, match="has not been landed whole"):
        engine.inject(state, 17)
    with pytest.raises(ValueError, match="segment 1 does not follow what was landed"):
        engine.land(state, 1)  # the refused injection has made an end of it
    engine.land(half)
    with pytest.raises(ValueError, match="segment 1 does not follow what was landed"):
        engine.land(other, 1)  # the same segments of another slot
    engine.land(other)
    with pytest.raises(ValueError, match="has not been landed whole"):
        engine.inject(state, 17)


def test_stop_cancel_and_no_room_end_as_the_seam_says(engine, setting) -> None:
    put(engine, received(setting[0], 3, (64,)))
    stop = next(iter(engine._adapter.stop_ids))
    assert stop > VOCABULARY
    assert decode(engine, stop, 5) == ([], Decoded(0, "stop"))
    cancelled = threading.Event()
    cancelled.set()
    tokens, end = decode(engine, 5, 9, cancelled)
    assert (tokens, end.finish_reason) == ([5], "cancelled")


def test_state_longer_than_the_engine_is_refused(engine, setting) -> None:
    assert engine.max_seq_len == ROWS + 8
    state = received(setting[0], 4, (64,))
    planes = {name: plane.repeat(1, 4, 1) for name, plane in converted(state).planes.items()}
    with pytest.raises(ValueError, match="256 tokens exceed the engine's cache of 208 rows"):
        engine.inject(ConvertedState(256, planes, ("index", "kv", "pe")), 17)


def test_unexpected_tensors_fall_back_to_inject_cache_and_say_so(
    engine, setting, stock, monkeypatch, caplog, tmp_path
) -> None:
    model, with_mtp = setting
    adapter = engine._adapter
    _, caches, _, _ = adapter.gen.decode_layer._get_device_result(3)
    before = caches[3 * 5 + 1]
    caches[3 * 5 + 1] = torch.zeros(1, before.shape[1], 520, dtype=before.dtype)[..., :512]
    monkeypatch.setattr(stock.get_profile(model), "build_engine", lambda *arguments: adapter)
    try:
        with caplog.at_level(logging.WARNING):
            slow = TileRTEngine(layout_of(model), tmp_path, ROWS, with_mtp)
            assert not slow.takes_bytes
            for seed in (5, 6):
                state = received(model, seed, (64, 7))
                slow.inject(converted(state), 17)
                assert decode(slow, 5, 12)[0] == expected(state, setting, 5, 12)
    finally:
        caches[3 * 5 + 1] = before
    said = [record.message for record in caplog.records if "tensor by tensor" in record.message]
    assert said == [
        "state is injected tensor by tensor (slow): device 3: the kv tensors are not alike and contiguous"
    ]


class _OnAnyThread:
    """The engine for a node: each thread needs the mode."""

    def __init__(self, engine: TileRTEngine) -> None:
        self._engine = engine

    takes_bytes = True
    max_seq_len = ROWS

    def self_check(self) -> None:
        """There is no GPU to check."""

    def reset(self) -> None:
        self._engine.reset()

    def land(self, state, first=0) -> None:
        with OnCpu():
            self._engine.land(state, first)

    def settle(self) -> None:
        self._engine.settle()

    def inject(self, state, last_prompt_token) -> None:
        with OnCpu():
            self._engine.inject(state, last_prompt_token)

    def decode(self, *arguments):
        with OnCpu():
            return self._engine.decode(*arguments)


class _Memory:
    """A transport that moves nothing: the test writes into the slots itself."""

    name = "mooncake"

    def register(self, ptr, nbytes, device) -> None:
        pass

    def local_meta(self):
        return {}

    def close(self) -> None:
        pass


async def test_a_node_decodes_each_request_from_its_own_slot(engine, setting) -> None:
    """Three requests over two slots; the next one arrives while one decodes."""
    model = setting[0]
    states = [received(model, seed, (64, 10 + seed)) for seed in range(3)]
    node = Node(
        slots=2,
        max_seq_len=ROWS,
        layout=states[0].layout,
        profile=get_profile(model),
        engine=lambda: _OnAnyThread(engine),
        transport=_Memory(),
        verify_checksums=False,
        engine_name="tilert",
    )
    await node.start()
    running = asyncio.ensure_future(node.run())
    try:
        calls = []
        for number, state in enumerate(states):
            rid = f"{number:032x}"
            handoff = await node.signal.until(lambda rid=rid: _reserve(node, rid))
            handoff = node.slots.admit(rid, handoff.generation)
            handoff.facts |= {"seq_len": state.seq_len, "bytes": 0}
            handoff.last_prompt_token = 17
            node.memory[handoff.slot] = state.slot
            await node.accept_state(handoff, state.segments, None)
            call = Decode(5 + number, 25, GREEDY)
            node.attach(rid, call, 10.0)
            calls.append(call)
        for number, (state, call) in enumerate(zip(states, calls, strict=True)):
            tokens: list[int] = []
            while not isinstance(item := await asyncio.wait_for(call.tokens.get(), 30), End):
                tokens += item
            assert item.error is None
            assert tokens == expected(state, setting, 5 + number, 25)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        node.close()


def _reserve(node: Node, rid: str):
    try:
        return node.slots.reserve(rid, ahead=True)
    except Exception:
        return None

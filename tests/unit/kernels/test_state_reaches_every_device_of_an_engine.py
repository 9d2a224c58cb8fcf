"""The injector on engines of several devices, all on the CPU: what is there afterwards is the request's state."""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace

import pytest
import torch

from vllm_tilert.kernels.inject import Injector
from vllm_tilert.profiles.base import ConvertedState
from vllm_tilert.profiles.mla_nsa import DIMS, ORDER, PROFILES, empty_planes

LAYERS = {"glm5": 79, "dsv32": 62}
ROWS = 140
POISON = -77.0


class Engine:
    """Cache tensors as TileRT's decode layer holds them, and a record of slow injections."""

    def __init__(self, model: str, layers: int, devices: int, rows: int = ROWS) -> None:
        self.decode_layer = self
        self.num_devices = devices
        self.caches = []
        for device in range(devices):
            used = ({"index"} if device == 0 else {"kv", "pe"}) if model == "glm5" else set(ORDER)
            self.caches.append(
                [
                    torch.full((1, rows if name in used else 1, DIMS[name]), POISON, dtype=torch.bfloat16)
                    for _ in range(layers)
                    for name in ORDER
                ]
            )
        self.slow: list[int] = []

    def _get_device_result(self, device_id: int):
        return None, self.caches[device_id], None, None

    def inject_cache(self, layer_caches, start_pos: int = 0) -> None:
        self.slow.append(len(layer_caches))

    def check(self, state: ConvertedState, layers: int) -> None:
        """Every used tensor holds the state in its first rows and nothing new behind them."""
        for caches in self.caches:
            for layer in range(layers):
                for name, cache in zip(ORDER, caches[3 * layer : 3 * layer + 3], strict=True):
                    if cache.shape[1] == 1:
                        assert (cache == POISON).all()
                        continue
                    assert torch.equal(cache[0, : state.seq_len], state.planes[name][layer])
                    assert (cache[0, state.seq_len :] == POISON).all()


def layout(model: str):
    config = {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "index_head_dim": 128,
        "num_hidden_layers": LAYERS[model] - 1,
        "num_nextn_predict_layers": 1,
    }
    return PROFILES[model].layout_from_config(config, "bf16")


def planes_of(layers: int, tokens: int) -> ConvertedState:
    planes = empty_planes(layers, tokens, torch.device("cpu"))
    for plane in planes.values():
        plane.copy_(torch.randint(-1000, 1000, plane.shape).bfloat16())
    return ConvertedState(tokens, planes, ORDER)


@pytest.fixture(params=["glm5", "dsv32"])
def model(request) -> str:
    return request.param


@pytest.mark.parametrize(("devices", "tokens"), [(1, 65), (3, 1), (8, 130)])
def test_converted_planes(model, devices, tokens) -> None:
    if model == "glm5" and devices == 1:
        devices = 2  # its planes are spread over at least two
    engine = Engine(model, LAYERS[model], devices)
    injector = Injector(engine, LAYERS[model])
    assert injector.direct
    assert injector.rows == ROWS
    state = planes_of(LAYERS[model], tokens)
    injector.inject(state)
    engine.check(state, LAYERS[model])
    assert engine.slow == []


@pytest.mark.parametrize("segments", [(1,), (64, 63), (64, 64, 2)], ids=str)
def test_received_bytes(model, segments) -> None:
    geometry = layout(model)
    slot = torch.full((geometry.segment_bytes(sum(segments)),), 0x3C, dtype=torch.uint8).random_(0, 0x78)
    want = PROFILES[model].convert(slot, geometry, segments)
    engine = Engine(model, LAYERS[model], 3)
    Injector(engine, LAYERS[model]).land(slot, geometry, segments)
    engine.check(want, LAYERS[model])


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_received_bytes_in_parts(model, cut) -> None:
    geometry, segments = layout(model), (64, 64, 2)
    slot = torch.full((geometry.segment_bytes(130),), 0x3C, dtype=torch.uint8).random_(0, 0x78)
    want = PROFILES[model].convert(slot, geometry, segments)
    engine = Engine(model, LAYERS[model], 3)
    injector = Injector(engine, LAYERS[model])
    injector.queue(slot, geometry, segments[:cut])
    rows = sum(segments[:cut])
    assert all((cache[0, rows:] == POISON).all() for caches in engine.caches for cache in caches[:3])
    slot[: geometry.offset(128) if cut == 2 else geometry.offset(64)].fill_(
        0
    )  # what is there is not read again
    injector.queue(slot, geometry, segments, cut)
    injector.finish()
    engine.check(want, LAYERS[model])


def test_without_mtp_the_draft_layers_state_is_left_out(model) -> None:
    layers = LAYERS[model] - 1
    engine = Engine(model, layers, 2)
    injector = Injector(engine, layers, unused=1)
    state = planes_of(LAYERS[model], 70)
    injector.inject(state)
    engine.check(state, layers)


def test_too_long_a_request_is_refused_before_anything_is_written(model) -> None:
    engine = Engine(model, LAYERS[model], 2)
    with pytest.raises(ValueError, match="141 tokens exceed the engine's cache of 140 rows"):
        Injector(engine, LAYERS[model]).inject(planes_of(LAYERS[model], 141))
    assert all((cache == POISON).all() for caches in engine.caches for cache in caches)


def _strided(engine: Engine) -> None:
    engine.caches[1][7] = torch.zeros(1, ROWS, 520, dtype=torch.bfloat16)[..., :512]


def _float(engine: Engine) -> None:
    engine.caches[1] = [cache.float() for cache in engine.caches[1]]


def _few(engine: Engine) -> None:
    del engine.caches[1][-1]


def _flat(engine: Engine) -> None:
    engine.caches[1] = [cache[0] for cache in engine.caches[1]]


def _rows_differ(engine: Engine) -> None:
    engine.caches[1][4] = torch.zeros(1, ROWS + 1, 512, dtype=torch.bfloat16)


def _fp8(engine: Engine) -> None:
    engine.caches[1][1::3] = [torch.zeros(1, ROWS, 528, dtype=torch.uint8) for _ in engine.caches[1][1::3]]


def _gone(engine: Engine) -> None:
    engine.decode_layer = SimpleNamespace(num_devices=2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_strided, "device 1: the kv tensors are not alike and contiguous"),
        (_float, "float32"),
        (_few, "cache tensors, expected"),
        (_flat, r"not \[1, rows, dim\]"),
        (_rows_differ, "not alike"),
        (_fp8, "torch.uint8 x 528, not bfloat16 x 512"),
        (_gone, "_get_device_result"),
    ],
)
def test_other_tensors_are_left_to_the_generator(change, reason, caplog) -> None:
    engine = Engine("dsv32", LAYERS["dsv32"], 2)
    change(engine)
    with caplog.at_level(logging.WARNING):
        injector = Injector(engine, LAYERS["dsv32"])
    assert not injector.direct
    assert injector.rows is None
    injector.inject(planes_of(LAYERS["dsv32"], 5))
    injector.inject(planes_of(LAYERS["dsv32"], 6))
    assert engine.slow == [62, 62]
    assert len(caplog.records) == 1
    assert re.search(reason, injector.reason)

"""Our planes are TileRT 0.1.5's bytes, and what we convert are its tensors: real layer counts and lengths."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from unit.profiles.caches import nsa_caches
from vllm_tilert.profiles import stock as stock_layout
from vllm_tilert.profiles.base import get_profile

BLOCKS = 70
LENGTHS = (1, 63, 64, 65, 4097)


@pytest.fixture(scope="module", params=[("glm5", 79), ("dsv32", 62)], ids=lambda p: p[0])
def model(request):
    return request.param


@pytest.fixture(scope="module", params=["fp8_ds_mla", "bfloat16"])
def prefill(request, model):
    """(profile name, caches) with few blocks repeated in memory only once per dtype and model."""
    name, layers = model
    return name, nsa_caches(layers, BLOCKS, request.param, generator=torch.Generator().manual_seed(1))


def _stock_extract(stock, name, caches, table, tokens, limit):
    profile = stock.get_profile(name)
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=list(caches))])
    registered = profile.classify_layers(caches, groups)
    staging = torch.zeros(profile.buffer_bytes(limit), dtype=torch.uint8)
    request = SimpleNamespace(num_tokens=tokens, block_ids_per_group=[table])
    return profile, staging, profile.extract(registered, request, 0, staging, limit)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_extract_plan_and_convert_equal_stock(stock, prefill, tokens: int) -> None:
    name, caches = prefill
    table = random.Random(tokens).sample(range(BLOCKS), -(-tokens // 64))
    theirs, staging, sections = _stock_extract(stock, name, caches, table, tokens, tokens)
    profile = get_profile(name)
    layout = profile.layout_from_caches(caches)
    assert layout.version == theirs.layout_version

    out = torch.full((layout.segment_bytes(tokens),), 0xA5, dtype=torch.uint8)
    profile.gatherer(caches, layout).gather(table, 0, tokens, out).wait()
    assert torch.equal(out, staging)  # at a stride of exactly `tokens` the two layouts are one

    limit = tokens + 100
    hello = {"max_seq_len": limit, **theirs.hello_layout(1 << 20, limit)}
    assert hello == {"max_seq_len": limit, **stock_layout.hello_bases(layout, limit, 1 << 20)}
    assert stock_layout.slot_bytes(layout, limit) == theirs.buffer_bytes(limit)
    sources, targets, lengths = theirs.rdma_plan(hello, sections, 0, tokens, 0)
    assert sorted(zip(sources, targets, lengths, strict=True)) == sorted(
        stock_layout.parts(layout, hello, 0, tokens)
    )

    received = SimpleNamespace(
        rid="r", seq_len=tokens, last_prompt_token=0, first_token_id=None, sampling=None
    )
    want = theirs.convert(staging, 0, tokens, received)
    state = profile.convert(out, layout, [tokens])
    assert len(want.layers) == len(state.layers) == layout.layers
    for mine, other in zip(state.layers, want.layers, strict=True):
        assert torch.equal(mine[1], other[1])
        assert torch.equal(mine[2], other[2])
        # The rotation's float32 sums may be added in another order: one bfloat16 step apart, and seldom.
        gap = (mine[0].view(torch.int16).int() - other[0].view(torch.int16).int()).abs()
        near_zero = mine[0].float().abs().maximum(other[0].float().abs()) < 1e-3
        assert (gap.le(1) | near_zero).all()
        assert gap.gt(0).float().mean() < 0.01


def test_a_stock_connectors_buffer_is_understood(stock, prefill) -> None:
    name, caches = prefill
    tokens, limit = 130, 300
    _, staging, _ = _stock_extract(stock, name, caches, [5, 3, 9], tokens, limit)
    profile = get_profile(name)
    layout = profile.layout_from_caches(caches)
    out = torch.empty(layout.segment_bytes(tokens), dtype=torch.uint8)
    profile.gatherer(caches, layout).gather([5, 3, 9], 0, tokens, out)
    mine = profile.convert(out, layout, [tokens])
    theirs = profile.convert_strided(staging, layout, limit, tokens)
    assert all(torch.equal(mine.planes[plane], theirs.planes[plane]) for plane in mine.order)

"""What is gathered in any cut of segments converts to the rows the caches held, and to nothing else."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unit.profiles.caches import mla_caches, nsa_caches
from vllm_tilert.profiles.base import get_profile

POISON = 0xA5
BLOCKS = 9


def trip(profile, caches, table: list[int], segments: list[int]):
    """Gather each segment to its place in a poisoned slot with a guard behind it, then convert."""
    layout = profile.layout_from_caches(caches)
    gatherer = profile.gatherer(caches, layout)
    used = layout.segment_bytes(sum(segments))
    slot = torch.full((used + 64,), POISON, dtype=torch.uint8)
    at = 0
    for tokens in segments:
        out = slot[layout.offset(at) :][: layout.segment_bytes(tokens)]
        done = gatherer.gather(table, at, at + tokens, out)
        done.wait()
        assert done.done()
        at += tokens
    assert slot[used:].eq(POISON).all(), "wrote past the last segment"
    return profile.convert(slot, layout, segments)


def cuts(total: int, page: int) -> st.SearchStrategy[list[int]]:
    """All ways to cut `total` tokens at page boundaries."""
    points = st.sets(st.sampled_from(range(page, total, page)) if total > page else st.nothing())
    return points.map(lambda p: [b - a for a, b in zip([0, *sorted(p)], [*sorted(p), total], strict=True)])


@settings(max_examples=30)
@given(data=st.data())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mla_rows_arrive_as_they_were(dtype: torch.dtype, data: st.DataObject) -> None:
    total = data.draw(st.integers(1, BLOCKS * 16))
    segments = data.draw(cuts(total, 1) if total < 20 else cuts(total, 7))
    caches = mla_caches(2, BLOCKS, dtype)
    table = random.Random(total).sample(range(BLOCKS), BLOCKS)
    state = trip(get_profile("mla"), caches, table, segments)
    for i, (kv, pe) in enumerate(state.layers):
        rows = caches[f"model.layers.{i}.self_attn.attn"][table].reshape(-1, 576)[:total]
        assert torch.equal(kv, rows[:, :512])
        assert torch.equal(pe, rows[:, 512:])


@settings(max_examples=25)
@given(data=st.data())
@pytest.mark.parametrize("dtype", ["fp8_ds_mla", "bfloat16"])
def test_the_cut_into_segments_changes_nothing(dtype: str, data: st.DataObject) -> None:
    total = data.draw(st.integers(1, BLOCKS * 64))
    segments = data.draw(cuts(total, 64))
    caches = nsa_caches(2, BLOCKS, dtype)
    table = random.Random(total).sample(range(BLOCKS), -(-total // 64))
    profile = get_profile("dsv32")
    whole, cut = trip(profile, caches, table, [total]), trip(profile, caches, table, segments)
    assert whole.seq_len == cut.seq_len == total
    for name in ("index", "kv", "pe"):
        assert torch.equal(whole.planes[name], cut.planes[name]), name


def half_step(reference: torch.Tensor) -> torch.Tensor:
    """Half the distance between bfloat16 values around `reference`: what rounding alone may add."""
    exponent = torch.frexp(reference)[1].clamp(min=-125)
    return torch.ldexp(torch.ones_like(reference), exponent - 9)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 500])
def test_fp8_state_converts_to_the_float64_reference_within_bfloat16_rounding(tokens: int) -> None:
    caches = nsa_caches(2, BLOCKS, "fp8_ds_mla")
    table = random.Random(tokens).sample(range(BLOCKS), -(-tokens // 64))
    state = trip(get_profile("glm5"), caches, table, [tokens])
    signs = [[1.0 - 2.0 * ((i & j).bit_count() % 2) for j in range(128)] for i in range(128)]
    rotation = torch.tensor(signs, dtype=torch.float64) * 128**-0.5
    for i, (index, kv, pe) in enumerate(state.layers):
        rows = caches[f"model.layers.{i}.self_attn.attn"][table].reshape(-1, 656)[:tokens]
        values = rows[:, :512].contiguous().view(torch.float8_e4m3fn).double()
        scales = rows[:, 512:528].contiguous().view(torch.float32).double()
        want = values * scales.repeat_interleave(128, 1)
        assert ((kv.double() - want).abs() <= half_step(want) * (1 + 2**-14)).all()
        assert torch.equal(pe.view(torch.uint8), rows[:, 528:])
        pages = caches[f"model.layers.{i}.self_attn.indexer.k_cache"].view(BLOCKS, -1)[table]
        keys = pages[:, :8192].reshape(-1, 128)[:tokens].view(torch.float8_e4m3fn).double()
        key_scales = pages[:, 8192:].reshape(-1, 4)[:tokens].contiguous().view(torch.float32).double()
        # TileRT rounds the key before the rotation; the reference starts from that value.
        want = (keys * key_scales).bfloat16().double() @ rotation
        slack = (keys * key_scales).abs().sum(1, keepdim=True) * 2**-24  # the float32 sum's own rounding
        assert ((index.double() - want).abs() <= half_step(want) + slack).all()


def test_bfloat16_latents_arrive_bit_for_bit() -> None:
    caches = nsa_caches(2, BLOCKS, "bfloat16")
    state = trip(get_profile("glm5"), caches, [3, 0, 8], [128, 30])
    for i, (_, kv, pe) in enumerate(state.layers):
        rows = caches[f"model.layers.{i}.self_attn.attn"][[3, 0, 8]].reshape(-1, 576)[:158]
        assert torch.equal(kv, rows[:, :512])
        assert torch.equal(pe, rows[:, 512:])


def test_converted_state_does_not_change_with_the_slot() -> None:
    profile, caches = get_profile("mla"), mla_caches(2, BLOCKS, torch.float32)
    layout = profile.layout_from_caches(caches)
    slot = torch.zeros(layout.segment_bytes(5), dtype=torch.uint8)
    profile.gatherer(caches, layout).gather([1], 0, 5, slot)
    state = profile.convert(slot, layout, [5])
    before = state.planes["kv"].clone()
    slot.fill_(POISON)
    assert torch.equal(state.planes["kv"], before)


@pytest.mark.parametrize(
    ("table", "start", "stop", "size", "says"),
    [
        ([0, 1], 0, 0, 64, "no range"),
        ([0, 1], 64, 60, 64, "no range"),
        ([0, 1], 0, 129, 129, "beyond the 2 blocks"),
        ([0, 1], 32, 64, 32, "page boundary"),
        ([0, BLOCKS], 0, 128, 128, "outside the cache"),
        ([0, -1], 0, 128, 128, "outside the cache"),
        ([0, 1], 0, 128, 64, "out must be"),
    ],
)
def test_a_gather_that_does_not_fit_writes_nothing(table, start, stop, size, says) -> None:
    profile, caches = get_profile("glm5"), nsa_caches(1, BLOCKS, "fp8_ds_mla")
    layout = profile.layout_from_caches(caches)
    out = torch.full((layout.segment_bytes(size),), POISON, dtype=torch.uint8)
    with pytest.raises(ValueError, match=says):
        profile.gatherer(caches, layout).gather(table, start, stop, out)
    assert out.eq(POISON).all()


@pytest.mark.parametrize(
    ("segments", "says"),
    [([], "add up"), ([0, 64], "add up"), ([65, 64], "inside a page"), ([640], "cannot hold")],
)
def test_segments_that_do_not_fit_are_not_converted(segments: list[int], says: str) -> None:
    profile = get_profile("glm5")
    layout = profile.layout_from_caches(nsa_caches(1, 1, "fp8_ds_mla"))
    slot = torch.zeros(layout.segment_bytes(128), dtype=torch.uint8)
    with pytest.raises(ValueError, match=says):
        profile.convert(slot, layout, segments)

"""The checksum of a plane changes with any damage, and is one number on every kind of hardware."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unit.profiles.caches import nsa_caches
from vllm_tilert.checksum import GOLDEN, plane_checksums
from vllm_tilert.profiles.base import get_profile
from vllm_tilert.profiles.layout import Layout, Plane

LAYOUT = Layout("x", 1, "uint8", layers=2, page=1, planes=(Plane("a", 1, 40), Plane("b", 1, 12)))


def random_segment(tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (LAYOUT.segment_bytes(tokens),), dtype=torch.uint8, generator=generator)


def plainly(data: bytes) -> int:
    """The definition, word by word in Python's own integers."""
    mask, total = (1 << 64) - 1, 0
    padded = data + bytes(-len(data) % 8)
    for i in range(len(padded) // 8):
        u = int.from_bytes(padded[8 * i : 8 * i + 8], "little") + i * GOLDEN & mask
        u ^= u >> 32
        total += u * (2 * u + 1)
    u = total + len(data) * GOLDEN & mask
    u ^= u >> 32
    return u * (2 * u + 1) & mask


@pytest.mark.parametrize("tokens", [1, 2, 3, 819, 4000])
def test_it_is_what_its_definition_says(tokens: int) -> None:
    segment = random_segment(tokens)
    split = LAYOUT.plane_offsets(tokens)[1]
    data = segment.numpy().tobytes()
    assert plane_checksums(segment, LAYOUT, tokens) == [plainly(data[:split]), plainly(data[split:])]


@settings(max_examples=200)
@given(at=st.integers(0, LAYOUT.segment_bytes(400) - 1), bit=st.integers(0, 7))
def test_any_flipped_bit_shows_in_its_plane_alone(at: int, bit: int) -> None:
    segment = random_segment(400)
    before = plane_checksums(segment, LAYOUT, 400)
    segment[at] ^= 1 << bit
    after = plane_checksums(segment, LAYOUT, 400)
    plane = int(at >= LAYOUT.plane_offsets(400)[1])
    assert [a != b for a, b in zip(before, after, strict=True)] == [plane == 0, plane == 1]


@settings(max_examples=100)
@given(rows=st.lists(st.integers(0, 799), min_size=2, max_size=2, unique=True), top_bit=st.booleans())
def test_swapped_rows_show(rows: list[int], top_bit: bool) -> None:
    segment = random_segment(400)
    plane = segment[: LAYOUT.plane_offsets(400)[1]].view(800, 40)
    if top_bit:  # rows that differ in one word's highest bit only, the hardest to tell apart
        plane[rows[1]] = plane[rows[0]]
        plane[rows[1], 7] ^= 0x80
    before = plane_checksums(segment, LAYOUT, 400)
    plane[rows] = plane[rows[::-1]]
    assert plane_checksums(segment, LAYOUT, 400)[0] != before[0]


def test_zeros_of_different_length_differ() -> None:
    sums = {
        plane_checksums(torch.zeros(LAYOUT.segment_bytes(n), dtype=torch.uint8), LAYOUT, n)[0]
        for n in range(1, 50)
    }
    assert len(sums) == 49


def test_a_segment_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous uint8"):
        plane_checksums(random_segment(3), LAYOUT, 4)


def test_it_holds_for_a_real_layout() -> None:
    caches = nsa_caches(2, 3, "fp8_ds_mla")
    profile = get_profile("glm5")
    layout = profile.layout_from_caches(caches)
    out = torch.empty(layout.segment_bytes(70), dtype=torch.uint8)
    profile.gatherer(caches, layout).gather([2, 0], 0, 70, out)
    bounds = [*layout.plane_offsets(70), out.numel()]
    data = out.numpy().tobytes()
    assert plane_checksums(out, layout, 70) == [plainly(data[a:b]) for a, b in itertools.pairwise(bounds)]

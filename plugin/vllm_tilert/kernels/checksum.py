"""The word sums of `vllm_tilert.checksum` on a GPU: one launch for all planes of a segment."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return"
from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl

from vllm_tilert.checksum import GOLDEN

_STEP = GOLDEN - (1 << 64)  # as the signed integer of the same bits
_MASK = (1 << 64) - 1
_BLOCK = 4096  # words a program adds up in one round


@triton.jit
def word_sum_kernel(
    segment,  # *int64
    bounds,  # *int64 [planes, 2]: first and last word of each plane
    sums,  # *int64 [planes], zero at first
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    plane = tl.program_id(1)
    low = tl.load(bounds + 2 * plane)
    high = tl.load(bounds + 2 * plane + 1)
    lane = tl.arange(0, BLOCK).to(tl.int64)
    total = tl.zeros([BLOCK], tl.int64)
    at = low + tl.program_id(0).to(tl.int64) * BLOCK
    while at < high:
        word = at + lane
        live = word < high
        u = tl.load(segment + word, mask=live, other=0) + (word - low) * STEP
        u = u ^ ((u >> 32) & 0xFFFFFFFF)
        u = u * (2 * u + 1)
        total += tl.where(live, u, 0)
        at += tl.num_programs(0).to(tl.int64) * BLOCK
    tl.atomic_add(sums + plane, tl.sum(total, 0), sem="relaxed")


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def word_sums(segment: torch.Tensor, spans: Sequence[tuple[int, int]]) -> list[int]:
    """The sum of each byte span of `segment`, modulo 2**64; spans start and end on 8-byte boundaries.

    On a stream of its own, so that it waits neither for vLLM's next forward nor for an engine that decodes:
    the bytes must be there, not only queued.
    """
    if segment.is_cuda:
        with torch.cuda.stream(_stream(segment.device)):
            return _word_sums(segment, spans)
    return _word_sums(segment, spans)


def _word_sums(segment: torch.Tensor, spans: Sequence[tuple[int, int]]) -> list[int]:
    if any(low % 8 or high % 8 for low, high in spans):
        raise ValueError(f"planes {list(spans)} do not lie on 8-byte boundaries")
    bounds = torch.tensor(spans, dtype=torch.int64).div_(8, rounding_mode="floor").to(segment.device)
    sums = torch.zeros(len(spans), dtype=torch.int64, device=segment.device)
    longest = max(high - low for low, high in spans) // 8
    programs = min(-(-longest // _BLOCK), 1024)
    word_sum_kernel[(programs, len(spans))](
        segment.view(torch.int64), bounds, sums, STEP=_STEP, BLOCK=_BLOCK, num_warps=8
    )
    return [int(total) & _MASK for total in sums.tolist()]

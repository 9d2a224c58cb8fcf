"""A fast checksum of each plane of a segment, the same on CPU and GPU.

A plane is read as little-endian 64-bit words w[i] (zero-filled at the end). Each word is mixed with its
position by a permutation of 64-bit integers, and the results are added modulo 2**64, so that the work
splits over any number of threads in any order:

    u = w[i] + i * GOLDEN;  u ^= u >> 32;  u *= 2 * u + 1;  sum += u

Since the mix is a permutation, changing any one word always changes the sum; swapped, moved or several
changed words escape with a chance of about 2**-64. It is no defence against a forger.
"""

from __future__ import annotations

import itertools
import sys
from typing import Final

import numpy as np
import torch

from vllm_tilert.profiles.layout import Layout

GOLDEN: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1
_BLOCK: Final = 1 << 14  # words; the three working arrays of a block stay in a core's L2 cache

if sys.byteorder != "little":
    raise ImportError("vllm_tilert.checksum reads planes as little-endian words; this host is big-endian")

_STEPS: Final = np.arange(_BLOCK, dtype=np.uint64) * np.uint64(GOLDEN)


def plane_checksums(segment: torch.Tensor, layout: Layout, tokens: int) -> list[int]:
    """One unsigned 64-bit checksum for each plane of a segment.

    `segment` uint8 [layout.segment_bytes(tokens)], contiguous, on any device. On a GPU its bytes must be there,
    not only queued, and the caller's thread waits for the sums. Raises ValueError when the size does not fit.
    """
    want = layout.segment_bytes(tokens)
    if segment.dtype != torch.uint8 or segment.numel() != want or not segment.is_contiguous():
        raise ValueError(f"segment must be {want} contiguous uint8, not {segment.numel()} {segment.dtype}")
    bounds = [*layout.plane_offsets(tokens), want]
    spans = list(itertools.pairwise(bounds))
    if segment.is_cuda:
        from vllm_tilert.kernels.checksum import word_sums

        sums = word_sums(segment, spans)
    else:
        data = segment.numpy()
        sums = [_word_sum(data[low:high]) for low, high in spans]
    return [_finish(total, high - low) for total, (low, high) in zip(sums, spans, strict=True)]


def _finish(total: int, size: int) -> int:
    """Fold the plane's size in, so that zeros lost at the end show."""
    u = (total + size * GOLDEN) & _MASK
    u ^= u >> 32
    return u * (2 * u + 1) & _MASK


def _word_sum(plane: np.ndarray) -> int:
    """The sum over the words of `plane` (uint8), modulo 2**64."""
    whole = plane.size // 8
    words = plane[: whole * 8].view(np.uint64)
    u, v = np.empty_like(_STEPS), np.empty_like(_STEPS)
    total = 0
    for at in range(0, whole, _BLOCK):
        part = words[at : at + _BLOCK]
        total += _mix_sum(part, at, u[: part.size], v[: part.size])
    rest = plane[whole * 8 :]
    if rest.size:
        last = np.frombuffer(rest.tobytes().ljust(8, b"\0"), np.uint64)
        total += _mix_sum(last, whole, u[:1], v[:1])
    return total & _MASK


def _mix_sum(words: np.ndarray, at: int, u: np.ndarray, v: np.ndarray) -> int:
    np.add(words, _STEPS[: words.size], out=u)
    np.add(u, np.uint64(at * GOLDEN & _MASK), out=u)
    np.right_shift(u, 32, out=v)
    np.bitwise_xor(u, v, out=u)
    np.left_shift(u, 1, out=v)
    np.bitwise_or(v, 1, out=v)
    np.multiply(u, v, out=u)
    return int(np.add.reduce(u))

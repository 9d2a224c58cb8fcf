"""Gather a run of tokens out of every layer's paged caches in one launch.

A program moves one page of one layer: 64 attention rows, split into the kv and pe planes, and the indexer
page. All accesses are in 16-byte steps; a page's rows lie one after the other in the cache, so reads are
linear. The work runs on a stream of its own, ordered behind the caller's stream by an event. The calling
thread only fills a pinned buffer, out of which the kernel reads the block ids, and launches by the compiled
kernel's own launcher with plain addresses, which takes a fraction of the time of Triton's usual way.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return"
from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from vllm_tilert.profiles.layout import Layout
from vllm_tilert.profiles.mla_nsa import INDEX_PAGE_BYTES, PAGE, PE_BYTES

_WORD = 8  # bytes of the int64 the kernel moves


@triton.jit(do_not_specialize=["tokens", "pe_at", "index_at"])
def gather_kernel(
    caches,  # *int64 [layers, 2]: addresses of a layer's attention and indexer cache
    blocks,  # *int32 [pages]: the block that holds each page; host memory will do
    out,  # *int64: the segment
    tokens,
    pe_at,  # offsets of planes pe and index in the segment, in pairs of words
    index_at,
    LATENT: tl.constexpr,  # words of the latent values in a row, a power of two
    SCALE: tl.constexpr,  # words of its scales, a power of two, or 0
    PE: tl.constexpr,
    INDEX: tl.constexpr,  # words of an indexer page: KEYS + 32
    KEYS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
):
    page = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    block = tl.load(blocks + page).to(tl.int64)
    pages = tl.num_programs(0)
    attention = tl.load(caches + 2 * layer).to(tl.pointer_type(tl.int64))
    attention = tl.multiple_of(attention, 16)
    index = tl.load(caches + 2 * layer + 1).to(tl.pointer_type(tl.int64))
    index = tl.multiple_of(index, 16)

    KV: tl.constexpr = LATENT + SCALE
    ROW: tl.constexpr = KV + PE
    row = tl.arange(0, PAGE_TOKENS)
    first = page * PAGE_TOKENS
    live = (first + row < tokens)[:, None]
    source = attention + block * (PAGE_TOKENS * ROW)
    kv_out = out + (layer * tokens + first) * KV
    pe_out = out + 2 * pe_at.to(tl.int64) + (layer * tokens + first) * PE

    latent = tl.arange(0, LATENT)[None, :]
    pe = tl.arange(0, PE)[None, :]
    key = tl.arange(0, KEYS)
    key_scale = tl.arange(0, INDEX - KEYS)
    page_in = index + block * INDEX
    page_out = out + 2 * index_at.to(tl.int64) + (layer * pages + page) * INDEX
    # Every load before the first store, so that they are in flight together.
    a = tl.load(source + row[:, None] * ROW + latent, mask=live)
    b = tl.load(source + row[:, None] * ROW + KV + pe, mask=live)
    c = tl.load(page_in + key)
    d = tl.load(page_in + KEYS + key_scale)
    if SCALE:
        scale = tl.arange(0, SCALE)[None, :]
        s = tl.load(source + row[:, None] * ROW + LATENT + scale, mask=live)
        tl.store(kv_out + row[:, None] * KV + LATENT + scale, s, mask=live)
    tl.store(kv_out + row[:, None] * KV + latent, a, mask=live)
    tl.store(pe_out + row[:, None] * PE + pe, b, mask=live)
    tl.store(page_out + key, c)
    tl.store(page_out + KEYS + key_scale, d)


class GatherKernel:
    """The kernel for one layout: compiled at the first launch, which must be complete before the others."""

    def __init__(self, layout: Layout, warps: int = 16) -> None:
        self._layout = layout
        self._warps = warps
        row = layout.planes[0].unit_bytes // _WORD
        latent = 1 << (row.bit_length() - 1)
        self._constants = {
            "LATENT": latent,
            "SCALE": row - latent,
            "PE": PE_BYTES // _WORD,
            "INDEX": INDEX_PAGE_BYTES // _WORD,
            "KEYS": PAGE * 128 // _WORD,
            "PAGE_TOKENS": PAGE,
        }
        self._compiled: Any = None

    def compile(self, caches: torch.Tensor, blocks: torch.Tensor, out: torch.Tensor, tokens: int) -> None:
        """Compile the kernel and queue the gather of `tokens` tokens on the current stream; see `launch`."""
        _, pe_at, index_at = self._layout.plane_offsets(tokens)
        self._compiled = gather_kernel[(-(-tokens // PAGE), self._layout.layers)](
            caches,
            blocks,
            out.view(torch.int64),
            tokens,
            pe_at // (2 * _WORD),
            index_at // (2 * _WORD),
            **self._constants,
            num_warps=self._warps,
        )

    def launch(self, caches: int, blocks: int, out: int, tokens: int, stream: int) -> None:
        """Queue the gather of `tokens` tokens on a stream, by its handle. All pointers are addresses.

        `caches` int64 [layers, 2] addresses; `blocks` int32, one block id a page; `out` the segment: each
        16-byte aligned. Every id in `blocks` must be a block of the caches: the kernel does not check.
        """
        _, pe_at, index_at = self._layout.plane_offsets(tokens)
        self._compiled[(-(-tokens // PAGE), self._layout.layers, 1)](
            caches,
            blocks,
            out,
            tokens,
            pe_at // (2 * _WORD),
            index_at // (2 * _WORD),
            *self._constants.values(),
            stream=stream,
        )


@dataclass
class _Ids:
    """Block ids that a kernel reads: pinned host memory, and the event after which it is free."""

    pinned: torch.Tensor
    host: np.ndarray[Any, np.dtype[np.int32]]
    address: int
    event: torch.cuda.Event | None = None


class CudaGatherer:
    """The `Gatherer` of caches in GPU memory. Use it from one thread at a time."""

    def __init__(
        self, attention: Sequence[torch.Tensor], index: Sequence[torch.Tensor], layout: Layout
    ) -> None:
        self._layout = layout
        self._device = attention[0].device
        self._blocks = attention[0].shape[0]
        self._keep = (tuple(attention), tuple(index))  # the addresses below stay theirs
        addresses = [[a.data_ptr(), i.data_ptr()] for a, i in zip(attention, index, strict=True)]
        if any(address % 16 for pair in addresses for address in pair):
            raise ValueError("a cache does not start on a 16-byte boundary")
        self._caches = torch.tensor(addresses, dtype=torch.int64, device=self._device)
        self._caches_at = self._caches.data_ptr()
        self._stream = torch.cuda.Stream(self._device)
        self._ready = torch.cuda.Event()
        self._kernel = GatherKernel(layout)
        self._free = [self._ids() for _ in range(8)]
        self._busy: list[_Ids] = []
        self._warm_up()

    def _ids(self) -> _Ids:
        pinned = torch.empty(self._blocks, dtype=torch.int32, pin_memory=True)
        return _Ids(pinned, pinned.numpy(), pinned.data_ptr())  # one address on the host and on the device

    def _warm_up(self) -> None:
        """Compile now rather than in the first request."""
        out = torch.empty(self._layout.segment_bytes(1), dtype=torch.uint8, device=self._device)
        blocks = torch.zeros(1, dtype=torch.int32, device=self._device)
        self._kernel.compile(self._caches, blocks, out, 1)
        torch.cuda.current_stream(self._device).synchronize()
        self.gather(array("i", [0]), 0, 1, out).wait()

    def gather(
        self, block_ids: Sequence[int], start: int, stop: int, out: torch.Tensor, after: Any = None
    ) -> CudaCompletion:
        """See `base.Gatherer.gather`. An `array("i")` of block ids is read as it lies."""
        tokens, first, last = stop - start, start // PAGE, -(-stop // PAGE)
        if not 0 <= start < stop or start % PAGE or last > len(block_ids):
            raise ValueError(
                f"tokens [{start}, {stop}) of {len(block_ids)} blocks of {PAGE} tokens are no segment"
            )
        if not isinstance(block_ids, array):
            block_ids = array("i", block_ids)  # an id over 32 bits raises OverflowError
        ids = np.frombuffer(block_ids, dtype=np.int32)[first:last]
        if ids.view(np.uint32).max() >= self._blocks:  # as unsigned, so that it tells of negative ids too
            raise ValueError(f"a block id lies outside the cache's {self._blocks} blocks")
        want, address = self._layout.segment_bytes(tokens), out.data_ptr()
        if out.dtype != torch.uint8 or out.numel() != want or not out.is_contiguous() or address % 16:
            raise ValueError(f"out must be {want} contiguous, 16-byte aligned uint8, not {out.numel()}")
        buffers = self._take()
        buffers.host[: last - first] = ids
        event, stream = torch.cuda.Event(), self._stream
        if after is None:
            after = self._ready
            after.record(torch.cuda.current_stream(self._device))
        stream.wait_event(after)
        self._kernel.launch(self._caches_at, buffers.address, address, tokens, stream.cuda_stream)
        event.record(stream)
        buffers.event = event
        self._busy.append(buffers)
        return CudaCompletion(event)

    def _take(self) -> _Ids:
        """A buffer that no kernel reads any more; a new one when all are in flight, rather than to wait."""
        while self._busy and (event := self._busy[0].event) is not None and event.query():
            self._free.append(self._busy.pop(0))
        return self._free.pop() if self._free else self._ids()


class CudaCompletion:
    """A gather queued on the gather stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        """Whether the bytes have landed."""
        return self._event.query()

    def wait(self) -> None:
        """Block this thread until the bytes have landed."""
        self._event.synchronize()

"""Convert a received segment in one launch: dequantise, rotate the index key, write bfloat16 rows.

A program takes up to 64 tokens of one layer. The rows land in dense planes or, addressed through a table,
straight in an engine's cache tensors. The index key is rounded to bfloat16, as TileRT rounds it, and
multiplied by the +1/-1 Hadamard matrix on the matrix unit with float32 accumulation, where every product
is exact; the scale comes last.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return"
from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from vllm_tilert.profiles.layout import Layout
from vllm_tilert.profiles.mla_nsa import INDEX_PAGE_BYTES, KEY_BYTES, PAGE, hadamard


@triton.jit(
    do_not_specialize=["tokens", "first_row", "pe_at", "index_at", "kv_stride", "pe_stride", "index_stride"]
)
def convert_kernel(
    segment,  # *uint8
    rotation,  # *bfloat16 [128, 128] (*float32 in Triton's interpreter, which cannot multiply bfloat16)
    targets,  # *int64 [layers, 3]: address of row 0 of index, kv and pe; 0: do not write this plane
    tokens,
    first_row,
    pe_at,  # offsets of planes pe and index in the segment, in steps of 16 bytes
    index_at,
    kv_stride,  # from layer to layer in each plane of the segment, likewise
    pe_stride,
    index_stride,
    FP8: tl.constexpr,
    KV_BYTES: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    PAGE_KEYS: tl.constexpr,  # bytes of the keys in an indexer page
    PAGE_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,  # tokens of a program: divides PAGE_TOKENS
):
    layer = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * TOKENS
    row = tl.arange(0, TOKENS)
    live = first + row < tokens
    at = (first_row + first + row).to(tl.int64)
    index_out = tl.load(targets + 3 * layer)
    kv_out = tl.load(targets + 3 * layer + 1)
    pe_out = tl.load(targets + 3 * layer + 2)

    if kv_out != 0:
        source = segment + layer * kv_stride * 16 + (first + row).to(tl.int64) * KV_BYTES
        target = tl.multiple_of(kv_out.to(tl.pointer_type(tl.bfloat16)), 16) + at * 512
        if FP8:
            # [token, 128-block, value]: each block of values has its own scale.
            block = tl.arange(0, 4)
            lane = tl.arange(0, 128)
            cell = block[None, :, None] * 128 + lane[None, None, :]
            bits = tl.load(source[:, None, None] + cell, mask=live[:, None, None], other=0)
            scales = (source + 512).to(tl.pointer_type(tl.float32))
            scale = tl.load(scales[:, None] + block[None, :], mask=live[:, None], other=0)
            value = bits.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale[:, :, None]
            tl.store(target[:, None, None] + cell, value.to(tl.bfloat16), mask=live[:, None, None])
        else:
            column = tl.arange(0, 512)[None, :]
            raw = tl.load(source.to(tl.pointer_type(tl.bfloat16))[:, None] + column, mask=live[:, None])
            tl.store(target[:, None] + column, raw, mask=live[:, None])

    if pe_out != 0:
        column = tl.arange(0, 64)[None, :]
        source = segment + (pe_at + layer * pe_stride) * 16 + (first + row).to(tl.int64) * 128
        raw = tl.load(source.to(tl.pointer_type(tl.bfloat16))[:, None] + column, mask=live[:, None])
        target = tl.multiple_of(pe_out.to(tl.pointer_type(tl.bfloat16)), 16) + at * 64
        tl.store(target[:, None] + column, raw, mask=live[:, None])

    if index_out != 0:
        column = tl.arange(0, 128)
        page = (
            segment
            + (index_at + layer * index_stride) * 16
            + (first // PAGE_TOKENS).to(tl.int64) * PAGE_BYTES
        )
        inner = first % PAGE_TOKENS + row
        bits = tl.load(page + inner[:, None] * 128 + column[None, :], mask=live[:, None], other=0)
        scale = tl.load((page + PAGE_KEYS).to(tl.pointer_type(tl.float32)) + inner, mask=live, other=0)
        key = (bits.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale[:, None]).to(tl.bfloat16)
        matrix = tl.load(rotation + column[:, None] * 128 + column[None, :])
        key = key.to(rotation.dtype.element_ty)
        rotated = tl.dot(key, matrix, input_precision="ieee") * 0.08838834764831845  # 128 ** -0.5
        target = tl.multiple_of(index_out.to(tl.pointer_type(tl.bfloat16)), 16) + at * 128
        tl.store(target[:, None] + column[None, :], rotated.to(tl.bfloat16), mask=live[:, None])


@cache
def _rotation(device: torch.device) -> torch.Tensor:
    return hadamard(device, torch.bfloat16 if device.type == "cuda" else torch.float32)


class ConvertKernel:
    """The conversion for one layout on one device. `compile` comes first, on that device."""

    def __init__(self, layout: Layout, device: torch.device, block: int = 64, warps: int = 8) -> None:
        self._layout = layout
        self._rotation = _rotation(device)
        self._block = block
        self._warps = warps
        self._constants = {
            "FP8": layout.dtype == "fp8_ds_mla",
            "KV_BYTES": layout.planes[0].unit_bytes,
            "PAGE_BYTES": INDEX_PAGE_BYTES,
            "PAGE_KEYS": KEY_BYTES,
            "PAGE_TOKENS": PAGE,
            "TOKENS": block,
        }
        self._compiled: Any = None

    def _sizes(self, stride: int) -> tuple[int, ...]:
        """Where planes pe and index begin, and the steps from layer to layer of all three, in 16 bytes."""
        _, pe_at, index_at = self._layout.plane_offsets(stride)
        steps = (plane.units(stride) * plane.unit_bytes // 16 for plane in self._layout.planes)
        return pe_at // 16, index_at // 16, *steps

    def compile(self, segment: torch.Tensor) -> None:
        """Compile; `segment` is one of one token. Nothing is written."""
        nowhere = torch.zeros(self._layout.layers, 3, dtype=torch.int64, device=segment.device)
        self._compiled = self.interpret(segment, 1, 1, nowhere, 0)

    def interpret(
        self, segment: torch.Tensor, stride: int, tokens: int, targets: torch.Tensor, first_row: int
    ) -> Any:
        """As `launch`, but with tensors, on the current stream and by Triton's usual way, on the CPU too if
        its interpreter is on; returns the compiled kernel."""
        return convert_kernel[(-(-tokens // self._block), self._layout.layers)](
            segment,
            self._rotation,
            targets,
            tokens,
            first_row,
            *self._sizes(stride),
            **self._constants,
            num_warps=self._warps,
        )

    def launch(
        self, segment: int, stride: int, tokens: int, targets: int, first_row: int, stream: torch.cuda.Stream
    ) -> None:
        """Queue the conversion of the first `tokens` tokens of a segment laid out for `stride` tokens.

        `segment` and `targets` are addresses, 16-byte aligned; `targets` int64 [layers, 3]: addresses of row
        0 of each layer's index [.., 128], kv [.., 512] and pe [.., 64] bfloat16 rows, 16-byte aligned; 0
        leaves a plane out. Rows `first_row` onwards are written.
        """
        self._compiled[(-(-tokens // self._block), self._layout.layers, 1)](
            segment,
            self._rotation.data_ptr(),
            targets,
            tokens,
            first_row,
            *self._sizes(stride),
            *self._constants.values(),
            stream=stream.cuda_stream,
        )


def launch_convert(
    segment: torch.Tensor,
    layout: Layout,
    stride: int,
    tokens: int,
    planes: Mapping[str, torch.Tensor],
    at: int,
) -> None:
    """Queue a conversion into dense planes [layers, seq, dim]; see `mla_nsa.convert_segment`."""
    targets = dense_targets(planes, layout.layers)
    ConvertKernel(layout, segment.device).interpret(segment, stride, tokens, targets, at)


def dense_targets(planes: Mapping[str, torch.Tensor], layers: int) -> torch.Tensor:
    """The target table of dense planes, made on their device."""
    device = planes["kv"].device
    order = [planes["index"], planes["kv"], planes["pe"]]
    table = torch.arange(layers, device=device, dtype=torch.int64)[:, None].expand(layers, 3).contiguous()
    for column, plane in enumerate(order):
        table[:, column].mul_(plane.stride(0) * plane.element_size()).add_(plane.data_ptr())
    return table

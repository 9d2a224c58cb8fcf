"""Profiles `glm5` and `dsv32`: latent attention with a sparse indexer, page 64, draft layer included.

The bytes are those of TileRT 0.1.5. Per layer, vLLM has two caches:

  attention  [blocks, 64, 656] uint8 (fp8_ds_mla: 512 fp8, 4 float32 scales, 64 bfloat16 rope) or
             [blocks, 64, 576] bfloat16 (512 latent, 64 rope)
  indexer    [blocks, 64, 132] uint8; a page is 64 x 128 fp8 keys, then their 64 float32 scales

A row of the attention cache is split into planes `kv` (528 or 1,024 bytes) and `pe` (128 bytes); an
indexer page travels whole (8,448 bytes). Converting dequantises `kv` and the index key to bfloat16 and
rotates the index key by the 128-point Hadamard transform, as TileRT's indexer expects it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from vllm_tilert.profiles import base
from vllm_tilert.profiles.base import ConvertedState, Gatherer, Landed, Profile, ProfileError
from vllm_tilert.profiles.layout import Layout, Plane

PAGE: Final = 64
KV_LORA_RANK: Final = 512
ROPE_DIM: Final = 64
INDEX_DIM: Final = 128
QUANT_BLOCK: Final = 128
"""Latent values that share one scale; the index key (128 values) has one scale."""

PE_BYTES: Final = ROPE_DIM * 2
KEY_BYTES: Final = PAGE * INDEX_DIM
INDEX_PAGE_BYTES: Final = KEY_BYTES + PAGE * 4
ORDER: Final = ("index", "kv", "pe")
"""The planes in the order of TileRT's cache tensors."""
DIMS: Final = {"index": INDEX_DIM, "kv": KV_LORA_RANK, "pe": ROPE_DIM}

_KV_BYTES: Final = {
    "fp8_ds_mla": KV_LORA_RANK + KV_LORA_RANK // QUANT_BLOCK * 4,
    "bfloat16": KV_LORA_RANK * 2,
}
_DTYPE_NAMES: Final = {
    "fp8_ds_mla": "fp8_ds_mla",
    "fp8": "fp8_ds_mla",
    "fp8_e4m3": "fp8_ds_mla",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "auto": "bfloat16",
}
_BFLOAT16_VERSIONS: Final = 40
"""What TileRT adds to a family's layout version for a bfloat16 cache."""


class MlaNsaProfile:
    """One family; `version` is its layout version with an fp8 cache."""

    def __init__(self, name: str, version: int) -> None:
        self.name: Final = name
        self._version = version

    def _layout(self, layers: int, dtype: str) -> Layout:
        return Layout(
            profile=self.name,
            version=self._version + (_BFLOAT16_VERSIONS if dtype == "bfloat16" else 0),
            dtype=dtype,
            layers=layers,
            page=PAGE,
            planes=(
                Plane("kv", 1, _KV_BYTES[dtype]),
                Plane("pe", 1, PE_BYTES),
                Plane("index", PAGE, INDEX_PAGE_BYTES),
            ),
        )

    def layout_from_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> Layout:
        """The layout of one attention and one indexer cache a layer, the draft layer last."""
        attention, index = _split(kv_caches)
        first = attention[0]
        row = first.shape[-1] * first.element_size()
        dtype = next((name for name, size in _KV_BYTES.items() if size + PE_BYTES == row), None)
        if dtype is None or first.dtype != (torch.uint8 if dtype == "fp8_ds_mla" else torch.bfloat16):
            raise ProfileError(
                "attention cache row",
                f"{first.shape[-1]} {first.dtype}",
                "serve with --kv-cache-dtype fp8_ds_mla (656 bytes) or bfloat16 (576 values)",
            )
        if first.dim() != 3 or first.shape[1] != PAGE:
            raise ProfileError("attention cache shape", list(first.shape), f"serve with --block-size {PAGE}")
        keys = index[0]
        if keys.dtype != torch.uint8 or list(keys.shape[1:]) != [PAGE, INDEX_PAGE_BYTES // PAGE]:
            raise ProfileError(
                "indexer cache", f"{list(keys.shape)} {keys.dtype}", f"expected uint8 [blocks, {PAGE}, 132]"
            )
        if len(index) != len(attention) or keys.shape[0] != first.shape[0]:
            raise ProfileError(
                "indexer caches",
                f"{len(index)} of {keys.shape[0]} blocks",
                f"expected one for each attention cache: {len(attention)} of {first.shape[0]} blocks",
            )
        return self._layout(len(attention), dtype)

    def gatherer(self, kv_caches: Mapping[str, torch.Tensor], layout: Layout) -> Gatherer:
        """A gatherer over these caches: one kernel a segment on a GPU, index_select on the CPU."""
        attention, index = _split(kv_caches)
        if attention[0].is_cuda:
            from vllm_tilert.kernels.gather import CudaGatherer

            return CudaGatherer(attention, index, layout)
        return CpuGatherer(attention, index, layout)

    def layout_from_config(self, config: Mapping[str, Any], kv_cache_dtype: str) -> Layout:
        """The layout for config.json: hidden layers and draft layers. `auto` means bfloat16, as in TileRT."""
        for field, want in (
            ("kv_lora_rank", KV_LORA_RANK),
            ("qk_rope_head_dim", ROPE_DIM),
            ("index_head_dim", INDEX_DIM),
        ):
            base.expect_config(config, field, want)
        layers = base.config_int(config, "num_hidden_layers", "expected the number of layers")
        draft = base.config_int(
            config, "num_nextn_predict_layers", "the draft layer's state is part of the handoff; expected 1"
        )
        dtype = _DTYPE_NAMES.get(kv_cache_dtype)
        if dtype is None:
            raise ProfileError("kv_cache_dtype", kv_cache_dtype, f"{self.name} takes fp8_ds_mla or bfloat16")
        return self._layout(layers + draft, dtype)

    def convert(self, slot: torch.Tensor, layout: Layout, segments: Sequence[int]) -> ConvertedState:
        """Received bytes -> bfloat16 planes [layers, seq, dim]; see `base.Profile.convert`."""
        seq_len = base.check_slot(slot, layout, segments)
        planes = empty_planes(layout.layers, seq_len, slot.device)
        at = 0
        for tokens in segments:
            segment = slot[layout.offset(at) :][: layout.segment_bytes(tokens)]
            convert_segment(segment, layout, tokens, tokens, planes, at)
            at += tokens
        return ConvertedState(seq_len, planes, ORDER)

    def convert_strided(
        self, slot: torch.Tensor, layout: Layout, max_seq_len: int, seq_len: int
    ) -> ConvertedState:
        """Convert what a stock sender wrote: a segment of `max_seq_len` tokens of which `seq_len` are set."""
        base.check_slot(slot, layout, [max_seq_len])
        if not 0 < seq_len <= max_seq_len:
            raise ValueError(f"seq_len {seq_len} is not in 1 to {max_seq_len}")
        planes = empty_planes(layout.layers, seq_len, slot.device)
        convert_segment(slot, layout, max_seq_len, seq_len, planes, 0)
        return ConvertedState(seq_len, planes, ORDER)


PROFILES: Final[dict[str, Profile]] = {
    "glm5": MlaNsaProfile("glm5", 10),
    "dsv32": MlaNsaProfile("dsv32", 11),
}


def empty_planes(layers: int, seq_len: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Unset bfloat16 planes [layers, seq_len, dim]."""
    return {
        name: torch.empty(layers, seq_len, DIMS[name], dtype=torch.bfloat16, device=device) for name in ORDER
    }


def convert_segment(
    segment: torch.Tensor,
    layout: Layout,
    stride: int,
    tokens: int,
    planes: Mapping[str, torch.Tensor],
    at: int,
) -> None:
    """Convert the first `tokens` tokens of a segment laid out for `stride` tokens into rows `at` onwards."""
    if segment.is_cuda:
        from vllm_tilert.kernels.convert import launch_convert

        launch_convert(segment, layout, stride, tokens, planes, at)
        return
    views = plane_views(segment, layout, stride)
    pages = -(-tokens // PAGE)
    rotation = hadamard(segment.device)
    for layer in range(layout.layers):
        rows = slice(at, at + tokens)
        kv = views["kv"][layer, :tokens]
        if layout.dtype == "bfloat16":
            planes["kv"][layer, rows] = kv.view(torch.bfloat16)
        else:
            planes["kv"][layer, rows] = _dequantise(
                kv[:, :KV_LORA_RANK], kv[:, KV_LORA_RANK:].view(torch.float32)
            )
        planes["pe"][layer, rows] = views["pe"][layer, :tokens].view(torch.bfloat16)
        page = views["index"][layer, :pages]
        keys = page[:, :KEY_BYTES].reshape(-1, INDEX_DIM)[:tokens]
        scales = page[:, KEY_BYTES:].reshape(-1, 4)[:tokens].view(torch.float32)
        # TileRT rounds the key to bfloat16 before it rotates; so do we, to get its values.
        key = _dequantise(keys, scales).to(torch.bfloat16).float()
        planes["index"][layer, rows] = (key @ rotation) * INDEX_DIM**-0.5


def plane_views(segment: torch.Tensor, layout: Layout, tokens: int) -> dict[str, torch.Tensor]:
    """The planes of a segment as uint8 [layers, units, unit_bytes] views."""
    return {
        plane.name: segment[at : at + layout.layers * plane.units(tokens) * plane.unit_bytes].view(
            layout.layers, plane.units(tokens), plane.unit_bytes
        )
        for plane, at in zip(layout.planes, layout.plane_offsets(tokens), strict=True)
    }


def hadamard(device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The 128 x 128 Hadamard matrix of +1 and -1 in natural (Sylvester) order, unscaled."""
    one = torch.ones(1, 1, dtype=dtype, device=device)
    matrix = one
    while matrix.shape[0] < INDEX_DIM:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def _dequantise(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp8 (uint8 [n, d]) times one float32 scale for every 128 values [n, d / 128] -> float32 [n, d]."""
    blocks = _float(values).view(values.shape[0], -1, QUANT_BLOCK)
    return blocks.mul_(scales.unsqueeze(-1)).view(values.shape)


def _float(values: torch.Tensor) -> torch.Tensor:
    """The bytes of e4m3 values as float32, faster on a CPU than by torch's own conversion: shifted, they are
    halves of the same value but for a factor of 256. NaN alone is not."""
    bits = values.to(torch.int16)
    magnitude = bits & 0x7F
    if (magnitude == 0x7F).any():
        return values.view(torch.float8_e4m3fn).float()
    return ((bits & 0x80) << 8 | magnitude << 7).view(torch.float16).float().mul_(256.0)


def _split(kv_caches: Mapping[str, torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Attention caches and indexer caches, each in layer order."""
    index = {name: cache for name, cache in kv_caches.items() if "indexer" in name}
    attention = {name: cache for name, cache in kv_caches.items() if name not in index}
    return base.by_layer(attention, "attention"), base.by_layer(index, "indexer")


class CpuGatherer:
    """Gathers by index_select, a few calls a layer."""

    def __init__(
        self, attention: Sequence[torch.Tensor], index: Sequence[torch.Tensor], layout: Layout
    ) -> None:
        self._layout = layout
        self._blocks = attention[0].shape[0]
        self._pages = [cache.view(torch.uint8).view(self._blocks, PAGE, -1) for cache in attention]
        self._index = [cache.view(self._blocks, INDEX_PAGE_BYTES) for cache in index]

    def gather(
        self, block_ids: Sequence[int], start: int, stop: int, out: torch.Tensor, after: Any = None
    ) -> Landed:
        """See `base.Gatherer.gather`."""
        layout, tokens = self._layout, stop - start
        base.check_gather(layout, PAGE, self._blocks, block_ids, start, stop, out)
        table = torch.tensor(block_ids[start // PAGE : -(-stop // PAGE)], dtype=torch.int64)
        views = plane_views(out, layout, tokens)
        split = layout.planes[0].unit_bytes
        for layer, (pages, index) in enumerate(zip(self._pages, self._index, strict=True)):
            rows = pages.index_select(0, table).flatten(0, 1)[:tokens]
            views["kv"][layer] = rows[:, :split]
            views["pe"][layer] = rows[:, split:]
            torch.index_select(index, 0, table, out=views["index"][layer])
        return base.LANDED

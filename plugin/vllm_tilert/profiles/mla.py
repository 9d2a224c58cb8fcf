"""Profile `mla`: latent attention without a sparse indexer (DeepSeek-V3-type), any block size, on the CPU.

vLLM's CPU_MLA cache row is one token's latent: kv_c [512], then k_pe [64], float32 or bfloat16. The row
travels as it is; a segment may start at any token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from vllm_tilert.profiles import base
from vllm_tilert.profiles.base import ConvertedState, Landed, ProfileError
from vllm_tilert.profiles.layout import Layout, Plane

KV_LORA_RANK: Final = 512
ROPE_DIM: Final = 64
ROW: Final = KV_LORA_RANK + ROPE_DIM

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_VERSIONS: Final = {"float32": 70, "bfloat16": 71}
_DTYPE_NAMES: Final = {"float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16"}


def _layout(layers: int, dtype: str) -> Layout:
    row = ROW * _DTYPES[dtype].itemsize
    return Layout("mla", _VERSIONS[dtype], dtype, layers, page=1, planes=(Plane("kv", 1, row),))


class MlaProfile:
    """The `mla` profile; see the module."""

    name: Final = "mla"

    def layout_from_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> Layout:
        """The layout of caches [blocks, 1, block_size, 576] or [blocks, block_size, 576]."""
        caches = base.by_layer(kv_caches, "mla")
        first = caches[0]
        shape = list(first.shape)
        if shape[-1] != ROW or not (len(shape) == 3 or (len(shape) == 4 and shape[1] == 1)):
            raise ProfileError("mla cache shape", shape, f"expected [blocks, block_size, {ROW}]")
        dtype = next((name for name, dtype in _DTYPES.items() if dtype == first.dtype), None)
        if dtype is None:
            raise ProfileError("mla cache dtype", str(first.dtype), "expected float32 or bfloat16")
        return _layout(len(caches), dtype)

    def gatherer(self, kv_caches: Mapping[str, torch.Tensor], layout: Layout) -> MlaGatherer:
        """A gatherer over these caches, which lie in host memory; raises ProfileError where they do not."""
        caches = base.by_layer(kv_caches, "mla")
        # index_select would be queued on a GPU and called done.
        if caches[0].device.type != "cpu":
            raise ProfileError(
                "mla cache device", str(caches[0].device), "profile mla gathers on the CPU only"
            )
        return MlaGatherer(caches, layout)

    def layout_from_config(self, config: Mapping[str, Any], kv_cache_dtype: str) -> Layout:
        """The layout for config.json; `auto` takes the model's own dtype. Raises ProfileError."""
        base.expect_config(config, "kv_lora_rank", KV_LORA_RANK)
        base.expect_config(config, "qk_rope_head_dim", ROPE_DIM)
        layers = base.config_int(config, "num_hidden_layers", "expected the number of layers")
        asked = kv_cache_dtype
        if asked == "auto":
            asked = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
        dtype = _DTYPE_NAMES.get(asked)
        if dtype is None:
            raise ProfileError("kv_cache_dtype", asked, "profile mla takes float32 or bfloat16")
        return _layout(layers, dtype)

    def convert(self, slot: torch.Tensor, layout: Layout, segments: Sequence[int]) -> ConvertedState:
        """Rows -> kv [layers, seq, 512] and pe [layers, seq, 64] in the cache's dtype."""
        seq_len = base.check_slot(slot, layout, segments)
        dtype = _DTYPES[layout.dtype]
        kv = torch.empty(layout.layers, seq_len, KV_LORA_RANK, dtype=dtype, device=slot.device)
        pe = torch.empty(layout.layers, seq_len, ROPE_DIM, dtype=dtype, device=slot.device)
        at = 0
        for tokens in segments:
            segment = slot[layout.offset(at) :][: layout.segment_bytes(tokens)]
            rows = segment.view(dtype).view(layout.layers, tokens, ROW)
            kv[:, at : at + tokens] = rows[..., :KV_LORA_RANK]
            pe[:, at : at + tokens] = rows[..., KV_LORA_RANK:]
            at += tokens
        return ConvertedState(seq_len, {"kv": kv, "pe": pe}, ("kv", "pe"))


class MlaGatherer:
    """Gathers rows by index_select, one call a layer."""

    def __init__(self, caches: Sequence[torch.Tensor], layout: Layout) -> None:
        self._layout = layout
        self._blocks = caches[0].shape[0]
        self._block_size = caches[0].shape[-2]
        self._rows = [cache.view(-1, ROW) for cache in caches]

    def gather(
        self, block_ids: Sequence[int], start: int, stop: int, out: torch.Tensor, after: Any = None
    ) -> Landed:
        """See `base.Gatherer.gather`."""
        size = self._block_size
        base.check_gather(self._layout, size, self._blocks, block_ids, start, stop, out)
        first = start // size
        table = torch.tensor(block_ids[first : -(-stop // size)], dtype=torch.int64)
        rows = (table[:, None] * size + torch.arange(size)).flatten()[
            start - first * size : stop - first * size
        ]
        rows = rows.to(out.device)
        planes = out.view(self._rows[0].dtype).view(self._layout.layers, stop - start, ROW)
        for source, target in zip(self._rows, planes, strict=True):
            torch.index_select(source, 0, rows, out=target)
        return base.LANDED

"""Caches as vLLM registers them, filled with valid random state."""

from __future__ import annotations

import torch


def mla_caches(layers: int, blocks: int, dtype: torch.dtype, block_size: int = 16) -> dict[str, torch.Tensor]:
    """CPU_MLA caches [blocks, 1, block_size, 576]."""
    return {
        f"model.layers.{i}.self_attn.attn": torch.randn(blocks, 1, block_size, 576).to(dtype)
        for i in range(layers)
    }


def nsa_caches(
    layers: int, blocks: int, dtype: str, device: str = "cpu", generator: torch.Generator | None = None
) -> dict[str, torch.Tensor]:
    """Attention and indexer caches of a sparse-attention model; every fp8 value finite."""

    def fp8(*shape: int) -> torch.Tensor:
        bits = torch.randint(0, 256, shape, device=device, generator=generator, dtype=torch.uint8)
        return torch.where(bits & 0x7F == 0x7F, bits ^ 1, bits)  # 0x7F and 0xFF are NaN

    def scales(*shape: int) -> torch.Tensor:
        # As vLLM makes them: amax / 448, so anything positive.
        return torch.rand(*shape, device=device, generator=generator) * 0.05 + 1e-4

    caches = {}
    for i in range(layers):
        name = f"model.layers.{i}.self_attn"
        rope = torch.randn(blocks, 64, 64, device=device, generator=generator).bfloat16()
        if dtype == "bfloat16":
            latent = torch.randn(blocks, 64, 512, device=device, generator=generator).bfloat16()
            caches[f"{name}.attn"] = torch.cat([latent, rope], -1)
        else:
            row = [fp8(blocks, 64, 512), scales(blocks, 64, 4).view(torch.uint8), rope.view(torch.uint8)]
            caches[f"{name}.attn"] = torch.cat(row, -1)
        page = torch.cat([fp8(blocks, 64 * 128), scales(blocks, 64).view(torch.uint8)], -1)
        caches[f"{name}.indexer.k_cache"] = page.view(blocks, 64, 132)
    return caches

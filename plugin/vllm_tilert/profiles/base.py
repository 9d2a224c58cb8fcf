"""What every model family must know how to do: the Profile seam.

A profile owns the geometry of one family. On the prefill host it recognises vLLM's caches and gathers
a request's rows out of them; on the decode host it turns what arrived into the engine's tensors. Both
ends derive the same `Layout`, and the handoff is refused when they do not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from vllm_tilert.profiles.layout import Layout


class ProfileError(ValueError):
    """A model, cache or configuration that a profile cannot take: which field, its value, what to do."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        super().__init__(f"{field} is {value!r}: {remedy}")
        self.field = field
        self.value = value
        self.remedy = remedy


class Completion(Protocol):
    """A gather under way. The bytes are in `out` once `wait` has returned or `done` is true."""

    def done(self) -> bool:
        """Whether the bytes have landed; never blocks."""

    def wait(self) -> None:
        """Block the calling thread (no other) until the bytes have landed."""


class Gatherer(Protocol):
    """Copies runs of a request's tokens out of the paged caches of one worker."""

    def gather(
        self, block_ids: Sequence[int], start: int, stop: int, out: torch.Tensor, after: Any = None
    ) -> Completion:
        """Copy tokens [start, stop) of the request that owns `block_ids` into `out`.

        `block_ids`  the request's block table from its first token on
        `start`      a multiple of `layout.page`
        `out`        uint8 [layout.segment_bytes(stop - start)], contiguous, on the caches' device

        On the CPU the copy is over on return. On a GPU it is queued behind the CUDA event `after`, or behind
        what the calling thread's current stream holds so far, and `out` may be read after
        `Completion.wait()`. Every byte of `out` is written. Raises ValueError, with nothing copied, on a
        range, table or buffer that does not fit.
        """


@dataclass(frozen=True)
class ConvertedState:
    """One request's state as the engine wants it. Owns its memory: the slot may be reused at once.

    `planes` maps a plane's name to a tensor [layers, seq_len, dim]: `kv` dim 512, `pe` dim 64, and
    `index` dim 128 where the model has one. The dtype is bfloat16, or float32 for float32 caches.
    """

    seq_len: int
    planes: Mapping[str, torch.Tensor]
    order: tuple[str, ...]

    @property
    def layers(self) -> list[tuple[torch.Tensor, ...]]:
        """Per layer, the planes in the engine's order: (kv, pe), or (index, kv, pe) as TileRT has it."""
        return list(zip(*(self.planes[name].unbind(0) for name in self.order), strict=True))


class Profile(Protocol):
    """One model family. Stateless: a profile may serve any number of layouts at once."""

    @property
    def name(self) -> str:
        """`mla`, `glm5` or `dsv32`."""

    def layout_from_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> Layout:
        """The layout of the caches vLLM registered. Raises ProfileError on any it does not expect."""

    def gatherer(self, kv_caches: Mapping[str, torch.Tensor], layout: Layout) -> Gatherer:
        """A gatherer over these caches; build it once, at registration."""

    def layout_from_config(self, config: Mapping[str, Any], kv_cache_dtype: str) -> Layout:
        """The layout that the model's config.json and cache dtype imply. Raises ProfileError."""

    def convert(self, slot: torch.Tensor, layout: Layout, segments: Sequence[int]) -> ConvertedState:
        """Turn the received bytes into engine tensors on the slot's device.

        `slot` uint8 holds the segments one after the other from its first byte; `segments` are their
        lengths in tokens. Raises ValueError when they do not fit the layout or the slot. On a GPU the
        work is queued on the current stream.
        """


_ALIASES: Final[dict[str, str]] = {
    "mla": "mla",
    "glm5": "glm5",
    "glm_5": "glm5",
    "glm-5": "glm5",
    "dsv32": "dsv32",
    "deepseek_v3_2": "dsv32",
    "deepseek-v3.2": "dsv32",
    "dsv3.2": "dsv32",
    "v32": "dsv32",
}


def get_profile(name: str) -> Profile:
    """The profile called `name` or one of its aliases. Raises ProfileError for any other name."""
    canonical = _ALIASES.get(name)
    if canonical is None:
        raise ProfileError("profile", name, f"choose one of {', '.join(sorted(_ALIASES))}")
    if canonical == "mla":
        from vllm_tilert.profiles.mla import MlaProfile

        return MlaProfile()
    from vllm_tilert.profiles import mla_nsa

    return mla_nsa.PROFILES[canonical]


class Landed:
    """The Completion of a copy that was over when it was asked for."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


LANDED: Final = Landed()

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def layer_index(name: str) -> int:
    """The layer number in a cache's name. Raises ProfileError when there is none."""
    found = _LAYER.search(name)
    if found is None:
        raise ProfileError("kv_caches", name, "expected a cache named like model.layers.N.self_attn.attn")
    return int(found[1])


def by_layer(caches: Mapping[str, torch.Tensor], kind: str) -> list[torch.Tensor]:
    """`caches` in layer order. Raises ProfileError unless they are layers 0 to n-1, once each, and alike."""
    ordered = sorted(caches.items(), key=lambda item: layer_index(item[0]))
    numbers = [layer_index(name) for name, _ in ordered]
    if not numbers or numbers != list(range(len(numbers))):
        raise ProfileError(f"{kind} layers", numbers, "expected layers 0 to n-1, each once")
    first_name, first = ordered[0]
    for name, cache in ordered:
        if (cache.shape, cache.dtype, cache.device) != (first.shape, first.dtype, first.device):
            raise ProfileError(
                f"{kind} cache {name}",
                f"{list(cache.shape)} {cache.dtype} on {cache.device}",
                f"expected that of {first_name}: {list(first.shape)} {first.dtype} on {first.device}",
            )
        if not cache.is_contiguous():
            raise ProfileError(f"{kind} cache {name}", list(cache.stride()), "expected a contiguous cache")
    return [cache for _, cache in ordered]


def check_gather(
    layout: Layout,
    block_size: int,
    blocks: int,
    block_ids: Sequence[int],
    start: int,
    stop: int,
    out: torch.Tensor,
) -> None:
    """Raise ValueError unless tokens [start, stop) lie in `block_ids` and `out` holds exactly them."""
    if not 0 <= start < stop:
        raise ValueError(f"tokens [{start}, {stop}) are no range")
    if start % layout.page:
        raise ValueError(f"a segment must start on a page boundary ({layout.page}), not at {start}")
    if stop > len(block_ids) * block_size:
        raise ValueError(f"token {stop - 1} lies beyond the {len(block_ids)} blocks of {block_size} tokens")
    used = block_ids[start // block_size : -(-stop // block_size)]
    if min(used) < 0 or max(used) >= blocks:
        raise ValueError(f"a block id lies outside the cache's {blocks} blocks")
    want = layout.segment_bytes(stop - start)
    if out.dtype != torch.uint8 or out.numel() != want or not out.is_contiguous():
        raise ValueError(f"out must be {want} contiguous uint8, not {out.numel()} {out.dtype}")


def check_slot(slot: torch.Tensor, layout: Layout, segments: Sequence[int]) -> int:
    """The tokens `segments` hold. Raises ValueError unless the layout allows them and the slot holds them."""
    seq_len = sum(segments)
    layout.check_segments(list(segments), seq_len)
    if slot.dtype != torch.uint8 or slot.dim() != 1 or not slot.is_contiguous():
        raise ValueError(f"slot must be contiguous uint8 [bytes], not {slot.dtype} {list(slot.shape)}")
    if slot.numel() < layout.segment_bytes(seq_len):
        raise ValueError(f"slot of {slot.numel()} bytes cannot hold {layout.segment_bytes(seq_len)}")
    return seq_len


def config_int(config: Mapping[str, Any], field: str, remedy: str) -> int:
    """An integer field of config.json. Raises ProfileError when it is missing or no positive integer."""
    value = config.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ProfileError(f"config.{field}", value, remedy)
    return value


def expect_config(config: Mapping[str, Any], field: str, want: int) -> None:
    """Raise ProfileError unless config.json says `want` for `field`."""
    if config.get(field) != want:
        raise ProfileError(f"config.{field}", config.get(field), f"this profile is for models with {want}")

"""How a request's attention state lies in staging memory and in a decode node's slot.

State travels in segments. A segment holds a run of tokens that starts on a page boundary, for every
plane and layer, with no gap: plane after plane, in a plane layer after layer, in a layer token after
token (or page after page). A segment of tokens [a, b) lies in the slot at `offset(a)`, so segments of
one request follow each other without gaps and each is written as one part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Plane:
    """One contiguous region of a segment: `unit_bytes` for every `unit_tokens` tokens and layer."""

    name: str
    unit_tokens: int
    unit_bytes: int

    def units(self, tokens: int) -> int:
        """Units that hold `tokens` tokens (the last one may be part full)."""
        return -(-tokens // self.unit_tokens)


@dataclass(frozen=True)
class Layout:
    """The geometry both ends of a handoff must agree on.

    `page` is the alignment of segment starts in tokens (1 where no plane is paged).
    `dtype` is the cache's dtype name: fp8_ds_mla, bfloat16 or float32.
    """

    profile: str
    version: int
    dtype: str
    layers: int
    page: int
    planes: tuple[Plane, ...]

    def segment_bytes(self, tokens: int) -> int:
        """Bytes of a segment of `tokens` tokens, all planes and layers."""
        return self.layers * sum(p.units(tokens) * p.unit_bytes for p in self.planes)

    def plane_offsets(self, tokens: int) -> tuple[int, ...]:
        """Byte offset of each plane inside a segment of `tokens` tokens."""
        offsets, at = [], 0
        for plane in self.planes:
            offsets.append(at)
            at += self.layers * plane.units(tokens) * plane.unit_bytes
        return tuple(offsets)

    def offset(self, token: int) -> int:
        """Byte offset in the slot of the segment that starts at `token`.

        Raises ValueError when `token` is not on a page boundary.
        """
        if token % self.page:
            raise ValueError(f"a segment must start on a page boundary ({self.page}), not at {token}")
        return self.segment_bytes(token)

    def check_segments(self, lengths: list[int], seq_len: int) -> None:
        """Raise ValueError unless `lengths` cut `seq_len` tokens into legal segments."""
        if not lengths or any(n <= 0 for n in lengths) or sum(lengths) != seq_len:
            raise ValueError(f"segments {lengths} do not add up to {seq_len} tokens")
        for n in lengths[:-1]:
            if n % self.page:
                raise ValueError(f"segment of {n} tokens ends inside a page of {self.page}")

    def describe(self) -> dict[str, Any]:
        """The layout as JSON, for Hello and Request; equal layouts describe equally."""
        return {
            "profile": self.profile,
            "version": self.version,
            "dtype": self.dtype,
            "layers": self.layers,
            "page": self.page,
            "planes": [[p.name, p.unit_tokens, p.unit_bytes] for p in self.planes],
        }

    def mismatch(self, other: object) -> str | None:
        """The first field in which a peer's description differs, in words, or None if none does."""
        if not isinstance(other, dict):
            return "layout: missing"
        for field, mine in self.describe().items():
            if other.get(field) != mine:
                return f"layout.{field}: here {mine!r}, peer {other.get(field)!r}"
        return None

"""How TileRT 0.1.5 lays a request out: one buffer of `max_seq_len` tokens at fixed strides.

That is our segment of `max_seq_len` tokens of which only the first rows are set, so the same `Layout`
describes both: here are the addresses a sender needs towards a stock receive server, and what a node needs
to take what a stock sender wrote (see `MlaNsaProfile.convert_strided`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from vllm_tilert.profiles.base import ProfileError
from vllm_tilert.profiles.layout import Layout

LAYERS: Final[dict[str, int]] = {"glm5": 79, "dsv32": 62}
"""Cache layers (draft layer included) that the stock profiles are fixed to."""

_BASES: Final[dict[str, str]] = {"kv": "kv_base", "pe": "pe_base", "index": "ki_base"}


class Part(NamedTuple):
    """One write: `length` bytes at `source` in the sender's segment to address `target` of the peer."""

    source: int
    target: int
    length: int


def check_layout(layout: Layout) -> None:
    """Raise ProfileError unless a stock peer can take this layout: it compares nothing but the version."""
    layers = LAYERS.get(layout.profile)
    if layers is None:
        raise ProfileError("profile", layout.profile, "stock TileRT takes glm5 and dsv32 only")
    if layout.layers != layers:
        raise ProfileError("layers", layout.layers, f"stock TileRT {layout.profile} takes {layers} layers")


def slot_bytes(layout: Layout, max_seq_len: int) -> int:
    """Bytes of a stock receive buffer."""
    return layout.segment_bytes(max_seq_len)


def hello_bases(layout: Layout, max_seq_len: int, address: int) -> dict[str, int]:
    """The base addresses a stock sender expects in Hello, for a buffer at `address`."""
    offsets = layout.plane_offsets(max_seq_len)
    return {_BASES[plane.name]: address + at for plane, at in zip(layout.planes, offsets, strict=True)}


def parts(layout: Layout, hello: Mapping[str, Any], start: int, tokens: int) -> list[Part]:
    """The writes that land a segment of `tokens` tokens from token `start` on in a stock buffer.

    One part a layer and plane. Raises ProfileError when the layout is none of stock's, and ValueError when
    the segment does not start on a page or does not fit the peer's buffer.
    """
    check_layout(layout)
    limit = int(hello["max_seq_len"])
    layout.offset(start)  # the page check
    if start + tokens > limit:
        raise ValueError(f"tokens up to {start + tokens} exceed the peer's max_seq_len of {limit}")
    found = []
    for plane, source in zip(layout.planes, layout.plane_offsets(tokens), strict=True):
        base = int(hello[_BASES[plane.name]]) + start // plane.unit_tokens * plane.unit_bytes
        length = plane.units(tokens) * plane.unit_bytes
        stride = plane.units(limit) * plane.unit_bytes
        found += [Part(source + i * length, base + i * stride, length) for i in range(layout.layers)]
    return found

"""The Engine seam: TileRT's own (inject, decode, reset), and a self-check."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_tilert.profiles.base import ConvertedState
from vllm_tilert.profiles.layout import Layout

GREEDY_BELOW = 1e-5
"""Temperatures below this mean greedy decoding, as in TileRT."""


class EngineUnavailable(RuntimeError):
    """The engine cannot run on this host: what is missing, and the remedy."""


@dataclass(frozen=True)
class Sampling:
    """What TileRT's engine can honour. Defaults are TileRT's."""

    temperature: float = 1.0
    top_p: float = 0.95
    top_k: int = 256

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True)
class ReceivedState:
    """One request's state as it arrived and was verified, still in its slot.

    `slot` uint8, the `segments` (lengths in tokens) of `layout` one after the other. It is the engine's to
    read until `Engine.reset`.
    """

    slot: torch.Tensor
    layout: Layout
    segments: tuple[int, ...]

    @property
    def seq_len(self) -> int:
        """Tokens it holds."""
        return sum(self.segments)

    def continues(self, earlier: ReceivedState, count: int) -> bool:
        """Whether `earlier` is this state's first `count` segments, in the same slot."""
        return (
            self.slot.data_ptr() == earlier.slot.data_ptr()
            and self.layout == earlier.layout
            and self.segments[:count] == earlier.segments
        )


@dataclass(frozen=True)
class Decoded:
    """A finished decode. `finish_reason` is stop, length or cancelled; MTP figures where there are any."""

    tokens: int
    finish_reason: str
    mtp_accept_mean: float | None = None


class Engine(Protocol):
    """Decodes one request at a time. Every method but `land` is called on one and the same thread."""

    @property
    def max_seq_len(self) -> int:
        """Tokens that prompt and reply together may have."""

    @property
    def takes_bytes(self) -> bool:
        """Whether it is given a ReceivedState, to convert it where it is needed, or a ConvertedState."""

    def land(self, state: ReceivedState, first: int = 0) -> None:
        """Begin to put `state` in place, from its segment `first` on; those before it have been landed.

        Only where `takes_bytes`, and only while the engine has no request. Returns without waiting, on any
        thread. What it puts in place is of no request until `inject` has been called, and a `land` from
        segment 0 on begins anew. Raises ValueError when it does not fit the engine or what was landed.
        """

    def settle(self) -> None:
        """Wait until what `land` began is in place; it reads nothing of the slot any more then."""

    def inject(self, state: ConvertedState | ReceivedState, last_prompt_token: int) -> None:
        """Restore the engine to `state.seq_len` prefilled tokens; MTP starts from the last one's id.

        A ReceivedState has been landed whole; over when all of it is in place. Raises ValueError when they
        do not fit the engine, or when another state, or less than all, was landed.
        """

    def decode(
        self,
        first_token_id: int,
        max_tokens: int,
        sampling: Sampling,
        on_tokens: Callable[[list[int]], None],
        cancel: threading.Event,
    ) -> Decoded:
        """Continue from `first_token_id`, which is the first token of the output.

        `on_tokens` gets each accepted burst at once; stop tokens are never passed on. Ends early when
        `cancel` is set.
        """

    def reset(self) -> None:
        """Forget the request. Raising means that the engine cannot be trusted any more."""

    def self_check(self) -> None:
        """Raise unless the engine computes. Called when it is idle."""

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


@dataclass(frozen=True)
class Decoded:
    """A finished decode. `finish_reason` is stop, length or cancelled; MTP figures where there are any."""

    tokens: int
    finish_reason: str
    mtp_accept_mean: float | None = None


class Engine(Protocol):
    """Decodes one request at a time. Every method is called on one and the same thread."""

    @property
    def max_seq_len(self) -> int:
        """Tokens that prompt and reply together may have."""

    @property
    def takes_bytes(self) -> bool:
        """Whether `inject` is given a ReceivedState, to convert it where it is needed, or a ConvertedState."""

    def inject(self, state: ConvertedState | ReceivedState, last_prompt_token: int) -> None:
        """Restore the engine to `state.seq_len` prefilled tokens; MTP starts from the last one's id.

        Raises ValueError when they do not fit the engine.
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

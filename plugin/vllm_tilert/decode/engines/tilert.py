"""TileRT's own engine, driven through its model profiles' seam: `build_engine`, `inject`, `decode`.

Imported only where TileRT's wheel is installed (CPython 3.12, Blackwell GPUs).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch

from vllm_tilert.decode.engines.base import Decoded, EngineUnavailable, ReceivedState, Sampling
from vllm_tilert.kernels.inject import Injector
from vllm_tilert.profiles.base import ConvertedState
from vllm_tilert.profiles.layout import Layout

AR_STEPS: Final = 8
"""Decode steps per host synchronisation, TileRT's own default."""


class TileRTEngine:
    """See `base.Engine`. `layout` is that of the state that will come, the draft layer's included."""

    def __init__(self, layout: Layout, weights: Path, max_seq_len: int, with_mtp: bool) -> None:
        level = logging.getLogger().level
        try:
            from tilert.pd_vllm.profiles import base as tilert_profiles
        except ImportError as error:
            raise EngineUnavailable(
                f"engine tilert needs TileRT's wheel ({error}): install tilert==0.1.5.post3 under CPython 3.12"
            ) from None
        finally:
            logging.getLogger().setLevel(level)  # TileRT's import turns DEBUG on for everything
        try:
            stock = tilert_profiles.get_profile(layout.profile)
        except KeyError:
            raise EngineUnavailable(
                f"engine tilert has no model {layout.profile!r}: choose glm5 or dsv32"
            ) from None
        self._adapter: Any = stock.build_engine(str(weights), max_seq_len, with_mtp, AR_STEPS)
        draft = 0 if with_mtp else 1  # without MTP the engine has no draft layer to put state into
        self._injector = Injector(self._adapter.gen, layout.layers - draft, unused=draft)
        self._injector.warm_up(layout)
        self._inject_cache = self._adapter.gen.inject_cache
        self._landed: ReceivedState | None = None

    @property
    def takes_bytes(self) -> bool:
        """See `base.Engine`. Bytes are converted straight into the engine's tensors, where those allow it."""
        return self._injector.direct

    @property
    def max_seq_len(self) -> int:
        """See `base.Engine`."""
        # The adapter knows no window and says 200,000.
        return min(int(self._adapter.max_seq_len), self._injector.rows or self._adapter.max_seq_len)

    def land(self, state: ReceivedState, first: int = 0) -> None:
        """See `base.Engine`."""
        before, self._landed = self._landed, None
        if first and (before is None or not state.continues(before, first)):
            raise ValueError(f"segment {first} does not follow what was landed")
        self._injector.queue(state.slot, state.layout, state.segments, first)
        self._landed = state

    def settle(self) -> None:
        """See `base.Engine`."""
        self._injector.finish()

    def inject(self, state: ConvertedState | ReceivedState, last_prompt_token: int) -> None:
        """See `base.Engine`."""
        landed, self._landed = self._landed, None
        if isinstance(state, ReceivedState):
            if landed is None or not state.continues(landed, len(state.segments)):
                raise ValueError("the state has not been landed whole")
            self.settle()
        else:
            self._injector.inject(state)
        # What else the adapter does at injection is its own; only the copying has been done.
        self._adapter.gen.inject_cache = _nothing
        try:
            self._adapter.inject(
                SimpleNamespace(layers=(), seq_len=state.seq_len, last_prompt_token=last_prompt_token)
            )
        finally:
            self._adapter.gen.inject_cache = self._inject_cache

    def decode(
        self,
        first_token_id: int,
        max_tokens: int,
        sampling: Sampling,
        on_tokens: Callable[[list[int]], None],
        cancel: threading.Event,
    ) -> Decoded:
        """See `base.Engine`."""
        if first_token_id in self._adapter.stop_ids:
            return Decoded(0, "stop")
        told = 0

        def on_token(token: int) -> None:
            nonlocal told
            told += 1
            on_tokens([int(token)])

        tokens = self._adapter.decode(
            first_token_id,
            max_tokens,
            {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k},
            on_token=on_token,
            cancel_event=cancel,
        )
        if told < len(tokens):  # the adapter says nothing of a first token after which there is no room
            on_tokens([int(token) for token in tokens[told:]])
        stats = self._adapter.last_stats
        return Decoded(len(tokens), stats["finish_reason"], stats.get("mtp_accept_mean"))

    def reset(self) -> None:
        """See `base.Engine`."""
        self._adapter.reset()

    def self_check(self) -> None:
        """Every GPU must still compute."""
        for index in range(torch.cuda.device_count()):
            if torch.ones(1024, device=f"cuda:{index}").sum().item() != 1024:
                raise RuntimeError(f"cuda:{index} adds up wrongly")


def _nothing(layers: Any, start_pos: int = 0) -> None:
    """Stands in for `inject_cache` where the state is in place already."""

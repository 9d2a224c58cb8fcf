"""TileRT's own engine, driven through its model profiles' seam: `build_engine`, `inject`, `decode`.

Imported only where TileRT's wheel is installed (CPython 3.12, Blackwell GPUs).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch

from vllm_tilert.decode.engines.base import Decoded, EngineUnavailable, Sampling
from vllm_tilert.kernels.inject import Injector
from vllm_tilert.profiles.base import ConvertedState

AR_STEPS: Final = 8
"""Decode steps per host synchronisation, TileRT's own default."""


class TileRTEngine:
    """See `base.Engine`. `profile` is `glm5` or `dsv32`, `layers` its caches with the draft layer's."""

    def __init__(self, profile: str, weights: Path, max_seq_len: int, with_mtp: bool, layers: int) -> None:
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
            stock = tilert_profiles.get_profile(profile)
        except KeyError:
            raise EngineUnavailable(f"engine tilert has no model {profile!r}: choose glm5 or dsv32") from None
        self._use(stock.build_engine(str(weights), max_seq_len, with_mtp, AR_STEPS), layers)

    def _use(self, adapter: Any, layers: int) -> None:
        self._adapter = adapter
        self._injector = Injector(adapter.gen, layers)
        self._state: ConvertedState | None = None
        if self._injector.direct:
            # The adapter's own inject goes on to set the position and what the draft layer needs.
            adapter.gen.inject_cache = self._inject_directly

    def _inject_directly(self, layers: Sequence[Sequence[torch.Tensor]], start_pos: int = 0) -> None:
        assert self._state is not None
        self._injector.inject(self._state)

    @property
    def max_seq_len(self) -> int:
        """See `base.Engine`."""
        return int(self._adapter.max_seq_len)

    def inject(self, state: ConvertedState, last_prompt_token: int) -> None:
        """See `base.Engine`."""
        self._state = state
        try:
            self._adapter.inject(
                SimpleNamespace(
                    layers=state.layers, seq_len=state.seq_len, last_prompt_token=last_prompt_token
                )
            )
        finally:
            self._state = None

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
        tokens = self._adapter.decode(
            first_token_id,
            max_tokens,
            {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k},
            on_token=lambda token: on_tokens([int(token)]),
            cancel_event=cancel,
        )
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

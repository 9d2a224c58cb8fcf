"""The reference engine: transformers on a CPU or one GPU, token by token.

It decodes the very tokens vLLM would have produced, wherever the model fits: in the local cluster, in
tests, and as the oracle of the handoff.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from vllm_tilert.decode.engines.base import Decoded, EngineUnavailable, ReceivedState, Sampling
from vllm_tilert.profiles.base import ConvertedState

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ReferenceEngine:
    """See `base.Engine`. Takes the `mla` profile's planes: kv [layers, seq, 512], pe [layers, seq, 64]."""

    takes_bytes: Final = False

    def __init__(self, model_dir: Path, dtype: str, max_seq_len: int, device: str = "cpu") -> None:
        try:
            from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig
        except ImportError as error:
            raise EngineUnavailable(
                f"engine reference needs transformers ({error}): install requirements/decode-reference.txt"
            ) from None
        if dtype not in _DTYPES:
            raise EngineUnavailable(f"engine reference decodes in {' or '.join(_DTYPES)}, not in {dtype}")
        self._new_cache: Callable[[], Any] = DynamicCache
        self._device = torch.device(device)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=_DTYPES[dtype], attn_implementation="eager", local_files_only=True
        )
        self._model.to(self._device).eval()
        self._max_seq_len = max_seq_len
        self._stop = _stop_ids(GenerationConfig.from_pretrained(model_dir, local_files_only=True))
        self._cache: Any = None
        self._seq_len = 0
        self._random = torch.Generator(self._device)
        self._random.seed()

    @property
    def max_seq_len(self) -> int:
        """See `base.Engine`."""
        return self._max_seq_len

    def land(self, state: ReceivedState, first: int = 0) -> None:
        """See `base.Engine`; it takes no bytes."""
        raise ValueError("engine reference takes converted state only")

    def settle(self) -> None:
        """See `base.Engine`."""

    @torch.inference_mode()
    def inject(self, state: ConvertedState | ReceivedState, last_prompt_token: int) -> None:
        """See `base.Engine`."""
        assert isinstance(state, ConvertedState)
        cache = self._new_cache()
        # An MTP draft layer's cache comes last, and is not used here.
        layers = self._model.config.num_hidden_layers
        for layer in range(layers):
            kv, pe = state.planes["kv"][layer], state.planes["pe"][layer]
            # vLLM rotates pairs (0, 1), (2, 3), ... and stores them so; transformers keeps the halves apart.
            rope = pe.view(state.seq_len, -1, 2).transpose(1, 2).reshape(state.seq_len, -1)
            cache.update(kv.to(self._device)[None, None], rope.to(self._device)[None, None], layer)
        self._cache, self._seq_len = cache, state.seq_len

    @torch.inference_mode()
    def decode(
        self,
        first_token_id: int,
        max_tokens: int,
        sampling: Sampling,
        on_tokens: Callable[[list[int]], None],
        cancel: threading.Event,
    ) -> Decoded:
        """See `base.Engine`."""
        if self._cache is None:
            raise RuntimeError("nothing was injected")
        vocabulary = self._model.config.vocab_size
        if not 0 <= first_token_id < vocabulary:
            raise ValueError(f"first_token_id {first_token_id} is outside the vocabulary of {vocabulary}")
        token, count = first_token_id, 0
        room = self._max_seq_len - self._seq_len
        while True:
            if token in self._stop:
                return Decoded(count, "stop")
            count += 1
            on_tokens([token])
            if count >= min(max_tokens, room):
                return Decoded(count, "length")
            if cancel.is_set():
                return Decoded(count, "cancelled")
            token = self._next(token, self._seq_len + count - 1, sampling)

    def _next(self, token: int, position: int, sampling: Sampling) -> int:
        at = torch.tensor([[position]], device=self._device)
        logits = self._model(
            input_ids=torch.tensor([[token]], device=self._device),
            position_ids=at,
            past_key_values=self._cache,
            use_cache=True,
        ).logits[0, -1]
        if not torch.isfinite(logits).all():
            raise FloatingPointError("the model's logits are not finite")
        if sampling.greedy:
            return int(logits.argmax())
        return self._sample(logits.float() / sampling.temperature, sampling)

    def _sample(self, logits: torch.Tensor, sampling: Sampling) -> int:
        k = min(sampling.top_k, logits.numel()) if sampling.top_k > 0 else logits.numel()
        best, ids = logits.topk(k)
        probabilities = best.softmax(-1)
        # The smallest set whose mass reaches top_p: a token stays while what precedes it is below.
        keep = probabilities.cumsum(-1) - probabilities < sampling.top_p
        keep[0] = True
        probabilities = probabilities * keep
        return int(ids[torch.multinomial(probabilities, 1, generator=self._random)])

    def reset(self) -> None:
        """See `base.Engine`."""
        self._cache, self._seq_len = None, 0

    @torch.inference_mode()
    def self_check(self) -> None:
        """One forward pass of one token without state: its logits must be finite and the same each time."""
        logits = self._model(input_ids=torch.tensor([[0]], device=self._device), use_cache=False).logits
        if not torch.isfinite(logits).all():
            raise RuntimeError("the model's logits are not finite")


def _stop_ids(config: Any) -> frozenset[int]:
    ids = config.eos_token_id
    if ids is None:
        return frozenset()
    return frozenset(ids) if isinstance(ids, list) else frozenset({int(ids)})

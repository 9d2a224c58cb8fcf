"""TileRT's engine without its GPUs, for tests of what surrounds its kernels.

Real, from the published wheel: the profile registry and `build_engine`, both generators, their decode
layers with `_init_weights`, the `Dsa` and `MTP` modules that make the cache tensors and intermediates, the
engine adapter with its decode loops, `inject_cache`, `set_cur_pos`. Reduced: `max_seq_len`, so that the
caches of eight devices fit; they are all on the CPU. Made up: the weights (none) and `torch.ops.tilert`,
the native library: `Backend` predicts tokens from every byte of every device's caches, so that state which
is missing, misplaced or another's gives other tokens.
"""

from __future__ import annotations

import contextlib
import json
import logging
import zlib
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

DEVICES = 8
ROWS = 200  # max_seq_len; the modules add a pad of 8
VOCABULARY = 151  # token ids of the stand-in; stop tokens lie above


class OnCpu(TorchFunctionMode):
    """Every device a factory or `Tensor.to` names is the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], str | int | torch.device):
            args = (args[0], "cpu", *args[2:])
        return func(*args, **kwargs)


def next_token(previous: int, position: int, state: int) -> int:
    """The token after `previous`, which stands at `position`, over a prompt whose state is `state`."""
    return (previous * 31 + position * 7 + state) % VOCABULARY


def digest(planes: Iterable[torch.Tensor]) -> int:
    """A number that any byte of `planes` changes."""
    total = 0
    for plane in planes:
        total = zlib.crc32(plane.contiguous().view(torch.uint8).numpy().tobytes(), total)
    return total


class Backend:
    """In the place of `torch.ops.tilert`. MTP steps accept one to three tokens each."""

    def __init__(self, index: Any) -> None:
        self._index = index
        self._devices: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._position: int | None = None
        self._rows = 0
        self._state: int | None = None  # of the request that is decoded
        self._accepted: list[int] = []
        self._counts: list[int] = []

    def __getattr__(self, name: str) -> Any:
        name = name.removesuffix("_glm5")
        mtp = "_mtp_e2e" in name
        what = name.replace("_mtp_e2e", "").removeprefix("dsa_").removeprefix("show_hands").lstrip("_")
        known = {
            "prepare_money": partial(self._prepare, mtp),
            "": partial(self._step, mtp),
            "set_cur_pos": self._set_position,
            "accepted_tokens": lambda device: self._flat(self._accepted),
            "num_accepted": lambda device: self._flat(self._counts),
            "reset": self._reset,
        }
        if what in ("go_home", "set_sampling_seed", "set_prefill_valid_tokens"):
            return lambda *arguments: None
        if what not in known:
            raise AttributeError(name)
        return known[what]

    def _prepare(self, mtp: bool, params: Any, temporaries: Any, caches: Any, *rest: Any) -> None:
        # With MTP each device comes twice, the second time without the draft layer's caches.
        self._devices.setdefault(id(temporaries), (temporaries, caches))

    def _set_position(self, position: int) -> None:
        self._position, self._rows, self._state = position + 1, position + 1, None

    def _reset(self) -> None:
        self._position = self._state = None

    @staticmethod
    def _flat(values: list[int]) -> torch.Tensor:
        return torch.tensor([len(values), *values], dtype=torch.int32)

    def state(self) -> int:
        """The digests of all devices' caches over the prompt's rows; planes a device does not use left out."""
        return sum(
            digest(cache[0, : self._rows] for cache in caches if cache.shape[1] > 1)
            for _, caches in self._devices.values()
        )

    def _step(self, mtp: bool, tokens: torch.Tensor, steps: int = 1) -> None:
        temporaries, index = next(iter(self._devices.values()))[0], self._index
        first = self._position is None
        if first and mtp:
            # The last prompt token again, at its own place: the draft layer needs its hidden state.
            self._position = int(temporaries[index.CUR_POS].flatten()[0])
            self._rows = self._position + 1
        assert self._position is not None
        if self._state is None:
            self._state = self.state()
        state, previous = self._state, int(tokens.flatten()[0])
        self._accepted, self._counts = [], []
        for _ in range(steps):
            count = 1 + self._position % 3 if mtp and not first else 1
            for _ in range(count):
                previous = next_token(previous, self._position, state)
                self._accepted.append(previous)
                self._position += 1
            self._counts.append(count)
        if mtp:
            _fill(temporaries[index.NEXT_DRAFT_TOKENS], [previous])
            _fill(temporaries[index.ACCEPTED_TOKENS], self._counts[-1:])
            _fill(temporaries[index.PREDICTED_TOKENS], self._accepted[-self._counts[-1] :])
        else:
            temporaries[index.TOKEN_OUT][0][0] = previous


def _fill(tensor: torch.Tensor, values: list[int]) -> None:
    tensor.flatten()[: len(values)] = torch.tensor(values).to(tensor.dtype)


class _AtOnce:
    """A thread that has run when it is started: the mode above holds in one thread only."""

    def __init__(self, target: Any, args: tuple[Any, ...] = ()) -> None:
        self._work = partial(target, *args)

    def start(self) -> None:
        self._work()

    def join(self) -> None:
        pass


def write_tokenizer(folder: Path) -> None:
    """What the generators read from the weights' folder besides weights."""
    from tokenizers import Tokenizer, models

    words = {f"w{i}": i for i in range(VOCABULARY)}
    stops = ["<|endoftext|>", "<|user|>", "<|observation|>", "<|assistant|>"]
    tokenizer = Tokenizer(models.WordLevel(words | {"<unk>": VOCABULARY}, unk_token="<unk>"))
    tokenizer.add_special_tokens(stops)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": stops[0], "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))


@contextlib.contextmanager
def tilert_on_cpu(model: str, monkeypatch: pytest.MonkeyPatch):
    """Makes `TileRTEngine(model, ...)` work in this thread."""
    import importlib

    level, threads = logging.getLogger().level, torch.get_num_threads()
    tree = {"glm5": "glm_5", "dsv32": "deepseek_v3_2"}[model]
    tilert = importlib.import_module("tilert")
    logging.getLogger().setLevel(level)  # importing tilert turns everything to DEBUG
    module = partial(importlib.import_module)
    end2end = module(f"tilert.models.{tree}.modules.end2end")
    arguments = module(f"tilert.models.{tree}.model_args")
    name = "ModelArgsGLM5" if model == "glm5" else "ModelArgs"
    backend = Backend(module(f"tilert.models.{tree}.temp_var_indices").Idx)

    monkeypatch.setattr(tilert, "load_backend", lambda family: None)
    monkeypatch.setattr(torch.ops, "tilert", backend, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: DEVICES)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(arguments, name, partial(getattr(arguments, name), max_seq_len=ROWS))
    monkeypatch.setattr(end2end, "threading", SimpleNamespace(Thread=_AtOnce))
    monkeypatch.setattr(torch.nn.Linear, "reset_parameters", lambda self: None)  # most of the time otherwise
    monkeypatch.setattr(end2end, "get_profile_log_tensor", lambda **shape: torch.zeros(1))
    monkeypatch.setattr(end2end.ShowHandsDSALayer, "load_device_weights", lambda *a, **k: {})
    for part in (module(f"tilert.models.{tree}.modules.{kind}") for kind in ("dsa", "mtp")):
        for found in (getattr(part, kind, None) for kind in ("Dsa", "MTP")):
            if found is not None:
                monkeypatch.setattr(found, "init_tilert_weights", lambda self, weights: None)
                monkeypatch.setattr(found, "get_weights_list", lambda self: [])
    try:
        with OnCpu():
            yield backend
    finally:
        torch.set_num_threads(threads)  # the generators ask for 64

"""A client's request, checked and resolved once: what both legs and the answer's shape are made from."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson

from tilert_router.config import FAST_SUFFIX, Model
from tilert_router.errors import ApiError, bad_request
from tilert_router.fields import PREFILL, Kind, not_served, strip
from tilert_router.parsing import parsers_of

COMPLETION_MAX_TOKENS: Final = 16
"""vLLM's default length of a completion."""
_MIN_TEMPERATURE: Final = 1e-2


@dataclass(frozen=True, slots=True)
class Defaults:
    """What generation_config.json says about sampling, as vLLM reads it."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = None
    not_applied: tuple[str, ...] = ()
    """Its settings that TileRT does not apply; prefill is told their neutral values."""

    @classmethod
    def load(cls, folder: Path) -> Defaults:
        """Read `folder`/generation_config.json; vLLM's own defaults where there is none."""
        try:
            config = json.loads((folder / "generation_config.json").read_text())
        except FileNotFoundError:
            return cls()
        given = {k: v for k, v in config.items() if v is not None}
        neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0}
        return cls(
            temperature=float(given.get("temperature", 1.0)),
            top_p=float(given.get("top_p", 1.0)),
            top_k=int(given.get("top_k", 0)),
            max_tokens=given.get("max_new_tokens"),
            not_applied=tuple(k for k, v in neutral.items() if k in given and given[k] != v),
        )


@dataclass(frozen=True, slots=True)
class Sampling:
    """The three values a TileRT engine knows; the same on both legs."""

    temperature: float
    top_p: float
    top_k: int

    def as_json(self) -> dict[str, float | int]:
        """The `sampling` object of a decode call, and fields of a prefill call."""
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}


@dataclass(frozen=True, slots=True)
class Request:
    """One generation as the router serves it. `body` is the client's, stripped; not yet checked by vLLM."""

    kind: Kind
    body: dict[str, Any]
    model: str
    fast: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    max_tokens: int | None
    sampling: Sampling
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    include_stop: bool
    skip_special_tokens: bool
    return_token_ids: bool
    stream_interval: int
    unserved: str | None
    """The field that TileRT cannot honour, if any."""
    defaults: Defaults = field(repr=False, default=Defaults())

    def prefill_body(self, served_name: str, rid: str, handoff: Mapping[str, Any]) -> dict[str, Any]:
        """The body of the prefill leg: the prompt, one token, the same sampling, and where state goes.

        `handoff` becomes kv_transfer_params. Made from an allow-list, so that nothing of a client's
        passes but what shapes the prompt.
        """
        allowed = PREFILL[self.kind]
        body = {k: v for k, v in self.body.items() if k in allowed and v is not None}
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            body["prompt"] = prompt[0]
        body |= self.sampling.as_json()
        body |= {k: 1.0 if k == "repetition_penalty" else 0.0 for k in self.defaults.not_applied}
        if "tools" in body:
            # The prompt is the same, and nothing of one token is to be parsed.
            body["tool_choice"] = "none"
        if self.body.get("min_tokens"):
            body["min_tokens"] = 1
        return body | {
            "model": served_name,
            "max_tokens": 1,
            "stream": False,
            "return_token_ids": True,
            "request_id": rid,
            "kv_transfer_params": dict(handoff),
        }

    def budget(self, prompt_tokens: int, window: int) -> int:
        """Tokens this request may get: what was asked for, or the rest of the window."""
        rest = window - prompt_tokens
        return rest if self.max_tokens is None else min(self.max_tokens, rest)


def parse_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request. Raises ApiError 400."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise bad_request(f"the body must be a JSON object, not {_json_type(body)}", code="invalid_json")
    return body


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return names.get(type(value), "a number")


def _flag(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise bad_request(f"{name}: must be true or false, not {_json_type(value)}", name)
    return value


def _integer(body: Mapping[str, Any], name: str, low: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise bad_request(f"{name}: must be an integer, not {_json_type(value)}", name)
    if value < low:
        raise bad_request(f"{name}: must be at least {low}, got {value}", name)
    return value


def _number(body: Mapping[str, Any], name: str, default: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise bad_request(f"{name}: must be a number, not {_json_type(value)}", name)
    return float(value)


def resolve_sampling(body: Mapping[str, Any], defaults: Defaults, max_top_k: int) -> Sampling:
    """Temperature, top_p and top_k by vLLM's precedence: the request's, then the model's, then vLLM's.

    Raises ApiError 400 outside vLLM's ranges.
    """
    temperature = _number(body, "temperature", defaults.temperature)
    if not 0.0 <= temperature <= 2.0:
        raise bad_request(f"temperature: must be in [0, 2], got {temperature:g}", "temperature")
    top_p = _number(body, "top_p", defaults.top_p)
    if not 0.0 < top_p <= 1.0:
        raise bad_request(f"top_p: must be in (0, 1], got {top_p:g}", "top_p")
    top_k = _integer(body, "top_k", -1)
    if top_k is None:
        top_k = defaults.top_k
    if temperature == 0.0:
        # vLLM's own normal form of greedy; the engines decide by the temperature alone.
        return Sampling(0.0, 1.0, 1)
    top_k = max_top_k if top_k <= 0 else min(top_k, max_top_k)
    return Sampling(max(temperature, _MIN_TEMPERATURE), top_p, top_k)


def _stop(body: Mapping[str, Any]) -> tuple[str, ...]:
    value = body.get("stop")
    if value is None or value == []:
        return ()
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(s, str) for s in strings):
        raise bad_request("stop: must be a string or an array of strings", "stop")
    if not all(strings):
        raise bad_request("stop: must not contain an empty string", "stop")
    return tuple(strings)


def _token_ids(body: Mapping[str, Any]) -> frozenset[int]:
    value = body.get("stop_token_ids")
    if value is None:
        return frozenset()
    if not isinstance(value, list) or not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        raise bad_request("stop_token_ids: must be an array of integers", "stop_token_ids")
    return frozenset(value)


def model_of(body: Mapping[str, Any], model: Model) -> tuple[str, bool]:
    """The model as the client named it, and whether that is the fast alias. Raises ApiError 404."""
    name = body.get("model")
    if name is None:
        return model.name, False
    if name == model.name:
        return model.name, False
    if name == model.name + FAST_SUFFIX:
        return str(name), True
    if not isinstance(name, str):
        raise bad_request(f"model: must be a string, not {_json_type(name)}", "model")
    raise ApiError(
        404,
        f"The model `{name[:200]}` does not exist; this server has `{model.name}` "
        f"and `{model.name}{FAST_SUFFIX}`.",
        code="model_not_found",
        param="model",
    )


def resolve(kind: Kind, raw: dict[str, Any], model: Model, defaults: Defaults) -> Request:
    """Check what the router itself acts on. Raises ApiError 400 or 404 naming the field."""
    body = strip(raw)
    name, fast = model_of(body, model)
    if kind is Kind.CHAT:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise bad_request("messages: must be a non-empty array", "messages")
        tools = body.get("tools")
        if tools == []:
            raise bad_request("tools: must not be empty; leave it out or give one tool", "tools")
        if body.get("tool_choice") not in (None, "none") and not tools:
            raise bad_request("tool_choice: needs tools", "tool_choice")
        _flag(body, "parallel_tool_calls")
        _flag(body, "include_reasoning")
    elif body.get("prompt") in (None, "", []) and not body.get("prompt_embeds"):
        raise bad_request("prompt: must be given and not empty", "prompt")

    stream = _flag(body, "stream")
    options = body.get("stream_options")
    if options is not None:
        if not isinstance(options, dict):
            raise bad_request("stream_options: must be an object", "stream_options")
        if options and not stream:
            raise bad_request("stream_options: only with stream=true", "stream_options")
    include_usage = stream and _flag(options or {}, "include_usage")

    limit = "max_tokens"
    max_tokens = None
    if kind is Kind.CHAT:
        max_tokens = _integer(body, "max_completion_tokens", 1)
        if max_tokens is not None:
            limit = "max_completion_tokens"
    if max_tokens is None:
        max_tokens = _integer(body, "max_tokens", 1)
    if max_tokens is not None and max_tokens > model.max_model_len:
        raise bad_request(
            f"{limit}={max_tokens} cannot be greater than max_model_len={model.max_model_len}. "
            "Please request fewer output tokens.",
            limit,
        )
    min_tokens = _integer(body, "min_tokens", 0)
    if min_tokens is not None and max_tokens is not None and min_tokens > max_tokens:
        raise bad_request(f"min_tokens: must be at most {limit}={max_tokens}, got {min_tokens}", "min_tokens")
    if max_tokens is None:
        max_tokens = COMPLETION_MAX_TOKENS if kind is Kind.COMPLETION else defaults.max_tokens

    return Request(
        kind=kind,
        body=body,
        model=name,
        fast=fast,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=include_usage and _flag(options or {}, "continuous_usage_stats"),
        max_tokens=max_tokens,
        sampling=resolve_sampling(body, defaults, model.max_top_k),
        stop=_stop(body),
        stop_token_ids=_token_ids(body),
        include_stop=_flag(body, "include_stop_str_in_output"),
        skip_special_tokens=_flag(body, "skip_special_tokens", True),
        return_token_ids=_flag(body, "return_token_ids"),
        stream_interval=_integer(body, "stream_interval", 1) or 1,
        unserved=not_served(kind, body, parsers_of(model)),
        defaults=defaults,
    )

"""What becomes of each request field: one table, from which the code decides and the docs are made.

The table covers vLLM's request schemas. A field that is not in it has no effect, as in vLLM. `null` is
the same as leaving a field out.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

Body = Mapping[str, Any]


class Kind(StrEnum):
    """Which of OpenAI's two calls."""

    CHAT = "chat"
    COMPLETION = "completion"

    @property
    def path(self) -> str:
        """The call's path, the same on the router and on vLLM."""
        return "/v1/chat/completions" if self is Kind.CHAT else "/v1/completions"


class Treatment(StrEnum):
    """What the TileRT path does with a field."""

    ROUTER = "honoured by the router"
    PREFILL = "honoured by prefill"
    SAMPLING = "honoured by both legs"
    NEUTRAL = "native pool, or 400"
    IGNORED = "no effect, as in vLLM"
    STRIPPED = "removed on every route"


@dataclass(frozen=True, slots=True)
class Row:
    """One field. With NEUTRAL, `neutral(value, body)` says which values TileRT serves all the same, and `parsed`,
    which it serves as well where the router has the parser of that name (`reasoning` or `tools`)."""

    name: str
    treatment: Treatment
    note: str = ""
    neutral: Callable[[Any, Body], bool] | None = None
    kinds: tuple[Kind, ...] = (Kind.CHAT, Kind.COMPLETION)
    parsed: tuple[str, Callable[[Any, Body], bool]] | None = None


def _is(*values: Any) -> Callable[[Any, Body], bool]:
    # `type` keeps 0 and False, 1 and True apart only where JSON does; 0 and 0.0 are one number.
    return lambda value, _: any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in values)


def greedy(body: Body) -> bool:
    """Whether the request asks for greedy decoding by itself, so that randomness has no effect."""
    temperature = body.get("temperature")
    return isinstance(temperature, int | float) and temperature == 0


def _or_greedy(*values: Any) -> Callable[[Any, Body], bool]:
    neutral = _is(*values)
    return lambda value, body: neutral(value, body) or greedy(body)


def _empty(value: Any, _: Body) -> bool:
    return value in ([], {}, "")


def _text_format(value: Any, _: Body) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


def _auto_tools(value: Any, _: Body) -> bool:
    return value in ("none", "auto")


def _no_calls(_: Any, body: Body) -> bool:
    return body.get("tool_choice") == "none"


def _free_calls(tools: Any, body: Body) -> bool:
    # `strict` asks for a grammar, which TileRT has not.
    functions = [t.get("function") for t in tools if isinstance(t, dict)] if isinstance(tools, list) else []
    strict = any(isinstance(f, dict) and f.get("strict") for f in functions)
    return body.get("tool_choice") in (None, "auto", "none") and not strict


def _one_prompt(value: Any, _: Body) -> bool:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, list):
        return bool(value) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
    return isinstance(value, str) and value != ""


def _spaces(value: Any, body: Body) -> bool:
    return value is True or body.get("skip_special_tokens") in (None, True)


def _positive(value: Any, _: Body) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


_CHAT, _COMPLETION = (Kind.CHAT,), (Kind.COMPLETION,)
_R, _P, _S, _N, _I, _X = (
    Treatment.ROUTER,
    Treatment.PREFILL,
    Treatment.SAMPLING,
    Treatment.NEUTRAL,
    Treatment.IGNORED,
    Treatment.STRIPPED,
)

TABLE: Final[tuple[Row, ...]] = (
    Row("model", _R, "NAME or NAME-fast; vLLM's name for it goes to prefill"),
    Row("messages", _P, kinds=_CHAT),
    Row("prompt", _N, "one prompt, as text or token ids, is served", _one_prompt, _COMPLETION),
    Row("stream", _R),
    Row("stream_options", _R, "include_usage, continuous_usage_stats"),
    Row("max_tokens", _R, "left out: the rest of the context (chat), 16 (completions)"),
    Row("max_completion_tokens", _R, "goes before max_tokens", kinds=_CHAT),
    Row("stop", _R, "strings that never show, even when split over tokens; the decode is cancelled"),
    Row("stop_token_ids", _R),
    Row("include_stop_str_in_output", _R),
    Row("skip_special_tokens", _R),
    Row("return_token_ids", _R),
    Row(
        "include_reasoning",
        _N,
        "true is served; with model.reasoning_parser false as well",
        _is(True),
        _CHAT,
        ("reasoning", _is(True, False)),
    ),
    Row("parallel_tool_calls", _R, "false shows the first call only, as in vLLM", kinds=_CHAT),
    Row("stream_interval", _R, "tokens a chunk has at least, but for the first and the last"),
    Row("temperature", _S, "0 is greedy; left out: generation_config.json, then 1.0"),
    Row("top_p", _S, "left out: generation_config.json, then 1.0"),
    Row("top_k", _S, "0, -1 and values above model.max_top_k become model.max_top_k"),
    Row(
        "tools",
        _N,
        "served with tool_choice none; with model.tool_parser and tool_choice auto as well, but for strict ones",
        _no_calls,
        _CHAT,
        ("tools", _free_calls),
    ),
    Row(
        "tool_choice",
        _N,
        "none is served; with model.tool_parser auto as well",
        _is("none"),
        _CHAT,
        ("tools", _auto_tools),
    ),
    Row("reasoning_effort", _P, kinds=_CHAT),
    Row("add_generation_prompt", _P, kinds=_CHAT),
    Row("continue_final_message", _P, kinds=_CHAT),
    Row("add_special_tokens", _P),
    Row("documents", _P, kinds=_CHAT),
    Row("chat_template", _P, kinds=_CHAT),
    Row("chat_template_kwargs", _P, kinds=_CHAT),
    Row("media_io_kwargs", _P, kinds=_CHAT),
    Row("mm_processor_kwargs", _P, kinds=_CHAT),
    Row("truncate_prompt_tokens", _N, "positive values are served", _positive),
    Row("truncation_side", _P),
    Row("cache_salt", _P),
    Row("return_prompt_text", _N, "false is served", _is(False), _CHAT),
    Row("frequency_penalty", _N, "0 is served", _is(0)),
    Row("presence_penalty", _N, "0 is served", _is(0)),
    Row("repetition_penalty", _N, "1 is served", _is(1)),
    Row("min_p", _N, "0, and any with temperature 0", _or_greedy(0)),
    Row("seed", _N, "-1, and any with temperature 0", _or_greedy(-1)),
    Row("logit_bias", _N, "empty is served", _empty),
    Row("logprobs", _N, "false is served", _is(False), _CHAT),
    Row("logprobs", _N, "", _is(), _COMPLETION),
    Row("top_logprobs", _N, "0 is served", _is(0), _CHAT),
    Row("prompt_logprobs", _N, "", _is()),
    Row("logprob_token_ids", _N, "empty is served", _empty),
    Row("n", _N, "1 is served", _is(1)),
    Row("best_of", _N, "1 is served", _is(1)),
    Row("use_beam_search", _N, "false is served", _is(False)),
    Row("min_tokens", _N, "0 and 1 are served", _is(0, 1)),
    Row("ignore_eos", _N, "false is served", _is(False)),
    Row("allowed_token_ids", _N, "empty is served", _empty),
    Row("bad_words", _N, "empty is served", _empty),
    Row("response_format", _N, '{"type": "text"} is served', _text_format),
    Row("structured_outputs", _N, "", _is()),
    Row("guided_json", _N, "", _is()),
    Row("guided_regex", _N, "", _is()),
    Row("guided_choice", _N, "", _is()),
    Row("guided_grammar", _N, "", _is()),
    Row("thinking_token_budget", _N, "", _is()),
    Row("watermarking", _N, "false is served", _is(False)),
    Row("repetition_detection", _N, "", _is()),
    Row("spaces_between_special_tokens", _N, "true, and any while special tokens are skipped", _spaces),
    Row("echo", _N, "false is served", _is(False)),
    Row("suffix", _N, "empty is served", _empty, _COMPLETION),
    Row("prompt_embeds", _N, "empty is served", _empty, _COMPLETION),
    Row("priority", _N, "0 is served; an API key has a priority of its own", _is(0)),
    Row("vllm_xargs", _N, "empty is served", _empty),
    Row("routed_experts_prompt_start", _N, "0 is served", _is(0)),
    Row("functions", _N, "empty is served; use tools", _empty, _CHAT),
    Row("function_call", _N, "none and auto are served; use tool_choice", _auto_tools, _CHAT),
    Row("user", _I),
    Row("session_id", _I),
    Row("length_penalty", _I, "of beam search only"),
    Row("return_tokens_as_token_ids", _I, "of logprobs only"),
    Row("return_token_offsets", _I),
    Row("mm_payload", _I),
    Row("return_mm_kwargs", _I),
    Row("request_id", _X, "the handoff id is the router's own; send x-request-id to have an id echoed"),
    Row("kv_transfer_params", _X),
    Row("ec_transfer_params", _X),
)

STRIPPED: Final = frozenset(row.name for row in TABLE if row.treatment is _X)
"""Fields that no client may set, on the native route as well."""


def _rows(kind: Kind, *treatments: Treatment) -> tuple[Row, ...]:
    return tuple(row for row in TABLE if kind in row.kinds and row.treatment in treatments)


NEUTRAL: Final = {kind: {row.name: row for row in _rows(kind, _N)} for kind in Kind}
PREFILL: Final = {
    kind: frozenset(row.name for row in _rows(kind, _P))
    | ({"tools"} if kind is Kind.CHAT else {"prompt"})
    | {"truncate_prompt_tokens"}
    for kind in Kind
}
"""Fields that shape the prompt and go to prefill as they are."""


def not_served(kind: Kind, body: Body, parsers: Container[str] = ()) -> str | None:
    """The first field whose value the TileRT path cannot honour with these `parsers`, or None."""
    rows = NEUTRAL[kind]
    for name, value in body.items():
        row = rows.get(name)
        if row is None or value is None:
            continue
        assert row.neutral is not None
        if row.neutral(value, body):
            continue
        if row.parsed is None or row.parsed[0] not in parsers or not row.parsed[1](value, body):
            return name
    return None


def strip(body: dict[str, Any]) -> dict[str, Any]:
    """`body` without what no client may set; the same object when there is nothing to remove."""
    xargs = body.get("vllm_xargs")
    if isinstance(xargs, dict) and STRIPPED & xargs.keys():
        body = body | {"vllm_xargs": {k: v for k, v in xargs.items() if k not in STRIPPED}}
    if STRIPPED & body.keys():
        body = {k: v for k, v in body.items() if k not in STRIPPED}
    return body


def table_markdown() -> str:
    """The table as the docs show it."""
    lines = ["| field | call | on the TileRT path | note |", "|---|---|---|---|"]
    for row in TABLE:
        call = row.kinds[0].value if len(row.kinds) == 1 else "both"
        lines.append(f"| `{row.name}` | {call} | {row.treatment.value} | {row.note} |")
    return "\n".join(lines) + "\n"

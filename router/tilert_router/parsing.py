"""The seam of output parsing: reasoning and tool calls out of a model's text. Without a parser, text is content.

The parsers are vLLM's own (`vllm_parsing`, the one module that imports vLLM); what they need is here as Protocols.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tilert_router.config import ConfigError, Model


@dataclass(frozen=True, slots=True)
class Parsed:
    """A part of an answer, or all of it: an OpenAI message or delta without its role."""

    fields: Mapping[str, Any]
    """`content`, `reasoning`, `tool_calls`, those that have something."""

    @property
    def calls(self) -> bool:
        """Whether there is a tool call in it."""
        return bool(self.fields.get("tool_calls"))


class AnswerParser(Protocol):
    """One answer's parser. Both methods raise ApiError when the text cannot be parsed."""

    def delta(self, text: str, token_ids: Sequence[int], finished: bool) -> Parsed | None:
        """Add text and the tokens that came with it; None when there is nothing to show yet."""
        ...

    def whole(self, text: str, token_ids: Sequence[int]) -> Parsed:
        """Parse an answer that is not streamed."""
        ...


class Parsing(Protocol):
    """Makes parsers; one per process."""

    def start(self, body: Mapping[str, Any], prompt_token_ids: Sequence[int]) -> AnswerParser:
        """A parser for the answer to a chat request. Raises ApiError 400 when vLLM's schema refuses the request."""
        ...


def parsers_of(model: Model) -> frozenset[str]:
    """What is parsed out of the text, as `fields` names it."""
    names = {"reasoning": model.reasoning_parser, "tools": model.tool_parser}
    return frozenset(name for name, parser in names.items() if parser)


def load_parsing(model: Model) -> Parsing | None:
    """vLLM's parsers as configured; None where none is. Raises ConfigError that says what is missing."""
    if not parsers_of(model):
        return None
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "model.reasoning_parser, model.tool_parser: need vLLM's parsers on the router host; "
            "install vllm-tilert[router-parsing] there, or leave them out"
        )
    made: Parsing = importlib.import_module("tilert_router.vllm_parsing").VllmParsing(model)
    return made

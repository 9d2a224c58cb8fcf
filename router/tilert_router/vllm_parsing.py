"""vLLM's own output parsers behind `parsing`. The only module of the router that imports vLLM: on the CPU build,
no GPU, no engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from tilert_router.config import ConfigError, Model
from tilert_router.errors import ApiError, bad_request
from tilert_router.parsing import Parsed

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import Parser, ParserManager

log = logging.getLogger(__name__)


def _failed(error: Exception) -> ApiError:
    # The class alone: the message may quote the answer.
    log.error("parsing failed", extra={"fault": type(error).__name__})
    return ApiError(500, "The answer could not be parsed.", code="parse_failed")


def _calls(calls: list[dict[str, Any]], parallel: bool) -> list[dict[str, Any]]:
    return calls if parallel else [call for call in calls if call.get("index", 0) == 0]


class VllmAnswerParser:
    """One answer through vLLM's parser."""

    def __init__(
        self, parser: Parser, request: ChatCompletionRequest, prompt_token_ids: Sequence[int]
    ) -> None:
        self._parser = parser
        self._request = request
        self._prompt = list(prompt_token_ids)
        self._parallel = request.parallel_tool_calls is not False
        parser.set_prompt_token_ids(self._prompt)

    def delta(self, text: str, token_ids: Sequence[int], finished: bool) -> Parsed | None:
        """See `AnswerParser.delta`."""
        try:
            message = self._parser.parse_delta(
                text, list(token_ids), self._request, self._prompt, finished=finished
            )
        except Exception as error:
            raise _failed(error) from None
        if message is None:
            return None
        fields = {k: v for k, v in message.model_dump(exclude_none=True).items() if v and k != "role"}
        if "tool_calls" in fields:
            fields["tool_calls"] = _calls(fields["tool_calls"], self._parallel)
        return Parsed(fields) if any(fields.values()) else None

    def whole(self, text: str, token_ids: Sequence[int]) -> Parsed:
        """See `AnswerParser.whole`."""
        try:
            reasoning, content, calls = self._parser.parse(
                text, self._request, enable_auto_tools=True, model_output_token_ids=list(token_ids)
            )
        except Exception as error:
            raise _failed(error) from None
        fields: dict[str, Any] = {"content": content}
        if reasoning and self._request.include_reasoning:
            fields["reasoning"] = reasoning
        if calls:
            shown = calls if self._parallel else calls[:1]
            fields["tool_calls"] = [
                {
                    "id": call.id or _call_id(),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in shown
            ]
        return Parsed(fields)


def _call_id() -> str:
    return f"chatcmpl-tool-{os.urandom(8).hex()}"


class VllmParsing:
    """vLLM's parsers of one model."""

    def __init__(self, model: Model) -> None:
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(model.tokenizer), local_files_only=True)
            self._parser: type[Parser] = ParserManager.get_parser(
                tool_parser_name=model.tool_parser,
                reasoning_parser_name=model.reasoning_parser,
                enable_auto_tools=model.tool_parser is not None,
                model_name=model.name,
                tokenizer=self._tokenizer,
            )
        except Exception as error:
            raise ConfigError(f"model.reasoning_parser, model.tool_parser: vLLM says: {error}") from None

    def start(self, body: Mapping[str, Any], prompt_token_ids: Sequence[int]) -> VllmAnswerParser:
        """See `Parsing.start`."""
        wanted = ("messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs")
        given = {
            k: body[k] for k in (*wanted, "include_reasoning", "reasoning_effort") if body.get(k) is not None
        }
        try:
            request = ChatCompletionRequest.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            path = ".".join(map(str, first["loc"]))
            raise bad_request(f"{path}: {first['msg']}", path.split(".")[0]) from None
        # What the template was rendered with: it says whether the model thinks.
        kwargs = request.build_chat_params(None, "auto").chat_template_kwargs
        parser = self._parser(self._tokenizer, request.tools, chat_template_kwargs=dict(kwargs))
        return VllmAnswerParser(parser, request, prompt_token_ids)

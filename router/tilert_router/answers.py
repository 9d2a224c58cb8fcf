"""Answers in OpenAI's shapes: whole, and as server-sent events built from bytes."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

import orjson
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from tilert_router.fields import Kind
from tilert_router.generate import Generation
from tilert_router.parsing import Parsed

DONE: Final = b"data: [DONE]\n\n"
KEEPALIVE: Final = b": waiting\n\n"
WRITE_AHEAD: Final = 64 << 10
"""Bytes that may wait for a client before its node is not read any more: asyncio's own high-water mark."""


def event(payload: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


class Chunks:
    """The chunks of one streamed answer. What does not change is rendered once."""

    def __init__(self, generation: Generation, answer_id: str) -> None:
        request = generation.request
        self._generation = generation
        self._chat = request.kind is Kind.CHAT
        self._parser = generation.parser
        self._called = False
        self._ids = request.return_token_ids and shows_tokens(generation)
        self._continuous = request.continuous_usage
        self._head: dict[str, Any] = {
            "id": answer_id,
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": int(time.time()),
            "model": request.model,
        }
        head = orjson.dumps(self._head)[:-1]
        self._opening = (
            b"data: " + head + (b',"choices":[{"delta":' if self._chat else b',"choices":[{"text":')
        )
        self._before = self._opening + (b'{"content":' if self._chat else b"")
        self._after = (b"}" if self._chat else b"") + b',"index":0,"logprobs":null,"finish_reason":null'

    def first(self) -> bytes | None:
        """The chunk that names the role (chat), and the prompt's tokens where they were asked for."""
        if not self._chat:
            return None
        chunk = self._head | {
            "choices": [
                {
                    "index": 0,
                    "delta": {"role": "assistant", "content": ""},
                    "logprobs": None,
                    "finish_reason": None,
                }
            ]
        }
        if self._generation.request.return_token_ids:
            chunk["prompt_token_ids"] = self._generation.prefilled.prompt_token_ids
        return event(chunk | self._usage())

    def piece(self, text: str, token_ids: list[int]) -> bytes:
        """A chunk with text and, where asked for, token ids; nothing where a parser has nothing to show."""
        end = b"}]"
        if self._ids and token_ids:
            end = b',"token_ids":' + orjson.dumps(token_ids) + end
        if self._continuous:
            end += b',"usage":' + orjson.dumps(self._generation.usage())
        if self._parser is None:
            return self._before + orjson.dumps(text) + self._after + end + b"}\n\n"
        return self._parsed(self._parser.delta(text, token_ids, False), end)

    def _parsed(self, parsed: Parsed | None, end: bytes) -> bytes:
        if parsed is None and not self._ids:
            return b""
        fields = parsed.fields if parsed else {}
        self._called |= bool(parsed and parsed.calls)
        return self._opening + orjson.dumps(fields) + self._after[1:] + end + b"}\n\n"

    def last(self) -> bytes:
        """What the parser held back, and the chunk with the finish reason."""
        generation = self._generation
        rest = b""
        if self._parser is not None:
            parsed = self._parser.delta("", [], True)
            if parsed is not None:
                rest = self._parsed(parsed, b"}]")
        choice: dict[str, Any] = {
            "index": 0,
            "logprobs": None,
            "finish_reason": finish_reason(generation, self._called),
            "stop_reason": generation.stop_reason,
        }
        if self._chat:
            choice["delta"] = {}
        else:
            choice["text"] = ""
        return rest + event(self._head | {"choices": [choice]} | self._usage())

    def usage(self) -> bytes:
        """The last chunk of a stream that asked for usage: no choices."""
        return event(self._head | {"choices": [], "usage": self._generation.usage()})

    def _usage(self) -> dict[str, Any]:
        return {"usage": self._generation.usage()} if self._continuous else {}


def shows_tokens(generation: Generation) -> bool:
    """Whether token ids may be shown: not where they would tell the reasoning that was to be left out, as in vLLM."""
    return generation.parser is None or generation.request.body.get("include_reasoning") is not False


def finish_reason(generation: Generation, called: bool) -> str:
    """The answer's finish reason; `tool_calls` only for calls that are whole."""
    return "tool_calls" if called and generation.finish_reason == "stop" else generation.finish_reason


def whole(generation: Generation, answer_id: str, text: str, token_ids: list[int]) -> dict[str, Any]:
    """A non-streamed answer."""
    request = generation.request
    chat = request.kind is Kind.CHAT
    parsed = generation.parser.whole(text, token_ids) if generation.parser else None
    choice: dict[str, Any] = {
        "index": 0,
        "logprobs": None,
        "finish_reason": finish_reason(generation, bool(parsed and parsed.calls)),
        "stop_reason": generation.stop_reason,
    }
    fields = parsed.fields if parsed else {"content": text}
    choice |= {"message": {"role": "assistant", **fields}} if chat else {"text": text}
    answer: dict[str, Any] = {
        "id": answer_id,
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [choice],
        "usage": generation.usage(),
    }
    if request.return_token_ids:
        if shows_tokens(generation):
            choice["token_ids"] = token_ids
        (answer if chat else choice)["prompt_token_ids"] = generation.prefilled.prompt_token_ids
    return answer


class Whole:
    """The sink of a non-streamed answer."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self.token_ids: list[int] = []

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self._text)

    def show(self, text: str, token_ids: list[int]) -> bool:
        """Keep a part."""
        self._text.append(text)
        self.token_ids += token_ids
        return True

    def silent(self) -> None:
        """Nothing to tell before the end."""

    async def drain(self) -> None:
        """There is always room."""


class Events:
    """The sink of a streamed answer: chunks go to the client's connection as they are made.

    aiohttp sends the headers and the end; in between each event is framed here, so that a token's way from the
    node to the client is one callback.
    """

    def __init__(
        self, http: web.Request, response: web.StreamResponse, writer: AbstractStreamWriter, chunks: Chunks,
        client_s: float,
    ) -> None:  # fmt: skip
        assert http.transport is not None
        self._transport = http.transport
        self._writer = writer
        self._chunks = chunks
        self._client_s = client_s
        # A client of HTTP/1.0 reads to the end of the connection.
        self._framed = "Transfer-Encoding" in response.headers

    def show(self, text: str, token_ids: list[int]) -> bool:
        """Send a chunk."""
        data = self._chunks.piece(text, token_ids)
        return self.send(data) if data else True

    def send(self, data: bytes) -> bool:
        """Send an event; False once the client is too far behind."""
        transport = self._transport
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._framed else data)
        return transport.get_write_buffer_size() < WRITE_AHEAD

    def silent(self) -> None:
        """Send a comment, so that nobody on the way takes the connection for dead."""
        self.send(KEEPALIVE)

    async def drain(self) -> None:
        """Wait for the client to read. Raises TimeoutError when it does not."""
        async with asyncio.timeout(self._client_s):
            await self._writer.drain()

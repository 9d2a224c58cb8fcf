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
        self._ids = request.return_token_ids
        self._continuous = request.continuous_usage
        self._head: dict[str, Any] = {
            "id": answer_id,
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": int(time.time()),
            "model": request.model,
        }
        head = orjson.dumps(self._head)[:-1]
        opening = b'{"delta":{"content":' if self._chat else b'{"text":'
        self._before = b"data: " + head + b',"choices":[' + opening
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
        if self._ids:
            chunk["prompt_token_ids"] = self._generation.prefilled.prompt_token_ids
        return event(chunk | self._usage())

    def piece(self, text: str, token_ids: list[int]) -> bytes:
        """A chunk with text and, where asked for, token ids."""
        end = b"}]"
        if self._ids:
            end = b',"token_ids":' + orjson.dumps(token_ids) + end
        if self._continuous:
            end += b',"usage":' + orjson.dumps(self._generation.usage())
        return self._before + orjson.dumps(text) + self._after + end + b"}\n\n"

    def last(self) -> bytes:
        """The chunk with the finish reason."""
        generation = self._generation
        choice: dict[str, Any] = {
            "index": 0,
            "logprobs": None,
            "finish_reason": generation.finish_reason,
            "stop_reason": generation.stop_reason,
        }
        if self._chat:
            choice["delta"] = {}
        else:
            choice["text"] = ""
        return event(self._head | {"choices": [choice]} | self._usage())

    def usage(self) -> bytes:
        """The last chunk of a stream that asked for usage: no choices."""
        return event(self._head | {"choices": [], "usage": self._generation.usage()})

    def _usage(self) -> dict[str, Any]:
        return {"usage": self._generation.usage()} if self._continuous else {}


def whole(generation: Generation, answer_id: str, text: str, token_ids: list[int]) -> dict[str, Any]:
    """A non-streamed answer."""
    request = generation.request
    chat = request.kind is Kind.CHAT
    choice: dict[str, Any] = {
        "index": 0,
        "logprobs": None,
        "finish_reason": generation.finish_reason,
        "stop_reason": generation.stop_reason,
    }
    choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    answer: dict[str, Any] = {
        "id": answer_id,
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [choice],
        "usage": generation.usage(),
    }
    if request.return_token_ids:
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
        return self.send(self._chunks.piece(text, token_ids))

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

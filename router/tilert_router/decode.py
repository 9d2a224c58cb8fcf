"""The decode node's HTTP interface, from the router's side.

The stream of a decode is NDJSON with one line per burst of accepted tokens; it is the router's hot
path, so a line of the usual form is read without building a JSON tree.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from vllm_tilert.wire import api


class NodeError(Exception):
    """The node refused or failed. `code` is its error code, or one of ours below."""

    def __init__(self, code: str, message: str = "", status: int = 0) -> None:
        super().__init__(f"{code}: {message}" if message else code)
        self.code = code
        self.message = message
        self.status = status


UNREACHABLE = "unreachable"
"""No connection, or it broke."""
TIMEOUT = "timeout"
"""No answer in time; whether the node acted is not known."""
MALFORMED = "malformed"
"""An answer that is not of this protocol."""
STALLED = "stalled"
"""An open decode sent nothing for too long."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a node granted."""

    rid: str
    slot: int
    generation: int
    ahead: bool


@dataclass(frozen=True, slots=True)
class Done:
    """How a decode ended."""

    finish_reason: str
    n: int
    seq_len: int | None
    timing_ms: dict[str, Any]
    handoff: dict[str, Any]


class DecodeClient:
    """Calls to one decode node. Every method raises NodeError and nothing else of its own."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, secret: str | None, connect_s: float
    ) -> None:
        self._session = session
        self._url = url
        self._headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        self._connect_s = connect_s

    async def _call(self, method: str, path: str, timeout_s: float, body: Any = None) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=self._connect_s)
        try:
            async with self._session.request(
                method,
                self._url + path,
                data=None if body is None else orjson.dumps(body),
                headers=self._headers | {"Content-Type": "application/json"},
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                raw = await response.read()
                status = response.status
        except TimeoutError:
            raise NodeError(TIMEOUT) from None
        except (aiohttp.ClientError, OSError) as error:
            raise NodeError(UNREACHABLE, type(error).__name__) from None
        return _answer(status, raw)

    async def reserve(self, rid: str, *, ahead: bool, ttl_s: float, timeout_s: float) -> Reservation:
        """Ask for a slot. NodeError codes: busy, draining, rid_reused, unreachable, timeout, ..."""
        body = {"rid": rid, "ahead": ahead, "ttl_s": ttl_s}
        answer = await self._call("POST", api.RESERVE, timeout_s, body)
        try:
            if answer["rid"] != rid:
                raise NodeError(MALFORMED, "reservation of another rid")
            return Reservation(rid, int(answer["slot"]), int(answer["generation"]), bool(answer["ahead"]))
        except (KeyError, TypeError, ValueError):
            raise NodeError(MALFORMED, "reservation") from None

    async def cancel(self, rid: str, timeout_s: float) -> bool:
        """Give a request up; False when the node does not know it."""
        try:
            await self._call("POST", api.CANCEL, timeout_s, {"rid": rid})
        except NodeError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def status(self, timeout_s: float) -> dict[str, Any]:
        """The node's /decode_status."""
        return await self._call("GET", api.STATUS, timeout_s)

    async def drain(self, on: bool, timeout_s: float) -> None:
        """Make the node refuse new reservations, or accept them again."""
        await self._call("POST", api.DRAIN if on else api.UNDRAIN, timeout_s, {})

    async def open(self, body: dict[str, Any], timeout_s: float | None) -> DecodeStream:
        """Open a streaming decode: returns once the node's headers are there, which means that the
        state is injected and the engine is this request's. `timeout_s` None: as long as it takes."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._connect_s)
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._session.post(
                    self._url + api.DECODE,
                    data=orjson.dumps(body | {"stream": True}),
                    headers=self._headers | {"Content-Type": "application/json"},
                    timeout=timeout,
                    allow_redirects=False,
                )
                if response.status != 200:
                    try:
                        _answer(response.status, await response.read())
                    finally:
                        response.close()
                    raise NodeError(MALFORMED, f"HTTP {response.status}", response.status)
        except TimeoutError:
            raise NodeError(TIMEOUT) from None
        except (aiohttp.ClientError, OSError) as error:
            raise NodeError(UNREACHABLE, type(error).__name__) from None
        return DecodeStream(response)


def _answer(status: int, raw: bytes) -> dict[str, Any]:
    try:
        answer = orjson.loads(raw)
    except orjson.JSONDecodeError:
        answer = None
    if status == 200:
        if not isinstance(answer, dict):
            raise NodeError(MALFORMED, "answer is not a JSON object", status)
        return answer
    if isinstance(answer, dict) and isinstance(answer.get("error"), str):
        raise NodeError(answer["error"], str(answer.get("message", "")), status)
    raise NodeError(MALFORMED, f"HTTP {status}", status)


class DecodeStream:
    """An open decode. Iterate `bursts`; afterwards `done` says how it ended."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.done: Done | None = None

    def close(self) -> None:
        """Drop the connection; a node takes that as a cancel."""
        self._response.close()

    async def bursts(self, stall_s: float, tick_s: float | None = None) -> AsyncIterator[list[int]]:
        """Accepted tokens as they come; an empty list each `tick_s` of silence.

        Ends when the node says done. Raises NodeError: the node's own code, `stalled`, `unreachable`
        (also when the stream ends without done) or `malformed`.
        """
        content = self._response.content
        rest = b""
        silent = 0.0
        wait = stall_s if tick_s is None else min(tick_s, stall_s)
        while True:
            try:
                async with asyncio.timeout(wait):
                    data = await content.readany()
            except TimeoutError:
                silent += wait
                if silent >= stall_s:
                    raise NodeError(STALLED, f"no token for {stall_s:g} s") from None
                yield []
                continue
            except (aiohttp.ClientError, OSError) as error:
                raise NodeError(UNREACHABLE, type(error).__name__) from None
            if not data:
                raise NodeError(UNREACHABLE, "the stream ended before it was done")
            silent = 0.0
            lines = (rest + data).split(b"\n")
            rest = lines.pop()
            tokens: list[int] = []
            for line in lines:
                if not line:
                    continue
                message = _parse_line(line)
                burst = message.get("t")
                if burst is not None:
                    tokens += burst
                elif message.get("done"):
                    if tokens:
                        yield tokens
                    self.done = _done(message)
                    return
                elif "error" in message:
                    if tokens:
                        yield tokens
                    raise NodeError(str(message["error"]), str(message.get("message", "")))
            if tokens:
                yield tokens


def _parse_line(line: bytes) -> dict[str, Any]:
    try:
        message = orjson.loads(line)
    except orjson.JSONDecodeError:
        raise NodeError(MALFORMED, "a line is not JSON") from None
    if not isinstance(message, dict):
        raise NodeError(MALFORMED, "a line is not an object")
    return message


def _done(message: dict[str, Any]) -> Done:
    timing = message.get("timing_ms")
    handoff = message.get("handoff")
    seq_len = message.get("seq_len")
    return Done(
        finish_reason=str(message.get("finish_reason", "stop")),
        n=int(message.get("n", 0)),
        seq_len=seq_len if isinstance(seq_len, int) else None,
        timing_ms=timing if isinstance(timing, dict) else {},
        handoff=handoff if isinstance(handoff, dict) else {},
    )

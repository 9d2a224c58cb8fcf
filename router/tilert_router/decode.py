"""The decode node's HTTP interface, from the router's side.

The stream of a decode is NDJSON with one line per burst of accepted tokens; it is the router's hot
path, so a line of the usual form is read without building a JSON tree.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import orjson

from tilert_router.upstream import Exchange, Origin, Unreachable
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
    wanted: bool = False
    """Somebody else asks for this node too, and was refused a moment ago."""


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

    def __init__(self, url: str, secret: str | None, connect_s: float) -> None:
        self._origin = Origin(url, connect_s)
        self._headers = {"Content-Type": "application/json"}
        if secret:
            self._headers["Authorization"] = f"Bearer {secret}"

    async def _call(self, method: str, path: str, timeout_s: float, body: Any = None) -> dict[str, Any]:
        data = b"" if body is None else orjson.dumps(body)
        try:
            answer = await self._origin.call(method, path, self._headers, data, timeout_s)
        except TimeoutError:
            raise NodeError(TIMEOUT) from None
        except Unreachable as error:
            raise NodeError(UNREACHABLE, str(error)) from None
        return _answer(answer.status, answer.body)

    def close(self) -> None:
        """Drop idle connections."""
        self._origin.close()

    async def reserve(self, rid: str, *, ahead: bool, ttl_s: float, timeout_s: float) -> Reservation:
        """Ask for a slot. NodeError codes: busy, draining, rid_reused, unreachable, timeout, ..."""
        body = {"rid": rid, "ahead": ahead, "ttl_s": ttl_s}
        answer = await self._call("POST", api.RESERVE, timeout_s, body)
        try:
            if answer["rid"] != rid:
                raise NodeError(MALFORMED, "reservation of another rid")
            return Reservation(
                rid,
                int(answer["slot"]),
                int(answer["generation"]),
                bool(answer["ahead"]),
                bool(answer.get("wanted")),
            )
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

    async def open(self, body: dict[str, Any]) -> DecodeStream:
        """Open a streaming decode: returns once the node's headers are there, which means that the
        state is injected and the engine is this request's. Takes as long as it takes."""
        try:
            exchange = await self._origin.open(
                "POST", api.DECODE, self._headers, orjson.dumps(body | {"stream": True})
            )
            if exchange.status != 200:
                try:
                    _answer(exchange.status, await exchange.read())
                finally:
                    exchange.close()
                raise NodeError(MALFORMED, f"HTTP {exchange.status}", exchange.status)
        except Unreachable as error:
            raise NodeError(UNREACHABLE, str(error)) from None
        return DecodeStream(exchange)


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
    """An open decode. `run` it once, then `close`."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._accept: Callable[[list[int]], bool]
        self._rest = b""
        self._silent_s = 0.0
        self._done: Done | None = None

    def close(self) -> None:
        """Over. Unless the node said done, the connection is dropped, which a node takes as a cancel."""
        self._exchange.close(finished=self._done is not None)

    def stop(self) -> None:
        """From inside `accept`: no more tokens are wanted; `run` returns None."""
        self._exchange.stop()

    async def run(
        self,
        accept: Callable[[list[int]], bool],
        drain: Callable[[], Awaitable[None]],
        stall_s: float,
        tick_s: float,
        silent: Callable[[], None],
    ) -> Done | None:
        """Give accepted tokens to `accept` as they come, and say how it ended; None after `stop`.

        `accept` runs inside the read callback; while it returns False the node is not read, until `drain()`
        returns. `silent` is called after each `tick_s` without tokens. Raises NodeError: the node's own code,
        `stalled`, `unreachable` (also when the stream ends without done) or `malformed`.
        """

        def ticked(seconds: float) -> None:
            self._silent_s += seconds
            if self._silent_s >= stall_s:
                raise NodeError(STALLED, f"no token for {stall_s:g} s")
            silent()

        self._accept = accept
        stopped = False
        try:
            await self._exchange.pump(self._feed, drain, min(tick_s, stall_s), ticked)
            stopped = not self._exchange.complete
        except Unreachable as error:
            raise NodeError(UNREACHABLE, str(error)) from None
        if self._done is None and not stopped:
            raise NodeError(UNREACHABLE, "the stream ended before it was done")
        return self._done

    def _feed(self, data: bytes) -> bool:
        self._silent_s = 0.0
        if self._rest:
            data = self._rest + data
        lines = data.split(b"\n")
        self._rest = lines.pop()
        tokens: list[int] = []
        room = True
        for line in lines:
            if not line:
                continue
            message = _parse_line(line)
            burst = message.get("t")
            if isinstance(burst, list):
                tokens += burst
            elif message.get("done") or "error" in message:
                if tokens:
                    room = self._accept(tokens)
                if "error" in message:
                    raise NodeError(str(message["error"]), str(message.get("message", "")))
                self._done = _done(message)
                self._exchange.stop()
                return room
        return self._accept(tokens) if tokens else room


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

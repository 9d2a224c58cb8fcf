"""The one HTTP client of the router: pooled HTTP/1.1 connections, and bodies handed over as they arrive.

A stream's bytes go to a plain function inside the callback that read them: no task wakes up for a token. What is
awaited is only the end, a fault, a silence, or a reader who is too slow.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final, cast
from urllib.parse import urlsplit

import httptools

_IDLE_S: Final = 4.0
"""Longest rest of a connection before it is used again: servers of uvicorn's kind close theirs after 5 s."""
_END_S: Final = 1.0
"""How long an answer that is over in substance may take to end as HTTP, before its connection is given up."""
_IDLE_MAX: Final = 128
"""Connections kept per address."""


class Unreachable(Exception):
    """No connection, or it broke before the answer was whole."""


class NotConnected(Unreachable):
    """No connection could be made: nothing was sent."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    status: int
    body: bytes


class Exchange:
    """One request and its answer, whose headers are there. End it with `close`, however it went."""

    __slots__ = ("_body", "_connection", "_feed", "_full", "_loop", "_stopped", "_waiter", "complete", "fault",
                 "headed", "headers", "heard", "status")  # fmt: skip

    def __init__(self, connection: _Connection, loop: asyncio.AbstractEventLoop) -> None:
        self._connection = connection
        self._loop = loop
        self._feed: Callable[[bytes], bool] | None = None
        self._body: list[bytes] = []
        self._full = False
        self._stopped = False
        self._waiter: asyncio.Future[None] | None = None
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.headed = False
        self.complete = False
        self.fault: Exception | None = None
        self.heard = 0.0
        """Loop time of the last bytes."""

    def wake(self) -> None:
        """Let whoever awaits this exchange look again."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _look_again(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def head(self) -> None:
        """Wait for the headers. Raises Unreachable."""
        while not self.headed:
            if self.fault is not None:
                raise self.fault
            await self._look_again()

    async def read(self) -> bytes:
        """Wait for the whole body. Raises Unreachable."""
        while not self.complete:
            if self.fault is not None:
                raise self.fault
            await self._look_again()
        return b"".join(self._body)

    def stop(self) -> None:
        """From inside `feed`: enough; `pump` returns."""
        self._stopped = True
        self.wake()

    async def pump(
        self,
        feed: Callable[[bytes], bool],
        drain: Callable[[], Awaitable[None]],
        tick_s: float | None = None,
        silent: Callable[[float], None] | None = None,
    ) -> None:
        """Give the body to `feed` as it arrives; returns at its end or after `stop`.

        `feed` runs inside the read callback. When it returns False nothing more is read until `drain()` returns.
        After each `tick_s` of silence `silent(seconds)` is called. What one of them raises ends the pump. Raises
        Unreachable when the connection breaks first.
        """
        loop = self._loop
        first, self._body = self._body, []
        self.heard = loop.time()
        self._feed = feed
        try:
            for data in first:
                self._full |= not feed(data)
            while not self._stopped:
                if self.fault is not None:
                    raise self.fault
                if self._full:
                    self._connection.pause()
                    await drain()
                    self._full = False
                    self.heard = loop.time()
                    self._connection.resume()
                elif self.complete:
                    return
                else:
                    await self._silence(tick_s, silent)
        finally:
            self._feed = None

    async def _silence(self, tick_s: float | None, silent: Callable[[float], None] | None) -> None:
        if tick_s is None or silent is None:
            await self._look_again()
            return
        timer = self._loop.call_at(self.heard + tick_s, self.wake)
        try:
            await self._look_again()
        finally:
            timer.cancel()
        passed = self._loop.time() - self.heard
        if passed >= tick_s * 0.999 and not (self.complete or self.fault or self._full or self._stopped):
            silent(passed)
            # The next tick; silence goes on being counted by the caller.
            self.heard = self._loop.time()

    def close(self, finished: bool = False) -> None:
        """Over. With `finished` the body's end may still be on its way, and the connection can be used again."""
        self._feed = _ignore
        self._connection.release(self, finished)

    # Called by the connection

    def received(self, data: bytes) -> None:
        """Bytes of the body."""
        self.heard = self._loop.time()
        if self._feed is None:
            self._body.append(data)
            return
        try:
            room = self._feed(data)
        except Exception as error:
            self._feed, self.fault = _ignore, error
            self.wake()
            return
        if not room and not self._full:
            self._full = True
            self._connection.pause()
            self.wake()


def _ignore(_: bytes) -> bool:
    return True


class _Connection(asyncio.Protocol):
    """One connection: at most one exchange at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, idle: list[_Connection]) -> None:
        self._loop = loop
        self._idle = idle
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport
        self._exchange: Exchange | None = None
        self._keep = False
        self._framed = False
        self._end_timer: asyncio.TimerHandle | None = None
        self.closed = False
        self.rested_since = 0.0

    def send(self, data: bytes) -> Exchange:
        """Start an exchange."""
        assert self._exchange is None
        self._exchange = exchange = Exchange(self, self._loop)
        self._transport.write(data)
        return exchange

    def pause(self) -> None:
        """Read nothing more for now."""
        if not self.closed:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        if not self.closed:
            self._transport.resume_reading()

    def release(self, exchange: Exchange, finished: bool) -> None:
        """The exchange's owner is done with it; nothing happens when it is over already."""
        if self._exchange is not exchange:
            return
        if exchange.complete:
            self._rest()
        elif finished and not self.closed:
            self._end_timer = self._loop.call_later(_END_S, self.abort)
        else:
            self.abort()

    def _rest(self) -> None:
        self._exchange = None
        if self._end_timer is not None:
            self._end_timer.cancel()
            self._end_timer = None
        if self._keep and not self.closed and len(self._idle) < _IDLE_MAX:
            self.rested_since = self._loop.time()
            self.resume()
            self._idle.append(self)
        else:
            self.abort()

    def abort(self) -> None:
        """Drop the connection."""
        self._exchange = None
        if not self.closed:
            self.closed = True
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is there."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Bytes from the server."""
        if self._exchange is None:
            self.abort()  # an answer that nobody asked for
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"not HTTP: {type(error).__name__}")
            self.abort()

    def eof_received(self) -> None:
        """The server closed its side."""

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self.closed = True
        if self in self._idle:
            self._idle.remove(self)
        exchange = self._exchange
        if exchange is not None and exchange.headed and not self._framed and exc is None:
            exchange.complete = True  # a body without a length ends with the connection
            exchange.wake()
        else:
            self._fail(type(exc).__name__ if exc else "closed")

    def _fail(self, fault: str) -> None:
        exchange = self._exchange
        if exchange is not None and not exchange.complete and exchange.fault is None:
            exchange.fault = Unreachable(fault)
            exchange.wake()

    # httptools

    def on_message_begin(self) -> None:
        """A status line follows: the only one, or the one after an interim answer."""
        exchange = self._exchange
        if exchange is not None:
            if exchange.complete:
                raise ValueError("a second answer")
            exchange.headers.clear()

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        if self._exchange is not None:
            self._exchange.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The headers are whole."""
        exchange = self._exchange
        if exchange is None:
            return
        exchange.status = self._parser.get_status_code()
        self._keep = self._parser.should_keep_alive()
        self._framed = any(name in (b"content-length", b"transfer-encoding") for name, _ in exchange.headers)
        if exchange.status >= 200:
            exchange.headed = True
            exchange.wake()

    def on_body(self, data: bytes) -> None:
        """Bytes of the body, without chunk framing."""
        if self._exchange is not None:
            self._exchange.received(data)

    def on_message_complete(self) -> None:
        """The answer is whole."""
        exchange = self._exchange
        if exchange is None or exchange.status < 200:
            return
        exchange.complete = True
        if self._end_timer is not None:
            self._rest()
        else:
            exchange.wake()


class Origin:
    """One server, `http://HOST:PORT` or https: its idle connections, and how a request to it begins."""

    def __init__(self, url: str, connect_s: float) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        secure = parts.scheme == "https"
        self._host = parts.hostname
        self._port = parts.port or (443 if secure else 80)
        self._ssl = ssl.create_default_context() if secure else None
        self._authority = parts.netloc.encode("ascii")
        self._connect_s = connect_s
        self._idle: list[_Connection] = []
        self._loop = asyncio.get_running_loop()

    async def _connect(self) -> _Connection:
        now = self._loop.time()
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed and now - connection.rested_since < _IDLE_S:
                return connection
            connection.abort()
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await self._loop.create_connection(
                    lambda: _Connection(self._loop, self._idle), self._host, self._port, ssl=self._ssl
                )
        except TimeoutError:
            raise NotConnected("connect timeout") from None
        except OSError as error:
            raise NotConnected(type(error).__name__) from None
        return connection

    async def open(self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> Exchange:
        """Send a request and wait for the answer's headers. Raises Unreachable; cancelling drops the connection."""
        lines = [f"{method} {path} HTTP/1.1\r\n"]
        lines += [f"{name}: {value}\r\n" for name, value in headers.items()]
        head = "".join(lines).encode("utf-8", "surrogateescape")
        connection = await self._connect()
        exchange = connection.send(
            b"%bHost: %b\r\nContent-Length: %d\r\n\r\n%b" % (head, self._authority, len(body), body)
        )
        try:
            await exchange.head()
        except BaseException:
            exchange.close()
            raise
        return exchange

    async def call(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes = b"",
        timeout_s: float | None = None,
    ) -> Answer:
        """One whole exchange. Raises Unreachable or TimeoutError."""
        async with asyncio.timeout(timeout_s):
            exchange = await self.open(method, path, headers, body)
            try:
                return Answer(exchange.status, await exchange.read())
            finally:
                exchange.close()

    def close(self) -> None:
        """Drop the idle connections."""
        while self._idle:
            self._idle.pop().abort()

"""The HTTP client against servers that send byte by byte, in odd frames, half answers, or nonsense."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilert_router.decode import DecodeClient, DecodeStream, NodeError
from tilert_router.upstream import NotConnected, Origin, Unreachable

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]
HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


async def request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    size = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
    return head + await reader.readexactly(size)


@asynccontextmanager
async def server(script: Script) -> AsyncIterator[tuple[Origin, list[int]]]:
    """A server that runs `script` on each connection; yields a client and the list of connections made."""
    made: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.append(len(made))
        try:
            await script(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    running = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = running.sockets[0].getsockname()[1]
    origin = Origin(f"http://127.0.0.1:{port}", 2)
    try:
        yield origin, made
    finally:
        origin.close()
        running.close()


def says(*parts: bytes, pause_s: float = 0.0, again: bool = True) -> Script:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await request(reader)
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(pause_s)
            if not again:
                return

    return script


async def body_of(origin: Origin) -> bytes:
    return (await origin.call("POST", "/x", {"a": "b"}, b"{}", 2)).body


async def test_connections_are_used_again() -> None:
    async with server(says(HEAD + b"Content-Length: 2\r\n\r\nok")) as (origin, made):
        for _ in range(3):
            assert await body_of(origin) == b"ok"
        assert len(made) == 1
        assert await asyncio.gather(*(body_of(origin) for _ in range(5))) == [b"ok"] * 5


async def test_a_connection_that_was_closed_meanwhile_is_not_used() -> None:
    async with server(says(HEAD + b"Content-Length: 2\r\n\r\nok", again=False)) as (origin, made):
        for _ in range(3):
            assert await body_of(origin) == b"ok"
            await asyncio.sleep(0.02)
        assert len(made) == 3


@pytest.mark.parametrize(
    ("parts", "body"),
    [
        ([CHUNKED + b"3\r\nabc\r\n", b"2;x=y\r\nde\r\n0\r\n\r\n"], b"abcde"),
        ([HEAD + b"Connection: close\r\n\r\nto the", b" end"], b"to the end"),
        ([b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n", HEAD + b"Content-Length: 1\r\n\r\nz"], b"z"),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], b""),
        ([HEAD + b"Content-Length: 0\r\n\r\n"], b""),
    ],
)
async def test_each_way_to_frame_a_body(parts: list[bytes], body: bytes) -> None:
    async with server(says(*parts, pause_s=0.01, again=False)) as (origin, _):
        assert await body_of(origin) == body


@pytest.mark.parametrize(
    "parts",
    [
        [CHUNKED + b"5\r\nab"],
        [CHUNKED + b"2\r\nab\r\n"],
        [HEAD + b"Content-Length: 10\r\n\r\nhalf"],
        [b"HTTP/1.1 200"],
        [b""],
        [b"SSH-2.0-OpenSSH_9.2\r\n"],
        [CHUNKED + b"zz\r\n"],
    ],
)
async def test_half_an_answer_is_none(parts: list[bytes]) -> None:
    async with server(says(*parts, again=False)) as (origin, _):
        with pytest.raises(Unreachable):
            await body_of(origin)


async def test_nobody_there_and_nobody_answers() -> None:
    with pytest.raises(NotConnected):
        await body_of(Origin("http://127.0.0.1:9", 1))
    async with server(says(b"", pause_s=5)) as (origin, _):
        with pytest.raises(TimeoutError):
            await origin.call("POST", "/x", {}, b"", 0.05)


async def test_what_nobody_asked_for_is_never_an_answer() -> None:
    extra = HEAD + b"Content-Length: 3\r\n\r\nold"
    async with server(says(HEAD + b"Content-Length: 2\r\n\r\nok" + extra)) as (origin, made):
        assert await body_of(origin) == b"ok"
        await asyncio.sleep(0.02)
        assert await body_of(origin) == b"ok"
        assert len(made) == 2


async def test_a_cancelled_call_drops_its_connection() -> None:
    gone = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        await reader.read()
        gone.set()

    async with server(script) as (origin, _):
        call = asyncio.create_task(body_of(origin))
        await asyncio.sleep(0.05)
        call.cancel()
        async with asyncio.timeout(2):
            await gone.wait()


async def test_a_slow_taker_stops_the_reading_and_loses_nothing() -> None:
    sent = b"".join(b"%x\r\n%b\r\n" % (1 << 16, bytes([i]) * (1 << 16)) for i in range(200))
    async with server(says(CHUNKED, sent, b"0\r\n\r\n")) as (origin, _):
        exchange = await origin.open("POST", "/x", {})
        got: list[int] = []
        drained = 0

        def feed(data: bytes) -> bool:
            got.append(len(data))
            return False

        async def drain() -> None:
            nonlocal drained
            before = len(got)
            drained += 1
            await asyncio.sleep(0.001)
            assert len(got) == before  # nothing arrives while the taker is full

        await exchange.pump(feed, drain)
        exchange.close()
        assert sum(got) == 200 << 16
        assert drained > 10


async def test_silence_is_told_and_what_a_taker_raises_ends_it() -> None:
    silences: list[float] = []

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(CHUNKED + b"1\r\na\r\n")
        while len(silences) < 2:
            await asyncio.sleep(0.01)
        writer.write(b"1\r\nb\r\n")
        await writer.drain()

    async with server(late) as (origin, _):
        exchange = await origin.open("POST", "/x", {})

        def feed(data: bytes) -> bool:
            if data == b"b":
                raise KeyError("taker")
            return True

        async def drain() -> None: ...

        with pytest.raises(KeyError):
            await exchange.pump(feed, drain, 0.05, silences.append)
        exchange.close()
        assert all(told >= 0.05 for told in silences)


LINES = [b'{"t":[1]}\n', b'{"t":[2,3]}\n', b'{"t":[]}\n', b"\n", b'{"t":[4]}\n']
DONE = b'{"done":true,"n":4,"seq_len":7,"finish_reason":"length","timing_ms":{}}\n'


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(cuts=st.lists(st.integers(1, 110), max_size=8), frames=st.lists(st.integers(1, 110), max_size=5))
def test_tokens_are_the_same_however_the_bytes_are_cut(cuts: list[int], frames: list[int]) -> None:
    text = b"".join(LINES) + DONE
    bounds = sorted({0, len(text), *(f for f in frames if f < len(text))})
    chunks = [text[a:b] for a, b in itertools.pairwise(bounds)]
    wire = CHUNKED + b"".join(b"%x\r\n%b\r\n" % (len(c), c) for c in chunks) + b"0\r\n\r\n"
    places = sorted({0, len(wire), *(c for c in cuts if c < len(wire))})
    parts = [wire[a:b] for a, b in itertools.pairwise(places)]
    assert asyncio.run(decoded(parts)) == [1, 2, 3, 4]


async def decoded(parts: list[bytes]) -> list[int]:
    tokens: list[int] = []

    def accept(burst: list[int]) -> bool:
        tokens.extend(burst)
        return True

    async with server(says(*parts, pause_s=0.0005)) as (origin, _):
        done = await (await stream_of(origin)).run(accept, nothing, 5, 5, lambda: None)
        assert done is not None
        assert (done.n, done.seq_len, done.finish_reason) == (4, 7, "length")
    return tokens


async def nothing() -> None: ...


async def stream_of(origin: Origin) -> DecodeStream:
    return DecodeStream(await origin.open("POST", "/pd/decode", {}))


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"not json\n", "malformed"),
        (b"[1]\n", "malformed"),
        (b'{"error":"engine_failed","message":"x"}\n', "engine_failed"),
        (b"", "unreachable"),
    ],
)
async def test_tokens_before_a_fault_are_shown_and_the_fault_is_named(line: bytes, code: str) -> None:
    body = b'{"t":[1]}\n' + line
    tokens: list[int] = []

    def accept(burst: list[int]) -> bool:
        tokens.extend(burst)
        return True

    parts = CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    async with server(says(parts)) as (origin, _):
        stream = await stream_of(origin)
        with pytest.raises(NodeError) as fault:
            await stream.run(accept, nothing, 5, 5, lambda: None)
        stream.close()
    assert fault.value.code == code
    assert tokens in ([1], [])
    if code == "engine_failed":
        assert tokens == [1]


async def test_a_node_that_goes_silent_is_given_up() -> None:
    async with server(says(CHUNKED + b'a\r\n{"t":[1]}\n\r\n', pause_s=5)) as (origin, _):
        stream = await stream_of(origin)
        ticks: list[None] = []
        with pytest.raises(NodeError, match="stalled"):
            await stream.run(lambda burst: True, nothing, 0.2, 0.06, lambda: ticks.append(None))
        assert len(ticks) >= 2


async def test_an_unreachable_node_says_so() -> None:
    client = DecodeClient("http://127.0.0.1:9", None, 1)
    with pytest.raises(NodeError, match="unreachable"):
        await client.status(1)

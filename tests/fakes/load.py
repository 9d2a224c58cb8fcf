"""Prefill, decode nodes and a native server that cost little enough to drive a router to its limit from one core.

They speak the real interfaces over raw connections on one event loop and compute nothing. Bursts of 1 to 4 tokens,
2.5 on average, are accepted every 2.5 / rate seconds and flushed every millisecond. Every token's text ends with
`MARK`, which stands nowhere else, so whoever counts marks knows which burst has arrived.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import orjson
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

MARK: Final = b"~"
PROMPT_TOKENS: Final = 1000
WORDS: Final = 4096
FLUSH_S: Final = 0.001
MEAN_BURST: Final = 2.5


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer whose tokens above 255 are words that end with MARK."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    draw = random.Random(0)
    words = [f"Ġ{''.join(draw.choices('abcdefghij', k=4))}{i}~" for i in range(WORDS)]
    vocab = {c: i for i, c in enumerate([*alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    # What AutoTokenizer wants to see beside it.
    (folder / "config.json").write_text('{"model_type": "llama"}')


@dataclass(slots=True, eq=False)
class Reply:
    """One answer, as the node sends it and the client sees it. Times are `perf_counter` seconds."""

    max_tokens: int
    asked: float = 0.0
    first: float = 0.0
    ended: float = 0.0
    received: int = 0
    sent: deque[tuple[int, float]] = field(default_factory=deque)
    """Tokens sent up to and with each burst that has not arrived, and when it was sent."""
    lags: list[tuple[float, float]] = field(default_factory=list)
    """When each burst arrived, and how long it took from the node to the client."""
    failed: str = ""


class _Http(asyncio.Protocol):
    """A keep-alive HTTP/1.1 server connection; bodies have a Content-Length."""

    def __init__(self, handle: Callable[[_Http, str, bytes], None]) -> None:
        self._handle = handle
        self._buffer = b""
        self.transport: asyncio.Transport
        self.paused = False
        self.closed = False
        self.stream: _Stream | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end]
            at = head.lower().find(b"content-length:")
            size = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._buffer) < end + 4 + size:
                return
            body = self._buffer[end + 4 : end + 4 + size]
            self._buffer = self._buffer[end + 4 + size :]
            self._handle(self, head.split(b" ", 2)[1].decode(), body)

    def answer(self, payload: Any, status: int = 200) -> None:
        body = orjson.dumps(payload)
        self.transport.write(
            b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
            % (status, len(body), body)
        )

    def chunk(self, data: bytes) -> None:
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class _Stream:
    """An answer on its way out."""

    __slots__ = (
        "_draw",
        "_due",
        "_left",
        "_lines",
        "_load",
        "_reply",
        "_sent",
        "_start",
        "http",
        "node",
        "rid",
    )

    def __init__(
        self, load: Load, http: _Http, reply: Reply, lines: bool, rid: str, node: Node | None
    ) -> None:
        self._load, self.http, self._reply, self._lines = load, http, reply, lines
        self.rid, self.node = rid, node
        self._draw = random.Random(len(load.streams) if load.seed is None else load.seed)
        self._left = reply.max_tokens
        self._sent = 0
        self._start = self._due = perf_counter()
        kind = b"application/x-ndjson" if lines else b"text/event-stream"
        http.transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nTransfer-Encoding: chunked\r\n\r\n" % kind
        )

    def tick(self, now: float) -> bool:
        """Send what is due; True once the answer is over."""
        if self.http.closed:
            self._free()
            return True
        if self.http.paused:
            self._due = now
            return False
        while self._due <= now:
            size = min(self._draw.randint(1, 4), self._left)
            self._left -= size
            self._sent += size
            self._reply.sent.append((self._sent, now))
            self._load.bursts += 1
            self.http.chunk(self._burst(size))
            if not self._left:
                self._load.decodes_s.append(perf_counter() - self._start)
                self._free()
                self._end()
                return True
            self._due += MEAN_BURST / self._load.rate
        return False

    def _burst(self, size: int) -> bytes:
        if self._lines:
            start = 256 + self._sent % (WORDS - 4)
            return b'{"t":%b}\n' % orjson.dumps(list(range(start, start + size)))
        return self._load.native_chunk % (b" word~" * size)

    def _end(self) -> None:
        if self._lines:
            done = {"done": True, "n": self._sent, "seq_len": PROMPT_TOKENS, "finish_reason": "length"}
            self.http.chunk(orjson.dumps(done | {"timing_ms": {}}) + b"\n")
        else:
            self.http.chunk(b"data: [DONE]\n\n")
        self.http.transport.write(b"0\r\n\r\n")

    def _free(self) -> None:
        if self.node is not None:
            self.node.slots.pop(self.rid, None)
            self.node.start_next()


class Node:
    """A decode node: two slots, one engine, answers in order of reservation."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self.slots: dict[str, int] = {}
        self._waiting: dict[str, _Http] = {}
        self._generation = 0
        self.port = 0

    def handle(self, http: _Http, path: str, body: bytes) -> None:
        if path == "/pd/decode":
            self._waiting[orjson.loads(body)["rid"]] = http
            # A stock router reserves nothing.
            self.slots.setdefault(next(reversed(self._waiting)), 0)
            self.start_next()
        elif path == "/pd/reserve":
            asked = orjson.loads(body)
            if self.slots and (not asked.get("ahead") or len(self.slots) >= 2):
                return http.answer({"error": "busy", "message": ""}, 429)
            self._generation += 1
            self.slots[asked["rid"]] = self._generation
            http.answer(
                {
                    "rid": asked["rid"],
                    "slot": 0,
                    "generation": self._generation,
                    "expires_in_s": 30,
                    "ahead": len(self.slots) > 1,
                }
            )
        elif path == "/pd/cancel":
            rid = orjson.loads(body)["rid"]
            stream = next((s for s in self._load.streams if s.rid == rid), None)
            if stream is not None:
                stream.http.transport.abort()
            self.slots.pop(rid, None)
            self.start_next()
            http.answer({"cancelled": rid})
        elif path == "/decode_status":
            slots = [{"slot": i, "state": "decoding", "rid": rid} for i, rid in enumerate(self.slots)]
            slots += [{"slot": i, "state": "free", "rid": None} for i in range(len(slots), 2)]
            status = "busy" if self.slots else "idle"
            http.answer({"status": status, "current_rid": None, "slots": slots, "max_seq_len": 1 << 20})
        else:
            http.answer({"status": "ok"})

    def start_next(self) -> None:
        rid = next(iter(self.slots), "")
        http = self._waiting.pop(rid, None)
        if http is not None:
            self._load.stream(http, rid, lines=True, node=self)


class Load:
    """The fakes of one run. `rate` is tokens/s of one answer, `prefill_s` how long a prefill takes."""

    def __init__(self, rate: float, prefill_s: float = 0.0) -> None:
        self.rate = rate
        self.prefill_s = prefill_s
        self.seed: int | None = None
        """Every answer comes in the same bursts, so takes equally long; None: they differ."""
        self.prefills_s: list[float] = []
        """How long each prefill took that was not answered at once."""
        self.decodes_s: list[float] = []
        """How long a node's engine was each answer's."""
        self.bursts = 0
        self.streams: list[_Stream] = []
        self.replies: dict[str, Reply] = {}
        """By the mark in the prompt, later by rid as well."""
        self.native_chunk = (
            b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1,"model":"small",'
            b'"choices":[{"index":0,"delta":{"content":"%b"},"logprobs":null,"finish_reason":null}]}\n\n'
        )
        self._servers: list[asyncio.Server] = []
        self._prompt_ids = list(range(PROMPT_TOKENS))

    async def listen(self, handle: Callable[[_Http, str, bytes], None]) -> int:
        """Serve on a free port of the loopback; returns it."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Http(handle), "127.0.0.1", 0, backlog=4096)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def nodes(self, count: int) -> list[Node]:
        """Start `count` decode nodes."""
        made = [Node(self) for _ in range(count)]
        for node in made:
            node.port = await self.listen(node.handle)
        return made

    def stream(self, http: _Http, rid: str, lines: bool, node: Node | None = None) -> None:
        """Start an answer; its first burst leaves at once."""
        stream = _Stream(self, http, self.replies[rid], lines, rid, node)
        if not stream.tick(perf_counter()):
            self.streams.append(stream)

    def prefill(self, http: _Http, path: str, body: bytes) -> None:
        """vLLM with the connector, told by ours or by the stock router what it wants to read."""
        if not path.startswith("/v1/"):
            return http.answer({"status": "ok", "data": []})
        asked = orjson.loads(body)
        name = _marked(body)
        rid = (asked.get("kv_transfer_params") or {}).get("tilert_rid") or f"{int(name[1:]):016x}"
        self.replies[rid] = self.replies[name]
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "x"},
            "token_ids": [256],
            "finish_reason": "length",
            "stop_reason": None,
        }
        if asked.get("logprobs"):
            choice["logprobs"] = {"content": [{"token": "token_id:256", "logprob": 0.0, "top_logprobs": []}]}
        answer: dict[str, Any] = {"id": f"chatcmpl-{rid}", "model": "small", "choices": [choice]}
        if asked.get("return_token_ids"):
            answer["prompt_token_ids"] = self._prompt_ids
        answer |= {"usage": {"prompt_tokens": PROMPT_TOKENS}}
        if not self.prefill_s:
            return http.answer(answer)
        start = perf_counter()

        def end() -> None:
            self.prefills_s.append(perf_counter() - start)
            http.answer(answer)

        asyncio.get_running_loop().call_later(self.prefill_s, end)

    def native(self, http: _Http, path: str, body: bytes) -> None:
        """An OpenAI server that streams the same bursts as chunks."""
        if path != "/v1/chat/completions":
            return http.answer(
                {"status": "ok", "object": "list", "data": [{"id": "small", "object": "model"}]}
            )
        self.stream(http, _marked(body), lines=False)

    async def tick(self) -> None:
        """Flush every millisecond, until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_S)
            now = perf_counter()
            self.streams = [stream for stream in self.streams if not stream.tick(now)]

    def close(self) -> None:
        for server in self._servers:
            server.close()
        for stream in self.streams:
            with suppress(Exception):
                stream.http.transport.abort()


def _marked(body: bytes) -> str:
    at = body.index(b"#")
    return body[at : body.index(b"#", at + 1)].decode()


class Client(asyncio.Protocol):
    """One connection that asks again and again, on keep-alive."""

    def __init__(self, load: Load, path: str = "/v1/chat/completions") -> None:
        self._load = load
        self._path = path
        self._tail = b""
        self.reply: Reply | None = None
        self.over: asyncio.Future[None] | None = None
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"connection lost: {exc}")

    def ask(self, name: str, max_tokens: int) -> asyncio.Future[None]:
        """Send one request; the future resolves when the answer has ended."""
        self.reply = reply = self._load.replies[name] = Reply(max_tokens)
        content = name + "# " + "lorem ipsum " * (PROMPT_TOKENS // 3)
        body = orjson.dumps(
            {
                "model": "small",
                "messages": [{"role": "user", "content": content}],
                "stream": True,
                "max_tokens": max_tokens,
                "temperature": 0.6,
            }
        )
        self.over = asyncio.get_running_loop().create_future()
        self._tail = b""
        reply.asked = perf_counter()
        self.transport.write(
            b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
            % (self._path.encode(), len(body), body)
        )
        return self.over

    def data_received(self, data: bytes) -> None:
        now = perf_counter()
        reply = self.reply
        if reply is None:
            return
        marks = data.count(MARK)
        if marks:
            if not reply.first:
                reply.first = now
            reply.received += marks
            sent = reply.sent
            while sent and sent[0][0] <= reply.received:
                reply.lags.append((now, now - sent.popleft()[1]))
        tail = self._tail + data[-64:]
        if tail.endswith(b"\r\n0\r\n\r\n"):
            self._end(
                "" if reply.received == reply.max_tokens else f"{reply.received} of {reply.max_tokens} tokens"
            )
        elif not reply.first and b" 200 " not in data[:16] and data.startswith(b"HTTP/1.1 "):
            self._end(data[:400].decode(errors="replace"))
        self._tail = tail[-64:]

    def _end(self, failed: str) -> None:
        if self.reply is not None and self.over is not None and not self.over.done():
            self.reply.ended = perf_counter()
            self.reply.failed = failed
            self.over.set_result(None)

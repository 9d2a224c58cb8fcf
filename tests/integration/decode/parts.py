"""A whole decode node in this process, and a sender that hands transformers' own state to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import torch
import uvicorn

from vllm_tilert.checksum import plane_checksums
from vllm_tilert.decode.engines.base import Engine
from vllm_tilert.decode.engines.reference import ReferenceEngine
from vllm_tilert.decode.http import build_app
from vllm_tilert.decode.node import Node
from vllm_tilert.decode.receiver import Receiver
from vllm_tilert.decode.slots import Limits
from vllm_tilert.profiles.base import get_profile
from vllm_tilert.profiles.layout import Layout
from vllm_tilert.small_model import CONFIG
from vllm_tilert.transports import Transport, make_transport
from vllm_tilert.wire import api, control

HOST = "127.0.0.1"
SECRET = "a shared secret"
MAX_SEQ_LEN = 1024
DEFAULT_LIMITS = Limits()
LAYOUT: Layout = get_profile("mla").layout_from_config(CONFIG, "float32")


class Oracle:
    """transformers' own prefill and greedy continuation of the small model, float32."""

    def __init__(self, model_dir: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    @torch.inference_mode()
    def continuation(self, prompt: list[int], count: int) -> list[int]:
        """`count` greedy tokens after `prompt`, without any handoff."""
        ids = torch.tensor([prompt])
        out = self._model.generate(ids, max_new_tokens=count, do_sample=False, min_new_tokens=count)
        return list(out[0, len(prompt) :].tolist())

    @torch.inference_mode()
    def state(self, prompt: list[int]) -> torch.Tensor:
        """The prompt's attention state as one segment, uint8, rows as vLLM stores them."""
        cache = self._model(torch.tensor([prompt]), use_cache=True).past_key_values
        rows = []
        for layer in cache.layers:
            kv, rope = layer.keys[0, 0], layer.values[0, 0]
            # transformers keeps the halves of the rotated part apart, vLLM interleaves them.
            pe = rope.view(len(prompt), 2, -1).transpose(1, 2).reshape(len(prompt), -1)
            rows.append(torch.cat((kv, pe), dim=1))
        return torch.stack(rows).contiguous().view(torch.uint8).flatten()


def prompt_of(seed: int, length: int) -> list[int]:
    """Random byte tokens."""
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass
class Running:
    """A node that listens on ports of its own."""

    node: Node
    control_port: int
    url: str
    http: aiohttp.ClientSession

    async def call(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Status and JSON of one call."""
        request = (
            self.http.get(self.url + path) if body is None else self.http.post(self.url + path, json=body)
        )
        async with request as answer:
            return answer.status, await answer.json()

    async def reserve(self, rid: str, **more: Any) -> dict[str, Any]:
        """A granted reservation."""
        status, body = await self.call(api.RESERVE, {"rid": rid, **more})
        assert status == 200, body
        return dict(body)

    async def stream(self, rid: str, first: int, count: int) -> tuple[int, list[dict[str, Any]]]:
        """Status and lines of a streamed greedy decode."""
        body = {
            "rid": rid,
            "first_token_id": first,
            "max_tokens": count,
            "sampling": {"temperature": 0},
            "timeout_s": 20,
            "stream": True,
        }
        async with self.http.post(self.url + api.DECODE, json=body) as answer:
            return answer.status, [json.loads(line) async for line in answer.content]

    async def idle(self, within: float = 5.0) -> None:
        """Wait until every slot is free."""
        async with asyncio.timeout(within):
            await self.node.signal.until(lambda: self.node.slots.idle)


def tokens_of(lines: list[dict[str, Any]]) -> list[int]:
    """The tokens of a stream's lines."""
    return [token for line in lines for token in line.get("t", [])]


@contextlib.asynccontextmanager
async def running(
    engine: Callable[[], Engine], secret: str | None = SECRET, limits: Limits = DEFAULT_LIMITS, slots: int = 2
) -> AsyncIterator[Running]:
    """A node with Mooncake over TCP, its control port and uvicorn, on ports picked by the kernel."""
    transport = make_transport("mooncake", "tcp")
    transport.init(HOST)
    node = Node(
        slots=slots,
        max_seq_len=MAX_SEQ_LEN,
        layout=LAYOUT,
        profile=get_profile("mla"),
        engine=engine,
        transport=transport,
        limits=limits,
    )
    await node.start()
    receiver = Receiver(node, secret.encode() if secret else None)
    port = await receiver.start(HOST, 0)
    web = uvicorn.Server(uvicorn.Config(build_app(node, secret), host=HOST, port=0, log_level="error"))
    work = [asyncio.ensure_future(node.run()), asyncio.ensure_future(web._serve())]
    while not web.started:
        await asyncio.sleep(0.01)
    url = f"http://{HOST}:{web.servers[0].sockets[0].getsockname()[1]}"
    headers = {"authorization": f"Bearer {secret}"} if secret else {}
    try:
        async with aiohttp.ClientSession(headers=headers) as http:
            yield Running(node, port, url, http)
    finally:
        await receiver.close()
        node.abort()
        web.should_exit = True
        await asyncio.gather(work[1], return_exceptions=True)
        work[0].cancel()
        await asyncio.gather(work[0], return_exceptions=True)
        node.close()


def engine_of(model_dir: Path) -> Callable[[], Engine]:
    """Builds the reference engine, as the node does on the engine's thread."""
    return lambda: ReferenceEngine(model_dir, "float32", MAX_SEQ_LEN)


class Sender:
    """One handoff, step by step, from a transport of its own."""

    def __init__(self, transport: Transport, segment: torch.Tensor, port: int) -> None:
        self.transport, self.segment, self.port = transport, segment, port
        self.hello: dict[str, Any] = {}
        self.accept: dict[str, Any] = {}

    async def connect(self) -> None:
        """Connect and read Hello."""
        self.reader, self.writer = await asyncio.open_connection(HOST, self.port)
        self.hello = await control.read(self.reader)

    async def tell(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send one message and read one."""
        self.writer.write(control.pack(message))
        return await control.read(self.reader)

    def request(self, rid: str, generation: int, tokens: int, /, **changed: Any) -> dict[str, Any]:
        """A Request; `changed` overrides fields, None removes one."""
        message = {
            "ext": 1,
            "rid": rid,
            "rank": 0,
            "generation": generation,
            "seq_len": tokens,
            "last_prompt_token": 0,
            "sampling": None,
            "layout": LAYOUT.describe(),
            "proof": control.proof(SECRET.encode(), self.hello["nonce"], rid, 0),
        } | changed
        return {k: v for k, v in message.items() if k not in changed or v is not None}

    async def admit(self, rid: str, generation: int, tokens: int) -> None:
        """Connect and be admitted."""
        await self.connect()
        self.accept = await self.tell(self.request(rid, generation, tokens))
        assert self.accept.get("accept") is True, self.accept

    async def write(self, start: int = 0, stop: int | None = None) -> None:
        """Write bytes [start, stop) of the segment."""
        stop = self.segment.numel() if stop is None else stop
        await asyncio.to_thread(
            self.transport.write,
            self.hello,
            [self.segment.data_ptr() + start],
            [self.accept["address"] + start],
            [stop - start],
            20.0,
        )

    async def say(self, tokens: int, sums: list[int] | None) -> None:
        """Say that a segment, not the last, is written."""
        self.writer.write(control.pack({"segment": tokens, "checksums": sums}))
        await self.writer.drain()

    async def done(self, rid: str, tokens: int, sums: list[list[int]] | None = None) -> dict[str, Any]:
        """Send Done and read the Verdict."""
        sums = [plane_checksums(self.segment, LAYOUT, tokens)] if sums is None else sums
        return await self.tell({"done": True, "rid": rid, "rank": 0, "segments": [tokens], "checksums": sums})

    async def close(self) -> None:
        """Close the connection."""
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


class Prefill:
    """The sending end of tests: the oracle's state, over Mooncake."""

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle
        self.transport = make_transport("mooncake", "tcp")
        self.transport.init(HOST)
        self._staging = torch.zeros(64 << 20, dtype=torch.uint8)
        self._used = 0
        self.transport.register(self._staging.data_ptr(), self._staging.numel(), "cpu")

    def sender(self, node: Running, prompt: list[int]) -> Sender:
        """A sender that holds the prompt's state in registered memory."""
        state = self.oracle.state(prompt)
        if self._used + state.numel() > self._staging.numel():
            self._used = 0
        segment = self._staging[self._used : self._used + state.numel()]
        segment.copy_(state)
        self._used += state.numel()
        return Sender(self.transport, segment, node.control_port)

    async def hand_off(self, node: Running, rid: str, generation: int, prompt: list[int]) -> dict[str, Any]:
        """A whole handoff; returns the Verdict."""
        sender = self.sender(node, prompt)
        await sender.admit(rid, generation, len(prompt))
        await sender.write()
        verdict = await sender.done(rid, len(prompt))
        await sender.close()
        return verdict

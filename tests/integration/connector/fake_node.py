"""A decode node's control port with behaviours to choose from, over real memory and a real transport."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_tilert.profiles.layout import Layout
from vllm_tilert.transports import Transport, make_transport
from vllm_tilert.wire import control


@dataclass
class FakeNode:
    """One slot at `address` in `buffer`. `hello`, `accept` and `verdict` change what is said.

    `on_accept`  awaited once Accept is out; may send, wait or close
    """

    layout: Layout
    max_seq_len: int = 2048
    host: str = "127.0.0.1"
    transport_name: str = "mooncake"
    protocol: str = "tcp"
    hello: dict[str, Any] = field(default_factory=dict)
    accept: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    verdict: dict[str, Any] = field(default_factory=lambda: {"ok": True})
    on_accept: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any] | None = None
    deadline_s: float = 30.0
    port: int = 0
    transport: Transport | None = None

    def __post_init__(self) -> None:
        self.transport = self.transport or make_transport(self.transport_name, self.protocol)
        self.transport.init(self.host)
        self.buffer = torch.full((self.layout.segment_bytes(self.max_seq_len),), 0xEE, dtype=torch.uint8)
        self.transport.register(self.buffer.data_ptr(), self.buffer.numel(), "cpu")
        self.requests: list[dict[str, Any]] = []
        self.said: list[dict[str, Any]] = []  # of segments, where `accept` asks for them
        self.ends: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.connections = 0

    async def __aenter__(self) -> FakeNode:
        self._server = await asyncio.start_server(self._serve, self.host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.transport.close()

    @property
    def untouched(self) -> bool:
        """Whether not one byte was written."""
        return bool((self.buffer == 0xEE).all())

    def segments(self, lengths: list[int]) -> list[torch.Tensor]:
        """What lies in the slot, segment by segment."""
        found, at = [], 0
        for tokens in lengths:
            offset = self.layout.offset(at)
            found.append(self.buffer[offset : offset + self.layout.segment_bytes(tokens)].clone())
            at += tokens
        return found

    async def ended(self, timeout_s: float = 20.0) -> dict[str, Any]:
        """The next message that ended a handoff: Done, Abort or {"closed": True}."""
        return await asyncio.wait_for(self.ends.get(), timeout_s)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            writer.write(control.pack(self._hello()))
            request = await control.read(reader)
            self.requests.append(request)
            answer = self._accept(request)
            if answer:
                writer.write(control.pack(answer))
            if answer and "accept" not in answer:
                return
            if self.on_accept is not None:
                await self.on_accept(reader, writer)
            while "segment" in (done := await control.read(reader)):
                self.said.append(done)
            if "done" in done and "ext" in self._hello():
                writer.write(control.pack(self.verdict))
                await writer.drain()
            self.ends.put_nowait(done)
        except (control.ProtocolError, OSError):
            self.ends.put_nowait({"closed": True})
        finally:
            writer.close()

    def _hello(self) -> dict[str, Any]:
        hello = {
            "magic": control.MAGIC,
            "ext": control.EXTENSION,
            "layout_version": self.layout.version,
            "transport": self.transport.name,
            "max_seq_len": self.max_seq_len,
            "busy": False,
            **self.transport.local_meta(),
            "layout": self.layout.describe(),
            "nonce": "00ff",
        } | self.hello
        return {name: value for name, value in hello.items() if value is not None}

    def _accept(self, request: dict[str, Any]) -> dict[str, Any]:
        answer = {
            "accept": True,
            "slot": 0,
            "generation": request.get("generation"),
            "address": self.buffer.data_ptr(),
            "bytes": self.layout.segment_bytes(request["seq_len"]),
            "deadline_s": self.deadline_s,
        }
        return self.accept(answer) if self.accept else answer

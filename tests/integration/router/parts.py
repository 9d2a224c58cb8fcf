"""A router in this process, in front of nodes that speak the real interfaces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from fakes.nodes import FakeDecode, FakePrefill, Site, start
from tilert_router.app import Router
from tilert_router.config import Config
from tilert_router.tracing import Tracer

CHAT = {"model": "small", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0}


def write_tokenizer(folder: Path) -> Path:
    """A byte-level tokenizer: token ids are bytes in the alphabet's order."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


class Bench:
    """Nodes, routers and a client."""

    def __init__(self, stack: AsyncExitStack, folder: Path) -> None:
        self._stack, self._folder = stack, folder
        self.http: aiohttp.ClientSession
        self.prefill: FakePrefill
        self.nodes: list[FakeDecode]

    async def up(self, nodes: int) -> None:
        self.http = await self._stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        )
        self.prefill, self.nodes = await start(self._stack, nodes)

    def config(self, **changes: Any) -> dict[str, Any]:
        """A configuration with these nodes."""
        return {
            "model": {"name": "small", "tokenizer": str(self._folder), "max_model_len": 2048},
            "prefill": [{"name": "p", "url": self.prefill.site.url}],
            "decode": [
                {"name": f"d{i}", "url": n.site.url, "host": "127.0.0.1", "ctrl_port": n.ctrl_port}
                for i, n in enumerate(self.nodes)
            ],
            "timeouts": {"stall_s": 10, "handoff_s": 10, "cancel_s": 2},
        } | changes

    async def router(self, **changes: Any) -> str:
        """Start a router; returns its address."""
        return (await self.whole_router(**changes))[1]

    async def whole_router(self, tracer: Tracer | None = None, **changes: Any) -> tuple[Router, str, str]:
        """Start a router; returns it, its address and that of its admin interface."""
        router = Router(Config.model_validate(self.config(**changes)), tracer)
        self._stack.push_async_callback(router.close)
        public = await self._stack.enter_async_context(Site(router.app()))
        admin = await self._stack.enter_async_context(Site(router.admin()))
        return router, public.url, admin.url

    async def enter(self, site: Site) -> Site:
        """Serve until the end of the test."""
        return await self._stack.enter_async_context(site)

    async def site(self, app: web.Application) -> str:
        """Serve another application; returns its address."""
        return (await self._stack.enter_async_context(Site(app))).url

    async def post(self, url: str, body: dict[str, Any], path: str = "/v1/chat/completions") -> Any:
        async with self.http.post(url + path, json=body, headers={"x-request-id": "job-42"}) as answer:
            return answer.status, answer.headers, await answer.read()


Up = Callable[[int], Coroutine[Any, Any, Bench]]


def events(raw: bytes) -> list[Any]:
    found = [line[6:] for line in raw.decode().split("\n") if line.startswith("data: ")]
    return [x if x == "[DONE]" else json.loads(x) for x in found]


async def settled(node: FakeDecode, within_s: float = 2.0) -> None:
    async with asyncio.timeout(within_s):
        while node.slots:
            await asyncio.sleep(0.01)

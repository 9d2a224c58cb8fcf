"""A prefill node and a decode node that speak their real interfaces and compute nothing.

The answer to a prompt is a function of the prompt and of the rid that prefill was told, so an answer
made from someone else's handoff is seen at once.
"""

from __future__ import annotations

import asyncio
import json
import math
from contextlib import AsyncExitStack
from typing import Any

from aiohttp import web

from vllm_tilert.decode.slots import WANTED_S

PROMPT_TOKENS = 7
FIRST_TOKEN = 65


class Site:
    """An aiohttp application on a free port of the loopback."""

    def __init__(self, app: web.Application) -> None:
        self._runner = web.AppRunner(app, handler_cancellation=True)
        self.url = ""

    async def __aenter__(self) -> Site:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()


class FakePrefill:
    """vLLM with the connector: one token, and the state sent to the decode node named in the request."""

    def __init__(self, decodes: dict[int, FakeDecode]) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.refuse: tuple[int, dict[str, Any]] | None = None
        self.first_token = FIRST_TOKEN
        self.ended = False
        self.delay_s = 0.0
        self._decodes = decodes
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._call)
        app.router.add_post("/v1/completions", self._call)
        self.site = Site(app)

    async def _call(self, http: web.Request) -> web.Response:
        body = await http.json()
        self.bodies.append(body)
        self.headers.append({name.lower(): value for name, value in http.headers.items()})
        if self.refuse:
            return web.json_response(self.refuse[1], status=self.refuse[0])
        # What the real one refuses: contradictory length and stream fields.
        if body.get("stream_options") or body["max_tokens"] != 1 or body.get("min_tokens", 0) > 1:
            return web.json_response({"error": {"message": "contradiction", "type": "x", "code": 400}}, 400)
        await asyncio.sleep(self.delay_s)
        where = body["kv_transfer_params"]
        self._decodes[where["tilert_ctrl_port"]].receive(where["tilert_rid"], where["tilert_generation"])
        ids = list(range(PROMPT_TOKENS))
        chat = http.path.endswith("chat/completions")
        choice = {
            "index": 0,
            "token_ids": [self.first_token],
            "finish_reason": "stop" if self.ended else "length",
            "stop_reason": None,
        }
        answer: dict[str, Any] = {"choices": [choice], "usage": {"prompt_tokens": PROMPT_TOKENS}}
        (answer if chat else choice)["prompt_token_ids"] = ids
        return web.json_response(answer)


class FakeDecode:
    """A decode node: two slots, one engine, reservations in order, headers when the engine is the rid's."""

    def __init__(self, ctrl_port: int) -> None:
        self.ctrl_port = ctrl_port
        self.slots: dict[str, int] = {}
        self.arrived: set[str] = set()
        self.decoded: list[str] = []
        self.cancelled: list[str] = []
        self.running: set[str] = set()
        self.most_running = 0
        self.token_s = 0.0
        self.burst = 1
        """Tokens a line."""
        self.sent = 0
        self.max_seq_len = 2048
        self.draining = False
        self.fail_after: int | None = None
        self.die_after: int | None = None
        self.stall_after: int | None = None
        self.lose_state = False
        self.script: list[int] | None = None
        """What is answered, first token included, instead of the usual letters; ends with stop where not cut."""
        self.account: dict[str, int] = {}
        """Replaces fields of the last line."""
        self._generation = 0
        self._refused_at = -math.inf
        self._remaining: dict[str, int] = {}
        self._known: set[str] = set()
        self._changed = asyncio.Condition()
        app = web.Application()
        app.router.add_post("/pd/reserve", self._reserve)
        app.router.add_post("/pd/decode", self._decode)
        app.router.add_post("/pd/cancel", self._cancel)
        app.router.add_post("/pd/drain", self._drain)
        app.router.add_post("/pd/undrain", self._drain)
        app.router.add_get("/decode_status", self._status)
        self.site = Site(app)

    def receive(self, rid: str, generation: int) -> None:
        """State arrives from prefill; refused unless the slot was reserved for it."""
        if self.slots.get(rid) == generation and not self.lose_state:
            self.arrived.add(rid)

    async def _reserve(self, http: web.Request) -> web.Response:
        body = await http.json()
        if self.draining:
            return web.json_response({"error": "draining", "message": ""}, status=503)
        now = asyncio.get_running_loop().time()
        if self.slots and (not body.get("ahead") or len(self.slots) >= 2):
            self._refused_at = now
            return web.json_response({"error": "busy", "message": ""}, status=429)
        self._generation += 1
        self.slots[body["rid"]] = self._generation
        self._known.add(body["rid"])
        return web.json_response(
            {
                "rid": body["rid"],
                "slot": 0,
                "generation": self._generation,
                "expires_in_s": 30,
                "ahead": len(self.slots) > 1,
                "wanted": now - self._refused_at < WANTED_S,
            }
        )

    async def _free(self, rid: str) -> None:
        self.slots.pop(rid, None)
        self._remaining.pop(rid, None)
        async with self._changed:
            self._changed.notify_all()

    async def _decode(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        rid = body["rid"]
        if rid not in self.slots:
            return web.json_response({"error": "not_reserved", "message": ""}, status=409)
        self._remaining[rid] = body["max_tokens"]
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: next(iter(self.slots), rid) == rid)
            if rid not in self.arrived:
                await self._free(rid)
                return web.json_response({"error": "kv_transfer_timeout", "message": ""}, status=504)
            self.running.add(rid)
            self.most_running = max(self.most_running, len(self.running))
            self.decoded.append(rid)
            response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
            await response.prepare(http)
            count = min(body["max_tokens"], len(self.script or []) or body["max_tokens"])
            cut = self.script is None or len(self.script) >= body["max_tokens"]
            for i in range(0, count, self.burst):
                if i == self.fail_after:
                    await response.write(b'{"error":"engine_failed","message":"secret 10.0.0.2"}\n')
                    return response
                if i == self.die_after:
                    assert http.transport is not None
                    http.transport.abort()
                    return response
                if i == self.stall_after:
                    await asyncio.sleep(3600)
                if rid in self.cancelled:
                    await response.write(b'{"error":"cancelled","message":""}\n')
                    return response
                if self.script is not None:
                    burst = self.script[i : min(i + self.burst, count)]
                else:
                    burst = [66 + (j - 1) % 20 for j in range(i, min(i + self.burst, count))]
                if not i:
                    burst[0] = body["first_token_id"]
                await response.write(json.dumps({"t": burst}).encode() + b"\n")
                self.sent += len(burst)
                self._remaining[rid] -= len(burst)
                if self.token_s:
                    await asyncio.sleep(self.token_s)
            done: dict[str, Any] = {"done": True, "n": count, "seq_len": PROMPT_TOKENS}
            done["finish_reason"] = "length" if cut else "stop"
            await self._free(rid)
            self.running.discard(rid)
            await response.write(json.dumps(done | self.account | {"timing_ms": {}}).encode() + b"\n")
            return response
        finally:
            self.running.discard(rid)
            await self._free(rid)

    async def _cancel(self, http: web.Request) -> web.Response:
        rid = (await http.json())["rid"]
        if rid not in self._known:
            return web.json_response({"error": "not_reserved", "message": ""}, status=404)
        self.cancelled.append(rid)
        if rid in self.slots and rid not in self.running:
            await self._free(rid)
        return web.json_response({"cancelled": rid})

    async def _drain(self, http: web.Request) -> web.Response:
        self.draining = http.path.endswith("/drain")
        return web.json_response({"draining": self.draining})

    async def _status(self, _: web.Request) -> web.Response:
        slots: list[dict[str, Any]] = [
            {"slot": i, "state": "reserved", "rid": rid, "remaining": self._remaining.get(rid)}
            for i, rid in enumerate(self.slots)
        ]
        slots += [{"slot": i, "state": "free", "rid": None, "remaining": None} for i in range(len(slots), 2)]
        running = next(iter(self.running), None)
        return web.json_response(
            {
                "status": "busy" if self.slots else "idle",
                "current_rid": running,
                "draining": self.draining,
                "max_seq_len": self.max_seq_len,
                "slots": slots,
            }
        )


async def start(stack: AsyncExitStack, count: int) -> tuple[FakePrefill, list[FakeDecode]]:
    """One prefill node and `count` decode nodes."""
    decodes = [FakeDecode(5000 + i) for i in range(count)]
    for node in decodes:
        await stack.enter_async_context(node.site)
    prefill = FakePrefill({node.ctrl_port: node for node in decodes})
    await stack.enter_async_context(prefill.site)
    return prefill, decodes

"""The router's HTTP surface: OpenAI's calls, health, metrics, and the admin interface on a port of its own."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

import orjson
from aiohttp import web

from tilert_router.answers import DONE, Chunks, Events, Whole, event, whole
from tilert_router.config import FAST_SUFFIX, Config, Decode, Policy, read_secret
from tilert_router.decode import DecodeClient, NodeError
from tilert_router.errors import ApiError, bad_request, unavailable
from tilert_router.fields import Kind, strip
from tilert_router.generate import Generation, Generator
from tilert_router.keys import Key, Keys
from tilert_router.leases import Bounds, NodeState, Pool
from tilert_router.metrics import Metrics
from tilert_router.native import NativePool
from tilert_router.openapi import document
from tilert_router.output import load_tokenizer
from tilert_router.parsing import load_parsing
from tilert_router.prefill import PrefillPool
from tilert_router.queue import FairQueue
from tilert_router.request import Defaults, Request, parse_body, resolve
from tilert_router.tracing import Tracer, load_tracer

log = logging.getLogger(__name__)

CLASS_HEADER: Final = "x-latency-class"
"""`fast` or `standard`: overrides the key's default."""
_ECHO: Final = re.compile(r"[\x21-\x7e]{1,128}")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Router:
    """Everything one router process has. Create it on the event loop, `start` it, then serve `app`."""

    def __init__(self, config: Config, tracer: Tracer | None = None) -> None:
        self.config = config
        self.keys = Keys(config.keys_file)
        times = config.timeouts
        bounds = Bounds(times.reserve_s, times.cancel_s, ttl_s=times.prefill_s + times.handoff_s)
        self.pool = Pool(FairQueue(config.queue.max_waiting), bounds, config.prefill_ahead)
        self.metrics = Metrics(lambda: self.pool)
        self.prefill = PrefillPool(
            config.model.served_name or config.model.name,
            read_secret(config.secrets.prefill_file),
            times.prefill_s,
            times.connect_s,
        )
        self.native = NativePool.of(config)
        self.tracer = tracer or load_tracer(config.tracing)
        self._defaults = Defaults.load(config.model.tokenizer)
        self._generator = Generator(
            config,
            self.pool,
            self.prefill,
            load_tokenizer(config.model.tokenizer),
            self.metrics,
            load_parsing(config.model),
        )
        self._used: dict[str, Decode] = {}
        self.pool.on_gone = lambda: self._use(self.config)
        self._use(config)

    def _use(self, config: Config) -> None:
        """Take the nodes of `config`; those that stay keep their leases.

        A node that comes back while it still ends what it had is taken back as it is. One that comes back changed waits
        until the old one has ended: both may be one server, and would lease it twice.
        """
        secret = read_secret(config.secrets.decode_file)
        self.prefill.set_nodes({node.name: node.url for node in config.prefill})
        wanted = {node.name: node for node in config.decode}
        for name in [name for name in self.pool.nodes if wanted.get(name) != self._used[name]]:
            self.pool.retire(name)
        self.config = config
        for name, chosen in wanted.items():
            if name not in self.pool.nodes:
                self._used[name] = chosen
                client = DecodeClient(chosen.url, secret, config.timeouts.connect_s)
                self.pool.add(name, chosen.host, chosen.ctrl_port, client, chosen.stock)
            elif chosen == self._used[name]:
                self.pool.restore(name)

    def reload(self, config: Config) -> None:
        """Take nodes and keys from a changed file; everything else needs a restart. Raises ConfigError."""
        self.keys.reload()
        self._use(self.config.model_copy(update={"prefill": config.prefill, "decode": config.decode}))
        self.pool.kick()

    # ---- OpenAI's calls

    async def generate(self, http: web.Request, kind: Kind) -> web.StreamResponse:
        """One chat or text completion."""
        key = self.keys.check(http.headers.get("Authorization"))
        body = parse_body(await http.read())
        if self.config.logs.prompts:
            log.info("request", extra={"key": key.name, "body": body})
        request = resolve(kind, body, self.config.model, self._defaults)
        policy, wait_s = self._policy(http, key, request)
        overflow = policy is Policy.TILERT_THEN_NATIVE and (request.unserved or self._too_long(key, wait_s))
        if policy is Policy.NATIVE or overflow:
            return await self._native(http, key, request)
        if request.unserved:
            raise bad_request(
                f"{request.unserved}: this value cannot be honoured at TileRT's speed, and this server has no "
                "other pool for it; leave it out",
                request.unserved,
                code="unsupported_parameter",
            )
        self.keys.enter(key)
        try:
            return await self._tilert(http, key, request, policy, wait_s)
        finally:
            self.keys.leave(key)

    def _policy(self, http: web.Request, key: Key, request: Request) -> tuple[Policy, float]:
        name = http.headers.get(CLASS_HEADER) or ("fast" if request.fast else key.latency_class or "standard")
        if name not in ("fast", "standard"):
            raise bad_request(f"{CLASS_HEADER}: must be fast or standard", CLASS_HEADER)
        chosen = self.config.latency_class(name)
        wait_s = self.config.queue.timeout_s
        if chosen.policy is Policy.TILERT_THEN_NATIVE:
            wait_s = min(wait_s, max(chosen.max_wait_s, 0.001))
        return chosen.policy, wait_s

    def _too_long(self, key: Key, wait_s: float) -> bool:
        """Whether waiting for a decode node is expected to take longer than `wait_s`."""
        expected = self.pool.expected_wait_s(self.pool.queue.ahead(key.priority))
        return expected is not None and expected > wait_s

    async def _native(self, http: web.Request, key: Key, request: Request) -> web.StreamResponse:
        self.keys.enter(key)
        started, outcome = asyncio.get_running_loop().time(), "cancelled"
        try:
            model = request.model.removesuffix(FAST_SUFFIX) if request.fast else request.model
            answer = await self.native.forward(http, strip(request.body), model)
            outcome = str(answer.status)
            return answer
        except ApiError as error:
            outcome = str(error.status)
            raise
        finally:
            self.keys.leave(key)
            self.metrics.requests.labels("native", outcome).inc()
            _log_end(http, key, "native", outcome, started, {})

    async def _tilert(
        self, http: web.Request, key: Key, request: Request, policy: Policy, wait_s: float
    ) -> web.StreamResponse:
        outcome = "cancelled"
        started = asyncio.get_running_loop().time()
        trace = self.tracer.request(http.headers, request.kind, self.config.model.name)
        usage: dict[str, int] | None = None
        served: dict[str, Any] = {"rid": None}
        try:
            try:
                generation = await self._generator.start(request, key.name, key.priority, wait_s, trace)
            except ApiError as error:
                if policy is Policy.TILERT_THEN_NATIVE and error.code in ("queue_timeout", "queue_full"):
                    outcome = "native"
                    return await self.native.forward(http, strip(request.body), self.config.model.name)
                raise
            try:
                opened = asyncio.get_running_loop().time()
                served = {
                    "rid": generation.rid,
                    "node": generation.node,
                    "queued_s": round(generation.queued_s, 4),
                }
                self.metrics.first_token.observe(opened - started)
                with trace.phase("decode", rid=generation.rid):
                    answer = await (self._stream if request.stream else self._whole)(http, generation)
                self.metrics.phase.labels("decode").observe(asyncio.get_running_loop().time() - opened)
                outcome = generation.finish_reason
                return answer
            finally:
                usage = generation.usage()
                self.metrics.tokens.inc(usage["completion_tokens"])
                self.keys.charge(key, usage["total_tokens"])
                generation.close()
        except ApiError as error:
            outcome = str(error.status)
            raise
        except _StreamFailed as error:
            outcome = "stream_failed"
            return error.response
        finally:
            self.metrics.requests.labels("tilert", outcome).inc()
            trace.end(outcome, usage)
            _log_end(http, key, "tilert", outcome, started, served | (usage or {}))

    async def _whole(self, http: web.Request, generation: Generation) -> web.StreamResponse:
        sink = Whole()
        times = self.config.timeouts
        await generation.run(sink, times.stall_s, times.stall_s)
        answer = whole(generation, _answer_id(generation), sink.text, sink.token_ids)
        return web.Response(
            body=orjson.dumps(answer), content_type="application/json", headers=_headers(http, generation)
        )

    async def _stream(self, http: web.Request, generation: Generation) -> web.StreamResponse:
        times = self.config.timeouts
        response = web.StreamResponse(
            headers=_headers(http, generation)
            | {
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )
        writer = await response.prepare(http)
        assert writer is not None
        chunks = Chunks(generation, _answer_id(generation))
        sink = Events(http, response, writer, chunks, times.client_s)
        try:
            if first := chunks.first():
                await response.write(first)
            else:
                writer.send_headers()
            await generation.run(sink, times.stall_s, times.keepalive_s)
            sink.send(chunks.last() + (chunks.usage() if generation.request.include_usage else b"") + DONE)
            await sink.drain()
        except ApiError as error:
            # The status is gone: the client learns it from an error event, and never sees [DONE].
            log.warning("stream failed", extra={"rid": generation.rid, "fault": error.message})
            sink.send(event(error.payload()))
            with suppress(OSError, TimeoutError):
                await sink.drain()
                await response.write_eof()
            raise _StreamFailed(response) from None
        except TimeoutError:
            log.info("client does not read", extra={"rid": generation.rid})
            if http.transport is not None:
                http.transport.abort()
            raise _StreamFailed(response) from None
        await response.write_eof()
        return response

    async def models(self, http: web.Request) -> web.Response:
        """The model, and its alias for the latency class."""
        self.keys.check(http.headers.get("Authorization"))
        model = self.config.model
        data = [
            {
                "id": name,
                "object": "model",
                "owned_by": "tilert",
                "root": model.name,
                "max_model_len": model.max_model_len,
            }
            for name in (model.name, model.name + FAST_SUFFIX)
        ]
        return _json({"object": "list", "data": data})

    async def openapi(self, _: web.Request) -> web.Response:
        """What clients may call."""
        return _json(document())

    async def health(self, _: web.Request) -> web.Response:
        """Liveness: the event loop turns."""
        return _json({"status": "ok"})

    async def ready(self, _: web.Request) -> web.Response:
        """Whether a request could be served now."""
        states = {name: node.state for name, node in self.pool.nodes.items()}
        down = (NodeState.DOWN, NodeState.UNKNOWN, NodeState.DRAINING)
        if all(state in down for state in states.values()) and not self.config.native:
            raise unavailable("No decode node is in service.", code="not_ready")
        return _json({"status": "ready"})

    async def show_metrics(self, _: web.Request) -> web.Response:
        """Prometheus text."""
        return web.Response(body=self.metrics.render(), headers={"Content-Type": "text/plain; version=0.0.4"})

    def app(self) -> web.Application:
        """What clients reach."""
        app = web.Application(client_max_size=self.config.limits.body_bytes, middlewares=[_errors])
        for kind in Kind:
            app.router.add_post(kind.path, _bound(self.generate, kind))
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/health", self.health)
        app.router.add_get("/ready", self.ready)
        app.router.add_get("/openapi.json", self.openapi)
        return app

    async def close(self) -> None:
        """Stop the background tasks and drop the connections to nodes."""
        await self.pool.close()
        self.native.close()
        self.prefill.close()
        for node in self.pool.nodes.values():
            if isinstance(node.client, DecodeClient):
                node.client.close()
        await asyncio.to_thread(self.tracer.close)  # may wait for the collector

    # ---- the admin interface

    def admin(self) -> web.Application:
        """What operators and Prometheus reach."""
        app = web.Application(middlewares=[_errors])
        app.router.add_get("/metrics", self.show_metrics)
        app.router.add_get("/health", self.health)
        app.router.add_get("/nodes", self._nodes)
        app.router.add_get("/queue", self._queue)
        app.router.add_post("/nodes/{name}/drain", self._drain)
        app.router.add_post("/nodes/{name}/undrain", self._drain)
        return app

    async def _nodes(self, _: web.Request) -> web.Response:
        return _json({"nodes": [node.describe() for node in self.pool.nodes.values()]})

    async def _queue(self, _: web.Request) -> web.Response:
        return _json({"waiting": len(self.pool.queue), "by_key": self.pool.queue.depths()})

    async def _drain(self, http: web.Request) -> web.Response:
        name = http.match_info["name"]
        node = self.pool.nodes.get(name)
        if node is None:
            raise ApiError(404, f"There is no decode node {name[:100]!r}.", code="not_found")
        on = not http.path.endswith("undrain")
        assert isinstance(node.client, DecodeClient)
        try:
            await node.client.drain(on, self.config.timeouts.reserve_s)
        except NodeError as error:
            raise ApiError(502, f"The node did not answer ({error.code}).", code=error.code) from None
        node.draining = on
        node.wake.set()
        return _json(node.describe())


class _StreamFailed(Exception):
    """A stream that has ended with an error event, or was cut."""

    def __init__(self, response: web.StreamResponse) -> None:
        super().__init__()
        self.response = response


def _bound(handler: Callable[[web.Request, Kind], Awaitable[web.StreamResponse]], kind: Kind) -> Handler:
    async def call(http: web.Request) -> web.StreamResponse:
        return await handler(http, kind)

    return call


def _answer_id(generation: Generation) -> str:
    prefix = "chatcmpl" if generation.request.kind is Kind.CHAT else "cmpl"
    return f"{prefix}-{generation.rid}"


def _headers(http: web.Request, generation: Generation) -> dict[str, str]:
    return _echo(http) | {"x-tilert-rid": generation.rid}


def _echo(http: web.Request) -> dict[str, str]:
    given = http.headers.get("x-request-id", "")
    return {"x-request-id": given} if _ECHO.fullmatch(given) else {}


def _log_end(
    http: web.Request, key: Key, pool: str, outcome: str, started: float, more: dict[str, Any]
) -> None:
    """One line a request, whoever served it: no text of it, only names, counts and how it ended."""
    seconds = round(asyncio.get_running_loop().time() - started, 4)
    client_id = _echo(http).get("x-request-id")
    line = {"pool": pool, "outcome": outcome, "client_id": client_id, "key": key.name, "seconds": seconds}
    log.info("request ended", extra=line | more)


def _json(payload: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(payload), status=status, content_type="application/json")


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure leaves in OpenAI's shape."""
    try:
        return await handler(request)
    except ApiError as error:
        answer = error
    except web.HTTPRequestEntityTooLarge:
        answer = ApiError(413, "The body is too large.", code="request_too_large")
    except web.HTTPMethodNotAllowed as error:
        answer = ApiError(
            405, f"{error.method} is not allowed here.", headers={"Allow": error.headers["Allow"]}
        )
    except web.HTTPException as error:
        answer = ApiError(error.status, error.reason)
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception:
        log.exception("request failed")
        answer = ApiError(500, "The router failed.", code="internal_error")
    return web.Response(
        body=answer.body(),
        status=answer.status,
        content_type="application/json",
        headers=answer.headers | _echo(request),
    )

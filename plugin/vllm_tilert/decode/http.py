"""The decode node's HTTP interface. See docs/contracts.md and `wire.api`."""

from __future__ import annotations

import asyncio
import hmac
import json
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_tilert.decode.engines.base import Sampling
from vllm_tilert.decode.node import Decode, End, Node
from vllm_tilert.decode.slots import MAX_TTL_S, Handoff, Refused
from vllm_tilert.wire import api
from vllm_tilert.wire.api import ErrorCode, SlotState

MAX_BODY: Final = 64 << 10
"""Largest request body in bytes; every call is a few hundred."""
_OPEN: Final = (api.HEALTH, api.METRICS)

RID = Field(pattern=r"^[0-9a-f]{32}$")


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ReserveBody(_Body):
    """Ask for a slot."""

    rid: str = RID
    seq_len: StrictInt | None = Field(None, ge=1)
    ttl_s: float | None = Field(None, gt=0, le=MAX_TTL_S)
    ahead: StrictBool = False


class SamplingBody(_Body):
    """What the engine can honour."""

    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: StrictInt | None = Field(None, ge=-1, le=1 << 30)

    def sampling(self) -> Sampling:
        """With the engine's defaults for what is not said."""
        return Sampling(**{k: v for k, v in self.model_dump().items() if v is not None})


class DecodeBody(_Body):
    """Decode a handed-over request."""

    rid: str = RID
    first_token_id: StrictInt = Field(ge=0, le=1 << 31)
    max_tokens: StrictInt = Field(256, ge=1, le=1 << 31)
    sampling: SamplingBody | None = None
    timeout_s: float = Field(120.0, gt=0, le=3600)
    stream: StrictBool = False


class RidBody(_Body):
    """Names a handoff."""

    rid: str = RID


def _error(error: Refused) -> JSONResponse:
    body: dict[str, Any] = {"error": error.code, "message": error.message}
    if error.rid:
        body["rid"] = error.rid
    return JSONResponse(body, status_code=api.HTTP_STATUS[error.code])


def describe(handoff: Handoff) -> dict[str, Any]:
    """An ended handoff as /pd/history shows it."""
    return {
        "rid": handoff.rid,
        "outcome": handoff.outcome,
        "message": handoff.message,
        "slot": handoff.slot,
        "generation": handoff.generation,
        "timing_ms": _rounded(handoff.timing_ms),
        **handoff.facts,
    }


def _rounded(timing: dict[str, float]) -> dict[str, float]:
    return {k: round(v, 3) for k, v in timing.items()}


def _summary(handoff: Handoff, end: End) -> dict[str, Any]:
    assert end.decoded is not None
    timing: dict[str, Any] = _rounded(handoff.timing_ms)
    if end.decoded.mtp_accept_mean is not None:
        timing["mtp_accept_mean"] = end.decoded.mtp_accept_mean
    return {
        "n": end.decoded.tokens,
        "seq_len": handoff.facts["seq_len"],
        "finish_reason": end.decoded.finish_reason,
        "timing_ms": timing,
        "handoff": {k: handoff.facts.get(k) for k in ("bytes", "segments", "wire_ms")},
    }


class DecodeResponse(Response):
    """Runs one decode call. Headers leave when the engine is the request's; then each burst at once."""

    def __init__(self, node: Node, handoff: Handoff, decode: Decode, stream: bool) -> None:
        super().__init__()
        self._node, self._handoff, self._decode, self._stream = node, handoff, decode, stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._respond(scope, receive, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await work
        finally:
            # Also when the server itself cancels this call.
            self._node.detach(self._handoff)
            work.cancel()
            gone.cancel()

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        handoff, decode = self._handoff, self._decode
        await self._node.signal.until(lambda: decode.opened or handoff.over)
        try:
            if not decode.opened:
                handoff.check()
            if not self._stream:
                answer = await self._whole()
                await answer(scope, receive, send)
                return
        except Refused as error:
            await _error(error)(scope, receive, send)
            return
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")],
            }
        )
        while True:
            item = await decode.tokens.get()
            if isinstance(item, End):
                break
            burst = item
            while not decode.tokens.empty():  # what has come meanwhile leaves in one line
                more = decode.tokens.get_nowait()
                if isinstance(more, End):
                    decode.tokens.put_nowait(more)
                    break
                burst = burst + more
            await _line(send, {"t": burst})
        if item.error is not None:
            last: dict[str, Any] = {"error": item.error.code, "message": item.error.message}
        else:
            last = {"done": True, **_summary(handoff, item)}
        await _line(send, last, more=False)

    async def _whole(self) -> JSONResponse:
        tokens: list[int] = []
        while not isinstance(item := await self._decode.tokens.get(), End):
            tokens += item
        if item.error is not None:
            raise item.error
        return JSONResponse({"rid": self._handoff.rid, "token_ids": tokens, **_summary(self._handoff, item)})


async def _line(send: Send, message: dict[str, Any], more: bool = True) -> None:
    data = json.dumps(message, separators=(",", ":")).encode() + b"\n"
    await send({"type": "http.response.body", "body": data, "more_body": more})


class _Gate:
    """Refuses whoever lacks the secret, and bodies that are too large, before anything is parsed."""

    def __init__(self, app: ASGIApp, secret: str | None) -> None:
        self._app = app
        self._secret = secret

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("authorization", "").encode()
        wanted = f"Bearer {self._secret}".encode()
        if self._secret is not None and scope["path"] not in _OPEN and not hmac.compare_digest(given, wanted):
            refusal = Refused(ErrorCode.UNAUTHORIZED, "Authorization: Bearer SECRET is missing or wrong")
            await _error(refusal)(scope, receive, send)
            return
        left = MAX_BODY

        async def bounded() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise Refused(ErrorCode.BAD_REQUEST, f"the body is larger than {MAX_BODY} bytes")
            return message

        await self._app(scope, bounded, send)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def build_app(node: Node, secret: str | None) -> FastAPI:
    """The HTTP application of one node. `secret` None: no authorisation."""
    app = FastAPI(title="TileRT decode node", docs_url=None, redoc_url=None)
    errors: dict[int | str, dict[str, Any]] = {
        status: {"description": "`{error, message, rid?}`"}
        for status in sorted(set(api.HTTP_STATUS.values()) | {404})
    }

    app.add_middleware(_Gate, secret=secret)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:]) or "body"
        return _error(Refused(ErrorCode.BAD_REQUEST, f"{where}: {first['msg']}"))

    @app.exception_handler(HTTPException)
    async def unreadable(_: Request, error: HTTPException) -> Response:
        """A body that is no text, an unknown path or a wrong method."""
        body = {"error": ErrorCode.BAD_REQUEST, "message": str(error.detail)}
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> Response:
        return _error(error)

    @app.post(api.RESERVE, responses=errors)
    async def reserve(body: ReserveBody) -> dict[str, Any]:
        if node.broken:
            raise Refused(ErrorCode.ENGINE_FAILED, node.broken, body.rid)
        if body.seq_len is not None and body.seq_len >= node.max_seq_len:
            raise Refused(
                ErrorCode.SEQ_LEN_EXCEEDED,
                f"seq_len is {body.seq_len}, the window is {node.max_seq_len} tokens, the reply included",
                body.rid,
            )
        handoff = node.slots.reserve(body.rid, body.ttl_s, body.ahead)
        return {
            "rid": handoff.rid,
            "slot": handoff.slot,
            "generation": handoff.generation,
            "expires_in_s": body.ttl_s or node.slots.limits.reserve,
            "ahead": len(node.slots.alive()) > 1,
            "wanted": node.slots.wanted,
        }

    @app.post(api.DECODE, responses=errors)
    async def decode(body: DecodeBody) -> Response:
        call = Decode(
            body.first_token_id, body.max_tokens, body.sampling.sampling() if body.sampling else Sampling()
        )
        handoff = node.attach(body.rid, call, body.timeout_s)
        return DecodeResponse(node, handoff, call, body.stream)

    @app.post(api.CANCEL, responses=errors)
    async def cancel(body: RidBody) -> Response:
        handoff = node.slots.find(body.rid)
        if handoff is None:
            error = {"error": ErrorCode.NOT_RESERVED, "message": "unknown rid", "rid": body.rid}
            return JSONResponse(error, status_code=404)
        node.slots.end(handoff, ErrorCode.CANCELLED, "the request was cancelled")
        return JSONResponse({"cancelled": body.rid})

    @app.get(api.STATUS)
    async def status() -> dict[str, Any]:
        engine = node.slots.engine
        current = engine or next(iter(node.slots.alive()), None)
        slots = [
            {
                "slot": number,
                "state": handoff.shown if handoff else SlotState.FREE,
                "rid": handoff.rid if handoff else None,
                "generation": node.slots.generation(number),
                "age_s": round(asyncio.get_running_loop().time() - handoff.since, 3) if handoff else None,
                "remaining": node.remaining(handoff) if handoff else None,
            }
            for number, handoff in enumerate(node.slots)
        ]
        return {
            "status": "idle" if node.slots.idle else "busy",
            "current_rid": current.rid if current else None,
            "draining": node.slots.draining,
            "engine": node.engine_name,
            "max_seq_len": node.max_seq_len,
            "layout": node.layout.describe(),
            "slots": slots,
        }

    @app.get(api.HISTORY + "/{rid}", responses=errors)
    async def history(rid: str) -> Response:
        handoff = node.slots.find(rid)
        if handoff is None or not handoff.over:
            return JSONResponse(
                {"error": ErrorCode.NOT_RESERVED, "message": "no such ended handoff"}, status_code=404
            )
        return JSONResponse(describe(handoff))

    @app.post(api.DRAIN)
    async def drain() -> dict[str, Any]:
        node.slots.drain(True)
        return {"draining": True}

    @app.post(api.UNDRAIN)
    async def undrain() -> dict[str, Any]:
        node.slots.drain(False)
        return {"draining": False}

    @app.get(api.HEALTH, responses={503: {"description": "`{status, reason}`"}})
    async def health() -> Response:
        reason = await node.check()
        if reason:
            return JSONResponse({"status": "unhealthy", "reason": reason}, status_code=503)
        return JSONResponse({"status": "ok"})

    @app.get(api.METRICS)
    async def metrics() -> Response:
        return PlainTextResponse(node.metrics.render(), media_type="text/plain; version=0.0.4")

    return app

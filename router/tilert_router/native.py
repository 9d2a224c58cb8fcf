"""The native pool: requests pass to any OpenAI endpoint as they are, less what no client may set."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any, Final

import orjson
from aiohttp import web

from tilert_router.answers import WRITE_AHEAD
from tilert_router.config import Config, Native, read_secret
from tilert_router.errors import ApiError, unavailable
from tilert_router.upstream import Exchange, NotConnected, Origin, Unreachable

log = logging.getLogger(__name__)

_HOP: Final = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "upgrade",
        "transfer-encoding",
    }
)  # fmt: skip
"""Headers of one connection."""
_NOT_FORWARDED: Final = _HOP | {
    "content-length",
    "host",
    "authorization",
    "accept-encoding",
    "expect",
    "x-request-id",
}
"""Of a request: what is between the client and this router, and the id that vLLM would take for its own."""


@dataclass(slots=True)
class NativePool:
    """Least busy first; one that cannot be reached is passed over for the next."""

    nodes: tuple[Native, ...]
    secret: str | None
    client_s: float
    _origins: dict[str, Origin] = field(default_factory=dict)
    _outstanding: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Config) -> NativePool:
        """The pool that `config` names."""
        pool = cls(config.native, read_secret(config.secrets.native_file), config.timeouts.client_s)
        pool._origins = {node.name: Origin(node.url, config.timeouts.connect_s) for node in config.native}
        return pool

    def close(self) -> None:
        """Drop idle connections."""
        for origin in self._origins.values():
            origin.close()

    async def forward(self, http: web.Request, body: dict[str, Any], model: str) -> web.StreamResponse:
        """Send `body` on and pass the answer back byte for byte. Raises ApiError 503 when nobody answers, 502
        when the one that was asked breaks off before it has answered."""
        headers = {k: v for k, v in http.headers.items() if k.lower() not in _NOT_FORWARDED}
        if self.secret:
            headers["Authorization"] = f"Bearer {self.secret}"
        for node in sorted(self.nodes, key=lambda n: self._outstanding.get(n.name, 0)):
            data = orjson.dumps(body | {"model": node.served_name or model})
            self._outstanding[node.name] = self._outstanding.get(node.name, 0) + 1
            try:
                upstream = await self._origins[node.name].open("POST", http.path, headers, data)
                try:
                    return await self._pass_back(http, upstream)
                finally:
                    upstream.close()
            except NotConnected as error:
                # Nothing was sent, so another may have it.
                log.warning("native node unreachable", extra={"node": node.name, "fault": str(error)})
            except Unreachable as error:
                log.warning("native node broke off", extra={"node": node.name, "fault": str(error)})
                raise ApiError(502, "The native server broke off.", code="native_failed") from None
            finally:
                self._outstanding[node.name] -= 1
        raise unavailable("No native server can be reached.", code="native_unreachable")

    async def _pass_back(self, http: web.Request, upstream: Exchange) -> web.StreamResponse:
        answer = web.StreamResponse(status=upstream.status)
        for name, value in upstream.headers:
            if name.decode("latin-1") not in _HOP:
                answer.headers.add(name.decode("latin-1"), value.decode("utf-8", "surrogateescape"))
        writer = await answer.prepare(http)
        assert writer is not None
        writer.send_headers()
        transport = http.transport
        assert transport is not None
        # A client of HTTP/1.0 reads to the end of the connection.
        frame = b"%x\r\n%b\r\n" if "Transfer-Encoding" in answer.headers else None

        def feed(data: bytes) -> bool:
            transport.write(frame % (len(data), data) if frame else data)
            return transport.get_write_buffer_size() < WRITE_AHEAD

        async def drain() -> None:
            async with asyncio.timeout(self.client_s):
                await writer.drain()

        try:
            await upstream.pump(feed, drain)
        except (Unreachable, TimeoutError) as error:
            # The status is gone: a connection that breaks is how the client learns that this is not all.
            log.warning("native answer broke off", extra={"fault": str(error) or "client does not read"})
            transport.abort()
            return answer
        await answer.write_eof()
        return answer

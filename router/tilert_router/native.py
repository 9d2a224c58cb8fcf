"""The native pool: requests pass to any OpenAI endpoint as they are, less what no client may set."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
import orjson
from aiohttp import web

from tilert_router.config import Config, Native, read_secret
from tilert_router.errors import unavailable

log = logging.getLogger(__name__)

_HOP: Final = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "upgrade",
        "transfer-encoding", "content-length", "content-encoding", "host", "authorization", "accept-encoding",
    }
)  # fmt: skip
"""Headers of one connection or one pair of peers."""


@dataclass(slots=True)
class NativePool:
    """Least busy first; one that cannot be reached is passed over for the next."""

    session: aiohttp.ClientSession
    nodes: tuple[Native, ...]
    secret: str | None
    connect_s: float
    _outstanding: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Config, session: aiohttp.ClientSession) -> NativePool:
        """The pool that `config` names."""
        secret = read_secret(config.secrets.native_file)
        return cls(session, config.native, secret, config.timeouts.connect_s)

    async def forward(self, http: web.Request, body: dict[str, Any], model: str) -> web.StreamResponse:
        """Send `body` on and pass the answer back byte for byte. Raises ApiError 503 when nobody answers."""
        headers = {k: v for k, v in http.headers.items() if k.lower() not in _HOP | {"x-request-id"}}
        if self.secret:
            headers["Authorization"] = f"Bearer {self.secret}"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.connect_s)
        for node in sorted(self.nodes, key=lambda n: self._outstanding.get(n.name, 0)):
            data = orjson.dumps(body | {"model": node.served_name or model})
            self._outstanding[node.name] = self._outstanding.get(node.name, 0) + 1
            try:
                try:
                    upstream = await self.session.post(
                        node.url + http.path,
                        data=data,
                        headers=headers,
                        timeout=timeout,
                        allow_redirects=False,
                    )
                except (aiohttp.ClientConnectorError, TimeoutError) as error:
                    # Nothing was sent, so another may have it.
                    log.warning("native node unreachable", extra={"node": node.name, "fault": str(error)})
                    continue
                async with upstream:
                    answer = web.StreamResponse(status=upstream.status)
                    for name, value in upstream.headers.items():
                        if name.lower() not in _HOP:
                            answer.headers.add(name, value)
                    await answer.prepare(http)
                    async for data in upstream.content.iter_any():
                        await answer.write(data)
                    await answer.write_eof()
                    return answer
            finally:
                self._outstanding[node.name] -= 1
        raise unavailable("No native server can be reached.", code="native_unreachable")

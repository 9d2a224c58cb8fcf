"""The prefill leg: one vLLM call that yields the first token and sends the state on its way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from tilert_router.errors import ApiError
from tilert_router.request import Request
from tilert_router.upstream import Origin, Unreachable

log = logging.getLogger(__name__)

_EJECT_S: Final = (0.5, 2.0, 10.0)
"""How long a node that failed is passed over, by failures in a row."""


class HandoffRefused(Exception):
    """The connector says that it does not hand this prefill off."""


class PrefillFailed(Exception):
    """This prefill node could not do it; another may. `answer` is what the client gets if none does."""

    def __init__(self, answer: ApiError) -> None:
        super().__init__(answer.message)
        self.answer = answer


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What prefill gave."""

    first_token_id: int
    prompt_tokens: int
    prompt_token_ids: list[int]
    ended: bool
    """The first token ended the answer (an end-of-sequence token): there is nothing to decode."""
    stop_reason: int | str | None
    prompt_text: str | None
    cached_tokens: int | None


@dataclass(slots=True, eq=False)
class PrefillNode:
    """One vLLM, with how busy this router keeps it."""

    name: str
    url: str
    origin: Origin
    outstanding: int = 0
    failures: int = 0
    ejected_until: float = 0.0
    last_used: float = 0.0


@dataclass(slots=True)
class PrefillPool:
    """Chooses the least busy prefill node and passes over those that fail."""

    served_name: str
    secret: str | None
    timeout_s: float
    connect_s: float
    nodes: dict[str, PrefillNode] = field(default_factory=dict)

    def set_nodes(self, urls: Mapping[str, str]) -> None:
        """Use these nodes from now on; running calls go on."""
        kept = {n: node for n, node in self.nodes.items() if urls.get(n) == node.url}
        self.nodes = {
            name: kept.get(name) or PrefillNode(name, url, Origin(url, self.connect_s))
            for name, url in urls.items()
        }

    def close(self) -> None:
        """Drop idle connections."""
        for node in self.nodes.values():
            node.origin.close()

    def choose(self, now: float, avoid: set[str]) -> PrefillNode:
        """Fewest outstanding calls, not ejected, not one that already failed this request."""
        return min(
            self.nodes.values(),
            key=lambda n: (n.ejected_until > now, n.name in avoid, n.outstanding, n.last_used),
        )

    async def run(
        self,
        request: Request,
        rid: str,
        handoff: Mapping[str, Any],
        avoid: set[str],
        trace: Mapping[str, str],
    ) -> Prefilled:
        """Prefill. Raises ApiError (the request's own fault, in upstream's words) or PrefillFailed.

        Cancelling closes the connection, which aborts the request in vLLM. A node that failed is
        added to `avoid`.
        """
        loop = asyncio.get_running_loop()
        node = self.choose(loop.time(), avoid)
        node.outstanding += 1
        node.last_used = loop.time()
        headers = {"Content-Type": "application/json", "X-Request-Id": rid, **trace}
        if self.secret:
            headers["Authorization"] = f"Bearer {self.secret}"
        body = orjson.dumps(request.prefill_body(self.served_name, rid, handoff))
        try:
            answer = await node.origin.call("POST", request.kind.path, headers, body, self.timeout_s)
            status, raw = answer.status, answer.body
        except TimeoutError:
            self._failed(node, avoid, "timeout")
            raise PrefillFailed(
                ApiError(504, "Prefill did not finish in time.", code="prefill_timeout")
            ) from None
        except Unreachable as error:
            self._failed(node, avoid, str(error))
            raise PrefillFailed(
                ApiError(503, "No prefill node can be reached.", code="prefill_unreachable")
            ) from None
        finally:
            node.outstanding -= 1
        if status == 200:
            try:
                prefilled = _read(raw)
            except HandoffRefused as error:
                log.warning("handoff refused", extra={"node": node.name, "rid": rid, "fault": str(error)})
                raise PrefillFailed(
                    ApiError(502, "The prefill was not handed off.", code="handoff_refused")
                ) from None
            except (KeyError, IndexError, TypeError, ValueError, orjson.JSONDecodeError):
                self._failed(node, avoid, "malformed answer")
                raise PrefillFailed(
                    ApiError(502, "Prefill answered without a first token.", code="prefill_malformed")
                ) from None
            node.failures = 0
            return prefilled
        if status in (401, 403):
            self._failed(node, avoid, f"HTTP {status}: check secrets.prefill_file")
            raise PrefillFailed(ApiError(503, "Prefill refused the router.", code="prefill_unauthorized"))
        if status == 429 or status >= 500 or status < 400:
            self._failed(node, avoid, f"HTTP {status}")
            refusal = (
                ApiError(
                    429, "Prefill is overloaded.", code="prefill_overloaded", headers={"Retry-After": "1"}
                )
                if status == 429
                else ApiError(502, "Prefill failed.", code="prefill_failed")
            )
            raise PrefillFailed(refusal)
        raise upstream_error(status, raw)

    def _failed(self, node: PrefillNode, avoid: set[str], fault: str) -> None:
        avoid.add(node.name)
        pause = _EJECT_S[min(node.failures, len(_EJECT_S) - 1)]
        node.failures += 1
        node.ejected_until = asyncio.get_running_loop().time() + pause
        log.warning("prefill failed", extra={"node": node.name, "fault": fault})


def upstream_error(status: int, raw: bytes) -> ApiError:
    """An upstream's 4xx in the upstream's own words."""
    try:
        answer = orjson.loads(raw)
    except orjson.JSONDecodeError:
        answer = {}
    error = answer.get("error", answer) if isinstance(answer, dict) else {}
    if not isinstance(error, dict):
        error = {"message": error}
    message = error.get("message") or error.get("detail") or "The request was refused."
    param, code, type_ = error.get("param"), error.get("code"), error.get("type")
    return ApiError(
        status,
        message if isinstance(message, str) else orjson.dumps(message).decode(),
        param=param if isinstance(param, str) else None,
        code=code if isinstance(code, str) else None,
        type_=type_ if isinstance(type_, str) else None,
    )


def _read(raw: bytes) -> Prefilled:
    answer = orjson.loads(raw)
    choice = answer["choices"][0]
    token_ids = choice["token_ids"]
    prompt_ids = answer.get("prompt_token_ids")
    if prompt_ids is None:
        prompt_ids = choice["prompt_token_ids"]
    if not prompt_ids or len(token_ids) != 1 or not isinstance(token_ids[0], int):
        raise ValueError("not one first token")
    told = (answer.get("kv_transfer_params") or {}).get("tilert_handoff") or {}
    if told.get("error"):
        raise HandoffRefused(str(told["error"]))
    usage = answer.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    return Prefilled(
        first_token_id=token_ids[0],
        prompt_tokens=len(prompt_ids),
        prompt_token_ids=prompt_ids,
        ended=choice.get("finish_reason") == "stop",
        stop_reason=choice.get("stop_reason"),
        prompt_text=answer.get("prompt_text"),
        cached_tokens=details.get("cached_tokens"),
    )

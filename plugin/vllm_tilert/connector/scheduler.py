"""The scheduler side: which requests are claimed, and what each step makes final.

Pure logic over what vLLM's scheduler decided; no I/O, no vLLM import. A request is claimed if and only
if its `kv_transfer_params` name a `tilert_host`. A claim that cannot be honoured is refused: the prefill
goes on as an ordinary request, nothing is sent, and the answer says why.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vllm_tilert.connector.config import ConnectorConfig
from vllm_tilert.connector.plan import Order, Progress, StepPlan
from vllm_tilert.wire.address import check_host, check_port
from vllm_tilert.wire.api import CONTROL_PORT, ErrorCode, is_rid

logger = logging.getLogger(f"vllm.{__name__}")  # below vLLM's logger, whose handler and level it takes

HOST_NOT_ALLOWED: Final = "host_not_allowed"
"""Reason of a refusal: the request names a host outside `tilert_allowed_hosts`."""


class Refused(Exception):
    """A claim that cannot be honoured: a code for counting, and the reason in words."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def claims(params: object) -> bool:
    """Whether `kv_transfer_params` ask for a handoff to a TileRT decode node."""
    return isinstance(params, Mapping) and bool(params.get("tilert_host"))


@dataclass
class _Claim:
    """A claimed request: its order, its blocks so far, and how far the worker has been told."""

    order: Order
    blocks: array[int]
    told: int = 0
    closed: str | None = None


class HandoffScheduler:
    """Follows claimed requests through chunks, preemption, resume, abort and end."""

    def __init__(self, config: ConnectorConfig) -> None:
        self._config = config
        self._claims: dict[str, _Claim] = {}
        self._refusals: dict[str, Refused] = {}
        self._closed: dict[str, str] = {}
        self._ended: set[str] = set()

    def step(self, output: Any) -> StepPlan:
        """The plan of one step. `output` is vLLM's SchedulerOutput; it is not changed."""
        preempted = self._preempt(output)
        opened: list[Order] = []
        refused: list[str] = []
        progress: list[Progress] = []
        scheduled: Mapping[str, int] = output.num_scheduled_tokens

        for new in output.scheduled_new_reqs:
            claim = self._claims.get(new.req_id)
            if claim is None:
                claim = self._claim(new, opened, refused)
            if claim is not None:  # one that is known comes back after a preemption
                claim.blocks, claim.told = _single_group(new.block_ids), 0
                computed = new.num_computed_tokens + scheduled.get(new.req_id, 0)
                self._advance(claim, computed, progress)

        cached = output.scheduled_cached_reqs
        for index, req_id in enumerate(cached.req_ids):
            claim = self._claims.get(req_id)
            if claim is None:
                continue
            before = cached.num_computed_tokens[index]
            blocks = cached.new_block_ids[index]
            if req_id in cached.resumed_req_ids:
                claim.blocks, claim.told = _single_group(blocks) if blocks is not None else array("i"), 0
            else:
                if before < min(claim.told, claim.order.seq_len):
                    # Tokens taken for final are computed again: another connector's load has failed.
                    self._close(claim, "recomputed")
                if blocks is not None:
                    claim.blocks.extend(_single_group(blocks))
            self._advance(claim, before + scheduled.get(req_id, 0), progress)

        plan = StepPlan(
            opened=tuple(opened),
            closed=self._closed,
            preempted=frozenset(preempted),
            progress=tuple(progress),
            ended=frozenset(self._ended),
            refused=tuple(refused),
        )
        self._closed = {}
        self._ended = set()
        return plan

    def finished(self, req_id: str, aborted: bool) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended. Returns whether its blocks must be kept until the worker reports it, and
        what the answer says of its handoff."""
        refusal = self._refusals.pop(req_id, None)
        if refusal is not None:
            return False, {"tilert_handoff": {"error": refusal.code, "message": str(refusal)}}
        claim = self._claims.pop(req_id, None)
        if claim is None:
            return False, None
        if aborted:
            self._close(claim, ErrorCode.CANCELLED)
        elif claim.told < claim.order.seq_len:
            self._close(claim, "prefill_incomplete")
        self._ended.add(req_id)
        about = {"rid": claim.order.rid, "seq_len": claim.order.seq_len}
        return True, {"tilert_handoff": about | ({"error": claim.closed} if claim.closed else {})}

    def _preempt(self, output: Any) -> set[str]:
        gone = getattr(output, "preempted_req_ids", None) or ()
        preempted = {req_id for req_id in gone if req_id in self._claims}
        for req_id in preempted:
            self._claims[req_id].blocks, self._claims[req_id].told = array("i"), 0
        return preempted

    def _claim(self, new: Any, opened: list[Order], refused: list[str]) -> _Claim | None:
        extra = getattr(new.sampling_params, "extra_args", None)
        params = extra.get("kv_transfer_params") if isinstance(extra, Mapping) else None
        if not claims(params) or new.req_id in self._refusals:
            return None
        assert isinstance(params, Mapping)
        try:
            order = self._order(new, params)
        except Refused as error:
            self._refusals[new.req_id] = error
            refused.append(error.code)
            logger.warning("handoff of request %s refused: %s: %s", new.req_id, error.code, error)
            return None
        opened.append(order)
        claim = self._claims[new.req_id] = _Claim(order, array("i"))
        return claim

    def _order(self, new: Any, params: Mapping[str, Any]) -> Order:
        """What the request's parameters ask for. Raises Refused."""
        try:
            host = check_host(params["tilert_host"])
            port = check_port(params.get("tilert_ctrl_port", CONTROL_PORT))
        except ValueError as error:
            raise Refused(ErrorCode.BAD_REQUEST, str(error)) from None
        if not self._config.allowed_hosts.allows(host):
            raise Refused(HOST_NOT_ALLOWED, f"{host} is not one of tilert_allowed_hosts")
        rid = params.get("tilert_rid")
        if not is_rid(rid):
            raise Refused(ErrorCode.BAD_REQUEST, "tilert_rid: expected 32 lower-case hex digits")
        if any(claim.order.rid == rid for claim in self._claims.values()):
            raise Refused(ErrorCode.RID_REUSED, f"rid {rid} is already being handed off")
        generation = params.get("tilert_generation")
        if generation is not None and (isinstance(generation, bool) or not isinstance(generation, int)):
            raise Refused(ErrorCode.BAD_REQUEST, "tilert_generation: expected a whole number")
        tokens = new.prompt_token_ids
        if not tokens:
            raise Refused(ErrorCode.BAD_REQUEST, "a prompt given as embeddings cannot be handed off")
        if getattr(new, "mm_features", None) or getattr(new, "lora_request", None) is not None:
            raise Refused(ErrorCode.BAD_REQUEST, "images, audio and LoRA adapters cannot be handed off")
        if len(tokens) > self._config.max_seq_len:
            raise Refused(
                ErrorCode.SEQ_LEN_EXCEEDED,
                f"the prompt's {len(tokens)} tokens exceed tilert_max_seq_len = {self._config.max_seq_len}",
            )
        return Order(new.req_id, str(rid), generation, host, port, len(tokens), int(tokens[-1]))

    def _advance(self, claim: _Claim, computed: int, progress: list[Progress]) -> None:
        """Note that `computed` tokens are final after this step, and pass it on.

        Steps that make nothing more final are passed on too: a worker that waits for staging memory may
        read a running request's blocks only in a step that names them.
        """
        if claim.closed is None:
            claim.told = min(computed, claim.order.seq_len)
            progress.append(Progress(claim.order.req_id, claim.told, claim.blocks[:]))

    def _close(self, claim: _Claim, reason: str) -> None:
        if claim.closed is None:
            claim.closed = reason
            self._closed[claim.order.req_id] = reason


def _single_group(block_ids: Sequence[Sequence[int]]) -> array[int]:
    """The blocks of the only cache group (the worker refuses caches with several at start)."""
    return array("i", block_ids[0])

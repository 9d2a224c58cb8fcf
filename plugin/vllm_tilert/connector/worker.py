"""The worker side: gathers what each step made final into staging memory and passes it on.

Everything here runs on one thread (see `steps`) and never waits for the network. When the staging pool is
full a handoff keeps its place, and its request keeps its blocks, until a piece is free or
`tilert_staging_wait_s` has passed.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from vllm_tilert.connector.config import ConfigError, ConnectorConfig
from vllm_tilert.connector.metrics import Counts
from vllm_tilert.connector.plan import Order, StepPlan
from vllm_tilert.connector.sender import THREADS, Handoff, Link, Segment
from vllm_tilert.profiles.base import Completion, Gatherer, get_profile
from vllm_tilert.profiles.layout import Layout
from vllm_tilert.staging import StagingPool
from vllm_tilert.transports import Transport, make_transport
from vllm_tilert.wire.api import ErrorCode

logger = logging.getLogger(f"vllm.{__name__}")  # below vLLM's logger, whose handler and level it takes

STAGING_FULL: Final = "staging_full"
GATHER_FAILED: Final = "gather_failed"
SENDER_RANK: Final = 0
"""The latent cache is the same on every tensor-parallel rank, so one rank sends."""
_SHARES: Final = 4
"""A segment takes at most this fraction of the pool, so that several handoffs are in flight."""


@dataclass
class _Outgoing:
    """A handoff as this side sees it: `gathered` of `computed` tokens are staged."""

    handoff: Handoff
    gathered: int = 0
    computed: int = 0
    blocks: array[int] = field(default_factory=lambda: array("i"))
    final: Any = None  # the event behind which `computed` tokens are in the cache
    closed: bool = False
    waiting_since: float | None = None
    gathers: list[Completion] = field(default_factory=list)

    def copying(self) -> bool:
        """Whether a gather may still read the request's blocks."""
        self.gathers = [gather for gather in self.gathers if not gather.done()]
        return bool(self.gathers)

    def complete(self) -> bool:
        """Whether no more will be read from the request's blocks."""
        everything = self.gathered == self.handoff.order.seq_len
        return (everything or self.closed or self.handoff.failed) and not self.copying()


class HandoffWorker:
    """One rank's worker side. Ranks that do not send only report requests as they end."""

    def __init__(self, config: ConnectorConfig, rank: int) -> None:
        self._config = config
        self._rank = rank
        self._counts = Counts()
        self._outgoing: dict[str, _Outgoing] = {}
        self._ended: set[str] = set()
        self._sending: set[Handoff] = set()
        self._link: Link | None = None
        self._gatherer: Gatherer | None = None
        self._pool: StagingPool | None = None

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take vLLM's caches: derive the layout, allocate and register staging, start the transport.

        Raises ProfileError, StagingError, ConfigError or TransportUnavailable, each naming the remedy.
        """
        if self._rank != SENDER_RANK:
            return
        config = self._config
        profile = get_profile(config.profile)
        layout = profile.layout_from_caches(kv_caches)
        self._gatherer = profile.gatherer(kv_caches, layout)
        device = next(iter(kv_caches.values())).device
        self._check_staging(layout)
        self._pool = StagingPool(config.staging_bytes, device)
        THREADS.warm()
        transport = make_transport(config.transport, config.protocol, config.rdma_devices)
        transport.init(config.local_host)
        transport.register(self._pool.buffer.data_ptr(), self._pool.capacity, str(device))
        self._link = Link(
            transport=transport,
            layout=layout,
            rank=self._rank,
            secret=config.secret,
            admission_timeout_s=config.admission_timeout_s,
            send_timeout_s=config.send_timeout_s,
            # On a GPU computing them costs, so the node is asked.
            checksum=True if config.checksum is None and device.type == "cpu" else config.checksum,
        )
        logger.info(
            "TileRT handoff ready: %s, %s over %s from %s, %d staging bytes on %s, checksums %s",
            layout,
            config.transport,
            config.protocol,
            config.local_host,
            config.staging_bytes,
            device,
            {True: "on", False: "off", None: "where the node wants them"}[self._link.checksum],
        )

    def _check_staging(self, layout: Layout) -> None:
        least = _SHARES * layout.segment_bytes(layout.page)
        if self._config.staging_bytes < least:
            raise ConfigError(
                "tilert_staging_bytes",
                self._config.staging_bytes,
                f"at least {least} are needed for this model, and "
                f"{layout.segment_bytes(self._config.max_seq_len)} hold one longest prompt",
            )

    @property
    def transport(self) -> Transport | None:
        """The transport in use; None before `register` and on ranks that do not send."""
        return self._link.transport if self._link else None

    def preempting(self, plan: StepPlan) -> None:
        """Before preempted requests' blocks are reused: let the gathers that read them end."""
        for req_id in plan.preempted:
            outgoing = self._outgoing.get(req_id)
            if outgoing is not None:
                for gather in outgoing.gathers:
                    gather.wait()
                outgoing.gathers.clear()
                outgoing.blocks, outgoing.computed, outgoing.waiting_since = array("i"), 0, None

    def before_forward(self, plan: StepPlan) -> None:
        """Open the step's new handoffs, so that admission runs beside the forward; close those given up."""
        self.preempting(plan)
        for reason in plan.refused:
            self._counts.refuse(reason)
        for order in plan.opened:
            self._open(order)
        for req_id, reason in plan.closed.items():
            outgoing = self._outgoing.get(req_id)
            if outgoing is not None:
                self._close(outgoing, reason, "the request ended before its prompt was computed")

    def _open(self, order: Order) -> None:
        if self._link is None:
            return
        handoff = Handoff(order, self._link, self._counts.report)
        self._outgoing[order.req_id] = _Outgoing(handoff)
        self._sending = {other for other in self._sending if other.alive}
        self._sending.add(handoff)
        handoff.start()

    def after_forward(self, plan: StepPlan, final: Any = None) -> None:
        """Gather what the step made final, in the order the handoffs were opened.

        `final` is the CUDA event behind which it is; None: what the calling thread's stream holds so far.
        """
        for progress in plan.progress:
            outgoing = self._outgoing.get(progress.req_id)
            if outgoing is not None:
                outgoing.computed, outgoing.blocks = progress.computed, progress.blocks
                outgoing.final = final
        named = {progress.req_id for progress in plan.progress}
        for req_id, outgoing in self._outgoing.items():
            # A request that is neither in this step nor ended may have lost its blocks.
            if req_id in named or req_id in self._ended:
                self._pump(outgoing)

    def finished(self, plan: StepPlan) -> set[str]:
        """Requests whose blocks may be freed now: ended, and nothing reads them any more."""
        self._ended |= plan.ended
        done = set()
        for req_id in self._ended:
            outgoing = self._outgoing.get(req_id)
            if outgoing is not None:
                if plan.ended.isdisjoint({req_id}):
                    self._pump(outgoing)
                if not outgoing.complete():
                    continue
                del self._outgoing[req_id]
            done.add(req_id)
        self._ended -= done
        return done

    def _pump(self, outgoing: _Outgoing) -> None:
        """Stage as much of what is final as there is room for. Never raises, never blocks."""
        order = outgoing.handoff.order
        try:
            while not outgoing.closed and not outgoing.handoff.failed:
                stop = self._stop(outgoing)
                if stop <= outgoing.gathered:
                    return
                if not self._gather(outgoing, stop):
                    self._wait(outgoing)
                    return
        except Exception as error:
            logger.exception("handoff %s: cannot gather", order.rid)
            self._close(outgoing, GATHER_FAILED, type(error).__name__)

    def _stop(self, outgoing: _Outgoing) -> int:
        """Where the next segment ends: whole pages only, but for the prompt's last tokens."""
        assert self._link is not None
        assert self._pool is not None
        layout, start = self._link.layout, outgoing.gathered
        stop = outgoing.computed
        if stop < outgoing.handoff.order.seq_len:
            stop -= stop % layout.page
        if stop > start and layout.segment_bytes(stop - start) > self._pool.capacity // _SHARES:
            pages = self._pool.capacity // _SHARES // layout.segment_bytes(layout.page)
            stop = start + pages * layout.page
        return stop

    def _gather(self, outgoing: _Outgoing, stop: int) -> bool:
        """Gather tokens up to `stop` into a piece and put it; False while the pool has no room."""
        assert self._link is not None
        assert self._pool is not None
        assert self._gatherer is not None
        start = outgoing.gathered
        piece = self._pool.try_take(self._link.layout.segment_bytes(stop - start))
        if piece is None:
            return False
        began = time.monotonic()
        try:
            tensor = piece.tensor
            completion = self._gatherer.gather(outgoing.blocks, start, stop, tensor, after=outgoing.final)
        except BaseException:
            piece.release()
            raise
        ended = time.monotonic()
        self._staged(tensor)
        outgoing.gathers.append(completion)
        outgoing.handoff.put(Segment(start, stop - start, piece, completion, ended - began, ended))
        outgoing.gathered, outgoing.waiting_since = stop, None
        return True

    def _staged(self, segment: torch.Tensor) -> None:
        """Called with each gathered segment before it is sent; a seam for fault tests, which corrupt it."""

    def _wait(self, outgoing: _Outgoing) -> None:
        """Note that the pool is full, and give up once that has lasted too long."""
        now = time.monotonic()
        if outgoing.waiting_since is None:
            outgoing.waiting_since = now
        elif now - outgoing.waiting_since > self._config.staging_wait_s:
            self._close(
                outgoing,
                STAGING_FULL,
                f"no room in tilert_staging_bytes = {self._config.staging_bytes} for "
                f"{self._config.staging_wait_s:.1f} s",
            )

    @staticmethod
    def _close(outgoing: _Outgoing, code: str, message: str) -> None:
        outgoing.closed = True
        outgoing.handoff.abort(code, message)

    def drain_counts(self) -> dict[str, Any] | None:
        """What was counted since the last call, or None."""
        if self._pool is not None:
            self._counts.staging(self._pool.in_use)
        return self._counts.drain()

    def close(self) -> None:
        """Give up what is under way, wait for it shortly, and let go of the transport."""
        for outgoing in self._outgoing.values():
            self._close(outgoing, ErrorCode.CANCELLED, "the prefill host is shutting down")
        limit = time.monotonic() + 5.0
        ended = [handoff.join(max(0.0, limit - time.monotonic())) for handoff in self._sending]
        if self._link is not None and all(ended):
            self._link.transport.close()
        self._link = None

"""One decode node: its slots, their memory, the engine's turns, and what time decides."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

import torch

from vllm_tilert import checksum
from vllm_tilert.decode.engines.base import Decoded, Engine, ReceivedState, Sampling
from vllm_tilert.decode.landing import LandingZone
from vllm_tilert.decode.metrics import Metrics
from vllm_tilert.decode.signal import Signal
from vllm_tilert.decode.slots import Handoff, Limits, Outcome, Refused, Slots
from vllm_tilert.profiles.base import Profile
from vllm_tilert.profiles.layout import Layout
from vllm_tilert.transports.base import Transport
from vllm_tilert.wire.api import ErrorCode

log = logging.getLogger(__name__)
T = TypeVar("T")

STALL_S: Final = 120.0
"""An engine that returns nothing for this long is given up, and the process with it."""
CHECK_EVERY_S: Final = 2.0
"""A self-check's result is reused this long, so that watching the node does not slow it down."""


@dataclass(frozen=True)
class End:
    """The last item of a decode's queue."""

    decoded: Decoded | None
    error: Refused | None = None


@dataclass(frozen=True, eq=False)
class Turn:
    """A handoff that has the engine, since when, and its injection on the engine's thread."""

    handoff: Handoff
    began: float
    injected: Future[None]


@dataclass(eq=False)
class Decode:
    """One decode call: what was asked, and the queue its tokens leave by."""

    first_token_id: int
    max_tokens: int
    sampling: Sampling
    tokens: asyncio.Queue[list[int] | End] = field(default_factory=asyncio.Queue)
    cancel: threading.Event = field(default_factory=threading.Event)
    opened: bool = False
    sent: int = 0
    """Tokens that have left."""


class Node:
    """See the module. Everything here runs on the event loop but what `_engine_thread` and
    `_convert_thread` are given.

    What arrives for an engine that takes bytes is landed in it at once: whole segments while more come, if
    the engine is free and the handoff next, and the rest the moment the state is complete. That happens on
    the event loop, whose thread knows first; a landing is queued there and waited for on the engine's thread.
    """

    def __init__(
        self,
        *,
        slots: int,
        max_seq_len: int,
        layout: Layout,
        profile: Profile,
        engine: Callable[[], Engine],
        transport: Transport,
        device: str = "cpu",
        limits: Limits = Limits(),  # noqa: B008 (frozen)
        verify_checksums: bool = True,
        engine_name: str = "reference",
        allow_stock_senders: bool = False,
    ) -> None:
        self.engine_name = engine_name
        self.stuck = False
        self._checked: tuple[float, str | None] = (-CHECK_EVERY_S, None)
        self.layout, self.profile, self.transport = layout, profile, transport
        self.max_seq_len = max_seq_len
        self.verify_checksums = verify_checksums
        self.signal = Signal()
        self.metrics = Metrics(self)
        self.slots = Slots(slots, time.monotonic, limits, self._slots_changed, self.metrics.ended)
        self._decodes: dict[str, Decode] = {}
        # TileRT and CUDA tie state to a thread, so the engine is built and used on one of its own;
        # conversion has another, so that a request is received and converted while one decodes.
        self._engine_thread = ThreadPoolExecutor(1, "engine")
        self._convert_thread = ThreadPoolExecutor(1, "convert")
        self.slot_bytes = layout.segment_bytes(max_seq_len)
        self.memory = torch.zeros((slots, self.slot_bytes), dtype=torch.uint8, device=device)
        transport.register(self.memory.data_ptr(), self.memory.numel(), device)
        self.landing: LandingZone | None = None
        if allow_stock_senders:
            quarantine = limits.transfer + limits.grace
            self.landing = LandingZone(profile, layout, max_seq_len, device, quarantine, time.monotonic)
            region = self.landing.memory
            transport.register(region.data_ptr(), region.numel(), device)
        self._engine_factory = engine
        self._engine: Engine | None = None
        self._turn: Turn | None = None
        self._last_sign = time.monotonic()
        self.broken: str | None = "the engine has not started"

    # ---- life

    async def start(self) -> None:
        """Build the engine and check it. Raises what the engine raises."""
        self._engine = await self._on_engine(self._engine_factory)
        if self._engine.max_seq_len < self.max_seq_len:
            raise ValueError(
                f"--max-seq-len is {self.max_seq_len}, but the engine's window is {self._engine.max_seq_len}"
            )
        await self._on_engine(self._engine.self_check)
        self.broken = None

    async def run(self) -> None:
        """Serve the engine's turns and the clock until cancelled, or until the engine breaks."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._serve_engine())
            group.create_task(self._serve_clock())
            group.create_task(self._serve_watch())

    def abort(self) -> None:
        """Give every request up: the engine returns at its next token."""
        for handoff in self.slots.alive():
            self.slots.end(handoff, ErrorCode.CANCELLED, "the node stops")
        for decode in self._decodes.values():
            decode.cancel.set()

    def close(self) -> None:
        """Stop the threads; nothing may be running on the engine."""
        self._engine_thread.shutdown(wait=True, cancel_futures=True)
        self._convert_thread.shutdown(wait=True, cancel_futures=True)
        self.transport.close()

    async def check(self) -> str | None:
        """Why the node is unhealthy, or None. An idle engine computes something to find out."""
        if self.broken:
            return self.broken
        if self.slots.engine is not None or self._engine is None:
            return None  # at work: `_serve_watch` sees to it that it gives signs
        at, reason = self._checked
        if time.monotonic() - at >= CHECK_EVERY_S:
            reason = None
            try:
                await asyncio.wait_for(asyncio.shield(self._on_engine(self._engine.self_check)), STALL_S)
            except Exception as error:
                reason = f"the engine's self-check failed: {error}"
            self._checked = (time.monotonic(), reason)
        return reason

    # ---- what the receiver does with a slot

    def address(self, handoff: Handoff) -> int:
        """Where the handoff's slot begins in registered memory."""
        return self.memory.data_ptr() + handoff.slot * self.slot_bytes

    async def accept_segment(self, handoff: Handoff, tokens: int, sums: Sequence[int] | None) -> None:
        """A segment that is not the last was written whole: verify it and let the engine have it. If it is not
        as it was sent the handoff ends."""
        if not self.slots.check_begins(handoff):
            return
        if sums is not None:
            slot, segments = self.memory[handoff.slot], [*handoff.arrived, tokens]
            verify = partial(self._verify, slot, segments, {len(handoff.arrived): sums})
            try:
                await self._on_convert(handoff, verify)
            except Refused:
                return
        self.slots.arrive(handoff, tokens)

    async def accept_state(
        self,
        handoff: Handoff,
        segments: Sequence[int],
        sums: Sequence[Sequence[int]] | None,
        landed: LandingZone | None = None,
    ) -> None:
        """The sender is done: verify and convert what arrived in the slot, or in the zone where it has
        `landed`. Raises Refused, with the slot given back."""
        if not self.slots.writer_done(handoff):
            handoff.check()
        slot = self.memory[handoff.slot]
        start = time.perf_counter()
        state: Any
        if landed is not None:
            state = await self._on_convert(handoff, partial(landed.convert, sum(segments)))
        elif sums is None and self._takes_bytes:  # nothing to do that is worth a thread
            state = ReceivedState(slot, self.layout, tuple(segments))
        else:
            rest = {n: sums[n] for n in range(len(handoff.arrived), len(segments))} if sums else {}
            work = partial(self._verify_and_convert, slot, list(segments), rest)
            state = await self._on_convert(handoff, work)
        handoff.timing_ms["convert"] = 1e3 * (time.perf_counter() - start)
        self.slots.converted(handoff, state)
        handoff.check()

    async def _on_convert(self, handoff: Handoff, work: Callable[[], T]) -> T:
        """Do `work` on the thread for it. Raises Refused, with the handoff ended."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._convert_thread, work)
        except Refused as error:
            self.slots.convert_failed(handoff, error.code, error.message)
            raise Refused(error.code, error.message, handoff.rid) from None
        except Exception as error:
            log.exception("conversion failed", extra={"rid": handoff.rid})
            message = f"conversion failed: {error}"
            self.slots.convert_failed(handoff, ErrorCode.ENGINE_FAILED, message)
            raise Refused(ErrorCode.ENGINE_FAILED, message, handoff.rid) from None

    def _verify_and_convert(
        self, slot: torch.Tensor, segments: list[int], sums: Mapping[int, Sequence[int]]
    ) -> Any:
        self._verify(slot, segments, sums)
        if self._takes_bytes:
            return ReceivedState(slot, self.layout, tuple(segments))
        return self.profile.convert(slot, self.layout, segments)

    def _verify(self, slot: torch.Tensor, segments: Sequence[int], sums: Mapping[int, Sequence[int]]) -> None:
        """Compare the segments of which there are checksums, by their numbers. Raises Refused."""
        for number, expected in sums.items():
            tokens, first = segments[number], sum(segments[:number])
            segment = slot[self.layout.offset(first) :][: self.layout.segment_bytes(tokens)]
            got = checksum.plane_checksums(segment, self.layout, tokens)
            for plane, mine, theirs in zip(self.layout.planes, got, expected, strict=True):
                if mine != theirs:
                    raise Refused(
                        ErrorCode.CHECKSUM_MISMATCH,
                        f"plane {plane.name} of segment {number} (tokens {first} to {first + tokens - 1}) "
                        "did not arrive as it was sent",
                    )

    @property
    def _takes_bytes(self) -> bool:
        """Whether the engine reads the slot itself: it is the handoff's until the engine has let go of it."""
        return self._engine is not None and self._engine.takes_bytes

    # ---- decode calls

    def attach(self, rid: str, decode: Decode, timeout_s: float) -> Handoff:
        """Register a decode call. Raises Refused. Its tokens and its end arrive in `decode.tokens`."""
        if self.broken:
            raise Refused(ErrorCode.ENGINE_FAILED, self.broken, rid)
        handoff = self.slots.find(rid)
        if handoff is not None and handoff.facts.get("seq_len", 0) >= self.max_seq_len:
            raise Refused(
                ErrorCode.SEQ_LEN_EXCEEDED, f"the prompt fills the window of {self.max_seq_len} tokens", rid
            )
        handoff = self.slots.attach(rid, timeout_s)
        self._decodes[rid] = decode
        self.signal.notify()
        return handoff

    def remaining(self, handoff: Handoff) -> int | None:
        """Tokens of the request still to come at most; None before its decode call."""
        decode = self._decodes.get(handoff.rid)
        return None if decode is None else max(decode.max_tokens - decode.sent, 0)

    def detach(self, handoff: Handoff) -> None:
        """The decode call is over, for whatever reason; a request that still runs is given up."""
        self.slots.end(handoff, ErrorCode.CANCELLED, "the caller went away")
        if self.slots.engine is not handoff:  # else the engine's turn ends it and forgets the call
            self._decodes.pop(handoff.rid, None)

    def _slots_changed(self) -> None:
        engine = self.slots.engine
        if engine is not None and engine.over and engine.rid in self._decodes:
            self._decodes[engine.rid].cancel.set()
        self._start_turn()
        self.signal.notify()

    # ---- the engine's turns

    def _start_turn(self) -> None:
        """Give the engine to the handoff whose turn it is, if it can begin.

        Its landing is queued here and now: a thread that had to be woken for it would wait until this one is
        done with whatever else there is to do.
        """
        if self.broken or (handoff := self.slots.start_engine()) is None:
            return
        began, engine, state = time.perf_counter(), self._engine, handoff.state
        assert engine is not None
        handoff.state = None
        work = partial(engine.inject, state, handoff.last_prompt_token)
        if isinstance(state, ReceivedState):
            try:
                engine.land(state, handoff.landed)
            except Exception as error:
                work = partial(_throw, error)
        self._turn = Turn(handoff, began, self._engine_thread.submit(work))

    async def _serve_engine(self) -> None:
        while True:
            work: Turn | Handoff = await self.signal.until(self._next_work)
            if isinstance(work, Handoff):
                await self._land_ahead(work)
                continue
            self._turn = None
            await self._take_turn(work)
            if self.broken:
                raise RuntimeError(f"the engine is broken: {self.broken}")

    def _next_work(self) -> Turn | Handoff | None:
        """What the engine is to do: a turn, or a handoff of which some may be landed ahead of its turn."""
        return self._turn or (self.slots.start_landing() if self._takes_bytes else None)

    async def _land_ahead(self, handoff: Handoff) -> None:
        state = ReceivedState(self.memory[handoff.slot], self.layout, handoff.arrived)
        first, engine = handoff.landed, self._engine
        assert engine is not None

        def land() -> None:
            engine.land(state, first)
            engine.settle()

        try:
            await self._on_engine(land)
        except Exception as error:
            log.exception("the engine failed", extra={"rid": handoff.rid})
            self.slots.end(handoff, ErrorCode.ENGINE_FAILED, f"the engine failed: {error}")
        self.slots.land_ended(handoff, len(state.segments))

    async def _take_turn(self, turn: Turn) -> None:
        handoff = turn.handoff
        decode = self._decodes[handoff.rid]
        engine = self._engine
        assert engine is not None
        loop = asyncio.get_running_loop()
        decoded: Decoded | None = None
        error: Refused | None = None

        def on_tokens(burst: list[int]) -> None:  # on the engine's thread
            decode.sent += len(burst)
            self._last_sign = time.monotonic()
            loop.call_soon_threadsafe(decode.tokens.put_nowait, burst)

        self._last_sign = time.monotonic()
        try:
            await asyncio.wrap_future(turn.injected)
            handoff.timing_ms["inject"] = 1e3 * (time.perf_counter() - turn.began)
            handoff.check()
            decode.opened = True
            self.signal.notify()
            start = time.perf_counter()
            decoded = await self._on_engine(
                lambda: engine.decode(
                    decode.first_token_id, decode.max_tokens, decode.sampling, on_tokens, decode.cancel
                )
            )
            handoff.timing_ms["decode"] = 1e3 * (time.perf_counter() - start)
            if decoded.finish_reason == "cancelled":
                decoded = None
                error = Refused(ErrorCode.CANCELLED, "the request was cancelled", handoff.rid)
        except Refused as refused:
            error = refused
        except Exception as failure:
            log.exception("the engine failed", extra={"rid": handoff.rid})
            error = Refused(ErrorCode.ENGINE_FAILED, f"the engine failed: {failure}", handoff.rid)
        try:
            await self._on_engine(engine.reset)
        except Exception as failure:
            log.exception("the engine cannot be reset")
            self.broken = f"the engine cannot be reset: {failure}"
        handoff.facts["n"] = decode.sent
        handoff.facts["finish_reason"] = decoded.finish_reason if decoded else None
        self._decodes.pop(handoff.rid, None)
        if decoded is not None:
            self.slots.engine_done(handoff, Outcome.DONE)
        else:
            assert error is not None
            self.slots.engine_done(handoff, error.code, error.message)
        self.metrics.decoded(handoff, decode.sent)
        decode.tokens.put_nowait(End(decoded, error))

    async def _serve_clock(self) -> None:
        while True:
            deadline = self.slots.next_deadline()
            await self.signal.changed(None if deadline is None else max(0.0, deadline - time.monotonic()))
            self.slots.expire()

    async def _serve_watch(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            if self.slots.engine is not None and time.monotonic() - self._last_sign > STALL_S:
                self.broken = f"the engine has given no sign for {STALL_S:g} s"
                self.stuck = True
                raise RuntimeError(self.broken)

    async def _on_engine(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._engine_thread, work)


def _throw(error: Exception) -> None:
    raise error

"""Who may write to, read from and decode out of each receive slot: a state machine without IO.

A `Handoff` is one request's stay in one slot. It is *over* once it has an outcome. What keeps the slot
after that is only what can still touch its memory, its *holds*: a writer that was admitted, the check and
conversion of what arrived, the engine. A slot is free exactly when it has no handoff that is alive or held,
so no sequence of events hands out a slot that someone could still write to.

Times are seconds of the injected monotonic clock. Nothing here blocks; `expire` applies what time alone
decides, and `next_deadline` says when to call it.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from vllm_tilert.wire.api import ASK_AGAIN_S, ErrorCode, SlotState

HISTORY: Final = 256
"""Ended handoffs that are remembered."""
MAX_TTL_S: Final = 600.0
WANTED_S: Final = 2.5 * ASK_AGAIN_S
"""Who was refused and has not asked again for so long has gone elsewhere."""


class Refused(Exception):
    """A request the node does not grant: the code and words of the answer."""

    def __init__(self, code: ErrorCode, message: str, rid: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.rid = rid


class Hold(enum.Flag):
    """What can still touch a slot's memory."""

    NONE = 0
    WRITER = enum.auto()
    CONVERT = enum.auto()
    LAND = enum.auto()
    ENGINE = enum.auto()


class Outcome(enum.StrEnum):
    """How a handoff ended, where it did not fail with an ErrorCode."""

    DONE = "done"
    EXPIRED = "expired"


@dataclass(frozen=True)
class Limits:
    """Bounds in seconds.

    reserve   a reservation for which neither a sender nor a decode call comes
    transfer  from a sender's admission to its Done; also the sender's own deadline for starting a write
    grace     added to `transfer` before a slot whose writer vanished is trusted again: the longest that
              a write started in time can take
    claim     a complete handoff for which no decode call comes
    """

    reserve: float = 30.0
    transfer: float = 60.0
    grace: float = 30.0
    claim: float = 30.0


@dataclass(eq=False)
class Handoff:
    """One request's stay in one slot. Only `Slots` changes it; the last four fields are its users'.

    `arrived` are the lengths in tokens of the segments that are known to be whole while more come; `landed` of
    them are in the engine, where nothing can be decoded from them before the handoff is `ready`.
    """

    rid: str
    slot: int
    generation: int
    order: int
    since: float
    expires: float | None
    holds: Hold = Hold.NONE
    outcome: Outcome | ErrorCode | None = None
    message: str = ""
    admitted: bool = False
    attached: bool = False
    ready: bool = False
    arrived: tuple[int, ...] = ()
    landed: int = 0
    writer_deadline: float | None = None
    state_deadline: float | None = None
    ended: float | None = None
    last_prompt_token: int = 0
    state: Any = None
    facts: dict[str, Any] = field(default_factory=dict)
    timing_ms: dict[str, float] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        """Whether it has an outcome; its slot may still be held."""
        return self.outcome is not None

    @property
    def shown(self) -> SlotState:
        """The state that the node reports for the slot."""
        if Hold.ENGINE in self.holds:
            return SlotState.DECODING
        if self.over:
            return SlotState.QUARANTINED if self.holds else SlotState.FREE
        if self.ready:
            return SlotState.READY
        return SlotState.RECEIVING if self.admitted else SlotState.RESERVED

    def check(self) -> None:
        """Raise Refused with the handoff's own reason if it is over."""
        if isinstance(self.outcome, ErrorCode):
            raise Refused(self.outcome, self.message, self.rid)
        if self.outcome is Outcome.EXPIRED:
            raise Refused(ErrorCode.NOT_RESERVED, self.message, self.rid)
        if self.outcome is Outcome.DONE:
            raise Refused(ErrorCode.RID_REUSED, f"{self.rid} was decoded already", self.rid)


class Slots:
    """The slots of one node and the order in which its engine serves them.

    `on_change` is called after every change, `on_end` once for each handoff when it gets its outcome.
    """

    def __init__(
        self,
        count: int,
        clock: Callable[[], float],
        limits: Limits = Limits(),
        on_change: Callable[[], None] = lambda: None,
        on_end: Callable[[Handoff], None] = lambda handoff: None,
    ) -> None:
        if count < 1:
            raise ValueError(f"slots is {count}: a node needs at least one")
        self.limits = limits
        self.draining = False
        self._clock = clock
        self._on_change = on_change
        self._on_end = on_end
        self._order = itertools.count()
        self._generation = [0] * count
        self._in_slot: list[Handoff | None] = [None] * count
        self._known: OrderedDict[str, Handoff] = OrderedDict()
        self._refused_at = -math.inf

    # ---- what there is

    def __len__(self) -> int:
        return len(self._in_slot)

    def __iter__(self) -> Iterator[Handoff | None]:
        """What is in each slot, in slot order; None where it is free."""
        return iter(self._in_slot)

    def generation(self, slot: int) -> int:
        """How many times the slot has been granted."""
        return self._generation[slot]

    @property
    def idle(self) -> bool:
        """Whether every slot is free."""
        return not any(self._in_slot)

    @property
    def engine(self) -> Handoff | None:
        """The handoff the engine is working for."""
        return next((h for h in self._in_slot if h and Hold.ENGINE in h.holds), None)

    @property
    def wanted(self) -> bool:
        """Whether somebody was refused a moment ago, and will ask again."""
        return self._clock() - self._refused_at < WANTED_S

    def find(self, rid: str) -> Handoff | None:
        """The handoff of `rid`, live or among the last ended."""
        return self._known.get(rid)

    def alive(self) -> list[Handoff]:
        """Handoffs that are not over, in the order of their grants: the order of the engine."""
        return sorted((h for h in self._in_slot if h and not h.over), key=lambda h: h.order)

    def drain(self, on: bool) -> None:
        """Grant no new reservation, or grant them again; what is there goes on."""
        self.draining = on
        self._changed()

    # ---- reservation and its end

    def reserve(self, rid: str, ttl_s: float | None = None, ahead: bool = False) -> Handoff:
        """Grant a slot to `rid`. Raises Refused: rid_reused, draining, busy.

        Without `ahead` only when the engine is this rid's at once; with it, behind others too.
        """
        if rid in self._known:
            raise Refused(ErrorCode.RID_REUSED, f"{rid} was reserved before; use a new rid", rid)
        if self.draining:
            raise Refused(ErrorCode.DRAINING, "the node is draining", rid)
        now = self._clock()
        slot = next((i for i, h in enumerate(self._in_slot) if h is None), None)
        taken = not ahead and (self.alive() or self.engine)
        if taken or slot is None:
            self._refused_at = now
            raise Refused(ErrorCode.BUSY, "the engine is taken" if taken else "no slot is free", rid)
        ttl = self.limits.reserve if ttl_s is None else min(ttl_s, MAX_TTL_S)
        self._generation[slot] += 1
        handoff = Handoff(rid, slot, self._generation[slot], next(self._order), now, now + ttl)
        self._in_slot[slot] = self._known[rid] = handoff
        self._changed()
        return handoff

    def end(self, handoff: Handoff, outcome: Outcome | ErrorCode, message: str = "") -> bool:
        """Give the request up, in any state. Returns whether it was alive; the first outcome stays."""
        if handoff.over:
            return False
        handoff.outcome, handoff.message = outcome, message or f"{handoff.rid}: {outcome.value}"
        handoff.expires = handoff.state_deadline = handoff.state = None
        handoff.ended = self._clock()
        self._on_end(handoff)
        self._release(handoff)
        return True

    # ---- the writer

    def admit(self, rid: str, generation: int) -> Handoff:
        """Let the sender of `rid` write until `limits.transfer` from now.

        Raises Refused: not_reserved (unknown, or another generation), rid_reused (it has a writer already),
        or the reason for which the handoff is over.
        """
        handoff = self._known.get(rid)
        if handoff is None:
            raise Refused(ErrorCode.NOT_RESERVED, f"{rid} holds no reservation here", rid)
        if generation != handoff.generation:
            raise Refused(
                ErrorCode.NOT_RESERVED, f"generation is {generation}: {rid} holds {handoff.generation}", rid
            )
        handoff.check()
        if handoff.admitted:
            raise Refused(ErrorCode.RID_REUSED, f"{rid} has a sender already", rid)
        handoff.admitted = True
        handoff.holds |= Hold.WRITER
        handoff.writer_deadline = self._clock() + self.limits.transfer
        handoff.expires = None
        self._changed()
        return handoff

    def check_begins(self, handoff: Handoff) -> bool:
        """A segment was written whole. True: check it now, then call `arrive` or `convert_failed`."""
        if not handoff.over:
            handoff.holds |= Hold.CONVERT
        return not handoff.over

    def arrive(self, handoff: Handoff, tokens: int) -> None:
        """The next segment is as it was sent; nothing reads it any more."""
        handoff.holds &= ~Hold.CONVERT
        if not handoff.over:
            handoff.arrived += (tokens,)
        self._release(handoff)

    def writer_done(self, handoff: Handoff) -> bool:
        """The sender wrote its last byte. True: check and convert now, then call `converted`."""
        self._drop_writer(handoff)
        if not handoff.over:
            handoff.holds |= Hold.CONVERT
        self._release(handoff)
        return not handoff.over

    def writer_stopped(self, handoff: Handoff, message: str) -> None:
        """The sender says that it gave up and that no write of its is outstanding."""
        self._drop_writer(handoff)
        self.end(handoff, ErrorCode.HANDOFF_FAILED, message)
        self._release(handoff)

    def writer_vanished(self, handoff: Handoff, message: str) -> None:
        """The connection broke before Done: the slot stays held until no write can be under way."""
        self.end(handoff, ErrorCode.HANDOFF_FAILED, message)
        self._release(handoff)

    def converted(self, handoff: Handoff, state: Any) -> None:
        """What arrived is whole and converted to `state`; nothing reads the slot any more."""
        handoff.holds &= ~Hold.CONVERT
        if not handoff.over:
            handoff.state, handoff.ready, handoff.state_deadline = state, True, None
            if not handoff.attached:
                handoff.expires = self._clock() + self.limits.claim
        self._release(handoff)

    def convert_failed(self, handoff: Handoff, code: ErrorCode, message: str) -> None:
        """What arrived is not whole, or could not be converted; nothing reads the slot any more."""
        handoff.holds &= ~Hold.CONVERT
        self.end(handoff, code, message)
        self._release(handoff)

    # ---- the decode call and the engine

    def start_landing(self) -> Handoff | None:
        """The handoff whose turn is next, if the engine is free and more of it has arrived than has landed.

        The engine may then put what has `arrived` in place, and nothing else, until `land_ended`.
        """
        turn = self.alive()
        if self._taken or not turn or turn[0].ready or len(turn[0].arrived) <= turn[0].landed:
            return None
        turn[0].holds |= Hold.LAND
        return turn[0]

    def land_ended(self, handoff: Handoff, landed: int) -> None:
        """The first `landed` segments are in the engine, which reads nothing of the slot any more."""
        handoff.holds &= ~Hold.LAND
        handoff.landed = landed
        self._release(handoff)

    @property
    def _taken(self) -> bool:
        return any(h is not None and h.holds & (Hold.ENGINE | Hold.LAND) for h in self._in_slot)

    def attach(self, rid: str, timeout_s: float) -> Handoff:
        """A decode call came for `rid`; its state must be there `timeout_s` from now.

        Raises Refused: not_reserved, rid_reused (a second call), or the reason for which it is over.
        """
        handoff = self._known.get(rid)
        if handoff is None:
            raise Refused(ErrorCode.NOT_RESERVED, f"{rid} holds no reservation here", rid)
        if handoff.attached:
            raise Refused(ErrorCode.RID_REUSED, f"{rid} has a decode call already", rid)
        handoff.check()
        handoff.attached = True
        handoff.expires = None
        if not handoff.ready:
            handoff.state_deadline = self._clock() + timeout_s
        self._changed()
        return handoff

    def start_engine(self) -> Handoff | None:
        """Give the engine to the handoff whose turn it is, if the engine is free and it can begin."""
        turn = self.alive()
        if self._taken or not turn or not (turn[0].ready and turn[0].attached):
            return None
        turn[0].holds |= Hold.ENGINE
        self._changed()
        return turn[0]

    def engine_done(self, handoff: Handoff, outcome: Outcome | ErrorCode, message: str = "") -> None:
        """The engine has returned and keeps nothing of the request."""
        handoff.holds &= ~Hold.ENGINE
        self.end(handoff, outcome, message)
        self._release(handoff)

    # ---- time

    def expire(self) -> None:
        """Apply every deadline that has passed."""
        now = self._clock()
        for h in [h for h in self._in_slot if h]:
            if h.expires is not None and now >= h.expires:
                waited = "no decode call came" if h.ready else "neither a sender nor a decode call came"
                self.end(h, Outcome.EXPIRED, f"the reservation of {h.rid} expired: {waited}")
            if h.state_deadline is not None and now >= h.state_deadline:
                self.end(h, ErrorCode.KV_TRANSFER_TIMEOUT, f"the state of {h.rid} did not arrive in time")
            if h.writer_deadline is not None and now >= h.writer_deadline:
                self.end(h, ErrorCode.KV_TRANSFER_TIMEOUT, f"the sender of {h.rid} was not done in time")
                if now >= h.writer_deadline + self.limits.grace:
                    self._drop_writer(h)
                    self._release(h)

    def next_deadline(self) -> float | None:
        """The clock reading at which `expire` has something to do, if any."""
        times: list[float] = []
        for h in self._in_slot:
            if h is None:
                continue
            times += [t for t in (h.expires, h.state_deadline) if t is not None]
            if h.writer_deadline is not None:
                times.append(h.writer_deadline + (self.limits.grace if h.over else 0.0))
        return min(times, default=None)

    # ---- inside

    def _drop_writer(self, handoff: Handoff) -> None:
        handoff.holds &= ~Hold.WRITER
        handoff.writer_deadline = None

    def _release(self, handoff: Handoff) -> None:
        """Free the slot if the handoff is over and nothing holds it."""
        if handoff.over and not handoff.holds and self._in_slot[handoff.slot] is handoff:
            self._in_slot[handoff.slot] = None
            self._known.move_to_end(handoff.rid)
            while len(self._known) > HISTORY + len(self):
                oldest = next(iter(self._known))
                if self._known[oldest] in self._in_slot:
                    self._known.move_to_end(oldest)
                else:
                    del self._known[oldest]
        self._changed()

    def _changed(self) -> None:
        self._on_change()

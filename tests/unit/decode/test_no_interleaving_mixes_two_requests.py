"""Whatever senders, callers, the engine and time do, a slot is one request's, and is free again in the end."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_tilert.decode.slots import WANTED_S, Handoff, Hold, Limits, Outcome, Refused, Slots
from vllm_tilert.wire.api import ASK_AGAIN_S, ErrorCode, SlotState, new_rid

LIMITS = Limits(reserve=30, transfer=60, grace=30, claim=30)


class Interleavings(RuleBasedStateMachine):
    """`memory` is what each slot holds: the rids whose writers wrote to it since it was granted."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.slots = Slots(2, lambda: self.now, LIMITS)
        self.handoffs: list[Handoff] = []
        self.writers: list[tuple[Handoff, float]] = []  # admitted and not stopped; with their last moment
        self.memory: dict[int, str] = {}
        self.converting: list[Handoff] = []
        self.checking: list[Handoff] = []
        self.landing: Handoff | None = None
        self.engine: Handoff | None = None
        self.served: list[int] = []

    def pick(self, data: st.DataObject, of: list[Handoff]) -> Handoff:
        return data.draw(st.sampled_from(of))

    @rule(ahead=st.booleans())
    def reserve(self, ahead: bool) -> None:
        engine_taken = bool(self.slots.alive() or self.engine)
        before = [h for h in self.slots if h]
        try:
            handoff = self.slots.reserve(new_rid(), ahead=ahead)
        except Refused:
            assert len(before) == 2 or (not ahead and engine_taken)
            return
        assert ahead or not engine_taken
        # No admitted writer, conversion or engine can still touch what was just handed out.
        assert handoff.slot not in [h.slot for h, last in self.writers if self.now < last]
        assert handoff.slot not in [h.slot for h in (*self.converting, *self.checking)]
        assert self.landing is None or self.landing.slot != handoff.slot
        assert self.engine is None or self.engine.slot != handoff.slot
        self.memory.pop(handoff.slot, None)
        self.handoffs.append(handoff)

    def admitted(self, ahead: bool) -> Handoff | None:
        before = len(self.handoffs)
        self.reserve(ahead)
        if len(self.handoffs) == before:
            return None
        handoff = self.handoffs[-1]
        self.slots.admit(handoff.rid, handoff.generation)
        return handoff

    @rule(ahead=st.booleans(), attached=st.booleans())
    def a_whole_handoff(self, ahead: bool, attached: bool) -> None:
        """The ordinary course, so that what comes after it is reached often."""
        if handoff := self.admitted(ahead):
            self.memory[handoff.slot] = handoff.rid
            assert self.slots.writer_done(handoff)
            self.slots.converted(handoff, handoff.rid)
            if attached:
                self.slots.attach(handoff.rid, 20)

    @rule(ahead=st.booleans(), attached=st.booleans())
    def half_a_handoff(self, ahead: bool, attached: bool) -> None:
        if handoff := self.admitted(ahead):
            self.writers.append((handoff, self.now + LIMITS.transfer + LIMITS.grace))
            assert self.slots.check_begins(handoff)
            self.slots.arrive(handoff, 64)
            if attached:
                self.slots.attach(handoff.rid, 20)

    @precondition(lambda self: self.handoffs)
    @rule(data=st.data())
    def reuse_of_a_rid(self, data: st.DataObject) -> None:
        with pytest.raises(Refused) as refused:
            self.slots.reserve(self.pick(data, self.handoffs).rid, ahead=True)
        assert refused.value.code == ErrorCode.RID_REUSED

    @precondition(lambda self: self.handoffs)
    @rule(data=st.data(), off=st.sampled_from([0, 0, 0, -1, 1]))
    def admit(self, data: st.DataObject, off: int) -> None:
        handoff = self.pick(data, self.handoffs)
        fresh = not handoff.over and not handoff.admitted and off == 0
        try:
            self.slots.admit(handoff.rid, handoff.generation + off)
        except Refused:
            assert not fresh
            return
        assert fresh
        self.writers.append((handoff, self.now + LIMITS.transfer + LIMITS.grace))

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        handoff, last = data.draw(st.sampled_from(self.writers))
        if self.now < last:
            in_slot = list(self.slots)[handoff.slot]
            assert in_slot is handoff  # else it writes into another request's slot
            self.memory[handoff.slot] = handoff.rid

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), how=st.sampled_from(["done", "stopped", "vanished"]))
    def writer_ends(self, data: st.DataObject, how: str) -> None:
        writer = data.draw(st.sampled_from(self.writers))
        handoff = writer[0]
        if handoff in self.checking:  # what it says next is not read yet
            return
        if how == "vanished":  # its last write may still be under way: it stays in `writers`
            self.slots.writer_vanished(handoff, "gone")
            return
        self.writers.remove(writer)
        if how == "stopped":
            self.slots.writer_stopped(handoff, "aborted")
        elif self.slots.writer_done(handoff):
            assert self.memory.get(handoff.slot, handoff.rid) == handoff.rid
            self.converting.append(handoff)

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def segment_begins(self, data: st.DataObject) -> None:
        handoff, _ = data.draw(st.sampled_from(self.writers))
        if handoff not in self.checking and self.slots.check_begins(handoff):
            assert not handoff.over
            self.checking.append(handoff)

    @precondition(lambda self: self.checking)
    @rule(data=st.data(), whole=st.booleans())
    def segment_checked(self, data: st.DataObject, whole: bool) -> None:
        handoff = self.pick(data, self.checking)
        self.checking.remove(handoff)
        before = handoff.arrived
        if whole:
            self.slots.arrive(handoff, 64)
        else:
            self.slots.convert_failed(handoff, ErrorCode.CHECKSUM_MISMATCH, "not whole")
        assert handoff.arrived == ((*before, 64) if whole and not handoff.over else before)

    @rule()
    def start_landing(self) -> None:
        handoff = self.slots.start_landing()
        if handoff is None:
            return
        assert self.landing is None
        assert self.engine is None
        assert handoff is self.slots.alive()[0]
        assert not handoff.ready
        assert handoff.landed < len(handoff.arrived)
        self.landing = handoff

    @precondition(lambda self: self.landing)
    @rule()
    def landing_ends(self) -> None:
        assert self.landing is not None
        self.slots.land_ended(self.landing, len(self.landing.arrived))
        self.landing = None

    @precondition(lambda self: self.converting)
    @rule(data=st.data(), whole=st.booleans())
    def converted(self, data: st.DataObject, whole: bool) -> None:
        handoff = self.pick(data, self.converting)
        self.converting.remove(handoff)
        if whole:
            self.slots.converted(handoff, handoff.rid)
        else:
            self.slots.convert_failed(handoff, ErrorCode.CHECKSUM_MISMATCH, "not whole")

    @precondition(lambda self: self.handoffs)
    @rule(data=st.data())
    def decode_call(self, data: st.DataObject) -> None:
        handoff = self.pick(data, self.handoffs)
        fresh = not handoff.over and not handoff.attached
        try:
            self.slots.attach(handoff.rid, 20)
        except Refused:
            assert not fresh
            return
        assert fresh

    @rule()
    def start_engine(self) -> None:
        handoff = self.slots.start_engine()
        if handoff is None:
            return
        assert self.engine is None
        assert self.landing is None
        assert not handoff.over
        assert handoff.attached
        assert handoff.state == handoff.rid
        assert all(handoff.order <= other.order for other in self.slots.alive())
        assert not self.served or handoff.order > self.served[-1]
        self.served.append(handoff.order)
        self.engine = handoff

    @precondition(lambda self: self.engine)
    @rule(outcome=st.sampled_from([Outcome.DONE, ErrorCode.ENGINE_FAILED]))
    def engine_ends(self, outcome: Outcome | ErrorCode) -> None:
        assert self.engine is not None
        self.slots.engine_done(self.engine, outcome)
        self.engine = None

    @precondition(lambda self: self.handoffs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.slots.end(self.pick(data, self.handoffs), ErrorCode.CANCELLED)

    @rule(seconds=st.sampled_from([1.0, 20.0, 31.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.slots.expire()

    @invariant()
    def a_held_slot_is_never_free(self) -> None:
        for handoff in self.handoffs:
            if handoff.holds:
                assert list(self.slots)[handoff.slot] is handoff
                assert handoff.shown is not SlotState.FREE

    @invariant()
    def nothing_is_kept_of_what_is_over(self) -> None:
        for handoff in self.handoffs:
            assert not (handoff.over and (handoff.state or handoff.expires or handoff.state_deadline))

    @invariant()
    def the_engine_is_one_requests(self) -> None:
        assert self.slots.engine is self.engine
        assert sum(Hold.ENGINE in h.holds for h in self.handoffs) <= 1

    def teardown(self) -> None:
        """With conversion and engine done, time alone frees every slot."""
        for handoff in self.checking:
            self.slots.arrive(handoff, 64)
        if self.landing is not None:
            self.slots.land_ended(self.landing, 0)
        for handoff in self.converting:
            self.slots.converted(handoff, handoff.rid)
        if self.engine is not None:
            self.slots.engine_done(self.engine, Outcome.DONE)
        while not self.slots.idle:
            running = self.slots.start_engine()
            if running is not None:
                self.slots.engine_done(running, Outcome.DONE)
                continue
            deadline = self.slots.next_deadline()
            assert deadline is not None
            assert deadline >= self.now
            self.now = deadline
            self.slots.expire()


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=150, stateful_step_count=40)


def test_a_vanished_writers_slot_is_kept_until_it_can_write_no_more() -> None:
    now = 0.0
    slots = Slots(1, lambda: now, LIMITS)
    handoff = slots.reserve(new_rid())
    slots.admit(handoff.rid, handoff.generation)
    now = 10.0
    slots.writer_vanished(handoff, "gone")
    for moment in (10.0, 60.0, 89.9):
        now = moment
        slots.expire()
        assert handoff.shown is SlotState.QUARANTINED
        with pytest.raises(Refused, match="no slot is free"):
            slots.reserve(new_rid(), ahead=True)
    assert slots.next_deadline() == 90.0
    now = 90.0
    slots.expire()
    assert slots.reserve(new_rid()).generation == handoff.generation + 1


def test_state_that_comes_after_the_end_is_let_go() -> None:
    slots = Slots(1, lambda: 0.0)
    handoff = slots.reserve(new_rid())
    slots.admit(handoff.rid, handoff.generation)
    assert slots.writer_done(handoff)
    slots.end(handoff, ErrorCode.CANCELLED)
    assert not slots.idle  # what is converted is read from the slot
    slots.converted(handoff, "state")
    assert (handoff.state, handoff.ready, slots.idle) == (None, False, True)


def test_draining_refuses_new_reservations_and_keeps_the_old() -> None:
    slots = Slots(2, lambda: 0.0)
    kept = slots.reserve(new_rid())
    slots.drain(True)
    with pytest.raises(Refused) as refused:
        slots.reserve(new_rid(), ahead=True)
    assert refused.value.code == ErrorCode.DRAINING
    slots.admit(kept.rid, kept.generation)
    slots.drain(False)
    slots.reserve(new_rid(), ahead=True)


def test_a_node_is_wanted_for_as_long_as_someone_who_was_refused_asks_again() -> None:
    now = 0.0
    slots = Slots(2, lambda: now)
    first = slots.reserve(new_rid())
    assert not slots.wanted
    with pytest.raises(Refused, match="reserved before"):
        slots.reserve(first.rid)
    assert not slots.wanted
    with pytest.raises(Refused, match="taken"):
        slots.reserve(new_rid())
    assert slots.wanted
    slots.reserve(new_rid(), ahead=True)
    assert slots.wanted  # whoever got this place, somebody was refused
    now = WANTED_S + 1
    assert not slots.wanted
    with pytest.raises(Refused, match="no slot is free"):
        slots.reserve(new_rid(), ahead=True)
    now += ASK_AGAIN_S
    assert slots.wanted

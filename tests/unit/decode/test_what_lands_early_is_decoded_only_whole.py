"""Segments land in the engine while more come. Whatever two requests, their writers, callers and the engine do in
between, the engine decodes each request from its own state, whole and as it was sent, or not at all."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from unit.connector.loop import LoopTransport
from vllm_tilert.checksum import plane_checksums
from vllm_tilert.decode.engines.base import Decoded, ReceivedState, Sampling
from vllm_tilert.decode.node import Decode, End, Node
from vllm_tilert.decode.slots import Handoff, Hold, Outcome, Refused
from vllm_tilert.profiles.base import get_profile
from vllm_tilert.profiles.layout import Layout, Plane
from vllm_tilert.wire.api import ErrorCode, new_rid

LAYOUT = Layout("mla", 1, "float32", layers=1, page=2, planes=(Plane("kv", 1, 8),))
SEGMENTS = (2, 4, 1)
TOKENS = sum(SEGMENTS)


class Engine:
    """Rows of a cache that outlive requests, as a real engine's do. It says what it would decode from."""

    takes_bytes, max_seq_len = True, TOKENS + 1

    def __init__(self) -> None:
        self.node: Node
        self.rows = [b"nobody's"] * TOKENS
        self.busy = False
        self.wrong: list[str] = []  # kept, since a node takes what an engine raises for a failed request
        self.landed: list[tuple[Handoff, int]] = []
        self.decoded: list[tuple[Handoff, list[bytes]]] = []

    def land(self, state: ReceivedState, first: int = 0) -> None:
        handoff = next(h for h in self.node.slots if h and self.node.address(h) == state.slot.data_ptr())
        if self.busy:
            self.wrong.append("it landed in the middle of another request's turn")
        if not handoff.over and handoff not in (self.node.slots.engine, self.node.slots.alive()[0]):
            self.wrong.append("it landed before its turn")
        self.landed.append((handoff, len(state.segments)))
        for token in range(sum(state.segments[:first]), state.seq_len):
            self.rows[token] = state.slot[8 * token :][:8].numpy().tobytes()

    def settle(self) -> None:
        pass

    def inject(self, state: Any, last_prompt_token: int) -> None:
        if state.segments != SEGMENTS or self.busy:
            self.wrong.append("half a prompt, or two at once")
        self.busy = True

    def decode(self, first: int, most: int, sampling: Any, on_tokens: Any, cancel: Any) -> Decoded:
        if cancel.is_set():
            return Decoded(0, "cancelled")
        assert self.node.slots.engine is not None
        self.decoded.append((self.node.slots.engine, list(self.rows)))
        on_tokens([first])
        return Decoded(1, "length")

    def reset(self) -> None:
        self.busy = False

    def self_check(self) -> None:
        pass


class Thread:
    """An executor whose work is done when the test says so."""

    def __init__(self) -> None:
        self.work: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.work.append((future, work, arguments))
        return future

    def step(self) -> None:
        future, work, arguments = self.work.popleft()
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work(*arguments))
        except Exception as error:
            future.set_exception(error)

    def shutdown(self, **_: Any) -> None:
        pass


class Sender:
    """A writer that was admitted. `wrong` is the segment whose bytes are not what it says they are."""

    def __init__(self, handoff: Handoff, wrong: int | None, memory: torch.Tensor) -> None:
        self.handoff, self.wrong, self._slot = handoff, wrong, memory[handoff.slot]
        self.written = self.said = 0
        self.saying: asyncio.Future[None] | None = None
        self.gone = False

    @property
    def marks(self) -> list[bytes]:
        """What its tokens' rows are to be."""
        return [f"{self.handoff.order:04d}{token:04d}".encode() for token in range(TOKENS)]

    @property
    def heard(self) -> bool:
        """Whether the node has looked at all it has said; until then it reads nothing more of it."""
        return self.saying is None or self.saying.done()

    def write(self) -> None:
        """The next segment; it does not wait for what the node thinks of the former."""
        first = sum(SEGMENTS[: self.written])
        for token in range(first, first + SEGMENTS[self.written]):
            self._slot[8 * token : 8 * token + 8] = self._slot.new_tensor(list(self.marks[token]))
        self.written += 1

    def sums(self) -> list[list[int]]:
        """The checksums it tells."""
        found, first = [], 0
        for number, tokens in enumerate(SEGMENTS):
            sent = self._slot.new_tensor(list(b"".join(self.marks[first : first + tokens])))
            found.append([plane + (number == self.wrong) for plane in plane_checksums(sent, LAYOUT, tokens)])
            first += tokens
        return found


class EarlyLanding(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.engine, self.on_engine, self.on_convert = Engine(), Thread(), Thread()
        self.node = self.engine.node = Node(
            slots=2,
            max_seq_len=TOKENS + 1,
            layout=LAYOUT,
            profile=get_profile("mla"),
            engine=lambda: self.engine,
            transport=LoopTransport(),
        )
        for thread in (self.node._engine_thread, self.node._convert_thread):
            thread.shutdown()
        self.node._engine_thread, self.node._convert_thread = self.on_engine, self.on_convert  # type: ignore
        starting = self.loop.create_task(self.node.start())
        while not starting.done():
            self.settle()
            if self.on_engine.work:
                self.on_engine.step()
        self.running = self.loop.create_task(self.node.run())
        self.senders: list[Sender] = []
        self.calls: list[tuple[Handoff, Decode]] = []
        self.settle()

    def settle(self) -> None:
        """Let the event loop do what it can."""
        for _ in range(12):
            self.loop.run_until_complete(asyncio.sleep(0))

    def pick(self, data: st.DataObject, ready: Callable[[Sender], bool]) -> Sender | None:
        found = [sender for sender in self.senders if not sender.gone and ready(sender)]
        return data.draw(st.sampled_from(found)) if found else None

    def say(self, sender: Sender) -> None:
        """Of the next segment that it is written."""
        sums, over, work = sender.sums(), sender.handoff.over, len(self.on_convert.work)
        if sender.said < len(SEGMENTS) - 1:
            say = self.node.accept_segment(sender.handoff, SEGMENTS[sender.said], sums[sender.said])
        else:
            say = self.node.accept_state(sender.handoff, SEGMENTS, sums)
            sender.gone = True
        sender.said += 1
        sender.saying = self.loop.create_task(say)
        self.settle()
        assert not over or len(self.on_convert.work) == work, "it looks at a slot that may be another's"

    def call(self, handoff: Handoff) -> None:
        call = Decode(7, 1, Sampling())
        self.node.attach(handoff.rid, call, 60)
        self.calls.append((handoff, call))
        self.settle()

    @rule(
        wrong=st.sampled_from([None, None, None, 0, 1, 2]),
        segments=st.integers(0, len(SEGMENTS)),
        attached=st.booleans(),
        keeps_up=st.booleans(),
    )
    def a_prompt_comes(self, wrong: int | None, segments: int, attached: bool, keeps_up: bool) -> None:
        """With so many segments, and an engine's thread that keeps up or not: the ordinary course, so that what
        comes after it is reached often."""
        try:
            handoff = self.node.slots.reserve(new_rid(), 60, ahead=True)
        except Refused:
            return
        self.node.slots.admit(handoff.rid, handoff.generation)
        handoff.facts |= {"seq_len": TOKENS, "bytes": 0}
        sender = Sender(handoff, wrong, self.node.memory)
        self.senders.append(sender)
        if attached:
            self.call(handoff)
        for _ in range(segments):
            sender.write()
            self.say(sender)
            while not sender.heard and self.on_convert.work:
                self.the_convert_thread_works()
            while keeps_up and self.on_engine.work:
                self.the_engine_works()
            if handoff.over:
                return

    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        """Also when the request has ended meanwhile: the writer does not know yet."""
        if sender := self.pick(data, lambda s: s.written < len(SEGMENTS)):
            assert list(self.node.slots)[sender.handoff.slot] is sender.handoff
            sender.write()

    @rule(data=st.data())
    def say_what_is_written(self, data: st.DataObject) -> None:
        if sender := self.pick(data, lambda s: s.said < s.written and s.heard):
            self.say(sender)

    @rule(data=st.data())
    def say_done_at_once(self, data: st.DataObject) -> None:
        """Without a word of what was written since the last, as a sender does that announces no segments."""
        if sender := self.pick(data, lambda s: s.heard):
            while sender.written < len(SEGMENTS):
                sender.write()
            sender.gone = True
            say = self.node.accept_state(sender.handoff, SEGMENTS, sender.sums())
            sender.saying = self.loop.create_task(say)
            self.settle()

    @rule(data=st.data(), vanished=st.sampled_from([False, False, True]))
    def the_writer_ends(self, data: st.DataObject, vanished: bool) -> None:
        if sender := self.pick(data, lambda s: s.heard):
            if vanished:  # its writes may still be under way: it goes on writing and says nothing more
                self.node.slots.writer_vanished(sender.handoff, "gone")
                sender.said = len(SEGMENTS)
                sender.saying = self.loop.create_future()
            else:
                self.node.slots.writer_stopped(sender.handoff, "given up")
                sender.gone = True
            self.settle()

    @rule(data=st.data())
    def decode_call(self, data: st.DataObject) -> None:
        waiting = [s.handoff for s in self.senders if not s.handoff.over and not s.handoff.attached]
        if waiting:
            self.call(data.draw(st.sampled_from(waiting)))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        alive = self.node.slots.alive()
        if alive:
            self.node.slots.end(data.draw(st.sampled_from(alive)), ErrorCode.CANCELLED)
            self.settle()

    @precondition(lambda self: self.on_engine.work)
    @rule()
    def the_engine_works(self) -> None:
        self.on_engine.step()
        self.settle()

    @precondition(lambda self: self.on_convert.work)
    @rule()
    def the_convert_thread_works(self) -> None:
        self.on_convert.step()
        self.settle()

    @invariant()
    def whoever_is_decoded_is_whole_and_its_own(self) -> None:
        senders = {sender.handoff.rid: sender for sender in self.senders}
        for handoff, rows in self.engine.decoded:
            sender = senders[handoff.rid]
            assert rows == sender.marks
            assert sender.wrong is None
        assert not self.running.done(), self.running
        assert self.engine.wrong == []

    @invariant()
    def whoever_says_done_was_decoded(self) -> None:
        served = {handoff.rid for handoff, _ in self.engine.decoded}
        assert all(s.handoff.rid in served for s in self.senders if s.handoff.outcome is Outcome.DONE)

    def teardown(self) -> None:
        """With the writers gone, everything ends, and no slot is kept but those of writers that vanished."""
        for sender in self.senders:
            if not sender.gone and sender.heard:
                self.node.slots.writer_stopped(sender.handoff, "given up")
        self.settle()
        self.node.abort()
        while self.on_engine.work or self.on_convert.work:
            for thread in (self.on_engine, self.on_convert):
                if thread.work:
                    thread.step()
            self.settle()
        for handoff in self.node.slots:
            assert handoff is None or handoff.holds is Hold.WRITER
        for _, call in self.calls:
            items = [call.tokens.get_nowait() for _ in range(call.tokens.qsize())]
            assert sum(isinstance(item, End) for item in items) <= 1
        self.running.cancel()
        told = [sender.saying for sender in self.senders if sender.saying is not None]
        self.loop.run_until_complete(
            asyncio.gather(self.running, *(t for t in told if t.done()), return_exceptions=True)
        )
        self.loop.close()


TestEarlyLanding = EarlyLanding.TestCase
TestEarlyLanding.settings = settings(max_examples=100, stateful_step_count=40)

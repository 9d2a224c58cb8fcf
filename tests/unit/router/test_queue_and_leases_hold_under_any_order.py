"""Any order of arrivals, departures, faults and time: nobody is lost or served twice, and no slot is left behind."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tilert_router.decode import TIMEOUT, UNREACHABLE, NodeError, Reservation
from tilert_router.leases import Bounds, Lease, NodeState, Pool
from tilert_router.queue import QUANTUM, FairQueue, QueueFull, Ticket
from vllm_tilert.decode.slots import WANTED_S

KEYS = st.sampled_from(["alice", "bob", "carol"])
LOOP = asyncio.new_event_loop()


def ticket(key: str, priority: int = 0, cost: int = 1) -> Ticket:
    return Ticket(key, priority, cost, math.inf, LOOP.create_future())


class QueueMachine(RuleBasedStateMachine):
    """Against a model: for each priority and key the tickets in order."""

    BOUND = 6

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue(self.BOUND)
        self.lines: dict[tuple[int, str], list[Ticket]] = defaultdict(list)
        self.taken: list[Ticket] = []

    def waiting(self) -> list[Ticket]:
        return [t for line in self.lines.values() for t in line]

    @rule(key=KEYS, priority=st.integers(-1, 1), cost=st.integers(1, 3 * QUANTUM))
    def push(self, key: str, priority: int, cost: int) -> None:
        new = ticket(key, priority, cost)
        try:
            self.queue.push(new)
        except QueueFull:
            assert len(self.waiting()) >= self.BOUND
        else:
            self.lines[priority, key].append(new)

    @rule()
    def pop(self) -> None:
        got = self.queue.pop()
        waiting = self.waiting()
        if got is None:
            assert not waiting
            return
        assert got.priority == min(t.priority for t in waiting)
        assert self.lines[got.priority, got.key].pop(0) is got
        self.taken.append(got)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def put_back(self, data: st.DataObject) -> None:
        back = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        self.queue.push_front(back)
        self.lines[back.priority, back.key].insert(0, back)
        if back.priority == min(t.priority for t in self.waiting()):
            assert self.queue.pop() is back
            self.queue.push_front(back)

    @precondition(lambda self: self.waiting())
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(self.waiting()))
        assert self.queue.discard(gone)
        assert not self.queue.discard(gone)
        self.lines[gone.priority, gone.key].remove(gone)

    @invariant()
    def the_count_is_right(self) -> None:
        assert len(self.queue) == len(self.waiting()) == sum(self.queue.depths().values())


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=60, stateful_step_count=40)


@given(costs=st.lists(st.tuples(st.integers(1, 2000), st.integers(1, 2000)), min_size=30, max_size=60))
def test_two_keys_that_always_wait_get_equal_shares(costs: list[tuple[int, int]]) -> None:
    queue = FairQueue(1000)
    for first, second in costs:
        queue.push(ticket("a", cost=first))
        queue.push(ticket("b", cost=second))
    served = {"a": 0, "b": 0}
    while all(queue.depths().get(key) for key in served):
        got = queue.pop()
        assert got is not None
        served[got.key] += got.cost
        # Never further apart than one turn and the largest request.
        assert abs(served["a"] - served["b"]) <= QUANTUM + 2 * 2000


# ---- leases


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes at once whenever everybody waits."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        real = self._selector.select

        def select(timeout: float | None = None) -> Any:
            self.now += timeout or 0.0
            return real(0)

        self._selector.select = select

    def time(self) -> float:
        return self.now


@dataclass
class SimNode:
    """A decode node's rules: slots in order of reservation, the first has the engine."""

    latency: float = 0.001
    fault: str = ""
    slots: dict[str, int | None] = field(default_factory=dict)
    """rid -> tokens still to come, where it decodes."""
    refused_at: float = -1.0
    granted: set[str] = field(default_factory=set)
    cancelled: set[str] = field(default_factory=set)

    async def act(self) -> None:
        await asyncio.sleep(self.latency)
        if self.fault == "dead":
            raise NodeError(UNREACHABLE)

    async def tell(self) -> None:
        await asyncio.sleep(self.latency)
        if self.fault in ("dead", "mute"):
            raise NodeError(TIMEOUT)

    async def reserve(self, rid: str, *, ahead: bool, ttl_s: float, timeout_s: float) -> Reservation:
        await self.act()
        if rid in self.cancelled or rid in self.granted:
            raise NodeError("rid_reused", status=409)
        if self.fault == "draining":
            raise NodeError("draining", status=503)
        now = asyncio.get_running_loop().time()
        if len(self.slots) >= (2 if ahead else 1):
            self.refused_at = now
            raise NodeError("busy", status=429)
        was_ahead, wanted = bool(self.slots), now - self.refused_at < WANTED_S
        self.slots[rid] = None
        self.granted.add(rid)
        await self.tell()
        return Reservation(rid, 0, len(self.granted), was_ahead, wanted)

    async def cancel(self, rid: str, timeout_s: float) -> bool:
        await self.act()
        known = rid in self.granted
        self.slots.pop(rid, None)
        self.cancelled.add(rid)
        await self.tell()
        return known

    async def status(self, timeout_s: float) -> dict[str, Any]:
        await self.act()
        slots: list[dict[str, Any]] = [
            {"slot": i, "state": "decoding" if left else "reserved", "rid": rid, "remaining": left}
            for i, (rid, left) in enumerate(self.slots.items())
        ]
        slots += [{"slot": i, "state": "free", "rid": None} for i in range(len(slots), 2)]
        status = {
            "status": "busy" if self.slots else "idle",
            "current_rid": next(iter(self.slots), None),
            "draining": self.fault == "draining",
            "slots": slots,
        }
        await self.tell()
        return status


class LeaseMachine(RuleBasedStateMachine):
    """Two routers on two nodes that fail, lose answers, restart and drain."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.nodes = [SimNode(), SimNode()]
        self.pools: list[Pool] = []
        self.waiting: list[asyncio.Task[Lease]] = []
        self.held: list[Lease] = []
        self.lost: set[str] = set()
        self.seen: set[str] = set()
        self.loop.run_until_complete(self._start())

    async def _start(self) -> None:
        for _ in range(2):
            pool = Pool(FairQueue(20), Bounds(reserve_s=1, cancel_s=2, ttl_s=1000))
            for i, node in enumerate(self.nodes):
                pool.add(f"d{i}", "127.0.0.1", 5556, node)
            self.pools.append(pool)
        await asyncio.sleep(0.1)

    def spend(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))
        for task in [t for t in self.waiting if t.done()]:
            self.waiting.remove(task)
            if not task.cancelled():
                lease = task.result()
                assert lease.rid not in self.seen, "one lease given twice"
                self.seen.add(lease.rid)
                self.held.append(lease)

    def node_of(self, lease: Lease) -> SimNode:
        return self.nodes[int(lease.node.name[1:])]

    @rule(pool=st.integers(0, 1), key=KEYS, priority=st.integers(0, 1), cost=st.sampled_from([1, 24, 1900]))
    def ask(self, pool: int, key: str, priority: int, cost: int) -> None:
        async def acquire() -> Lease:
            new = Ticket(key, priority, cost, math.inf, self.loop.create_future())
            return await self.pools[pool].acquire(new)

        if len(self.pools[pool].queue) < 20:
            self.waiting.append(self.loop.create_task(acquire()))
            self.spend(0)

    @rule(seconds=st.sampled_from([0.0005, 0.001, 0.0015, 0.01, 0.3, 3.0]))
    def pass_time(self, seconds: float) -> None:
        self.spend(seconds)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.waiting)).cancel()
        self.spend(0)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.held))
        if next(iter(self.node_of(lease).slots), None) == lease.rid:
            left = data.draw(st.sampled_from([3, 24, 1900]))
            self.node_of(lease).slots[lease.rid] = left
            lease.open(left)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), twice=st.booleans())
    def end(self, data: st.DataObject, twice: bool) -> None:
        lease = data.draw(st.sampled_from(self.held))
        self.held.remove(lease)
        node = self.node_of(lease)
        if lease.opened and lease.rid in node.slots:
            node.slots.pop(lease.rid)
            lease.finish()
        else:
            lease.abandon("test")
        if twice:
            lease.abandon("test")
            lease.finish()

    @rule(node=st.integers(0, 1), fault=st.sampled_from(["", "", "dead", "mute", "draining"]))
    def turn(self, node: int, fault: str) -> None:
        self.nodes[node].fault = fault

    @rule(node=st.integers(0, 1))
    def restart(self, node: int) -> None:
        self.lost |= self.nodes[node].slots.keys()
        self.nodes[node].slots.clear()

    @rule(node=st.integers(0, 1), latency=st.sampled_from([0.0, 0.001, 0.02]))
    def slow(self, node: int, latency: float) -> None:
        self.nodes[node].latency = latency

    @invariant()
    def every_lease_is_a_slot_that_the_node_holds_for_it(self) -> None:
        for lease in self.held:
            assert lease.rid in self.node_of(lease).slots or lease.rid in self.lost
            assert lease.node.leases.get(lease.rid) is lease

    @invariant()
    def nothing_is_asked_of_a_node_that_settles(self) -> None:
        for pool in self.pools:
            for node in pool.nodes.values():
                if node.state is NodeState.SETTLING:
                    assert not node.usable()

    def teardown(self) -> None:
        """Once the faults are over everybody is served, and then every slot is free."""
        for node in self.nodes:
            node.fault, node.latency = "", 0.001
        for _ in range(300):
            for lease in list(self.held):
                self.held.remove(lease)
                if lease.rid in self.node_of(lease).slots and not lease.settling:
                    self.node_of(lease).slots.pop(lease.rid)
                    lease.finish()
                else:
                    lease.abandon("test")
            self.spend(0.5)
            if not self.waiting and not self.held:
                break
        assert not self.waiting, "somebody waits for ever"
        self.spend(20)
        for pool in self.pools:
            assert len(pool.queue) == 0
            assert [node.state for node in pool.nodes.values()] == [NodeState.FREE] * 2
            assert not any(node.leases for node in pool.nodes.values())
        assert not any(node.slots for node in self.nodes)
        for pool in self.pools:
            self.loop.run_until_complete(pool.close())
        self.loop.close()


TestLeases = LeaseMachine.TestCase
TestLeases.settings = settings(max_examples=60, stateful_step_count=40)

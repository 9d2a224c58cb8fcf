"""Leases on decode nodes, and the dispatcher that gives them to waiting requests.

A node grants reservations; what is kept here are hints about when asking is worth while. Wrong hints
cost a refused call, never a double booking. A lease is released exactly once: by `finish` when the
node itself said the decode is done, or by `abandon`, which cancels on the node and waits until the
node no longer holds the rid. Until then the node counts as SETTLING and gets nothing new from here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Protocol

from tilert_router.decode import NodeError, Reservation
from tilert_router.queue import EXPECTED_TOKENS, FairQueue, Ticket
from vllm_tilert.wire import api
from vllm_tilert.wire.api import SlotState

log = logging.getLogger(__name__)

_FIRST_RETRY_S: Final = 0.002
_GIVE_WAY_S: Final = 2 * api.ASK_AGAIN_S
_PROBE_S: Final = 1.0
_DOWN_PROBE_S: Final = 0.25
_LONG_TOKENS: Final = 4 * EXPECTED_TOKENS
"""No answer is expected to take more: limits are often set far beyond what is used."""
_MUCH_SOONER: Final = 2
"""A node is free much sooner than another that has so many times its backlog."""
_SERVICE_WEIGHT: Final = 0.1
"""Of the newest service time in the running mean."""


class NodeState(StrEnum):
    """What a router shows for a node."""

    UNKNOWN = "UNKNOWN"
    FREE = "FREE"
    LEASED = "LEASED"
    AHEAD = "AHEAD"
    SETTLING = "SETTLING"
    DRAINING = "DRAINING"
    DOWN = "DOWN"


class Client(Protocol):
    """What the dispatcher needs of `decode.DecodeClient`."""

    async def reserve(self, rid: str, *, ahead: bool, ttl_s: float, timeout_s: float) -> Reservation: ...

    async def cancel(self, rid: str, timeout_s: float) -> bool: ...

    async def status(self, timeout_s: float) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Bounds:
    """Times of the dispatcher, in seconds."""

    reserve_s: float = 5
    cancel_s: float = 10
    ttl_s: float = 150
    """Life of a reservation that nothing has arrived for: longer than any prefill."""


@dataclass(slots=True, eq=False)
class Lease:
    """The right to one slot of `node`, and through it to the engine in turn."""

    node: Node
    rid: str
    remaining: int
    """Tokens that are still to come at most; before the decode leg is open, what the request was expected to take."""
    reservation: Reservation | None = None
    opened: bool = False
    """The decode leg is open: the engine is this lease's."""
    front: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once no earlier lease of this router is on the node."""
    settling: bool = False
    released: bool = False
    granted: float = 0.0
    prefilled: bool = False
    """A prefill has been sent, so that state may arrive."""

    def open(self, remaining: int) -> None:
        """The decode leg is open, with so many tokens to come: another request may line up behind it."""
        self.opened, self.remaining = True, remaining
        self.node.elsewhere = 0  # whatever was before it has ended
        self.node.pool._has_room_again(self.node)

    def finish(self) -> None:
        """The node said that this decode is done: it has freed the slot itself."""
        if not self.released and not self.settling:
            self.node.pool._release(self)

    def abandon(self, reason: str) -> None:
        """Give the lease up; the node is asked to cancel, in the background, until it confirms."""
        if not self.released and not self.settling:
            self.settling = True
            self.node.pool._settle(self, reason)


@dataclass(slots=True, eq=False)
class Node:
    """One decode node as this router sees it."""

    name: str
    host: str
    ctrl_port: int
    client: Client
    pool: Pool
    stock: bool = False
    known: bool = False
    down: bool = False
    draining: bool = False
    retired: bool = False
    """Removed from the configuration: takes nothing new, goes when its last lease has ended."""
    slots: int = 2
    max_seq_len: int | None = None
    busy_elsewhere: bool = False
    elsewhere: int = 0
    """Tokens that other routers' requests on it are expected to take, when it was last heard."""
    asking: bool = False
    retry_at: float = 0.0
    retry_s: float = _FIRST_RETRY_S
    wanted: bool = False
    """Another router was refused it before this one's last reservation: the next is that one's."""
    last_used: float = 0.0
    last_released: float = 0.0
    leases: dict[str, Lease] = field(default_factory=dict)
    fault: str = ""
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def state(self) -> NodeState:
        """The state to show."""
        if self.down:
            return NodeState.DOWN
        if not self.known:
            return NodeState.UNKNOWN
        if any(lease.settling for lease in self.leases.values()):
            return NodeState.SETTLING
        if self.draining or self.retired:
            return NodeState.DRAINING
        if len(self.leases) > 1:
            return NodeState.AHEAD
        return NodeState.LEASED if self.leases or self.busy_elsewhere else NodeState.FREE

    def describe(self) -> dict[str, Any]:
        """For the admin API."""
        return {
            "name": self.name,
            "state": self.state,
            "leases": [
                {"rid": x.rid, "open": x.opened, "settling": x.settling} for x in self.leases.values()
            ],
            "busy_elsewhere": self.busy_elsewhere,
            "slots": self.slots,
            "max_seq_len": self.max_seq_len,
            "fault": self.fault or None,
        }

    def serves(self) -> bool:
        """Whether requests may be given to it, now or as soon as it has room."""
        out = self.down or self.draining or self.retired
        return self.known and not out and not any(lease.settling for lease in self.leases.values())

    def usable(self) -> bool:
        """Whether a reservation may be asked for at all."""
        return self.serves() and not self.asking

    def backlog(self) -> int:
        """Tokens that are expected before a request that comes now would be decoded."""
        own = sum(min(lease.remaining, _LONG_TOKENS) for lease in self.leases.values())
        return own + (self.elsewhere or (EXPECTED_TOKENS if self.busy_elsewhere else 0))


class Pool:
    """All decode nodes and the queue in front of them."""

    def __init__(
        self,
        queue: FairQueue,
        bounds: Bounds,
        prefill_ahead: bool = True,
        mint: Callable[[], str] = api.new_rid,
        probe_s: float = _PROBE_S,
    ) -> None:
        self.queue = queue
        self.nodes: dict[str, Node] = {}
        self.prefill_ahead = prefill_ahead
        self._bounds = bounds
        self._mint = mint
        self._probe_s = probe_s
        self._tasks: set[asyncio.Task[Any]] = set()
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.service_s: float | None = None
        """Running mean of the time that one request keeps a node from the next; None before the first."""
        self._loop = asyncio.get_running_loop()
        self.on_gone: Callable[[], None] = lambda: None
        """Called after a retired node's last lease has ended."""

    # Nodes

    def add(self, name: str, host: str, ctrl_port: int, client: Client, stock: bool = False) -> Node:
        """Start to use a node; it is UNKNOWN until it has answered once."""
        node = Node(name, host, ctrl_port, client, self, stock, slots=1 if stock else 2)
        self.nodes[name] = node
        self._probes[name] = self._spawn(self._probe(node))
        return node

    def retire(self, name: str) -> None:
        """Stop to use a node; its leases end as they would have."""
        node = self.nodes[name]
        node.retired = True
        self._drop_if_gone(node)

    def restore(self, name: str) -> None:
        """Use a node again that was retired and still ends its leases; nothing otherwise."""
        self.nodes[name].retired = False
        self.kick()

    def _drop_if_gone(self, node: Node) -> None:
        if node.retired and not node.leases and self.nodes.get(node.name) is node:
            del self.nodes[node.name]
            self._probes.pop(node.name).cancel()
            self._loop.call_soon(self.on_gone)

    async def close(self) -> None:
        """Stop the background tasks; leases still held are left to the nodes' own time limits."""
        if self._timer:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Asking for a lease

    async def acquire(self, ticket: Ticket) -> Lease:
        """Wait for a lease. Raises QueueFull, or TimeoutError at the ticket's deadline.

        When the caller is cancelled it leaves the queue, or gives back what it was just granted.
        """
        ticket.enqueued = self._loop.time()
        # One that a node will take at once does not wait, so the bound is not for it.
        at_once = not len(self.queue) and self._choose(ticket.enqueued) is not None
        self.queue.push(ticket, bounded=not at_once)
        return await self._wait(ticket)

    async def reacquire(self, ticket: Ticket) -> Lease:
        """As `acquire` for one that was served and failed: it does not line up again."""
        ticket.future = self._loop.create_future()
        self.queue.push_front(ticket)
        return await self._wait(ticket)

    async def _wait(self, ticket: Ticket) -> Lease:
        self.kick()
        try:
            async with asyncio.timeout_at(ticket.deadline):
                lease: Lease = await ticket.future
                return lease
        except BaseException:
            self.queue.discard(ticket)
            if ticket.future.done() and not ticket.future.cancelled() and not ticket.future.exception():
                ticket.future.result().abandon("client gone")
            raise

    def kick(self) -> None:
        """Give waiting requests to nodes that may take one. Never blocks."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        while len(self.queue):
            now = self._loop.time()
            choice = self._choose(now)
            if choice is None:
                self._wake_at(now)
                return
            ticket = self.queue.pop()
            assert ticket is not None
            node, ahead = choice
            if node.name in ticket.avoid:
                other = self._choose(now, ticket.avoid)
                node, ahead = other or choice
            node.asking = True
            self._spawn(self._ask(node, ticket, ahead))

    def _choose(self, now: float, avoid: Iterable[str] = ()) -> tuple[Node, bool] | None:
        """The node to ask next, and whether to ask ahead.

        None also where one could be asked ahead, but another is expected to be free much sooner: a reservation
        is for good, and behind a long answer it would wait for all of that.
        """
        ready = [n for n in self.nodes.values() if n.usable() and n.retry_at <= now and n.name not in avoid]
        free = [n for n in ready if not n.leases and not n.busy_elsewhere]
        if free:
            return min(free, key=lambda n: n.last_used), False
        behind = [n for n in ready if self._has_room(n)]
        if not behind:
            return None
        node = min(behind, key=lambda n: (n.backlog(), n.last_used))
        return None if self._another_sooner(node, avoid) else (node, self.prefill_ahead and not node.stock)

    def _another_sooner(self, node: Node, avoid: Iterable[str]) -> bool:
        """Whether another node is expected to be free much sooner than `node`."""
        others = (n for n in self.nodes.values() if n.serves() and n.name not in avoid)
        return any(_MUCH_SOONER * n.backlog() < node.backlog() for n in others)

    def _has_room(self, node: Node) -> bool:
        """Whether a node that is busy may grant a reservation all the same."""
        if not node.leases:
            return True  # held by another router when last asked
        last = next(reversed(node.leases.values()))
        return self.prefill_ahead and last.opened and len(node.leases) < node.slots

    def _wake_at(self, now: float) -> None:
        times = [n.retry_at for n in self.nodes.values() if n.usable() and n.retry_at > now]
        if times:
            self._timer = self._loop.call_at(min(times), self.kick)

    async def _ask(self, node: Node, ticket: Ticket, ahead: bool) -> None:
        lease = Lease(node, self._mint(), ticket.cost)
        node.last_used = self._loop.time()
        try:
            if node.stock:
                reservation = Reservation(lease.rid, 0, 0, False)
            else:
                reservation = await node.client.reserve(
                    lease.rid, ahead=ahead, ttl_s=self._bounds.ttl_s, timeout_s=self._bounds.reserve_s
                )
            others = reservation.ahead and not node.leases
            if others:  # how long another router's request is, only the node knows
                node.elsewhere = _elsewhere(await node.client.status(self._bounds.reserve_s), {lease.rid})
        except NodeError as error:
            self._refused(node, lease, error)
            self._back(ticket)
        except BaseException:
            node.asking = False
            self._back(ticket)
            raise
        else:
            node.asking = False
            node.busy_elsewhere = False
            node.retry_s = _FIRST_RETRY_S
            elsewhere_sooner = others and self._another_sooner(node, ticket.avoid)
            lease.reservation = reservation
            lease.granted = self._loop.time()
            node.wanted = reservation.wanted
            if not node.leases:
                lease.front.set()
            node.leases[lease.rid] = lease
            if ticket.future.done():
                lease.abandon("client gone")
            elif elsewhere_sooner:
                lease.abandon("another node is free sooner")
                self._back(ticket)
            else:
                ticket.future.set_result(lease)
        self.kick()

    def expected_wait_s(self, ahead: int) -> float | None:
        """How long a request behind `ahead` waiting ones would wait at the observed pace; None when not known yet."""
        serving = [n for n in self.nodes.values() if n.known and not (n.down or n.draining or n.retired)]
        if not ahead and any(n.usable() and not n.leases and not n.busy_elsewhere for n in serving):
            return 0.0
        if self.service_s is None or not serving:
            return None
        return (ahead + 1) * self.service_s / len(serving)

    def _back(self, ticket: Ticket) -> None:
        if not ticket.future.done():
            self.queue.push_front(ticket)

    def _refused(self, node: Node, lease: Lease, error: NodeError) -> None:
        node.asking = False
        if error.code == api.ErrorCode.BUSY:
            node.busy_elsewhere = not node.leases
            node.retry_at = self._loop.time() + node.retry_s
            node.retry_s = min(node.retry_s * 2, api.ASK_AGAIN_S)
            return
        if error.code == api.ErrorCode.DRAINING:
            node.draining = True
            return
        self.mark_down(node, str(error))
        # The node may have granted it all the same.
        lease.abandon(f"reserve: {error}")

    # Releasing

    def _release(self, lease: Lease) -> None:
        assert not lease.released
        lease.released = True
        node = lease.node
        node.leases.pop(lease.rid, None)
        if lease.opened:
            now = self._loop.time()
            took = now - max(lease.granted, node.last_released)
            node.last_released = now
            mean = took if self.service_s is None else self.service_s
            self.service_s = mean + _SERVICE_WEIGHT * (took - mean)
        first = next(iter(node.leases.values()), None)
        if first is not None:
            first.front.set()
        node.retry_at = 0.0
        node.retry_s = _FIRST_RETRY_S
        if node.stock:
            node.known = False  # our gate opens again when the server itself says idle
            node.wake.set()
        self._drop_if_gone(node)
        self._has_room_again(node)

    def _has_room_again(self, node: Node) -> None:
        if (
            node.wanted
        ):  # whoever was refused asks again within this time; else the same router would win every time
            node.wanted = False
            node.retry_at = self._loop.time() + _GIVE_WAY_S
        self.kick()

    def _settle(self, lease: Lease, reason: str) -> None:
        lease.node.leases.setdefault(lease.rid, lease)
        log.info("lease abandoned", extra={"rid": lease.rid, "node": lease.node.name, "reason": reason})
        self._spawn(self._confirm_gone(lease))

    async def _confirm_gone(self, lease: Lease) -> None:
        node = lease.node
        deadline = self._loop.time() + self._bounds.cancel_s
        pause = 0.005
        while True:
            try:
                await node.client.cancel(lease.rid, self._bounds.cancel_s)
                if not holds(await node.client.status(self._bounds.cancel_s), lease.rid):
                    break
                fault = "does not let go of a cancelled request"
            except NodeError as error:
                fault = f"cancel: {error}"
            if self._loop.time() >= deadline and not node.down:
                self.mark_down(node, fault)
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.5)
        self._release(lease)

    # Health

    def mark_down(self, node: Node, fault: str) -> None:
        """Take a node out until it answers again."""
        if not node.down:
            log.warning("node down", extra={"node": node.name, "fault": fault})
        node.down, node.fault = True, fault
        node.wake.set()

    async def _probe(self, node: Node) -> None:
        while True:
            node.wake.clear()
            try:
                status = await node.client.status(self._bounds.reserve_s)
            except NodeError as error:
                self.mark_down(node, f"status: {error}")
                node.wake.clear()
            else:
                self._observe(node, status)
            quick = node.down or not node.known
            try:
                async with asyncio.timeout(_DOWN_PROBE_S if quick else self._probe_s):
                    await node.wake.wait()
            except TimeoutError:
                pass

    def _observe(self, node: Node, status: dict[str, Any]) -> None:
        was = node.state
        idle = status.get("status") == "idle"
        if not node.stock or idle:
            node.known = True
        if not any(lease.settling for lease in node.leases.values()):
            node.down, node.fault = False, ""
        node.draining = bool(status.get("draining"))
        slots = status.get("slots")
        if isinstance(slots, list) and slots:
            node.slots = len(slots)
        length = status.get("max_seq_len")
        node.max_seq_len = length if isinstance(length, int) else node.max_seq_len
        if not node.asking:
            node.elsewhere = _elsewhere(status, node.leases)
        if not node.leases and not node.asking:
            node.busy_elsewhere = not idle
            if idle:
                node.retry_at, node.retry_s = 0.0, _FIRST_RETRY_S
        if node.state is not was:
            log.info("node state", extra={"node": node.name, "from": was, "to": node.state})
            self.kick()


def _elsewhere(status: dict[str, Any], own: Container[str]) -> int:
    """Tokens that requests other than `own` are expected to take on a node, by its status."""
    slots = status.get("slots")
    expected = 0
    for slot in slots if isinstance(slots, list) else []:
        if slot.get("state") in (SlotState.FREE, SlotState.QUARANTINED) or slot.get("rid") in own:
            continue
        remaining = slot.get("remaining")
        expected += min(remaining, _LONG_TOKENS) if isinstance(remaining, int) else EXPECTED_TOKENS
    return expected


def holds(status: dict[str, Any], rid: str) -> bool:
    """Whether a node's status shows `rid` in a slot or in the engine.

    A quarantined slot no longer serves its rid: the node keeps it shut until no writer can reach it.
    """
    if status.get("current_rid") == rid:
        return True
    slots = status.get("slots")
    if not isinstance(slots, list):
        return status.get("status") != "idle"  # a stock server has one slot and no list
    return any(
        isinstance(s, dict) and s.get("rid") == rid and s.get("state") != api.SlotState.QUARANTINED
        for s in slots
    )

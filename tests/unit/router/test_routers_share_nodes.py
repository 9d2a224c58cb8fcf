"""Routers that share nodes know only their own leases; still nobody starves, and no short answer waits for a long one.

In virtual time, with the nodes' rules played: every run is the same.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest

from tilert_router.leases import Bounds, Lease, Pool
from tilert_router.queue import FairQueue, Ticket
from unit.router.test_queue_and_leases_hold_under_any_order import SimNode, VirtualLoop

RATE = 600
"""Tokens a second of an engine."""
PREFILL_S = 0.15


@dataclass
class Wait:
    """What became of one request."""

    pool: int
    tokens: int
    seconds: float
    """From asking to its first token."""


class World:
    """Nodes and the routers in front of them."""

    def __init__(self, nodes: int, routers: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.nodes = {f"d{n}": SimNode() for n in range(nodes)}
        self.pools = [Pool(FairQueue(1000), Bounds()) for _ in range(routers)]
        for pool in self.pools:
            for name, node in self.nodes.items():
                pool.add(name, "127.0.0.1", 5556, node)
        self.waits: list[Wait] = []

    async def ask(self, pool: int, tokens: int) -> None:
        """One request: lease, prefill, its turn, its tokens."""
        asked = self.loop.time()
        ticket = Ticket("k", 0, tokens, math.inf, self.loop.create_future())
        lease: Lease = await self.pools[pool].acquire(ticket)
        await asyncio.sleep(PREFILL_S)
        slots = self.nodes[lease.node.name].slots
        while next(iter(slots)) != lease.rid:
            await asyncio.sleep(0.001)
        lease.open(tokens)
        self.waits.append(Wait(pool, tokens, self.loop.time() - asked))
        while lease.remaining > 0:
            slots[lease.rid] = lease.remaining
            await asyncio.sleep(min(20, lease.remaining) / RATE)
            lease.remaining -= 20
        del slots[lease.rid]
        lease.finish()

    async def keep_asking(self, pool: int, tokens: int, until: float, pause_s: float = 0.0) -> None:
        """A client."""
        rng = random.Random(f"{pool} {tokens}")
        while self.loop.time() < until:
            await asyncio.sleep(pause_s * 2 * rng.random())
            await self.ask(pool, tokens)

    async def close(self) -> None:
        for pool in self.pools:
            await pool.close()


def run(story: Callable[[], Awaitable[None]]) -> None:
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(story())
    finally:
        loop.close()


@pytest.mark.parametrize(("nodes", "clients"), [(1, 2), (4, 8)])
def test_routers_that_want_the_same_nodes_take_turns(nodes: int, clients: int) -> None:
    async def story() -> None:
        world = World(nodes, routers=2)
        await asyncio.sleep(1)
        began = world.loop.time()
        await asyncio.gather(
            *(world.keep_asking(pool, 600, began + 40) for pool in (0, 1) for _ in range(clients))
        )
        took = world.loop.time() - began
        waits = [[w.seconds for w in world.waits if w.pool == pool] for pool in (0, 1)]
        # Fairly divided, everybody waits for as many answers as there are others for each node.
        assert max(map(max, waits)) <= 2 * (2 * clients / nodes)
        assert len(waits[0]) == pytest.approx(len(waits[1]), rel=0.15)
        # And that costs next to no time of the engines.
        assert 600 * len(world.waits) / RATE / nodes >= 0.93 * took
        await world.close()

    run(story)


def test_short_answers_do_not_wait_for_another_routers_long_one() -> None:
    async def story() -> None:
        world = World(nodes=2, routers=2)
        await asyncio.sleep(1)
        began = world.loop.time()
        long = asyncio.ensure_future(world.ask(0, 60 * RATE))
        await asyncio.gather(*(world.keep_asking(pool, 24, began + 40, pause_s=0.5) for pool in (0, 1)))
        short = [w.seconds for w in world.waits if w.tokens == 24]
        assert not long.done()
        assert len(short) > 80
        assert max(short) < 1
        await long
        await world.close()

    run(story)

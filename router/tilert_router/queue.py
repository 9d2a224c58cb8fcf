"""Who is served next: a bounded queue, fair between API keys, with priorities and deadlines.

Within a priority, keys take turns by deficit round robin over the cost of their requests (expected
tokens), so that a key with long answers does not get more of the engines than one with short ones.
A lower priority number goes first. No method blocks, and every one takes constant time apart from
the number of priorities in use.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Final

QUANTUM: Final = 512
"""Cost a key may spend a turn, in expected tokens."""

EXPECTED_TOKENS: Final = 512
"""What an answer is expected to take of which nothing is known."""

_serial = itertools.count()


class QueueFull(Exception):
    """The queue holds as many as it may."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One waiting request. `future` resolves when it is its turn (to what the dispatcher sets)."""

    key: str
    priority: int
    cost: int
    """Tokens of its answer, as far as they can be foreseen."""
    deadline: float
    """Loop time after which it no longer waits."""
    future: asyncio.Future[Any]
    enqueued: float = 0.0
    avoid: set[str] = field(default_factory=set)
    """Nodes that failed this request; others are preferred."""
    serial: int = field(default_factory=lambda: next(_serial))


class _Level:
    """One priority: keys in turn, each with its own line."""

    def __init__(self) -> None:
        self.lines: OrderedDict[str, OrderedDict[int, Ticket]] = OrderedDict()
        self.deficit: dict[str, float] = {}

    def pop(self) -> Ticket:
        while True:
            key, line = next(iter(self.lines.items()))
            ticket = next(iter(line.values()))
            if self.deficit[key] >= ticket.cost:
                self.deficit[key] -= ticket.cost
                self.remove(ticket)
                return ticket
            if len(self.lines) == 1:
                self.deficit[key] = ticket.cost  # alone, it need not save up
                continue
            self.deficit[key] += QUANTUM
            self.lines.move_to_end(key)

    def add(self, ticket: Ticket, front: bool) -> None:
        line = self.lines.get(ticket.key)
        if line is None:
            line = self.lines[ticket.key] = OrderedDict()
            self.deficit[ticket.key] = QUANTUM
        line[ticket.serial] = ticket
        if front:
            line.move_to_end(ticket.serial, last=False)
            self.lines.move_to_end(ticket.key, last=False)
            self.deficit[ticket.key] += ticket.cost

    def remove(self, ticket: Ticket) -> bool:
        line = self.lines.get(ticket.key)
        if line is None or line.pop(ticket.serial, None) is None:
            return False
        if not line:
            del self.lines[ticket.key]
            del self.deficit[ticket.key]  # an idle key saves nothing up
        return True


class FairQueue:
    """The waiting requests of one router."""

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self._levels: dict[int, _Level] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, ticket: Ticket, bounded: bool = True) -> None:
        """Add at the end of its key's line. Raises QueueFull, unless not `bounded`."""
        if bounded and self._size >= self.max_waiting:
            raise QueueFull
        self._add(ticket, front=False)

    def push_front(self, ticket: Ticket) -> None:
        """Put back one that was taken but not served; it is next, and the bound does not refuse it."""
        self._add(ticket, front=True)

    def _add(self, ticket: Ticket, front: bool) -> None:
        self._levels.setdefault(ticket.priority, _Level()).add(ticket, front)
        self._size += 1

    def pop(self) -> Ticket | None:
        """Take the next one, or None when nobody waits."""
        if not self._size:
            return None
        priority = min(self._levels)
        level = self._levels[priority]
        ticket = level.pop()
        self._size -= 1
        if not level.lines:
            del self._levels[priority]
        return ticket

    def discard(self, ticket: Ticket) -> bool:
        """Remove one that no longer waits; False when it is not in the queue."""
        level = self._levels.get(ticket.priority)
        if level is None or not level.remove(ticket):
            return False
        self._size -= 1
        if not level.lines:
            del self._levels[ticket.priority]
        return True

    def ahead(self, priority: int) -> int:
        """Waiting requests that a new one of this priority would not overtake."""
        return sum(
            len(line)
            for other, level in self._levels.items()
            if other <= priority
            for line in level.lines.values()
        )

    def depths(self) -> dict[str, int]:
        """Waiting requests of each key."""
        found: dict[str, int] = {}
        for level in self._levels.values():
            for key, line in level.lines.items():
                found[key] = found.get(key, 0) + len(line)
        return found

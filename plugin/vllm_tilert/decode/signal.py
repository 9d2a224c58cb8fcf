"""Waiting for a change of something that says when it has changed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Signal:
    """Wakes every coroutine that waits for a condition. Call `notify` on the event loop's thread."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Something has changed: every waiter looks again."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def changed(self, within: float | None = None) -> None:
        """Return at the next change, or after `within` seconds."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await asyncio.wait([waiter], timeout=within)
        finally:
            self._waiters.discard(waiter)

    async def until(self, condition: Callable[[], T | None]) -> T:
        """The first true result of `condition`, looked at now and after each change."""
        while True:
            if got := condition():
                return got
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)

"""Threads that wait for work: giving one a handoff takes microseconds of the forward thread, starting one a
tenth of a millisecond."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

SPARE: Final = 4
"""Threads that are kept when they have nothing to do."""


class Threads:
    """Runs each piece of work at once, on a thread that waits or on a new one. Daemon threads."""

    def __init__(self, spare: int = SPARE) -> None:
        self._spare = spare
        self._lock = threading.Lock()
        self._waiting = 0
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def warm(self) -> None:
        """Start as many as are kept."""
        while True:
            with self._lock:
                if self._waiting >= self._spare:
                    return
                self._waiting += 1
            self._start(None)

    def run(self, work: Callable[[], None]) -> None:
        """Run `work`, which must not raise, and return without waiting for it."""
        with self._lock:
            if taken := self._waiting > 0:
                self._waiting -= 1
        if taken:
            self._work.put(work)
        else:
            self._start(work)

    def _start(self, work: Callable[[], None] | None) -> None:
        threading.Thread(target=self._serve, args=(work,), name="handoff", daemon=True).start()

    def _serve(self, work: Callable[[], None] | None) -> None:
        while True:
            if work is not None:
                work()
                with self._lock:
                    if self._waiting >= self._spare:
                        return
                    self._waiting += 1
            work = self._work.get()

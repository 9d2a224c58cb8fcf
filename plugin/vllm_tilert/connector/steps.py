"""The forward thread's end of the worker side: it records an event, posts the step, and goes on.

A thread of its own runs the `HandoffWorker`, step by step in the order in which vLLM took them, so that
neither opening a handoff nor staging memory nor launching a gather costs the forward thread anything. What
must be over before vLLM goes on is waited for: blocks that a preemption takes away. All other blocks are kept
until `finished` reports their request, so a step that is looked at late still finds them as they were.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from queue import SimpleQueue
from typing import Final

import torch

from vllm_tilert.connector.plan import StepPlan
from vllm_tilert.connector.worker import HandoffWorker

logger = logging.getLogger(f"vllm.{__name__}")  # below vLLM's logger, whose handler and level it takes

CLOSE_S: Final = 10.0
"""How long a stop waits for the steps that are still to be looked at."""


class HandoffSteps:
    """The hooks of one `HandoffWorker`, for the forward thread. Nothing here waits but `preempting`."""

    def __init__(self, worker: HandoffWorker) -> None:
        self._worker = worker
        self._device: torch.device | None = None
        self._posted: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._done: set[str] = set()
        self._ending = 0  # requests that have ended and are not reported yet
        self._thread = threading.Thread(target=self._run, name="handoff-steps", daemon=True)

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """See HandoffWorker.register."""
        self._worker.register(kv_caches)
        device = next(iter(kv_caches.values())).device
        self._device = device if device.type == "cuda" else None
        self._thread.start()

    def preempting(self, plan: StepPlan) -> None:
        """Before preempted requests' blocks are reused: wait until nothing reads them any more."""
        if plan.preempted:
            over = threading.Event()
            self._posted.put(partial(self._preempt, plan, over))
            while not over.wait(1.0) and self._thread.is_alive():
                logger.warning("a preemption waits for the gathers that read the blocks it takes away")

    def _preempt(self, plan: StepPlan, over: threading.Event) -> None:
        try:
            self._worker.preempting(plan)
        finally:
            over.set()

    def before_forward(self, plan: StepPlan) -> None:
        """See HandoffWorker.before_forward."""
        self.preempting(plan)
        if plan.opened or plan.closed or plan.refused:
            self._posted.put(partial(self._worker.before_forward, plan))

    def after_forward(self, plan: StepPlan) -> None:
        """See HandoffWorker.after_forward: what the forward thread has queued so far is waited for."""
        if plan.progress or self._ending:
            event = None
            if self._device is not None and plan.progress:
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(torch.cuda.current_stream(self._device))
            self._posted.put(partial(self._worker.after_forward, plan, event))

    def finished(self, plan: StepPlan) -> set[str]:
        """See HandoffWorker.finished; a request may be reported a step later than it could be."""
        self._ending += len(plan.ended)
        if self._ending:
            self._posted.put(partial(self._finish, plan))
        with self._lock:
            done, self._done = self._done, set()
        self._ending -= len(done)
        return done

    def _finish(self, plan: StepPlan) -> None:
        done = self._worker.finished(plan)
        with self._lock:
            self._done |= done

    def close(self) -> None:
        """Look at what was posted, then see HandoffWorker.close."""
        if self._thread.is_alive():
            self._posted.put(None)
            self._thread.join(CLOSE_S)
        self._worker.close()

    def _run(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)
        while (work := self._posted.get()) is not None:
            try:
                work()
            except Exception:
                # The worker closes a handoff it cannot go on with; whatever else happens, the rest go on.
                logger.exception("a step of the handoffs failed")

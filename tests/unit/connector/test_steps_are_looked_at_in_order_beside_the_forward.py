"""The forward thread posts and goes on; a preemption alone waits, and nothing is lost or reordered."""

from __future__ import annotations

import threading
import time
from array import array

import pytest
import torch

from vllm_tilert.connector.plan import Order, Progress, StepPlan
from vllm_tilert.connector.steps import HandoffSteps

ORDER = Order("r", "0" * 32, 1, "127.0.0.1", 5556, 32, 7)


class Worker:
    """Writes down what it is called for; `gate` holds it up."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.held: set[str] = set()
        self.fails = False

    def register(self, kv_caches) -> None:
        self.calls.append("register")

    def _call(self, name: str) -> None:
        self.gate.wait(10)
        self.calls.append(name)
        if self.fails:
            raise RuntimeError("out of luck")

    def preempting(self, plan) -> None:
        self._call("preempting")

    def before_forward(self, plan) -> None:
        self._call("before")

    def after_forward(self, plan, final) -> None:
        self._call("after")

    def finished(self, plan) -> set[str]:
        self._call("finished")
        self.held |= plan.ended
        done, self.held = self.held, set()
        return done

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def worker():
    return Worker()


@pytest.fixture
def steps(worker):
    steps = HandoffSteps(worker)
    steps.register({"model.layers.0.self_attn.attn": torch.zeros(1)})
    yield steps
    worker.gate.set()
    steps.close()


def progress(computed: int) -> StepPlan:
    return StepPlan(progress=(Progress("r", computed, array("i", [1, 2])),))


def until(condition, within_s: float = 5.0) -> None:
    limit = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.001)


def test_the_forward_thread_does_not_wait(steps, worker) -> None:
    worker.gate.clear()
    began = time.monotonic()
    steps.before_forward(StepPlan(opened=(ORDER,)))
    steps.after_forward(progress(16))
    assert steps.finished(StepPlan()) == set()
    steps.after_forward(progress(32))
    assert steps.finished(StepPlan(ended=frozenset({"r"}))) == set()
    assert time.monotonic() - began < 1.0
    assert worker.calls == ["register"]
    worker.gate.set()
    until(lambda: len(worker.calls) == 5)
    assert worker.calls == ["register", "before", "after", "after", "finished"]


def test_a_request_is_reported_once_and_polling_ends(steps, worker) -> None:
    steps.after_forward(progress(32))
    reported = [steps.finished(StepPlan(ended=frozenset({"r"})))]
    limit = time.monotonic() + 5
    while not any(reported) and time.monotonic() < limit:
        time.sleep(0.001)
        reported.append(steps.finished(StepPlan()))
    assert [done for done in reported if done] == [{"r"}]
    until(lambda: worker.calls.count("finished") >= 1)
    time.sleep(0.05)
    calls = len(worker.calls)
    assert steps.finished(StepPlan()) == set()
    steps.after_forward(StepPlan())
    time.sleep(0.05)
    assert len(worker.calls) == calls  # nothing is under way, so nothing is posted


def test_a_preemption_waits_for_everything_before_it(steps, worker) -> None:
    worker.gate.clear()
    steps.after_forward(progress(16))
    threading.Timer(0.2, worker.gate.set).start()
    steps.preempting(StepPlan(preempted=frozenset({"r"})))
    assert worker.calls == ["register", "after", "preempting"]


def test_a_failing_step_stops_neither_the_others_nor_a_preemption(steps, worker) -> None:
    worker.fails = True
    steps.after_forward(progress(16))
    steps.preempting(StepPlan(preempted=frozenset({"r"})))
    worker.fails = False
    steps.after_forward(progress(32))
    until(lambda: worker.calls.count("after") == 2)


def test_a_stop_looks_at_what_was_posted_first(worker) -> None:
    steps = HandoffSteps(worker)
    steps.register({"model.layers.0.self_attn.attn": torch.zeros(1)})
    steps.after_forward(progress(16))
    steps.close()
    assert worker.calls == ["register", "after", "close"]

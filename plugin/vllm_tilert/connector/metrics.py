"""What a connector counts. Plain data that adds up across steps and workers."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

TIMES: Final = ("gather_s", "queue_s", "wire_s", "total_s")
"""Series of seconds, one value per finished handoff: staging and launching gathers, segments waiting for the
wire, writing, and everything from the opening to the verdict."""


@dataclass(frozen=True)
class HandoffReport:
    """How one handoff ended. `reason` is None for a success, else the code of the failure."""

    rid: str
    reason: str | None
    nbytes: int
    segments: int
    gather_s: float
    queue_s: float
    wire_s: float
    total_s: float


def empty() -> dict[str, Any]:
    """The counts of an interval in which nothing happened."""
    return {
        "handoffs": 0,
        "bytes": 0,
        "failures": {},
        "staging_bytes_in_use": 0,
        "staging_bytes_peak": 0,
        **{name: [] for name in TIMES},
    }


def add(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """The counts of two intervals or two workers together; `right` is the later one."""
    failures = dict(left["failures"])
    for reason, count in right["failures"].items():
        failures[reason] = failures.get(reason, 0) + count
    return {
        "handoffs": left["handoffs"] + right["handoffs"],
        "bytes": left["bytes"] + right["bytes"],
        "failures": failures,
        "staging_bytes_in_use": right["staging_bytes_in_use"],
        "staging_bytes_peak": max(left["staging_bytes_peak"], right["staging_bytes_peak"]),
        **{name: [*left[name], *right[name]] for name in TIMES},
    }


def is_empty(data: Mapping[str, Any]) -> bool:
    """Whether there is nothing to report."""
    return not data["handoffs"] and not data["failures"] and not data["staging_bytes_peak"]


def summary(data: Mapping[str, Any]) -> dict[str, int | float]:
    """A few numbers for vLLM's periodic log line."""
    found: dict[str, int | float] = {
        "Handoffs": data["handoffs"],
        "Handoff failures": sum(data["failures"].values()),
        "Handoff MB": round(data["bytes"] / 1e6, 3),
    }
    for name in TIMES:
        values = sorted(data[name])
        if values:
            found[f"Handoff {name.removesuffix('_s')} ms, median"] = round(values[len(values) // 2] * 1e3, 3)
    return found


class Counts:
    """Collects from sender threads; drained by the worker once a step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._data = empty()

    def report(self, report: HandoffReport) -> None:
        """Count a handoff that has ended."""
        with self._lock:
            if report.reason is not None:
                self._fail(report.reason)
                return
            self._data["handoffs"] += 1
            self._data["bytes"] += report.nbytes
            for name in TIMES:
                self._data[name].append(getattr(report, name))

    def refuse(self, reason: str) -> None:
        """Count a claim that was refused before anything was sent."""
        with self._lock:
            self._fail(reason)

    def _fail(self, reason: str) -> None:
        self._data["failures"][reason] = self._data["failures"].get(reason, 0) + 1

    def staging(self, in_use: int) -> None:
        """Note how many bytes of the staging pool are in use."""
        with self._lock:
            self._data["staging_bytes_in_use"] = in_use
            self._data["staging_bytes_peak"] = max(self._data["staging_bytes_peak"], in_use)

    def drain(self) -> dict[str, Any] | None:
        """The counts since the last call, or None when there are none."""
        with self._lock:
            if is_empty(self._data):
                return None
            data, self._data = self._data, empty()
            # The level lasts beyond the interval and is part of the next one's peak, so that a level which
            # has fallen to zero is reported once more.
            level = data["staging_bytes_in_use"]
            self._data["staging_bytes_in_use"] = self._data["staging_bytes_peak"] = level
            return data

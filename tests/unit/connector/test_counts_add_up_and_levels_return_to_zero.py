"""What the connector counts on its way to vLLM's metrics: nothing lost between steps, no level that stays up."""

from __future__ import annotations

from vllm_tilert.connector import metrics
from vllm_tilert.connector.metrics import Counts, HandoffReport


def report(reason: str | None = None, nbytes: int = 100) -> HandoffReport:
    return HandoffReport("0" * 32, reason, nbytes, 1, 0.1, 0.2, 0.3, 0.9)


def test_a_quiet_interval_reports_nothing() -> None:
    counts = Counts()
    counts.staging(0)
    assert counts.drain() is None


def test_a_level_is_reported_while_it_lasts_and_once_when_it_is_back_at_zero() -> None:
    counts = Counts()
    counts.staging(300)
    counts.staging(200)
    first = counts.drain()
    assert first is not None
    assert (first["staging_bytes_in_use"], first["staging_bytes_peak"]) == (200, 300)
    counts.staging(0)
    second = counts.drain()
    assert second is not None
    assert not metrics.is_empty(second)  # vLLM drops what says that it is empty
    assert second["staging_bytes_in_use"] == 0
    counts.staging(0)
    assert counts.drain() is None


def test_each_handoff_and_failure_is_reported_in_one_interval_only() -> None:
    counts = Counts()
    counts.report(report())
    counts.report(report("busy"))
    counts.refuse("host_not_allowed")
    first = counts.drain()
    assert first is not None
    assert (first["handoffs"], first["bytes"], first["wire_s"]) == (1, 100, [0.3])
    assert first["failures"] == {"busy": 1, "host_not_allowed": 1}
    assert counts.drain() is None
    counts.report(report(nbytes=7))
    second = counts.drain()
    assert second is not None
    both = metrics.add(first, second)
    assert (both["handoffs"], both["bytes"], both["total_s"]) == (2, 107, [0.9, 0.9])
    assert first["handoffs"] == 1, "adding changes neither"


def test_the_log_line_has_counts_and_medians() -> None:
    counts = Counts()
    for nbytes in (1_000_000, 2_000_000):
        counts.report(report(nbytes=nbytes))
    counts.report(report("busy"))
    line = metrics.summary(counts.drain() or {})
    assert (line["Handoffs"], line["Handoff failures"], line["Handoff MB"]) == (2, 1, 3.0)
    assert line["Handoff wire ms, median"] == 300.0

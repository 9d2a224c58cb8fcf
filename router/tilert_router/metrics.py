"""What a router counts, prefix `tilert_router_`, in a registry of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

from tilert_router.leases import NodeState, Pool

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counters and histograms; queue and nodes are read when scraped. `pool` gives the pool, once there is one."""

    def __init__(self, pool: Callable[[], Pool]) -> None:
        self._pool = pool
        self._registry = CollectorRegistry()
        registry = self._registry
        self.requests = Counter(
            "tilert_router_requests",
            "Requests that ended, by pool and outcome",
            ["pool", "outcome"],
            registry=registry,
        )
        self.retries = Counter(
            "tilert_router_retries",
            "Fresh attempts before the first token, by fault",
            ["fault"],
            registry=registry,
        )
        self.tokens = Counter(
            "tilert_router_tokens", "Tokens of answers from decode nodes", registry=registry
        )
        self.phase = Histogram(
            "tilert_router_phase_seconds",
            "Time in each phase: queue, prefill, handoff (first token to open decode leg), decode",
            ["phase"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.first_token = Histogram(
            "tilert_router_first_token_seconds", "Arrival to first chunk", buckets=_SECONDS, registry=registry
        )
        registry.register(self)

    def collect(self) -> Iterator[Any]:
        """Gauges read from queue and nodes as they are."""
        pool = self._pool()
        yield GaugeMetricFamily("tilert_router_waiting", "Requests in the queue", value=len(pool.queue))
        nodes = GaugeMetricFamily("tilert_router_nodes", "Decode nodes by state", labels=["state"])
        states = [node.state for node in pool.nodes.values()]
        for state in NodeState:
            nodes.add_metric([state], states.count(state))
        yield nodes

    def render(self) -> bytes:
        """Prometheus text."""
        return bytes(generate_latest(self._registry))

"""What a decode node counts, in a registry of its own (one per node)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

from vllm_tilert.decode.slots import Handoff
from vllm_tilert.wire.api import SlotState

if TYPE_CHECKING:
    from vllm_tilert.decode.node import Node

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """Counters and histograms, prefix `tilert_decode_`; slots and health are read when scraped."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._registry = CollectorRegistry()
        self._handoffs = Counter(
            "tilert_decode_handoffs", "Handoffs that ended, by outcome", ["outcome"], registry=self._registry
        )
        self._refused = Counter(
            "tilert_decode_refused",
            "Senders refused on the control port",
            ["reason"],
            registry=self._registry,
        )
        self._bytes = Counter("tilert_decode_received_bytes", "State received whole", registry=self._registry)
        self._tokens = Counter("tilert_decode_tokens", "Tokens handed out", registry=self._registry)
        self._phases = Histogram(
            "tilert_decode_phase_seconds",
            "Time of each phase: wire, convert, inject, decode",
            ["phase"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._registry.register(self)

    def refused(self, reason: str) -> None:
        """A control connection ended in a refusal."""
        self._refused.labels(str(reason)).inc()

    def received(self, handoff: Handoff) -> None:
        """A handoff's state has arrived whole."""
        self._bytes.inc(handoff.facts["bytes"])

    def decoded(self, handoff: Handoff, tokens: int) -> None:
        """The engine's turn is over."""
        self._tokens.inc(tokens)
        for phase, milliseconds in handoff.timing_ms.items():
            self._phases.labels(phase).observe(milliseconds / 1e3)

    def ended(self, handoff: Handoff) -> None:
        """A handoff has its outcome."""
        self._handoffs.labels(str(handoff.outcome)).inc()

    def collect(self) -> Iterator[Any]:
        """Gauges read from the node as it is."""
        slots = GaugeMetricFamily("tilert_decode_slots", "Receive slots by state", labels=["state"])
        shown = [h.shown if h else SlotState.FREE for h in self._node.slots]
        for state in SlotState:
            slots.add_metric([state], shown.count(state))
        yield slots
        yield GaugeMetricFamily(
            "tilert_decode_healthy",
            "1 unless the engine is known to be broken",
            value=0 if self._node.broken else 1,
        )
        yield GaugeMetricFamily(
            "tilert_decode_draining", "1 while draining", value=int(self._node.slots.draining)
        )

    def render(self) -> bytes:
        """Prometheus text."""
        return bytes(generate_latest(self._registry))

"""The seam of tracing: one trace a request, one span a phase. Without OpenTelemetry a client's context passes on."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Protocol

from tilert_router.config import ConfigError, Tracing

W3C: Final = ("traceparent", "tracestate")


class Trace(Protocol):
    """One request."""

    def phase(self, name: str, **attributes: str | int) -> AbstractContextManager[Mapping[str, str]]:
        """A span around queue, prefill, handoff or decode; yields the W3C headers for what is called in it."""
        ...

    def end(self, outcome: str, usage: Mapping[str, int] | None = None) -> None:
        """The request is over: its finish reason, or its status."""
        ...


class Tracer(Protocol):
    """Makes traces; one per process."""

    def request(self, headers: Mapping[str, str], kind: str, model: str) -> Trace:
        """A trace for a request, inside the client's own where `headers` name one."""
        ...

    def close(self) -> None:
        """Send what has not been sent."""
        ...


class Untraced:
    """No spans. As a trace it hands the client's own context on."""

    def __init__(self, headers: Mapping[str, str] | None = None) -> None:
        self._context = nullcontext(
            {name: headers[name] for name in W3C if name in headers} if headers else {}
        )

    def request(self, headers: Mapping[str, str], kind: str, model: str) -> Trace:
        """See `Tracer.request`."""
        return Untraced(headers)

    def phase(self, name: str, **attributes: str | int) -> AbstractContextManager[Mapping[str, str]]:
        """See `Trace.phase`."""
        return self._context

    def end(self, outcome: str, usage: Mapping[str, int] | None = None) -> None:
        """See `Trace.end`."""

    def close(self) -> None:
        """See `Tracer.close`."""


def load_tracer(config: Tracing) -> Tracer:
    """OpenTelemetry where an endpoint is configured. Raises ConfigError when it is not installed."""
    if config.endpoint is None:
        return Untraced()
    if any(
        importlib.util.find_spec(package) is None
        for package in ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter")
    ):
        raise ConfigError(
            "tracing.endpoint: needs OpenTelemetry; install vllm-tilert[router-tracing], or leave it out"
        )
    made: Tracer = importlib.import_module("tilert_router.otel").OtelTracer.of(config)
    return made

"""OpenTelemetry behind `tracing`; the only module that imports it. Spans carry names, counts and codes, never text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tilert_router.config import Tracing
from tilert_router.tracing import Trace

_W3C: Final = TraceContextTextMapPropagator()


class OtelTracer:
    """Traces into `provider`."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("tilert_router")

    @classmethod
    def of(cls, config: Tracing) -> OtelTracer:
        """Exports over OTLP/HTTP to the configured endpoint, in batches, from the SDK's own thread."""
        provider = TracerProvider(resource=Resource.create({"service.name": config.service_name}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=config.endpoint)))
        return cls(provider)

    def request(self, headers: Mapping[str, str], kind: str, model: str) -> Trace:
        """See `Tracer.request`."""
        parent = _W3C.extract({name.lower(): value for name, value in headers.items()})
        span = self._tracer.start_span(
            f"{kind} {model}",
            parent,
            SpanKind.SERVER,
            {"gen_ai.operation.name": kind, "gen_ai.request.model": model},
        )
        return OtelTrace(self._tracer, span)

    def close(self) -> None:
        """See `Tracer.close`."""
        self._provider.shutdown()


class OtelTrace:
    """One request's spans."""

    def __init__(self, tracer: trace.Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._context: Context = trace.set_span_in_context(span)

    @contextmanager
    def phase(self, name: str, **attributes: str | int) -> Iterator[Mapping[str, str]]:
        """See `Trace.phase`."""
        kind = SpanKind.INTERNAL if name == "queue" else SpanKind.CLIENT
        span = self._tracer.start_span(name, self._context, kind, attributes)
        headers: dict[str, str] = {}
        _W3C.inject(headers, trace.set_span_in_context(span))
        try:
            yield headers
        except BaseException as error:
            # The kind of fault alone: its message may quote what the client sent.
            fault = getattr(error, "code", None) or type(error).__name__
            span.set_status(Status(StatusCode.ERROR, str(fault)))
            raise
        finally:
            span.end()

    def end(self, outcome: str, usage: Mapping[str, int] | None = None) -> None:
        """See `Trace.end`."""
        if usage is not None:
            self._span.set_attribute("gen_ai.usage.input_tokens", usage["prompt_tokens"])
            self._span.set_attribute("gen_ai.usage.output_tokens", usage["completion_tokens"])
        self._span.set_attribute("tilert.outcome", outcome)
        if outcome not in ("stop", "length", "native"):
            self._span.set_status(Status(StatusCode.ERROR, outcome))
        self._span.end()

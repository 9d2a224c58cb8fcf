"""One trace a request: queue, prefill, handoff and decode as spans, inside the client's own trace and around vLLM's."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from integration.router.parts import CHAT, Up
from tilert_router import tracing
from tilert_router.config import ConfigError, Tracing
from tilert_router.otel import OtelTracer

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter) -> OtelTracer:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return OtelTracer(provider)


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def ids(span: ReadableSpan) -> tuple[str, str, str | None]:
    context = span.get_span_context()
    assert context is not None
    parent = f"{span.parent.span_id:016x}" if span.parent else None
    return f"{context.trace_id:032x}", f"{context.span_id:016x}", parent


@pytest.mark.parametrize("stream", [True, False])
async def test_the_phases_of_an_answer(
    up: Up, exporter: InMemorySpanExporter, tracer: OtelTracer, stream: bool
) -> None:
    bench = await up(1)
    _, url, _ = await bench.whole_router(tracer)
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT}-01", "tracestate": "x=1"}
    body = CHAT | {"stream": stream, "messages": [{"role": "user", "content": "a private question"}]}
    async with bench.http.post(url + "/v1/chat/completions", json=body, headers=headers) as answer:
        assert answer.status == 200
        await answer.read()
    spans = by_name(exporter)
    assert set(spans) == {"chat small", "queue", "prefill", "handoff", "decode"}
    root = spans["chat small"]
    assert ids(root)[0] == TRACE_ID
    assert ids(root)[2] == PARENT
    order = [spans[name] for name in ("queue", "prefill", "handoff", "decode")]
    assert all(ids(span)[2] == ids(root)[1] for span in order)
    times: list[int] = [t for span in order for t in (span.start_time or 0, span.end_time or 0)]
    assert times == sorted(times)
    # vLLM's own span goes under prefill.
    assert bench.prefill.headers[-1]["traceparent"] == f"00-{TRACE_ID}-{ids(spans['prefill'])[1]}-01"
    attributes = dict(root.attributes or {})
    assert attributes["gen_ai.usage.input_tokens"] == 7
    assert attributes["gen_ai.usage.output_tokens"] == 5
    assert attributes["tilert.outcome"] == "length"
    assert "private" not in "".join(span.to_json() for span in exporter.get_finished_spans())


async def test_a_fault_is_named_in_its_phase(
    up: Up, exporter: InMemorySpanExporter, tracer: OtelTracer
) -> None:
    bench = await up(1)
    _, url, _ = await bench.whole_router(tracer, limits={"retries": 0})
    bench.nodes[0].lose_state = True
    status, _, raw = await bench.post(url, CHAT)
    assert (status, json.loads(raw)["error"]["code"]) == (504, "kv_transfer_timeout")
    spans = by_name(exporter)
    assert spans["handoff"].status.status_code is StatusCode.ERROR
    assert spans["handoff"].status.description == "kv_transfer_timeout"
    assert spans["chat small"].status.description == "504"
    assert "decode" not in spans


async def test_spans_reach_a_collector(up: Up) -> None:
    bench = await up(1)
    got: list[bytes] = []
    collector = web.Application()

    async def take(http: web.Request) -> web.Response:
        got.append(await http.read())
        return web.Response()

    collector.router.add_post("/v1/traces", take)
    endpoint = await bench.site(collector) + "/v1/traces"
    router, url, _ = await bench.whole_router(tracing={"endpoint": endpoint, "service_name": "router-7"})
    assert (await bench.post(url, CHAT))[0] == 200
    await asyncio.to_thread(router.tracer.close)
    assert any(b"router-7" in data and b"handoff" in data for data in got)


async def test_without_tracing_the_clients_context_passes_on(up: Up) -> None:
    bench = await up(1)
    url = await bench.router()
    context = f"00-{TRACE_ID}-{PARENT}-01"
    async with bench.http.post(
        url + "/v1/chat/completions", json=CHAT, headers={"traceparent": context}
    ) as answer:
        assert answer.status == 200
    assert bench.prefill.headers[-1]["traceparent"] == context


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        return None

    monkeypatch.setattr(tracing.importlib.util, "find_spec", missing)
    with pytest.raises(ConfigError, match="router-tracing"):
        tracing.load_tracer(Tracing(endpoint="http://127.0.0.1:4318/v1/traces"))

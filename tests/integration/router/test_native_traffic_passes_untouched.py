"""General traffic reaches the native pool as the client sent it, and its answer comes back byte for byte."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from integration.router.parts import CHAT, Bench, Up, events

ANSWER = b'{"id": "x",   "choices": [], "strange": "\xc3\xa9"}'


class Native:
    """An OpenAI server that keeps what it was sent and answers what it is told."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.status, self.body, self.headers = (
            200,
            ANSWER,
            {"Content-Type": "application/json", "x-kept": "yes"},
        )
        self.step = asyncio.Event()
        self.break_off = False
        self.left = asyncio.Event()
        self.app = web.Application()
        self.app.router.add_post("/v1/{tail:.*}", self._call)

    async def _call(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        self.requests.append((http.path, {k.lower(): v for k, v in http.headers.items()}, body))
        if not body.get("stream"):
            return web.Response(status=self.status, body=self.body, headers=self.headers)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        try:
            await response.write(b'data: {"n": 1}\n\n')
            await self.step.wait()
            if self.break_off:
                assert http.transport is not None
                http.transport.abort()
                return response
            await response.write(b'data: {"n": 2}\n\ndata: [DONE]\n\n')
            await response.write_eof()
        except (asyncio.CancelledError, ConnectionError):
            self.left.set()
            raise
        return response


async def with_native(up: Up, **changes: Any) -> tuple[Bench, Native, str]:
    bench = await up(1)
    native = Native()
    site = await bench.site(native.app)
    return (
        bench,
        native,
        await bench.router(native=[{"name": "n", "url": site}, *changes.pop("more", [])], **changes),
    )


async def test_body_and_headers_arrive_as_sent_less_what_no_client_may_set(up: Up, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("between router and native\n")
    bench, native, url = await with_native(up, secrets={"native_file": tmp_path / "secret"})
    body = CHAT | {
        "n": 3,
        "logit_bias": {"5": -1.5},
        "unknown_to_the_router": {"deep": [1, None, "é"]},
        "kv_transfer_params": {"tilert_host": "203.0.113.9", "do_remote_decode": True},
        "ec_transfer_params": {"x": 1},
        "request_id": "someone-else",
        "vllm_xargs": {"kv_transfer_params": {"tilert_host": "203.0.113.9"}, "mine": 1},
    }
    headers = {"x-custom": "kept", "Authorization": "Bearer the client's own", "X-Request-Id": "job-42"}
    async with bench.http.post(url + "/v1/chat/completions", json=body, headers=headers) as answer:
        assert (answer.status, await answer.read()) == (200, ANSWER)
        assert answer.headers["x-kept"] == "yes"
    path, seen, sent = native.requests[0]
    assert path == "/v1/chat/completions"
    assert sent == {
        **CHAT,
        "n": 3,
        "logit_bias": {"5": -1.5},
        "unknown_to_the_router": {"deep": [1, None, "é"]},
        "vllm_xargs": {"mine": 1},
    }
    assert seen["x-custom"] == "kept"
    assert seen["authorization"] == "Bearer between router and native"
    assert "x-request-id" not in seen
    assert bench.prefill.bodies == []


@pytest.mark.parametrize("status", [201, 400, 404, 422, 429, 500, 503])
async def test_the_native_servers_own_status_and_words_come_back(up: Up, status: int) -> None:
    _, native, url = await with_native(up)
    native.status, native.body = status, b'{"error": {"message": "its own words"}}'
    native.headers |= {"Retry-After": "7"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(url + "/v1/completions", json={"prompt": "x"}) as answer,
    ):
        assert (answer.status, await answer.read()) == (status, native.body)
        assert answer.headers["Retry-After"] == "7"


async def test_an_encoded_answer_stays_encoded(up: Up) -> None:
    _, native, url = await with_native(up)
    native.body = gzip.compress(ANSWER)
    native.headers |= {"Content-Encoding": "gzip"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(url + "/v1/completions", json={"prompt": "x"}) as answer,
    ):
        assert await answer.read() == ANSWER


async def test_a_stream_passes_chunk_by_chunk(up: Up) -> None:
    bench, native, url = await with_native(up)
    async with bench.http.post(url + "/v1/chat/completions", json=CHAT | {"stream": True}) as answer:
        async with asyncio.timeout(2):
            assert await answer.content.readany() == b'data: {"n": 1}\n\n'  # the second is not even made yet
        native.step.set()
        assert events(await answer.read()) == [{"n": 2}, "[DONE]"]


async def test_a_native_server_that_breaks_off_is_not_a_whole_answer(up: Up) -> None:
    bench, native, url = await with_native(up)
    native.break_off = True
    async with bench.http.post(url + "/v1/chat/completions", json=CHAT | {"stream": True}) as answer:
        await answer.content.readany()
        native.step.set()
        with pytest.raises(aiohttp.ClientError):
            await answer.read()


async def test_a_client_that_leaves_ends_the_native_request(up: Up) -> None:
    bench, native, url = await with_native(up)
    async with bench.http.post(url + "/v1/chat/completions", json=CHAT | {"stream": True}) as answer:
        await answer.content.readany()
    async with asyncio.timeout(2):
        await native.left.wait()


async def test_one_that_cannot_be_reached_is_passed_over(up: Up) -> None:
    bench, native, url = await with_native(up, more=[{"name": "gone", "url": "http://127.0.0.1:9"}])
    for _ in range(4):
        assert (await bench.post(url, CHAT))[0] == 200
    assert len(native.requests) == 4
    url = await bench.router(native=[{"name": "gone", "url": "http://127.0.0.1:9"}])
    status, _, raw = await bench.post(url, CHAT)
    assert (status, json.loads(raw)["error"]["code"]) == (503, "native_unreachable")
    assert b"127.0.0.1" not in raw


async def test_what_tilert_cannot_honour_goes_native_and_the_rest_to_tilert(up: Up) -> None:
    bench, native, url = await with_native(up)
    fast = CHAT | {"model": "small-fast"}
    status, _, raw = await bench.post(url, fast)
    assert (status, json.loads(raw)["usage"]["completion_tokens"], native.requests) == (200, 5, [])
    assert (await bench.post(url, fast | {"seed": 4, "temperature": 1}))[0] == 200
    assert native.requests[0][2]["model"] == "small"  # the alias is the router's own
    assert len(bench.prefill.bodies) == 1


async def test_a_full_tilert_pool_overflows_to_native_by_policy(up: Up) -> None:
    bench, _native, url = await with_native(
        up,
        classes={"fast": {"policy": "tilert_then_native", "max_wait_s": 0.1}},
        prefill_ahead=False,
    )
    bench.nodes[0].token_s = 0.2
    fast = CHAT | {"model": "small-fast"}
    answers = await asyncio.gather(*(bench.post(url, fast) for _ in range(3)))
    assert sorted(raw == ANSWER for _, _, raw in answers) == [False, True, True]


async def test_latency_class_by_header_and_by_alias(up: Up) -> None:
    bench, native, url = await with_native(up)
    for headers, pool in (({}, "native"), ({"x-latency-class": "fast"}, "tilert")):
        before = len(native.requests)
        async with bench.http.post(url + "/v1/chat/completions", json=CHAT, headers=headers) as answer:
            assert answer.status == 200
        assert (len(native.requests) > before) == (pool == "native")
    async with bench.http.post(
        url + "/v1/chat/completions", json=CHAT, headers={"x-latency-class": "x"}
    ) as answer:
        assert answer.status == 400

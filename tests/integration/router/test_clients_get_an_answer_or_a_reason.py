"""The router over HTTP, in front of nodes that speak the real interfaces."""

from __future__ import annotations

import asyncio
import json
import time

import openai
import pytest

from fakes.nodes import PROMPT_TOKENS, FakePrefill
from integration.router.parts import CHAT, Up, events, settled


async def test_streaming_with_usage_and_max_completion_tokens_is_exact(up: Up) -> None:
    bench = await up(1)
    url = await bench.router()
    body = CHAT | {
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 4,
        "return_token_ids": True,
        "kv_transfer_params": {"tilert_host": "203.0.113.9"},
        "request_id": "mine",
    }
    status, headers, raw = await bench.post(url, body)
    assert status == 200
    assert headers["x-request-id"] == "job-42"
    seen = events(raw)
    assert seen[-1] == "[DONE]"
    assert seen[-2]["choices"] == []
    assert seen[-2]["usage"] == {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11}
    tokens = [t for e in seen[:-2] for c in e["choices"] for t in c.get("token_ids") or []]
    assert tokens == [65, 66, 67, 68]
    assert seen[0]["prompt_token_ids"] == list(range(PROMPT_TOKENS))
    sent = bench.prefill.bodies[0]
    assert sent["kv_transfer_params"]["tilert_host"] == "127.0.0.1"
    assert sent["request_id"] == sent["kv_transfer_params"]["tilert_rid"] == headers["x-tilert-rid"]
    assert "stream_options" not in sent
    assert "max_completion_tokens" not in sent


async def test_the_official_client_reads_answers_streams_and_errors(up: Up) -> None:
    bench = await up(1)
    url = await bench.router()
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        assert [m.id async for m in client.models.list()] == ["small", "small-fast"]
        answer = await client.chat.completions.create(**CHAT)  # type: ignore[call-overload]
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 5
        stream = await client.chat.completions.create(**CHAT, stream=True)  # type: ignore[call-overload]
        text = "".join([c.choices[0].delta.content or "" async for c in stream])
        assert text == answer.choices[0].message.content
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**CHAT, logprobs=True)  # type: ignore[call-overload]
        assert refused.value.param == "logprobs"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(**CHAT | {"model": "other"})  # type: ignore[call-overload]


async def test_prefills_own_refusal_reaches_the_client_and_frees_the_node(up: Up) -> None:
    bench = await up(1)
    url = await bench.router()
    bench.prefill.refuse = (400, {"error": {"message": "prompt too long", "type": "BadRequestError"}})
    status, _, raw = await bench.post(url, CHAT)
    assert status == 400
    assert json.loads(raw)["error"]["message"] == "prompt too long"
    bench.prefill.refuse = None
    await settled(bench.nodes[0])
    assert (await bench.post(url, CHAT))[0] == 200


@pytest.mark.parametrize("fault", ["fail_after", "die_after", "stall_after"])
async def test_a_decode_that_breaks_off_ends_in_an_error_never_in_stop(up: Up, fault: str) -> None:
    bench = await up(1)
    url = await bench.router(timeouts={"stall_s": 1, "cancel_s": 2})
    setattr(bench.nodes[0], fault, 3)
    start_s = time.monotonic()
    status, _, raw = await bench.post(url, CHAT | {"stream": True, "max_tokens": 50})
    seen = events(raw)
    assert status == 200
    assert "error" in seen[-1]
    assert not any(c.get("finish_reason") for e in seen[:-1] for c in e["choices"])
    assert "10.0.0.2" not in raw.decode()
    status, _, raw = await bench.post(url, CHAT | {"max_tokens": 50})
    assert status in (502, 503, 504)
    assert time.monotonic() - start_s < 10
    setattr(bench.nodes[0], fault, None)
    await settled(bench.nodes[0])
    assert (await bench.post(url, CHAT))[0] == 200


async def test_state_that_never_arrives_is_tried_once_more_elsewhere(up: Up) -> None:
    bench = await up(2)
    url = await bench.router()
    bench.nodes[0].lose_state = True
    for _ in range(4):
        status, _, _ = await bench.post(url, CHAT)
        assert status == 200
    rids = [b["request_id"] for b in bench.prefill.bodies]
    assert len(rids) == len(set(rids)) > 4
    bench.nodes[1].lose_state = True
    assert (await bench.post(url, CHAT))[0] in (503, 504)


@pytest.mark.parametrize("phase", ["prefill", "stream", "whole", "queue"])
async def test_a_client_that_leaves_in_any_phase_leaves_the_node_clean(up: Up, phase: str) -> None:
    bench = await up(1)
    url = await bench.router(prefill_ahead=False)
    node = bench.nodes[0]
    if phase == "prefill":
        bench.prefill.delay_s = 30
    node.token_s = 0.05
    holder = asyncio.create_task(bench.post(url, CHAT | {"max_tokens": 20})) if phase == "queue" else None
    await asyncio.sleep(0.3 if holder else 0)
    body = CHAT | {"max_tokens": 2000, "stream": phase == "stream"}
    leaving = asyncio.create_task(bench.post(url, body))
    await asyncio.sleep(0.5)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    if holder:
        assert (await holder)[0] == 200
    bench.prefill.delay_s = 0
    node.token_s = 0
    await settled(node)
    status, _, raw = await bench.post(url, CHAT)
    assert status == 200
    assert json.loads(raw)["usage"]["completion_tokens"] == 5


async def test_a_hundred_clients_wait_their_turn_while_health_answers_at_once(up: Up) -> None:
    bench = await up(1)
    url = await bench.router()
    bench.nodes[0].token_s = 0.002
    waiting = [asyncio.create_task(bench.post(url, CHAT | {"stream": i % 2 == 0})) for i in range(120)]
    slowest, start_s = 0.0, time.monotonic()
    while not all(task.done() for task in waiting):
        begin = time.monotonic()
        async with bench.http.get(url + "/health") as answer:
            assert answer.status == 200
        slowest = max(slowest, time.monotonic() - begin)
        await asyncio.sleep(0.02)
    assert {task.result()[0] for task in waiting} == {200}
    # No part of the queue's time: the harness, the nodes and the router share one event loop here.
    assert slowest < (time.monotonic() - start_s) / 3
    assert bench.nodes[0].most_running == 1


async def test_beyond_the_queue_is_429_with_retry_after(up: Up) -> None:
    bench = await up(1)
    url = await bench.router(queue={"max_waiting": 1, "timeout_s": 30}, prefill_ahead=False)
    bench.nodes[0].token_s = 0.05
    answers = await asyncio.gather(*(bench.post(url, CHAT) for _ in range(8)))
    refused = [headers for status, headers, _ in answers if status == 429]
    assert refused
    assert all(int(headers["Retry-After"]) >= 1 for headers in refused)
    assert {status for status, _, _ in answers} == {200, 429}


async def test_two_routers_share_a_node_without_double_booking(up: Up) -> None:
    bench = await up(1)
    urls = [await bench.router(), await bench.router()]
    bench.nodes[0].token_s = 0.002
    answers = await asyncio.gather(*(bench.post(urls[i % 2], CHAT) for i in range(20)))
    assert {status for status, _, _ in answers} == {200}
    assert bench.nodes[0].most_running == 1
    assert len(set(bench.nodes[0].decoded)) == len(bench.nodes[0].decoded) == 20


async def test_a_first_token_that_ends_the_answer_needs_no_decode(up: Up) -> None:
    bench = await up(1)
    url = await bench.router()
    bench.prefill.ended = True
    status, _, raw = await bench.post(url, CHAT)
    answer = json.loads(raw)
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "stop")
    assert answer["choices"][0]["message"]["content"] == ""
    bench.prefill.ended = False
    status, _, raw = await bench.post(url, CHAT | {"max_tokens": 1})
    assert (status, json.loads(raw)["usage"]["completion_tokens"]) == (200, 1)
    assert bench.nodes[0].decoded == []
    await settled(bench.nodes[0])


@pytest.mark.parametrize("account", [{"seq_len": PROMPT_TOKENS + 1}, {"n": 4}, {"n": 6}])
async def test_an_answer_from_another_state_or_with_lost_tokens_is_never_a_success(
    up: Up, account: dict[str, int]
) -> None:
    bench = await up(1)
    url = await bench.router()
    bench.nodes[0].account = account
    status, _, raw = await bench.post(url, CHAT)
    assert (status, json.loads(raw)["error"]["code"]) == (502, "answer_mismatch")
    _, _, raw = await bench.post(url, CHAT | {"stream": True})
    seen = events(raw)
    assert seen[-1]["error"]["code"] == "answer_mismatch"
    assert not any(c.get("finish_reason") for e in seen[:-1] for c in e["choices"])
    bench.nodes[0].account = {}
    assert (await bench.post(url, CHAT))[0] == 200


async def test_prefill_ahead_overlaps_one_requests_prefill_with_anothers_decode(up: Up) -> None:
    bench = await up(1)
    bench.prefill.delay_s = 0.15
    bench.nodes[0].token_s = 0.03  # five tokens: a decode as long as a prefill
    took: dict[bool, float] = {}
    for ahead in (False, True):
        url = await bench.router(prefill_ahead=ahead)
        start_s = time.monotonic()
        answers = await asyncio.gather(*(bench.post(url, CHAT) for _ in range(8)))
        took[ahead] = time.monotonic() - start_s
        assert {status for status, _, _ in answers} == {200}
    # (P + D) / max(P, D) is 2 in a long run; eight requests have one prefill that nothing hides.
    assert took[False] / took[True] > 1.5
    assert bench.nodes[0].most_running == 1


async def test_a_first_token_waits_for_its_decode_leg_so_a_lost_state_has_its_own_status(up: Up) -> None:
    bench = await up(1)
    url = await bench.router(limits={"retries": 0})
    node = bench.nodes[0]
    node.token_s = 0.05
    running = asyncio.create_task(bench.post(url, CHAT | {"stream": True, "max_tokens": 20}))
    async with asyncio.timeout(5):
        while not node.running:
            await asyncio.sleep(0.01)
        node.lose_state = True
        behind = asyncio.create_task(
            bench.http.post(url + "/v1/chat/completions", json=CHAT | {"stream": True})
        )
        while len(bench.prefill.bodies) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        # Its first token is there, the node is still another's: no byte has left.
        assert node.running
        assert not behind.done()
        status, _, raw = await running
        answer = await behind
        body = await answer.json()
    assert (status, events(raw)[-1]) == (200, "[DONE]")
    assert (answer.status, body["error"]["code"]) == (504, "kv_transfer_timeout")
    assert answer.content_type == "application/json"


async def test_silence_inside_a_stream_is_filled_with_comments(up: Up) -> None:
    bench = await up(1)
    url = await bench.router(timeouts={"stall_s": 5, "keepalive_s": 0.1, "handoff_s": 2, "cancel_s": 2})
    bench.nodes[0].token_s = 0.35
    _, _, raw = await bench.post(url, CHAT | {"stream": True, "max_tokens": 3})
    assert 4 <= raw.count(b": waiting\n\n") <= 9
    assert events(raw)[-1] == "[DONE]"


async def test_a_failing_prefill_node_is_passed_over(up: Up) -> None:
    bench = await up(1)
    other = FakePrefill({node.ctrl_port: node for node in bench.nodes})
    site = await bench.enter(other.site)
    nodes = [{"name": "p", "url": bench.prefill.site.url}, {"name": "q", "url": site.url}]
    url = await bench.router(prefill=nodes)
    for _ in range(4):
        assert (await bench.post(url, CHAT))[0] == 200
    assert len(bench.prefill.bodies) == len(other.bodies) == 2  # in turn, where both are idle
    other.refuse = (500, {"error": {"message": "out of memory at 10.0.0.7", "type": "x"}})
    answers = [await bench.post(url, CHAT) for _ in range(6)]
    assert {status for status, _, _ in answers} == {200}
    assert len(other.bodies) == 3  # asked once more, then left alone for a while
    bench.prefill.refuse = other.refuse
    status, _, raw = await bench.post(url, CHAT)
    assert (status, json.loads(raw)["error"]["code"]) == (502, "prefill_failed")
    assert b"10.0.0.7" not in raw

"""State computed elsewhere and handed over the wire decodes to the tokens it would have given there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from integration.decode.parts import Prefill, engine_of, prompt_of, running, tokens_of
from vllm_tilert.wire import api


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 700])
async def test_greedy_continuation_equals_the_one_without_a_handoff(
    prefill: Prefill, model_dir: Path, length: int
) -> None:
    prompt = prompt_of(length, length)
    expected = prefill.oracle.continuation(prompt, 32)
    rid = api.new_rid()
    async with running(engine_of(model_dir)) as node:
        grant = await node.reserve(rid)
        decode = asyncio.ensure_future(node.stream(rid, expected[0], 32))
        assert await prefill.hand_off(node, rid, grant["generation"], prompt) == {"ok": True}
        status, lines = await decode
        assert status == 200
        assert tokens_of(lines) == expected
        last = lines[-1]
        assert (last["done"], last["n"], last["seq_len"], last["finish_reason"]) == (
            True,
            32,
            length,
            "length",
        )
        assert last["handoff"]["bytes"] == 3 * 2304 * length
        await node.idle()
        status, history = await node.call(f"{api.HISTORY}/{rid}")
        assert (status, history["outcome"], history["n"]) == (200, "done", 32)


async def test_the_answer_in_one_piece_is_the_streamed_one(prefill: Prefill, model_dir: Path) -> None:
    prompt = prompt_of(5, 40)
    expected = prefill.oracle.continuation(prompt, 16)
    rid = api.new_rid()
    async with running(engine_of(model_dir)) as node:
        grant = await node.reserve(rid)
        await prefill.hand_off(node, rid, grant["generation"], prompt)
        body = {"rid": rid, "first_token_id": expected[0], "max_tokens": 16, "sampling": {"temperature": 0}}
        status, answer = await node.call(api.DECODE, body)
        assert (status, answer["token_ids"], answer["finish_reason"]) == (200, expected, "length")


async def test_two_requests_ahead_of_each_other_keep_their_own_state(
    prefill: Prefill, model_dir: Path
) -> None:
    """The second is received while the first decodes, and starts when the first has ended."""
    prompts = [prompt_of(11, 90), prompt_of(12, 50)]
    expected = [prefill.oracle.continuation(p, 48) for p in prompts]
    rids = [api.new_rid(), api.new_rid()]
    async with running(engine_of(model_dir)) as node:
        first = await node.reserve(rids[0])
        status, refusal = await node.call(api.RESERVE, {"rid": api.new_rid()})
        assert (status, refusal["error"]) == (429, "busy")
        second = await node.reserve(rids[1], ahead=True)
        assert second["slot"] != first["slot"]
        # The second one's state arrives first, and waits its turn.
        later = asyncio.ensure_future(node.stream(rids[1], expected[1][0], 48))
        await prefill.hand_off(node, rids[1], second["generation"], prompts[1])
        assert node.node.slots.engine is None
        sooner = asyncio.ensure_future(node.stream(rids[0], expected[0][0], 48))
        await prefill.hand_off(node, rids[0], first["generation"], prompts[0])
        assert [tokens_of((await call)[1]) for call in (sooner, later)] == expected


async def test_tokens_leave_one_by_one_as_they_are_made(prefill: Prefill, model_dir: Path) -> None:
    prompt = prompt_of(3, 30)
    first = prefill.oracle.continuation(prompt, 1)[0]
    rid = api.new_rid()
    async with running(engine_of(model_dir)) as node:
        grant = await node.reserve(rid)
        await prefill.hand_off(node, rid, grant["generation"], prompt)
        _, lines = await node.stream(rid, first, 64)
        assert len(lines) > 32  # and not a few large bursts


async def test_a_client_that_goes_away_frees_the_node_for_the_next(prefill: Prefill, model_dir: Path) -> None:
    prompt = prompt_of(7, 20)
    expected = prefill.oracle.continuation(prompt, 24)
    async with running(engine_of(model_dir)) as node:
        rid = api.new_rid()
        grant = await node.reserve(rid)
        await prefill.hand_off(node, rid, grant["generation"], prompt)
        body = {"rid": rid, "first_token_id": expected[0], "max_tokens": 900, "stream": True}
        async with aiohttp.ClientSession(headers=dict(node.http.headers)) as http:
            answer = await http.post(node.url + api.DECODE, json=body)
            await answer.content.readline()
            answer.close()
        await node.idle(2.0)
        assert (await node.call(f"{api.HISTORY}/{rid}"))[1]["outcome"] == "cancelled"
        rid = api.new_rid()
        grant = await node.reserve(rid)
        await prefill.hand_off(node, rid, grant["generation"], prompt)
        assert tokens_of((await node.stream(rid, expected[0], 24))[1]) == expected


async def test_the_status_says_what_a_request_may_still_take(prefill: Prefill, model_dir: Path) -> None:
    """For those who would line up behind it."""
    prompt, rid = prompt_of(7, 20), api.new_rid()
    first = prefill.oracle.continuation(prompt, 1)[0]
    async with running(engine_of(model_dir)) as node:
        grant = await node.reserve(rid)
        await node.reserve(api.new_rid(), ahead=True)
        await prefill.hand_off(node, rid, grant["generation"], prompt)
        body = {"rid": rid, "first_token_id": first, "max_tokens": 900, "stream": True}
        seen = []
        async with node.http.post(node.url + api.DECODE, json=body) as answer:
            for _ in range(2):
                for _ in range(5):
                    await answer.content.readline()
                _, status = await node.call(api.STATUS)
                seen.append([slot["remaining"] for slot in status["slots"]])
    (earlier, other), (later, _) = seen
    assert other is None  # only reserved
    assert 0 < later < earlier <= 895

"""Truly chunked prefill on a real vLLM: every chunk leaves as it is final, whatever happens between two of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from integration.connector.fake_node import FakeNode
from integration.connector.test_state_reaches_the_node import LAYOUT, prompt, to, whole
from integration.connector.vllm_server import Vllm, connector_config, vllm_server
from integration.decode.parts import HOST, Running, engine_of, running, tokens_of
from vllm_tilert.small_model import make_small_model
from vllm_tilert.wire.api import new_rid

pytestmark = pytest.mark.vllm

CHUNK, BLOCK, BLOCKS = 128, 16, 72
ADMISSION_S = 8.0
PREEMPTIONS = 'vllm:num_preemptions_total{engine="0",model_name="small"}'
USAGE = 'vllm:kv_cache_usage_perc{engine="0",model_name="small"}'
HITS = 'vllm:prefix_cache_hits_total{engine="0",model_name="small"}'


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small_model(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def vllm(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """Two prompts advance side by side, half a chunk each a step; little more cache than one longest prompt."""
    flags = ("--max-num-seqs", "4", "--max-model-len", "1024", "--num-gpu-blocks-override", str(BLOCKS))
    flags += ("--long-prefill-token-threshold", str(CHUNK // 2), "--max-num-scheduled-tokens", str(CHUNK))
    work = tmp_path_factory.mktemp("vllm")
    transfer = connector_config()
    transfer["kv_connector_extra_config"] |= {
        "tilert_staging_bytes": 4 << 20,
        "tilert_staging_wait_s": 30,
        "tilert_admission_timeout_s": ADMISSION_S,
    }
    with vllm_server(model_dir, work, transfer, *flags) as server:
        yield server


@pytest.fixture
async def decode(model_dir: Path) -> AsyncIterator[Running]:
    async with running(engine_of(model_dir), secret=None) as node:
        yield node


async def usage(vllm: Vllm) -> float:
    """Share of the cache that requests hold."""
    await vllm.prefill(prompt(2, seed=7))  # vLLM updates its gauges when it runs
    return (await vllm.metrics())[USAGE]


async def freed(vllm: Vllm, within_s: float = 10.0) -> None:
    """Wait until no request holds a cache block."""
    async with asyncio.timeout(within_s):
        while await usage(vllm) > 0:
            await asyncio.sleep(0.05)


async def failures(vllm: Vllm, reason: str) -> float:
    found = [
        value
        for name, value in (await vllm.metrics()).items()
        if name.startswith("vllm:tilert_handoff_failures_total") and f'reason="{reason}"' in name
    ]
    return sum(found)


async def hand_off_and_decode(
    vllm: Vllm, node: Running, tokens: list[int], count: int, ahead: bool = False
) -> list[int]:
    """Prefill by vLLM, `count` greedy tokens by the decode node."""
    rid = new_rid()
    grant = await node.reserve(rid, ahead=ahead)
    asked = {
        "tilert_host": HOST,
        "tilert_ctrl_port": node.control_port,
        "tilert_rid": rid,
        "tilert_generation": grant["generation"],
    }
    answer = await vllm.prefill(tokens, return_token_ids=True, kv_transfer_params=asked)
    status, lines = await node.stream(rid, answer["choices"][0]["token_ids"][0], count)
    assert status == 200, lines
    return tokens_of(lines)


async def own(vllm: Vllm, tokens: list[int], count: int) -> list[int]:
    """What vLLM itself says, with nothing handed off."""
    answer = await vllm.prefill(tokens, max_tokens=count, return_token_ids=True)
    return list(answer["choices"][0]["token_ids"])


@pytest.mark.parametrize("length", [CHUNK, CHUNK + 1, 2 * CHUNK, 300, 1000])
async def test_each_chunk_is_a_segment_and_the_bytes_are_the_caches(vllm: Vllm, length: int) -> None:
    async with FakeNode(LAYOUT) as node:
        await vllm.prefill(prompt(length, seed=length), **to(node, new_rid()))
        done = await node.ended()
        whole(node, done, vllm.dumps, length)
        if length > CHUNK:
            assert len(done["segments"]) == -(-length // CHUNK)
            assert set(done["segments"][:-1]) == {CHUNK}


async def test_the_first_chunk_arrives_before_the_prompt_is_computed(vllm: Vllm) -> None:
    async with FakeNode(LAYOUT) as node:
        prefill = asyncio.ensure_future(vllm.prefill(prompt(1000, seed=41), **to(node, new_rid())))
        while not prefill.done() and node.untouched:
            await asyncio.sleep(0.001)
        assert not prefill.done(), "nothing had arrived when the prompt was computed"
        await prefill
        whole(node, await node.ended(), vllm.dumps, 1000)


@pytest.mark.parametrize("length", [129, 300, 900])
async def test_a_chunked_prompt_decodes_to_vllms_own_tokens(vllm: Vllm, decode: Running, length: int) -> None:
    tokens = prompt(length, seed=1000 + length)
    assert await hand_off_and_decode(vllm, decode, tokens, 48) == await own(vllm, tokens, 48)


async def test_a_hit_of_all_but_the_last_block_decodes_to_vllms_own_tokens(
    vllm: Vllm, decode: Running
) -> None:
    tokens = prompt(8 * BLOCK, seed=52)
    expected = await own(vllm, tokens, 48)
    before = (await vllm.metrics())[HITS]
    assert await hand_off_and_decode(vllm, decode, tokens, 48) == expected
    assert (await vllm.metrics())[HITS] - before == 7 * BLOCK
    history = decode.node.slots._known.popitem()[1]
    assert history.facts["segments"] == 1, "what was hit leaves with the first chunk"


async def test_preempted_and_resumed_prompts_arrive_whole(vllm: Vllm, decode: Running) -> None:
    """Both prompts are let in, the cache holds only one and a half: one loses its blocks in the middle."""
    prompts = [prompt(700, seed=61), prompt(690, seed=62)]
    expected = [await own(vllm, tokens, 32) for tokens in prompts]
    await vllm.prefill(prompt(1000, seed=63))  # nothing of them is left in the prefix cache
    before = (await vllm.metrics())[PREEMPTIONS]
    first = asyncio.ensure_future(hand_off_and_decode(vllm, decode, prompts[0], 32))
    while not decode.node.slots.alive():
        await asyncio.sleep(0.001)
    second = asyncio.ensure_future(hand_off_and_decode(vllm, decode, prompts[1], 32, ahead=True))
    assert [await first, await second] == expected
    assert (await vllm.metrics())[PREEMPTIONS] > before
    await freed(vllm)


async def test_a_prompt_given_up_half_way_tells_the_node_and_frees_its_blocks(vllm: Vllm) -> None:
    before = await failures(vllm, "cancelled")
    async with FakeNode(LAYOUT) as node:
        prefill = asyncio.ensure_future(vllm.prefill(prompt(1000, seed=71), **to(node, new_rid())))
        while node.untouched:
            await asyncio.sleep(0.001)
        prefill.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await prefill
        end = await node.ended()
        assert end["abort"] == "cancelled"
    await freed(vllm)
    assert await failures(vllm, "cancelled") == before + 1


@contextlib.asynccontextmanager
async def streaming(vllm: Vllm, node: FakeNode, **more: Any) -> AsyncIterator[aiohttp.ClientResponse]:
    """A prompt larger than the staging pool on its way to `node`, with its first token said."""
    body = {"model": "small", "prompt": prompt(900, seed=81), "temperature": 0, "stream": True}
    body |= {"ignore_eos": True, **to(node, new_rid()), **more}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{vllm.url}/v1/completions", json=body) as answer,
    ):
        assert answer.status == 200
        await answer.content.readline()
        yield answer


async def test_blocks_outlive_the_answer_until_the_handoff_is_given_up(vllm: Vllm) -> None:
    """The prompt is computed, its blocks wait for staging; the node never accepts: a bounded wait, then free."""
    before = await failures(vllm, "connect_failed")
    async with FakeNode(LAYOUT, accept=lambda _: {}) as node:
        async with streaming(vllm, node, max_tokens=1) as answer:
            await answer.read()
        assert await usage(vllm) > 0.3
        await freed(vllm, within_s=2 * ADMISSION_S)
        assert node.untouched
    assert await failures(vllm, "connect_failed") == before + 1


async def test_a_request_given_up_while_its_blocks_wait_frees_them(vllm: Vllm) -> None:
    before = await failures(vllm, "cancelled")
    async with FakeNode(LAYOUT, accept=lambda _: {}) as node:
        async with streaming(vllm, node, max_tokens=120):
            assert await usage(vllm) > 0.3
        await freed(vllm, within_s=ADMISSION_S / 2)
        assert node.untouched
    assert await failures(vllm, "cancelled") == before + 1

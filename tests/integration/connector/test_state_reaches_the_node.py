"""What a decode node receives from a real vLLM is what vLLM's cache holds, whatever the scheduler does."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.connector.fake_node import FakeNode
from integration.connector.vllm_server import Vllm, connector_config, free_port, vllm_server
from vllm_tilert.checksum import plane_checksums
from vllm_tilert.profiles.base import get_profile
from vllm_tilert.small_model import CONFIG, make_small_model
from vllm_tilert.wire.api import new_rid

pytestmark = pytest.mark.vllm

LAYOUT = get_profile("mla").layout_from_config(CONFIG, "float32")


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """Prefix caching on; both connectors of a MultiConnector get every request."""
    work = tmp_path_factory.mktemp("vllm")
    model = make_small_model(work / "model")
    multi = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "connectors": [
                {
                    "kv_connector": "ExampleConnector",
                    "kv_role": "kv_producer",
                    "kv_connector_extra_config": {"shared_storage_path": str(work / "other")},
                },
                connector_config(),
            ]
        },
    }
    flags = ("--max-num-seqs", "8", "--enable-prefix-caching")
    with vllm_server(model, work, multi, *flags) as server:
        yield server


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(32, 127), k=length)


def to(node: FakeNode | int, rid: str, host: str = "127.0.0.1") -> dict[str, Any]:
    port = node if isinstance(node, int) else node.port
    return {
        "kv_transfer_params": {
            "tilert_host": host,
            "tilert_ctrl_port": port,
            "tilert_rid": rid,
            "tilert_generation": 7,
        }
    }


def whole(node: FakeNode, done: dict[str, Any], dumps: Path, seq_len: int) -> None:
    """Assert that the slot holds exactly the rows the cache held, and that the checksums say so."""
    rows = torch.load(dumps / f"{done['rid']}.pt")  # [layers, seq_len, 576]
    assert sum(done["segments"]) == seq_len == rows.shape[1]
    segments = node.segments(done["segments"])
    got = torch.cat([s.view(torch.float32).view(LAYOUT.layers, -1, 576) for s in segments], dim=1)
    assert torch.equal(got, rows)
    expected = [plane_checksums(s, LAYOUT, n) for s, n in zip(segments, done["segments"], strict=True)]
    assert done["checksums"] == expected


@pytest.mark.parametrize("length", [1, 15, 16, 17, 129, 700])
async def test_the_bytes_are_the_caches(vllm: Vllm, length: int) -> None:
    rid = new_rid()
    async with FakeNode(LAYOUT) as node:
        answer = await vllm.prefill(prompt(length, seed=length), **to(node, rid))
        done = await node.ended()
        assert answer["kv_transfer_params"]["tilert_handoff"] == {"rid": rid, "seq_len": length}
        assert node.requests[0]["last_prompt_token"] == prompt(length, seed=length)[-1]
        whole(node, done, vllm.dumps, length)


async def test_a_prefix_cache_hit_is_sent_whole(vllm: Vllm) -> None:
    async with FakeNode(LAYOUT) as first, FakeNode(LAYOUT) as second:
        await vllm.prefill(prompt(400, seed=2), **to(first, new_rid()))
        whole(first, await first.ended(), vllm.dumps, 400)
        before = (await vllm.metrics())['vllm:prefix_cache_hits_total{engine="0",model_name="small"}']
        await vllm.prefill(prompt(400, seed=2) + prompt(30, seed=3), **to(second, new_rid()))
        after = (await vllm.metrics())['vllm:prefix_cache_hits_total{engine="0",model_name="small"}']
        assert after - before >= 384
        whole(second, await second.ended(), vllm.dumps, 430)


async def test_requests_that_finish_together_reach_their_own_nodes(vllm: Vllm) -> None:
    for round_ in range(4):
        lengths = (50, 60)
        async with FakeNode(LAYOUT) as left, FakeNode(LAYOUT) as right:
            rids = [new_rid(), new_rid()]
            await asyncio.gather(
                *(
                    vllm.prefill(prompt(length, seed=100 * round_ + length), **to(node, rid))
                    for node, rid, length in zip((left, right), rids, lengths, strict=True)
                )
            )
            for node, rid, length in zip((left, right), rids, lengths, strict=True):
                done = await node.ended()
                assert done["rid"] == rid
                whole(node, done, vllm.dumps, length)


async def test_eight_at_once_to_two_nodes_stay_apart(vllm: Vllm) -> None:
    """Each handoff to a slot of its own, as a node with several slots has them."""
    nodes = [FakeNode(LAYOUT) for _ in range(8)]
    async with asyncio.TaskGroup() as group:
        for node in nodes:
            group.create_task(node.__aenter__())
    lengths = [30 + 37 * i for i in range(8)]
    rids = [new_rid() for _ in nodes]
    await asyncio.gather(
        *(
            vllm.prefill(prompt(n, seed=n), **to(node, rid))
            for node, rid, n in zip(nodes, rids, lengths, strict=True)
        )
    )
    for node, rid, length in zip(nodes, rids, lengths, strict=True):
        done = await node.ended()
        assert done["rid"] == rid
        whole(node, done, vllm.dumps, length)
        await node.__aexit__()


async def test_a_request_without_a_node_is_left_alone(vllm: Vllm) -> None:
    answer = await vllm.prefill(prompt(40, seed=4))
    assert answer["kv_transfer_params"] is None


@pytest.mark.parametrize("host", ["192.0.2.1", "localhost", "evil.example", "[127.0.0.1]", "127.0.0.1:80"])
async def test_a_host_outside_the_allow_list_gets_nothing(vllm: Vllm, host: str) -> None:
    async with FakeNode(LAYOUT) as node:
        answer = await vllm.prefill(prompt(40, seed=5), **to(node, new_rid(), host=host))
        assert answer["kv_transfer_params"]["tilert_handoff"]["error"] in ("host_not_allowed", "bad_request")
        await asyncio.sleep(0.2)
        assert node.connections == 0


async def test_a_rid_that_is_none_is_refused_and_the_engine_lives(vllm: Vllm) -> None:
    async with FakeNode(LAYOUT) as node:
        for rid in ("job-42", "", 7, None, {"a": 1}, "A" * 32):
            params = to(node, "")["kv_transfer_params"] | {"tilert_rid": rid}
            answer = await vllm.prefill(prompt(20, seed=6), kv_transfer_params=params)
            assert answer["kv_transfer_params"]["tilert_handoff"]["error"] == "bad_request"
        assert node.connections == 0


async def test_a_dead_node_does_not_strand_blocks(vllm: Vllm) -> None:
    dead = free_port()
    await asyncio.gather(*(vllm.prefill(prompt(600, seed=i), **to(dead, new_rid())) for i in range(10, 16)))
    name = 'vllm:kv_cache_usage_perc{engine="0",model_name="small"}'
    for _ in range(50):
        await vllm.prefill(prompt(2, seed=7))  # vLLM updates its gauges when it runs
        usage = (await vllm.metrics())[name]
        if usage == 0:
            break
        await asyncio.sleep(0.1)
    assert usage == 0
    failures = {k: v for k, v in (await vllm.metrics()).items() if "tilert_handoff_failures_total" in k}
    assert sum(v for k, v in failures.items() if "connect_failed" in k) >= 6


async def test_a_refusal_writes_nothing(vllm: Vllm) -> None:
    refusal = {"error": "busy", "message": "decoding"}
    async with FakeNode(LAYOUT, accept=lambda _: refusal) as node:
        await vllm.prefill(prompt(300, seed=20), **to(node, new_rid()))
        await asyncio.sleep(0.3)
        assert node.requests
        assert node.untouched


async def tilert_metrics(vllm: Vllm) -> dict[str, float]:
    """Our series, without their prefix and the labels of the engine."""
    await vllm.prefill(prompt(2, seed=7))  # vLLM passes statistics on when it runs
    found: dict[str, float] = {}
    for name, value in (await vllm.metrics()).items():
        if name.startswith("vllm:tilert_"):
            series = name.removeprefix("vllm:tilert_")
            reason = series.partition('reason="')[2].partition('"')[0]
            short = series.partition("{")[0] + (f":{reason}" if reason else "")
            if "_bucket" not in short:
                found[short] = found.get(short, 0.0) + value
    return found


async def test_vllms_metrics_say_what_was_handed_off(vllm: Vllm) -> None:
    before = await tilert_metrics(vllm)
    began = time.monotonic()
    async with FakeNode(LAYOUT) as node:
        for length in (64, 500):
            await vllm.prefill(prompt(length, seed=30 + length), **to(node, new_rid()))
            await node.ended()
    refused = {"error": "busy", "message": "decoding"}
    async with FakeNode(LAYOUT, accept=lambda _: refused) as busy:
        await vllm.prefill(prompt(64, seed=32), **to(busy, new_rid()))
    await vllm.prefill(prompt(64, seed=33), **to(busy, new_rid(), host="192.0.2.1"))
    wanted = {
        "handoffs_total": 2,
        "handoff_bytes_total": LAYOUT.segment_bytes(564),
        "handoff_failures_total:busy": 1,
        "handoff_failures_total:host_not_allowed": 1,
        **{f"handoff_{name}_seconds_count": 2 for name in ("gather", "queue", "wire", "total")},
    }
    async with asyncio.timeout(20):
        while True:
            after = await tilert_metrics(vllm)
            grown = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in {*before, *after}}
            if {name: grown.get(name, 0.0) for name in wanted} == wanted:
                break
            await asyncio.sleep(0.1)
    took = {name: grown[f"handoff_{name}_seconds_sum"] for name in ("gather", "queue", "wire", "total")}
    assert all(seconds > 0 for seconds in took.values())
    assert took["wire"] < took["total"] < time.monotonic() - began
    assert took["gather"] + took["queue"] < time.monotonic() - began
    assert after["staging_bytes_in_use"] == 0

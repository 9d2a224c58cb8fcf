"""The worker side step by step. It is called on the event loop that the node runs on: were it to wait for the
node anywhere, nothing here would end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from integration.connector.fake_node import FakeNode
from unit.connector.loop import LAYOUT, LoopTransport
from unit.profiles.caches import mla_caches
from vllm_tilert.connector import worker as worker_module
from vllm_tilert.connector.config import ConfigError, ConnectorConfig
from vllm_tilert.connector.plan import Order, Progress, StepPlan
from vllm_tilert.connector.worker import HandoffWorker
from vllm_tilert.wire.api import new_rid

PAGE = 16  # tokens of a cache block
TOKEN = LAYOUT.segment_bytes(1)
POOL = 64 * TOKEN  # a segment takes at most a quarter: 16 tokens


def config(**changes: Any) -> ConnectorConfig:
    settings = {
        "tilert_profile": "mla",
        "tilert_transport": "mooncake",
        "tilert_protocol": "tcp",
        "tilert_local_host": "127.0.0.1",
        "tilert_allowed_hosts": ["127.0.0.1"],
        "tilert_staging_bytes": POOL,
        "tilert_staging_wait_s": 20.0,
    } | changes
    return ConnectorConfig.parse(settings, max_model_len=1024)


class Prefill:
    """A worker over caches of 64 blocks, driven as vLLM drives it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int = 0, **changes: Any) -> None:
        self.transport = LoopTransport()
        monkeypatch.setattr(worker_module, "make_transport", lambda *_: self.transport)
        self.caches = mla_caches(LAYOUT.layers, 64, torch.float32)
        self.worker = HandoffWorker(config(**changes), rank)
        self.worker.register(self.caches)

    def step(self, **plan: Any) -> set[str]:
        """One scheduler step; the requests it reports as free."""
        made = StepPlan(**plan)
        self.worker.before_forward(made)
        self.worker.after_forward(made)
        return self.worker.finished(made)

    async def until_free(self, req_id: str, within_s: float = 5.0) -> None:
        """Idle steps until the request's blocks are free."""
        async with asyncio.timeout(within_s):
            while req_id not in self.step():
                await asyncio.sleep(0.002)

    def rows(self, blocks: tuple[int, ...], tokens: int) -> torch.Tensor:
        """What the caches hold for a request, uint8 [layers, tokens, row]."""
        pages = [cache.view(torch.uint8).view(64, PAGE, -1) for cache in self.caches.values()]
        return torch.stack([page[list(blocks)].flatten(0, 1)[:tokens] for page in pages])

    def counts(self) -> dict[str, Any]:
        return self.worker.drain_counts() or {}


@pytest.fixture
async def node() -> AsyncIterator[FakeNode]:
    async with FakeNode(LAYOUT, max_seq_len=1024, transport=LoopTransport()) as node:
        yield node


def order(node: FakeNode, tokens: int, req_id: str = "a") -> Order:
    return Order(req_id, new_rid(), 7, "127.0.0.1", node.port, tokens, 65)


def arrived(node: FakeNode, segments: list[int]) -> torch.Tensor:
    parts = [s.view(LAYOUT.layers, n, -1) for s, n in zip(node.segments(segments), segments, strict=True)]
    return torch.cat(parts, dim=1)


BLOCKS = (9, 2, 33, 40, 7, 21, 50, 3)
TOKENS = 120  # nearly twice the pool


async def test_a_prompt_larger_than_the_pool_follows_as_room_is_made(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = Prefill(monkeypatch)
    made = order(node, TOKENS)
    free = prefill.step(opened=(made,), progress=(Progress("a", TOKENS, BLOCKS),))
    assert free == set()
    assert "a" not in prefill.step(ended=frozenset({"a"})), "its blocks are still to be read"
    await prefill.until_free("a")
    done = await node.ended()
    assert sum(done["segments"]) == TOKENS
    assert max(done["segments"]) <= 16
    assert torch.equal(arrived(node, done["segments"]), prefill.rows(BLOCKS, TOKENS))
    async with asyncio.timeout(5):
        while not (counts := prefill.counts()).get("handoffs"):
            await asyncio.sleep(0.01)
    assert (counts["handoffs"], counts["bytes"]) == (1, LAYOUT.segment_bytes(TOKENS))
    assert counts["staging_bytes_peak"] <= POOL


async def test_a_full_pool_is_waited_for_so_long_and_no_longer(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.accept = lambda _: {}  # admits nobody, so no room is made
    prefill = Prefill(monkeypatch, tilert_staging_wait_s=0.3, tilert_admission_timeout_s=20.0)
    began = time.monotonic()
    prefill.step(opened=(order(node, TOKENS),), progress=(Progress("a", TOKENS, BLOCKS),))
    assert prefill.step(ended=frozenset({"a"})) == set()
    await prefill.until_free("a")
    assert time.monotonic() - began > 0.3
    assert node.untouched
    async with asyncio.timeout(5):
        while not (counts := prefill.counts()).get("failures"):
            await asyncio.sleep(0.01)
    assert counts["failures"] == {"staging_full": 1}
    assert (await node.ended())["abort"] == "staging_full"


async def test_two_prompts_share_the_pool_and_reach_their_own_nodes(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = Prefill(monkeypatch)
    other_blocks = (1, 60, 61, 5)
    async with FakeNode(LAYOUT, max_seq_len=1024, transport=LoopTransport()) as other:
        prefill.step(
            opened=(order(node, TOKENS, "a"), order(other, 50, "b")),
            progress=(Progress("a", TOKENS, BLOCKS), Progress("b", 50, other_blocks)),
        )
        prefill.step(ended=frozenset({"a", "b"}))
        async with asyncio.timeout(5):
            left = {"a", "b"}
            while left:
                left -= prefill.step()
                await asyncio.sleep(0.002)
        for at, tokens, blocks in ((node, TOKENS, BLOCKS), (other, 50, other_blocks)):
            done = await at.ended()
            assert torch.equal(arrived(at, done["segments"]), prefill.rows(blocks, tokens))


@pytest.mark.parametrize("told", [True, False])
async def test_blocks_are_read_only_in_steps_that_name_the_request(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    """Waiting for room, the request loses its blocks; by the time there is room, they are another's."""
    prefill = Prefill(monkeypatch)
    prefill.transport.hold = True  # the first segment stays in the pool
    prefill.step(opened=(order(node, TOKENS),), progress=(Progress("a", 96, BLOCKS[:6]),))
    gathered = prefill.worker._outgoing["a"].gathered
    assert gathered == 64
    # Preempted (some releases of vLLM say so): the rest of its blocks are given to somebody else.
    if told:
        prefill.worker.preempting(StepPlan(preempted=frozenset({"a"})))
    for cache in prefill.caches.values():
        cache[list(BLOCKS[4:])] = 13.0
    prefill.transport.held.set()
    for _ in range(20):
        prefill.step()
        await asyncio.sleep(0.002)
    assert prefill.worker._outgoing["a"].gathered == gathered


async def test_a_preempted_prompt_is_completed_from_its_new_blocks(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = Prefill(monkeypatch)
    first, second = BLOCKS[:3], (11, 12, 13, 14, 15, 16, 17, 18)
    prefill.step(opened=(order(node, TOKENS),), progress=(Progress("a", 40, first),))
    want = prefill.rows(first, 40)
    prefill.step(preempted=frozenset({"a"}))
    for cache in prefill.caches.values():
        cache[list(first)] = 13.0
    # It is computed again from the start, elsewhere, to the same values.
    pages = list(prefill.caches.values())
    for layer, cache in enumerate(pages):
        for token in range(40):
            cache[second[token // PAGE], 0, token % PAGE] = want[layer, token].view(torch.float32)
    prefill.step(progress=(Progress("a", 40, second[:3]),))
    prefill.step(progress=(Progress("a", TOKENS, second),))
    prefill.step(ended=frozenset({"a"}))
    await prefill.until_free("a")
    done = await node.ended()
    assert torch.equal(arrived(node, done["segments"]), prefill.rows(second, TOKENS))


async def test_a_request_closed_half_way_frees_its_blocks_and_tells_the_node(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = Prefill(monkeypatch)
    prefill.step(opened=(order(node, TOKENS),), progress=(Progress("a", 32, BLOCKS[:2]),))
    async with asyncio.timeout(5):
        while node.untouched:
            await asyncio.sleep(0.002)
    assert "a" in prefill.step(closed={"a": "cancelled"}, ended=frozenset({"a"}))
    assert (await node.ended())["abort"] == "cancelled"
    async with asyncio.timeout(5):
        while not (counts := prefill.counts()).get("failures"):
            await asyncio.sleep(0.01)
    assert counts["failures"] == {"cancelled": 1}


async def test_a_dead_node_frees_blocks_as_soon_as_that_is_known(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.accept = lambda _: {"error": "busy", "message": "decoding"}
    prefill = Prefill(monkeypatch)  # would wait 20 s for staging
    prefill.step(opened=(order(node, TOKENS),), progress=(Progress("a", TOKENS, BLOCKS),))
    prefill.step(ended=frozenset({"a"}))
    await prefill.until_free("a", within_s=5.0)
    assert node.untouched


async def test_state_that_cannot_be_gathered_fails_its_handoff_alone(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = Prefill(monkeypatch)
    async with FakeNode(LAYOUT, max_seq_len=1024, transport=LoopTransport()) as other:
        prefill.step(
            opened=(order(node, 40, "a"), order(other, 40, "b")),
            progress=(Progress("a", 40, (1, 2, 64)), Progress("b", 40, (4, 5, 6))),  # there is no block 64
        )
        free = prefill.step(ended=frozenset({"a", "b"}))
        assert "a" in free
        if "b" not in free:  # it may have had to wait for what the other left in the pool
            await prefill.until_free("b")
        end = await node.ended()
        assert end == {"closed": True} or end["abort"] == "gather_failed"  # before or after it had asked
        done = await other.ended()
        assert torch.equal(arrived(other, done["segments"]), prefill.rows((4, 5, 6), 40))


async def test_ranks_that_do_not_send_report_requests_at_once(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = Prefill(monkeypatch, rank=1)
    prefill.step(opened=(order(node, 40),), progress=(Progress("a", 40, BLOCKS[:3]),))
    assert prefill.step(ended=frozenset({"a"})) == {"a"}
    assert node.connections == 0


async def test_shutting_down_gives_up_what_is_under_way(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = Prefill(monkeypatch)
    prefill.step(opened=(order(node, TOKENS),), progress=(Progress("a", 32, BLOCKS[:2]),))
    async with asyncio.timeout(5):
        while node.untouched:
            await asyncio.sleep(0.002)
    await asyncio.to_thread(prefill.worker.close)
    assert (await node.ended())["abort"] == "cancelled"


def test_a_pool_too_small_for_four_pages_names_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=rf"tilert_staging_bytes is 100: at least {4 * TOKEN} are needed"):
        Prefill(monkeypatch, tilert_staging_bytes=100)

"""A decode node is killed while state is on its way and comes back elsewhere: the prefill side never restarts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.decode.parts import HOST, LAYOUT, SECRET, Oracle, Prefill, Running, prompt_of, tokens_of
from integration.decode.test_the_command_starts_drains_and_comes_back import command, free_ports
from vllm_tilert.connector.metrics import HandoffReport
from vllm_tilert.connector.plan import Order
from vllm_tilert.connector.sender import Handoff, Link, Segment
from vllm_tilert.profiles.base import LANDED
from vllm_tilert.staging import StagingPool
from vllm_tilert.transports import make_transport
from vllm_tilert.wire import api


class Connector:
    """The connector's sending half, over one transport for its whole life."""

    def __init__(self, oracle: Oracle, transport: str, protocol: str) -> None:
        self.oracle = oracle
        self.pool = StagingPool(16 << 20, torch.device("cpu"))
        self.transport = make_transport(transport, protocol)
        self.transport.init(HOST)
        self.transport.register(self.pool.buffer.data_ptr(), self.pool.capacity, "cpu")
        self.reports: list[HandoffReport] = []

    def open(self, rid: str, grant: dict[str, Any], port: int, tokens: int) -> Handoff:
        link = Link(self.transport, LAYOUT, 0, SECRET.encode(), 3.0, 20.0, True)
        order = Order("a", rid, grant["generation"], HOST, port, tokens, 65)
        handoff = Handoff(order, link, self.reports.append)
        handoff.start()
        return handoff

    def put(self, handoff: Handoff, state: torch.Tensor, start: int, stop: int) -> None:
        part = state.view(LAYOUT.layers, -1, 2304)[:, start:stop].flatten()
        piece = self.pool.try_take(part.numel())
        assert piece is not None
        piece.tensor.copy_(part)
        handoff.put(Segment(start, stop - start, piece, LANDED, 0.0, 0.0))

    async def hand_off_and_decode(self, node: Running, prompt: list[int], expected: list[int]) -> None:
        rid = api.new_rid()
        grant = await node.reserve(rid)
        handoff = self.open(rid, grant, node.control_port, len(prompt))
        state = self.oracle.state(prompt)
        self.put(handoff, state, 0, 20)
        self.put(handoff, state, 20, len(prompt))
        assert await asyncio.to_thread(handoff.join, 20.0)
        assert self.reports[-1].reason is None
        status, lines = await node.stream(rid, expected[0], len(expected))
        assert (status, tokens_of(lines)) == (200, expected)


@pytest.mark.parametrize(
    ("transport", "same_ports"),
    [(("mooncake", "tcp"), True), (("mooncake", "tcp"), False), (("nixl", "UCX"), True)],
    ids=["mooncake-same-ports", "mooncake-other-ports", "nixl"],
)
async def test_handoffs_go_on_with_the_node_that_came_back(
    prefill: Prefill, model_dir: Path, tmp_path: Path, transport: tuple[str, str], same_ports: bool
) -> None:
    prompt = prompt_of(31, 50)
    expected = prefill.oracle.continuation(prompt, 16)
    connector = Connector(prefill.oracle, *transport)
    ports = free_ports()
    async with command(model_dir, tmp_path, ports, transport) as (process, node):
        await connector.hand_off_and_decode(node, prompt, expected)
        rid = api.new_rid()
        cut_off = connector.open(rid, await node.reserve(rid), ports[0], len(prompt))
        state = prefill.oracle.state(prompt)
        connector.put(cut_off, state, 0, 20)
        async with asyncio.timeout(10):
            while connector.pool.in_use:  # until the first chunk has arrived
                await asyncio.sleep(0.005)
        process.kill()
        await process.wait()
        connector.put(cut_off, state, 20, len(prompt))
        assert await asyncio.to_thread(cut_off.join, 30.0)
        assert connector.reports[-1].reason in ("connect_failed", "write_failed", "protocol_error")
        assert connector.pool.in_use == 0
    async with command(model_dir, tmp_path, ports if same_ports else free_ports(), transport) as (_, node):
        for _ in range(2):
            await connector.hand_off_and_decode(node, prompt, expected)


@pytest.mark.parametrize("transport", [("mooncake", "tcp"), ("nixl", "UCX")], ids=lambda t: t[0])
async def test_a_node_that_is_down_costs_its_handoffs_a_reason_and_no_memory(
    prefill: Prefill, transport: tuple[str, str]
) -> None:
    connector = Connector(prefill.oracle, *transport)
    prompt = prompt_of(32, 40)
    state = prefill.oracle.state(prompt)
    for _ in range(3):
        handoff = connector.open(api.new_rid(), {"generation": 1}, free_ports()[0], len(prompt))
        connector.put(handoff, state, 0, len(prompt))
        assert await asyncio.to_thread(handoff.join, 10.0)
        assert connector.reports[-1].reason == "connect_failed"
    assert connector.pool.in_use == 0

"""TileRT's own code from the wheel at the other end: our connector hands off to its receive server, its connector
to our decode node. Mooncake over TCP, real layer counts; the stock connector's memory is the host's.

(NIXL is not run: the stock transport registers all memory as VRAM, which needs a GPU.)
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import random
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unit.profiles.caches import nsa_caches
from vllm_tilert.connector.metrics import HandoffReport
from vllm_tilert.connector.plan import Order
from vllm_tilert.connector.sender import Handoff, Link, Segment
from vllm_tilert.decode.engines.base import Decoded, Sampling
from vllm_tilert.decode.landing import NOWHERE
from vllm_tilert.decode.node import Decode, Node
from vllm_tilert.decode.receiver import Receiver
from vllm_tilert.decode.slots import Limits, Outcome
from vllm_tilert.profiles.base import LANDED, ConvertedState, get_profile
from vllm_tilert.staging import StagingPool
from vllm_tilert.transports import make_transport
from vllm_tilert.wire import control
from vllm_tilert.wire.api import new_rid

HOST = "127.0.0.1"
SECRET = b"what stock senders cannot prove"
BLOCKS = 70
LIMIT, LONG_LIMIT = 256, 4224
LENGTHS = (1, 63, 64, 65, 4097)
QUICK = Limits(reserve=20.0, transfer=20.0, grace=0.5, claim=20.0)


@functools.cache
def caches_of(layers: int, dtype: str) -> dict[str, torch.Tensor]:
    return nsa_caches(layers, BLOCKS, dtype, generator=torch.Generator().manual_seed(2))


class Prefilled:
    """One model's caches, seen by both ends' profiles, and what is computed from them. `limit`: max_seq_len."""

    def __init__(self, stock: Any, name: str, layers: int, dtype: str, limit: int = LIMIT) -> None:
        self.name, self.limit = name, limit
        self.caches = caches_of(layers, dtype)
        self.ours = get_profile(name)
        self.layout = self.ours.layout_from_caches(self.caches)
        self.gatherer = self.ours.gatherer(self.caches, self.layout)
        self.stock = stock.get_profile(name).configure("bf16" if dtype == "bfloat16" else dtype)
        self.config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=list(self.caches))])
        self.registered = self.stock.classify_layers(self.caches, self.config)

    def table(self, tokens: int) -> list[int]:
        """A shuffled block table; another for each length."""
        return random.Random(tokens).sample(range(BLOCKS), -(-tokens // 64))

    def gathered(self, start: int, stop: int, tokens: int, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None:
            out = torch.empty(self.layout.segment_bytes(stop - start), dtype=torch.uint8)
        self.gatherer.gather(self.table(tokens), start, stop, out).wait()
        return out

    def state(self, tokens: int) -> ConvertedState:
        """What our own end makes of the prompt."""
        return self.ours.convert(self.gathered(0, tokens, tokens), self.layout, [tokens])

    def stock_state(self, tokens: int) -> list[tuple[torch.Tensor, ...]]:
        """What TileRT's two ends make of it with no wire between them."""
        staging = torch.zeros(self.stock.buffer_bytes(self.limit), dtype=torch.uint8)
        request = SimpleNamespace(num_tokens=tokens, block_ids_per_group=[self.table(tokens)])
        self.stock.extract(self.registered, request, 0, staging, self.limit)
        return self.convert(staging, tokens)

    def convert(self, buffer: torch.Tensor, tokens: int) -> list[tuple[torch.Tensor, ...]]:
        received = SimpleNamespace(
            rid="r", seq_len=tokens, last_prompt_token=0, first_token_id=None, sampling=None
        )
        return list(self.stock.convert(buffer, buffer.data_ptr(), self.limit, received).layers)


@pytest.fixture(scope="module", params=[("glm5", 79, "fp8_ds_mla"), ("dsv32", 62, "bfloat16")], ids=str)
def model(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def tokens(request: pytest.FixtureRequest) -> int:
    """A prompt's length; given by the tests that try several."""
    return int(getattr(request, "param", 64))


@pytest.fixture
def prefilled(stock: Any, model: Any, tokens: int) -> Prefilled:
    return Prefilled(stock, *model, LIMIT if tokens < LIMIT else LONG_LIMIT)


# ---- our connector, their receive server


@pytest.fixture
def server(prefilled: Prefilled) -> Iterator[Any]:
    from tilert.pd_vllm.receive_server import ReceiveServer

    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    server = ReceiveServer(
        prefilled.stock, prefilled.limit, port, HOST, device="cpu", request_timeout=30.0, transport="mooncake"
    )
    server.port = port
    yield server
    # Closing alone does not wake its accept.
    server._stop.set()
    with contextlib.suppress(OSError):
        server._srv.shutdown(socket.SHUT_RDWR)
    server.close()


class OurSender:
    """Our handoffs to one port, over one transport and pool."""

    def __init__(self, prefilled: Prefilled, port: int) -> None:
        self.prefilled, self.port = prefilled, port
        self.pool = StagingPool(
            prefilled.layout.segment_bytes(prefilled.limit) + (1 << 20), torch.device("cpu")
        )
        self.transport = make_transport("mooncake", "tcp")
        self.transport.init(HOST)
        self.transport.register(self.pool.buffer.data_ptr(), self.pool.capacity, "cpu")
        self.reports: list[HandoffReport] = []

    def open(
        self, tokens: int, rid: str, generation: int | None = None, secret: bytes | None = None
    ) -> Handoff:
        link = Link(self.transport, self.prefilled.layout, 0, secret, 5.0, 60.0, None)
        order = Order("a", rid, generation, HOST, self.port, tokens, 17)
        handoff = Handoff(order, link, self.reports.append)
        handoff.start()
        return handoff

    def put(self, handoff: Handoff, start: int, stop: int) -> None:
        piece = self.pool.try_take(self.prefilled.layout.segment_bytes(stop - start))
        assert piece is not None
        self.prefilled.gathered(start, stop, handoff.order.seq_len, piece.tensor)
        handoff.put(Segment(start, stop - start, piece, LANDED, 0.0, 0.0))

    def send(self, tokens: int, rid: str, cuts: tuple[int, ...] = (), *admission: Any) -> None:
        """A whole handoff in the segments that `cuts` make; `admission`: generation and secret."""
        handoff = self.open(tokens, rid, *admission)
        bounds = (0, *cuts, tokens)
        for start, stop in itertools.pairwise(bounds):
            self.put(handoff, start, stop)
        assert handoff.join(60.0)
        assert self.pool.in_use == 0


@pytest.fixture
def our_sender(prefilled: Prefilled, server: Any) -> OurSender:
    return OurSender(prefilled, server.port)


@pytest.mark.parametrize("tokens", LENGTHS, indirect=True)
def test_their_receive_server_converts_what_we_sent_to_what_theirs_sends(
    prefilled: Prefilled, server: Any, our_sender: OurSender, tokens: int
) -> None:
    server.buffer.fill_(0xEE)  # nothing of an earlier request helps
    rid = new_rid()
    cuts = () if tokens <= 64 else (64,) if tokens < 4000 else (64, 2048, 4096)
    our_sender.send(tokens, rid, cuts)
    assert our_sender.reports[0].reason is None
    received = server.completed.get(timeout=10)
    assert (received.rid, received.seq_len, received.last_prompt_token) == (rid, tokens, 17)
    got = prefilled.convert(server.buffer, tokens)
    want = prefilled.stock_state(tokens)
    assert len(got) == len(want) == prefilled.layout.layers
    assert all(
        torch.equal(mine, theirs)
        for a, b in zip(got, want, strict=True)
        for mine, theirs in zip(a, b, strict=True)
    )


def test_a_busy_receive_server_gets_no_byte(server: Any, our_sender: OurSender) -> None:
    with socket.create_connection((HOST, server.port)) as other:
        control.recv(other)
        other.sendall(control.pack({"rid": "other", "rank": 0, "seq_len": 64, "last_prompt_token": 1}))
        while server._current is None:
            threading.Event().wait(0.005)
        server.buffer.fill_(0xEE)
        our_sender.send(64, new_rid())
        assert our_sender.reports[0].reason == "busy"
        assert bool((server.buffer == 0xEE).all())


def test_a_longer_prompt_than_the_receive_server_takes_gets_no_byte(
    server: Any, our_sender: OurSender
) -> None:
    server.max_seq_len = 63
    server.buffer.fill_(0xEE)
    our_sender.send(64, new_rid())
    assert our_sender.reports[0].reason == "seq_len_exceeded"
    assert bool((server.buffer == 0xEE).all())


def test_a_receive_server_of_the_other_dtype_gets_no_byte(
    prefilled: Prefilled, server: Any, our_sender: OurSender
) -> None:
    server.profile.configure("fp8" if prefilled.layout.dtype == "bfloat16" else "bf16")
    server.buffer.fill_(0xEE)
    our_sender.send(64, new_rid())
    assert our_sender.reports[0].reason == "layout_mismatch"
    assert bool((server.buffer == 0xEE).all())


def test_a_handoff_given_up_half_way_is_never_complete_there(server: Any, our_sender: OurSender) -> None:
    handoff = our_sender.open(200, new_rid())
    our_sender.put(handoff, 0, 64)
    while not server.buffer.any():
        threading.Event().wait(0.005)
    handoff.abort("cancelled", "gone")
    assert handoff.join(10.0)
    assert our_sender.reports[0].reason == "cancelled"
    assert server.completed.empty()
    rid = new_rid()
    server.release()
    our_sender.send(65, rid)
    assert server.completed.get(timeout=10).rid == rid


# ---- their connector, our decode node


class Recorder:
    """In the place of TileRT's engine, which needs eight GPUs: keeps what is injected."""

    takes_bytes = False

    def __init__(self, max_seq_len: int) -> None:
        self.max_seq_len = max_seq_len
        self.injected: list[ConvertedState] = []

    def inject(self, state: ConvertedState, last_prompt_token: int) -> None:
        self.injected.append(state)
        self.last = last_prompt_token

    def decode(
        self, first_token_id: int, max_tokens: int, sampling: Any, on_tokens: Any, cancel: Any
    ) -> Decoded:
        on_tokens([first_token_id])
        return Decoded(1, "length")

    def reset(self) -> None:
        pass

    def self_check(self) -> None:
        pass


class DecodeNode:
    """A node that listens, its engine's record, and requests through it."""

    def __init__(self, node: Node, engine: Recorder, port: int) -> None:
        self.node, self.engine, self.port = node, engine, port

    def reserve(self, ahead: bool = False) -> Any:
        return self.node.slots.reserve(new_rid(), ahead=ahead)

    async def decoded(self, rid: str) -> ConvertedState:
        """Decode `rid`; what was injected for it."""
        before = len(self.engine.injected)
        self.node.attach(rid, Decode(5, 1, Sampling()), 20.0)
        async with asyncio.timeout(20):
            await self.node.signal.until(lambda: self.node.slots.find(rid).over)  # type: ignore[union-attr]
        handoff = self.node.slots.find(rid)
        assert handoff is not None
        assert handoff.outcome is Outcome.DONE, handoff.message
        assert len(self.engine.injected) == before + 1
        return self.engine.injected[-1]


@contextlib.asynccontextmanager
async def decode_node(prefilled: Prefilled, allow: bool = True) -> AsyncIterator[DecodeNode]:
    transport = make_transport("mooncake", "tcp")
    transport.init(HOST)
    engine = Recorder(prefilled.limit)
    node = Node(
        slots=2,
        max_seq_len=prefilled.limit,
        layout=prefilled.layout,
        profile=prefilled.ours,
        engine=lambda: engine,
        transport=transport,
        limits=QUICK,
        allow_stock_senders=allow,
    )
    await node.start()
    receiver = Receiver(node, SECRET)
    port = await receiver.start(HOST, 0)
    running = asyncio.ensure_future(node.run())
    try:
        yield DecodeNode(node, engine, port)
    finally:
        await receiver.close()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        node.abort()
        node.close()


class StockConnector:
    """TileRT's connector with everything its own but where its staging buffer lies: in host memory."""

    def __init__(self, prefilled: Prefilled) -> None:
        from tilert.pd_vllm.prefill_connector import TileRTConnector
        from tilert.pd_vllm.transport import make_transport as stock_transport
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        extra = {
            "tilert_model": prefilled.name,
            "tilert_sync_send": True,
            "tilert_max_seq_len": prefilled.limit,
        }
        config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra, kv_role="kv_producer"),
            model_config=SimpleNamespace(max_model_len=prefilled.limit),
        )
        self.prefilled = prefilled
        self.connector = TileRTConnector(config, KVConnectorRole.WORKER, prefilled.config)
        self.connector.register_kv_caches(prefilled.caches)
        size = prefilled.stock.staging_bytes(prefilled.registered, 0, prefilled.limit)
        self.connector._staging = torch.zeros(size, dtype=torch.uint8)
        self.connector._transport = stock_transport("mooncake")
        self.connector._transport.init(HOST)
        self.connector._transport.register(self.connector._staging.data_ptr(), size, 0)
        self.connector._tp_rank = 0

    def prefill(self, rid: str, tokens: int, port: int) -> None:
        """One prompt computed in one step and sent; raises what the stock code raises."""
        params = {"kv_transfer_params": {"tilert_host": HOST, "tilert_ctrl_port": port}}
        req_id = f"cmpl-{rid}-0-0123abcd"  # as vLLM makes it of the router's request_id
        step = SimpleNamespace(
            num_scheduled_tokens={req_id: tokens},
            finished_req_ids=set(),
            preempted_req_ids=None,
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=req_id,
                    sampling_params=SimpleNamespace(extra_args=params),
                    prompt_token_ids=list(range(tokens)),
                    block_ids=[self.prefilled.table(tokens)],
                    num_computed_tokens=0,
                )
            ],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[]),
        )
        self.connector.bind_connector_metadata(self.connector.build_connector_meta(step))
        self.connector.wait_for_save()


def same(got: ConvertedState, want: ConvertedState) -> bool:
    return all(torch.equal(got.planes[name], want.planes[name]) for name in want.order)


@pytest.mark.parametrize("tokens", LENGTHS, indirect=True)
async def test_their_connector_hands_off_to_our_node(prefilled: Prefilled, tokens: int) -> None:
    connector = StockConnector(prefilled)
    async with decode_node(prefilled) as node:
        assert node.node.landing is not None
        node.node.landing.memory.fill_(0xEE)
        grant = node.reserve()
        await asyncio.to_thread(connector.prefill, grant.rid, tokens, node.port)
        assert same(await node.decoded(grant.rid), prefilled.state(tokens))
        assert node.engine.last == tokens - 1


async def test_without_the_option_their_connector_gives_up_before_it_writes(prefilled: Prefilled) -> None:
    connector = StockConnector(prefilled)
    async with decode_node(prefilled, allow=False) as node:
        node.node.memory.fill_(0xEE)
        grant = node.reserve()
        with pytest.raises(AssertionError, match="layout version mismatch: 0"):
            await asyncio.to_thread(connector.prefill, grant.rid, 65, node.port)
        assert bool((node.node.memory == 0xEE).all())
        # The reservation is as it was: our own sender is welcome.
        sender = OurSender(prefilled, node.port)
        await asyncio.to_thread(sender.send, 65, grant.rid, (), grant.generation, SECRET)
        assert same(await node.decoded(grant.rid), prefilled.state(65))


class Step:
    """A stock sender step by step: its wire, its plan, its transport."""

    def __init__(self, connector: StockConnector, tokens: int) -> None:
        self.connector, self.tokens = connector, tokens

    def connect(self, port: int) -> dict[str, Any]:
        from tilert.pd_vllm import wire

        self.wire = wire
        self.sock = socket.create_connection((HOST, port), 5.0)
        self.hello = wire.recv_msg(self.sock)
        return dict(self.hello)

    def request(self, rid: str) -> None:
        self.rid = rid
        self.wire.send_msg(
            self.sock,
            {"rid": rid, "rank": 0, "seq_len": self.tokens, "last_prompt_token": 3, "sampling": None},
        )

    def write(self) -> None:
        inner, prefilled = self.connector.connector, self.connector.prefilled
        request = SimpleNamespace(num_tokens=self.tokens, block_ids_per_group=[prefilled.table(self.tokens)])
        sections = prefilled.stock.extract(prefilled.registered, request, 0, inner._staging, prefilled.limit)
        plan = prefilled.stock.rdma_plan(self.hello, sections, 0, self.tokens, inner._staging.data_ptr())
        inner._transport.write(self.hello, *plan)

    def done(self) -> None:
        self.wire.send_msg(self.sock, {"done": True, "rid": self.rid, "rank": 0})
        self.sock.close()

    def reset(self) -> None:
        """End as a killed process may: with RST."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.sock.close()


@pytest.fixture
def glm5(stock: Any) -> Prefilled:
    return Prefilled(stock, "glm5", 79, "fp8_ds_mla")


async def lendable(node: DecodeNode, within_s: float = 5.0) -> None:
    """Wait until the landing zone is nobody's."""
    landing = node.node.landing
    assert landing is not None
    async with asyncio.timeout(within_s):
        while (lease := landing.lend()) is None:
            await asyncio.sleep(0.01)
    lease.quiet = True
    lease.end()


async def test_a_second_stock_sender_is_sent_away_before_it_writes(glm5: Prefilled) -> None:
    connector = StockConnector(glm5)
    async with decode_node(glm5) as node:
        first, second = node.reserve(), node.reserve(ahead=True)
        step = Step(connector, 130)
        await asyncio.to_thread(step.connect, node.port)
        step.request(first.rid)
        await asyncio.to_thread(step.write)
        assert node.node.landing is not None
        before = node.node.landing.memory.clone()
        with pytest.raises(AssertionError, match="layout version mismatch: 0"):
            await asyncio.to_thread(connector.prefill, second.rid, 200, node.port)
        assert torch.equal(node.node.landing.memory, before)
        step.done()
        assert same(await node.decoded(first.rid), glm5.state(130))
        await lendable(node)
        await asyncio.to_thread(connector.prefill, second.rid, 200, node.port)
        assert same(await node.decoded(second.rid), glm5.state(200))


async def test_our_own_sender_is_not_in_the_way_nor_delayed(glm5: Prefilled) -> None:
    connector = StockConnector(glm5)
    async with decode_node(glm5) as node:
        theirs, ours = node.reserve(), node.reserve(ahead=True)
        step = Step(connector, 130)
        await asyncio.to_thread(step.connect, node.port)
        step.request(theirs.rid)
        sender = OurSender(glm5, node.port)
        await asyncio.to_thread(sender.send, 200, ours.rid, (128,), ours.generation, SECRET)
        assert sender.reports[0].reason is None
        await asyncio.to_thread(step.write)
        step.done()
        assert same(await node.decoded(theirs.rid), glm5.state(130))
        assert same(await node.decoded(ours.rid), glm5.state(200))


async def test_an_unreserved_or_reused_rid_reaches_no_slot(glm5: Prefilled) -> None:
    connector = StockConnector(glm5)
    async with decode_node(glm5) as node:
        node.node.memory.fill_(0xEE)
        for rid in (new_rid(), "job"):
            await asyncio.to_thread(connector.prefill, rid, 65, node.port)  # it reads no refusal
            await lendable(node)
        grant = node.reserve()
        await asyncio.to_thread(connector.prefill, grant.rid, 65, node.port)
        assert same(await node.decoded(grant.rid), glm5.state(65))
        await lendable(node)
        await asyncio.to_thread(connector.prefill, grant.rid, 130, node.port)  # once more, other state
        await lendable(node)
        assert len(node.engine.injected) == 1
        assert bool((node.node.memory == 0xEE).all())
        assert node.node.slots.idle


async def test_a_request_that_ends_while_theirs_writes_frees_its_slot_and_keeps_the_zone(
    glm5: Prefilled,
) -> None:
    connector = StockConnector(glm5)
    async with decode_node(glm5) as node:
        given_up = node.reserve()
        step = Step(connector, 200)
        await asyncio.to_thread(step.connect, node.port)
        step.request(given_up.rid)
        async with asyncio.timeout(5):
            await node.node.signal.until(lambda: given_up.admitted)
        node.node.slots.end(given_up, Outcome.EXPIRED)
        async with asyncio.timeout(5):
            await node.node.signal.until(lambda: node.node.slots.idle)
        grant = node.reserve()  # the slot is free, and is another request's
        with pytest.raises(AssertionError, match="layout version mismatch: 0"):
            await asyncio.to_thread(connector.prefill, grant.rid, 65, node.port)
        sender = OurSender(glm5, node.port)
        await asyncio.to_thread(sender.send, 130, grant.rid, (), grant.generation, SECRET)
        assert sender.reports[0].reason is None
        before = node.node.memory.clone()
        await asyncio.to_thread(step.write)
        step.done()
        assert torch.equal(node.node.memory, before)
        assert same(await node.decoded(grant.rid), glm5.state(130))
        await lendable(node)


@pytest.mark.parametrize("asked", [False, True])
async def test_after_a_stock_sender_has_vanished_nobody_lands_until_it_cannot_write(
    glm5: Prefilled, asked: bool
) -> None:
    connector = StockConnector(glm5)
    async with decode_node(glm5) as node:
        assert node.node.landing is not None
        node.node.landing._quarantine_s = 1.0
        grant = node.reserve()
        step = Step(connector, 200)
        await asyncio.to_thread(step.connect, node.port)
        if asked:
            step.request(grant.rid)
            async with asyncio.timeout(5):
                await node.node.signal.until(lambda: grant.admitted)
        step.reset()
        async with asyncio.timeout(5):
            while node.node.landing._lease is not None:
                await asyncio.sleep(0.005)
        assert grant.over is asked
        next_one = node.reserve(ahead=True)
        with pytest.raises(AssertionError, match="layout version mismatch: 0"):
            await asyncio.to_thread(connector.prefill, next_one.rid, 65, node.port)
        await lendable(node)
        await asyncio.to_thread(connector.prefill, next_one.rid, 65, node.port)
        if not asked:
            node.node.slots.end(grant, Outcome.EXPIRED)
        assert same(await node.decoded(next_one.rid), glm5.state(65))


async def test_who_only_looks_in_does_not_close_the_zone(glm5: Prefilled) -> None:
    async with decode_node(glm5) as node:
        for _ in range(3):
            _, writer = await asyncio.open_connection(HOST, node.port)
            await asyncio.sleep(0.02)
            writer.close()
            await writer.wait_closed()
        await lendable(node, within_s=0.4)
        reader, writer = await asyncio.open_connection(HOST, node.port)
        assert (await control.read(reader))["layout_version"] == glm5.layout.version
        other, writer2 = await asyncio.open_connection(HOST, node.port)
        hello = await control.read(other)
        assert {name: hello[name] for name in NOWHERE} == NOWHERE
        writer.close()
        writer2.close()

"""One handoff after another on this machine's CPU, ours and TileRT's own, in one run.

usage: bin/bench handoff [TOKENS...]     GLM-5's 79 layers, fp8_ds_mla; fetches the stock wheel when it is not there yet

Both sides: the real connector's work over the same caches, Mooncake over TCP on loopback, the real decode server over
HTTP, and an engine that hands a token out as soon as it has the state. Stock is TileRT 0.1.5.post3's connector,
receive server and decode server; only its staging and receive buffers lie in host memory instead of a GPU's.
Milliseconds, medians of five, taken in turn; the tensors that arrive are compared once a length.

  gather     vLLM's pages to a staging buffer (stock: extract)
  checksum   computed by the sender and, within convert, by the node; stock has none
  wire       writing to the node
  convert    what arrived to the engine's tensors (ours: verified too, where there are checksums)
  to token   from the end of the prompt's last chunk to the first token out of the decode server
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import socket
import statistics
import sys
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import aiohttp
import torch
import uvicorn

from contract.conftest import CACHE, stock_path
from unit.profiles.caches import nsa_caches
from vllm_tilert.checksum import plane_checksums
from vllm_tilert.connector.config import ConnectorConfig
from vllm_tilert.connector.plan import Order, Progress, StepPlan
from vllm_tilert.connector.worker import HandoffWorker
from vllm_tilert.decode.engines.base import Decoded
from vllm_tilert.decode.http import build_app
from vllm_tilert.decode.node import Node
from vllm_tilert.decode.receiver import Receiver
from vllm_tilert.profiles.base import get_profile
from vllm_tilert.transports import make_transport
from vllm_tilert.wire import api

HOST = "127.0.0.1"
BLOCKS, LENGTHS, REPEAT = 70, (64, 1024, 4096), 5


@dataclass
class Times:
    """Milliseconds of one handoff."""

    gather: float = 0.0
    checksum: float = 0.0
    wire: float = 0.0
    convert: float = 0.0
    to_token: float = 0.0

    @classmethod
    def median(cls, runs: list[Times]) -> Times:
        return cls(**{name: statistics.median(getattr(run, name) for run in runs) for name in vars(runs[0])})


@dataclass
class Echo:
    """Stands for the engine on both sides."""

    max_seq_len: int
    takes_bytes: bool = False
    state: Any = None
    last_stats: dict[str, Any] = field(default_factory=lambda: {"finish_reason": "length"})

    def inject(self, state: Any, last_prompt_token: int = 0) -> None:
        self.state = state

    def reset(self) -> None:
        pass

    def self_check(self) -> None:
        pass


class OurEcho(Echo):
    def decode(self, first: int, max_tokens: int, sampling: Any, on_tokens: Any, cancel: Any) -> Decoded:
        on_tokens([first])
        return Decoded(1, "length")


class StockEcho(Echo):
    def decode(
        self, first_token_id: int, max_tokens: int, sampling: Any, on_token: Any, cancel_event: Any
    ) -> list[int]:
        on_token(first_token_id)
        return [first_token_id]


class Web:
    """uvicorn with one application, and a call that is timed to its first token."""

    async def start(self, app: Any) -> None:
        self._server = uvicorn.Server(uvicorn.Config(app, host=HOST, port=0, log_level="error"))
        self._serving = asyncio.ensure_future(self._server._serve())
        while not self._server.started:
            await asyncio.sleep(0.01)
        self.url = f"http://{HOST}:{self._server.servers[0].sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self._server.should_exit = True
        await self._serving

    async def first_token(self, http: aiohttp.ClientSession, rid: str) -> tuple[float, dict[str, Any]]:
        """When the first token came (`time.perf_counter`), and the last line."""
        body = {"rid": rid, "first_token_id": 5, "max_tokens": 1, "stream": True}
        async with http.post(self.url + api.DECODE, json=body) as answer:
            lines = answer.content
            first = json.loads(await lines.readline())
            at = time.perf_counter()
            if "t" not in first:
                raise SystemExit(f"the decode server says {first}")
            return at, json.loads((await lines.read()).splitlines()[-1])


class Ours:
    """The connector's worker and a decode node."""

    def __init__(self, caches: dict[str, torch.Tensor], limit: int, checksums: bool) -> None:
        self.caches, self.checksums = caches, checksums
        profile = get_profile("glm5")
        self.layout = profile.layout_from_caches(caches)
        settings = {
            "tilert_profile": "glm5",
            "tilert_transport": "mooncake",
            "tilert_protocol": "tcp",
            "tilert_local_host": HOST,
            "tilert_allowed_hosts": [HOST],
            "tilert_staging_bytes": 4 * self.layout.segment_bytes(limit),
            "tilert_checksum": checksums,
        }
        self.worker = HandoffWorker(ConnectorConfig.parse(settings, limit), 0)
        self.worker.register(caches)
        transport = make_transport("mooncake", "tcp")
        transport.init(HOST)
        self.engine = OurEcho(limit + 64)
        self.node = Node(
            slots=1,
            max_seq_len=limit + 64,
            layout=self.layout,
            profile=profile,
            engine=lambda: self.engine,
            transport=transport,
            verify_checksums=checksums,
        )

    async def start(self) -> None:
        await self.node.start()
        self.receiver = Receiver(self.node, None)
        self.port = await self.receiver.start(HOST, 0)
        self.running = asyncio.ensure_future(self.node.run())
        self.web = Web()
        await self.web.start(build_app(self.node, None))

    async def stop(self) -> None:
        await self.web.stop()
        await self.receiver.close()
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        self.worker.close()
        self.node.close()

    def step(self, **plan: Any) -> set[str]:
        made = StepPlan(**plan)
        self.worker.before_forward(made)
        self.worker.after_forward(made)
        return self.worker.finished(made)

    async def hand_off(
        self, http: aiohttp.ClientSession, table: list[int], tokens: int, chunks: int
    ) -> Times:
        rid = api.new_rid()
        grant = self.node.slots.reserve(rid)
        call = asyncio.ensure_future(self.web.first_token(http, rid))
        order = Order(rid, rid, grant.generation, HOST, self.port, tokens, 1)
        # Before the first forward; all chunks but the last have been computed and have left when it ends.
        self.step(opened=(order,))
        for number in range(1, chunks):
            self.step(progress=(Progress(rid, tokens * number // chunks, table),))
        while not grant.admitted or self.worker._pool.in_use:  # type: ignore[union-attr]
            await asyncio.sleep(0.001)
        began = time.perf_counter()
        await asyncio.to_thread(self.step, progress=(Progress(rid, tokens, table),))
        at, last = await call
        while rid not in self.step(ended=frozenset({rid})):
            await asyncio.sleep(0.001)
        while not (counts := self.worker.drain_counts()) or not counts["handoffs"]:
            await asyncio.sleep(0.001)
        sums = 0.0
        if self.checksums:
            segment = torch.zeros(self.layout.segment_bytes(tokens), dtype=torch.uint8)
            start = time.perf_counter()
            plane_checksums(segment, self.layout, tokens)
            sums = time.perf_counter() - start
        return Times(
            gather=1e3 * counts["gather_s"][0],
            checksum=1e3 * sums,
            wire=1e3 * counts["wire_s"][0],
            convert=last["timing_ms"]["convert"],
            to_token=1e3 * (at - began),
        )


class Stock:
    """TileRT's connector, receive server and decode server."""

    def __init__(self, caches: dict[str, torch.Tensor], limit: int) -> None:
        from tilert.pd_vllm import decode_server
        from tilert.pd_vllm.profiles import base
        from tilert.pd_vllm.receive_server import ReceiveServer

        from contract.test_the_stock_wire_works_both_ways import StockConnector

        logging.getLogger().setLevel(logging.WARNING)
        profile = base.get_profile("glm5").configure("fp8_ds_mla")
        profile.num_ranks = 1  # else it converts for eight devices, of which there are none
        config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=list(caches))])
        registered = profile.classify_layers(caches, config)
        with socket.socket() as free:
            free.bind((HOST, 0))
            self.port = free.getsockname()[1]
        self.server = ReceiveServer(profile, limit + 64, self.port, HOST, device="cpu")
        self.engine = StockEcho(limit + 64)
        self.app = decode_server.build_app(self.server, self.engine)
        self.tables: dict[int, list[int]] = {}
        prefilled = SimpleNamespace(
            name="glm5",
            limit=limit + 64,
            stock=profile,
            config=config,
            caches=caches,
            registered=registered,
            table=self.tables.__getitem__,
        )
        self.connector = StockConnector(prefilled)  # type: ignore[arg-type]
        self.spent = {"extract": 0.0, "write": 0.0}
        inner = self.connector.connector
        inner._profile.extract = self._timed("extract", inner._profile.extract)
        inner._transport.write = self._timed("write", inner._transport.write)

    def _timed(self, name: str, work: Any) -> Any:
        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = work(*arguments)
            self.spent[name] = time.perf_counter() - start
            return result

        return timed

    async def start(self) -> None:
        self.web = Web()
        await self.web.start(self.app)

    async def stop(self) -> None:
        await self.web.stop()
        self.server.close()

    async def hand_off(self, http: aiohttp.ClientSession, table: list[int], tokens: int) -> Times:
        rid = api.new_rid()
        self.tables[tokens] = table
        call = asyncio.ensure_future(self.web.first_token(http, rid))
        await asyncio.sleep(0.05)  # the decode call waits, as ours does
        began = time.perf_counter()
        await asyncio.to_thread(self.connector.prefill, rid, tokens, self.port)
        at, last = await call
        return Times(
            gather=1e3 * self.spent["extract"],
            wire=1e3 * self.spent["write"],
            convert=last["timing_ms"]["convert"],
            to_token=1e3 * (at - began),
        )


def compare(ours: Any, stock: Any) -> None:
    """The tensors both engines were given are equal; the index key up to one step of bfloat16."""
    for mine, theirs in zip(ours.layers, stock.layers, strict=True):
        gap = (mine[0].view(torch.int16).int() - theirs[0].view(torch.int16).int()).abs()
        near_zero = mine[0].float().abs().maximum(theirs[0].float().abs()) < 1e-3
        equal = (gap.le(1) | near_zero).all() and all(
            torch.equal(a, b) for a, b in zip(mine[1:], theirs[1:], strict=True)
        )
        if not equal:
            raise SystemExit("what arrived differs from what the stock code's arrived as")


def line(tokens: int, mega: float, what: str, times: Times) -> str:
    numbers = (times.gather, times.checksum, times.wire, times.convert, times.to_token)
    return f"| {tokens:,} | {mega:.1f} | {what} | " + " | ".join(f"{n:.1f}" for n in numbers) + " |"


async def bench(lengths: list[int]) -> None:
    caches = nsa_caches(79, BLOCKS, "fp8_ds_mla", generator=torch.Generator().manual_seed(1))
    stock = Stock(caches, max(lengths))
    sides = {checksums: Ours(caches, max(lengths), checksums) for checksums in (True, False)}
    for side in (stock, *sides.values()):
        await side.start()
    print(
        "| tokens | MB | | gather | checksum | wire | convert | to token |\n|---|---|---|---|---|---|---|---|"
    )
    async with aiohttp.ClientSession() as http:
        for tokens in lengths:
            table = random.Random(tokens).sample(range(BLOCKS), -(-tokens // 64))
            mega = sides[True].layout.segment_bytes(tokens) / 1e6
            kinds = [("ours", True, 1), ("ours, without checksums", False, 1)]
            kinds += [("ours, in 4 chunks", True, 4)] if tokens >= 1024 else []
            runs: dict[str, list[Times]] = {}
            for _ in range(REPEAT + 1):  # in turn, so that whatever else the machine does meets all of them
                for what, checksums, chunks in kinds:
                    times = await sides[checksums].hand_off(http, table, tokens, chunks)
                    runs.setdefault(what, []).append(times)
                runs.setdefault("stock", []).append(await stock.hand_off(http, table, tokens))
            compare(sides[True].engine.state, stock.engine.state)
            for what, measured in runs.items():
                print(line(tokens, mega, what, Times.median(measured[1:])), flush=True)
    for side in (stock, *sides.values()):
        await side.stop()


def main() -> None:
    lengths = [int(argument) for argument in sys.argv[1:]] or list(LENGTHS)
    stock_path.__wrapped__()
    sys.path.insert(0, str(CACHE))
    torch.cuda.synchronize = lambda *args: None  # the stock code calls it on any device
    logging.disable(logging.INFO)
    asyncio.run(bench(lengths))
    sys.stdout.flush()
    os._exit(0)  # the stock receive server's accept thread cannot be stopped


if __name__ == "__main__":
    main()

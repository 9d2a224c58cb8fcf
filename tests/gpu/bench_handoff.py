"""From the end of a prefill to the state ready in the engine: ours beside TileRT's own code, in one run.

usage: PYTHONPATH=plugin:tests:SITE python3 tests/gpu/bench_handoff.py [nixl|mooncake ...]

Two processes on cuda:0 (with two GPUs, the second is the node's): this one has vLLM-like caches of 79 layers
and runs the connector's worker side, or TileRT's extract and send; the other one is a whole decode node whose
engine has TileRT's cache tensors of one device, or TileRT's receive server, conversion and inject loop. The
forward is a kernel that only waits, so that admission runs beside it, as it does beside a real one. Times are
of one clock: its end as a thread sees it that waits for nothing else, and the moment the engine has the state.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from array import array
from types import SimpleNamespace
from typing import Any

import torch

LAYERS, BLOCKS, CHUNK = 79, 2100, 8192
LENGTHS = (1024, 8192, 32768, 131072)
REPEAT = 8
CONFIG = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "num_hidden_layers": LAYERS - 1,
    "num_nextn_predict_layers": 1,
}
HOST = "127.0.0.1"


def rid_of(number: int) -> str:
    return f"{number:032x}"


# The decode host.


class CacheTensors:
    """TileRT's cache tensors of one device, all three planes."""

    num_devices = 1

    def __init__(self, rows: int, device: torch.device) -> None:
        self.tensors = [
            torch.zeros(1, rows, dim, dtype=torch.bfloat16, device=device)
            for _ in range(LAYERS)
            for dim in (128, 512, 64)
        ]
        self.decode_layer = self

    def _get_device_result(self, device_id: int):
        return None, self.tensors, None, None


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


async def our_node(transport_name: str, protocol: str, device: torch.device, count: int) -> None:
    from vllm_tilert.decode.engines.base import Decoded, Sampling
    from vllm_tilert.decode.node import Decode, End, Node
    from vllm_tilert.decode.receiver import Receiver
    from vllm_tilert.kernels.inject import Injector
    from vllm_tilert.profiles.base import get_profile
    from vllm_tilert.transports import make_transport

    class Engine:
        takes_bytes, max_seq_len = True, max(LENGTHS) + 8

        def __init__(self) -> None:
            self.injector = Injector(CacheTensors(max(LENGTHS) + 8, device), LAYERS)
            self.ready = 0.0

        def inject(self, state, last) -> None:
            self.injector.land(state.slot, state.layout, state.segments)
            self.ready = time.monotonic()

        def decode(self, *arguments) -> Decoded:
            return Decoded(0, "length")

        def reset(self) -> None: ...

        def self_check(self) -> None: ...

    profile = get_profile("glm5")
    layout = profile.layout_from_config(CONFIG, "fp8_ds_mla")
    transport = make_transport(transport_name, protocol)
    transport.init(HOST)
    engine = Engine()
    node = Node(
        slots=2,
        max_seq_len=max(LENGTHS),
        layout=layout,
        profile=profile,
        engine=lambda: engine,
        transport=transport,
        device=str(device),
        verify_checksums=False,
    )
    await node.start()
    receiver = Receiver(node, None)
    say(port=await receiver.start(HOST, 0))
    running = asyncio.ensure_future(node.run())
    for number in range(count):
        handoff = await node.signal.until(lambda: node.slots.idle and node.slots.reserve(rid_of(number), 60))  # noqa: B023
        call = Decode(1, 1, Sampling())
        node.attach(handoff.rid, call, 60.0)
        say(generation=handoff.generation)
        while not isinstance(item := await call.tokens.get(), End):
            pass
        say(ready=engine.ready, error=str(item.error) if item.error else None, timing=handoff.timing_ms)
    running.cancel()
    os._exit(0)


def stock_node(transport_name: str, device: torch.device, count: int) -> None:
    from tilert.pd_vllm.profiles import base
    from tilert.pd_vllm.receive_server import ReceiveServer

    logging.getLogger().setLevel(logging.WARNING)
    profile = base.get_profile("glm5")
    import socket

    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    server = ReceiveServer(
        profile, max(LENGTHS), port, hostname=HOST, device=str(device), transport=transport_name
    )
    engine = CacheTensors(max(LENGTHS) + 8, device)
    say(port=port)
    for _ in range(count):
        say(generation=0)
        received = server.completed.get(timeout=120)
        arrived = time.monotonic()
        state = profile.convert(server.buffer, server.base_ptr, max(LENGTHS), received)
        torch.cuda.synchronize()
        converted = time.monotonic()
        for i, layer in enumerate(state.layers):  # the generator's inject_cache, for one device
            for offset, source in enumerate(layer):
                engine.tensors[3 * i + offset][0, : source.shape[0], :].copy_(source.to(device))
        torch.cuda.synchronize()
        ready = time.monotonic()
        server.release()
        say(
            ready=ready,
            error=None,
            timing={"convert": 1e3 * (converted - arrived), "inject": 1e3 * (ready - converted)},
        )
    os._exit(0)


# The prefill host.


class Peer:
    """The other process."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "node", *arguments], stdout=subprocess.PIPE, text=True
        )

    def read(self, field: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{") and field in (said := json.loads(line)):
                return said
        raise RuntimeError(f"the node ended before it said {field}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Forward:
    """A step's forward that computes nothing for some milliseconds, and when it ended."""

    def __init__(self, milliseconds: float) -> None:
        torch.cuda._sleep(int(milliseconds * 1.7e6))
        event = torch.cuda.Event()
        event.record()
        self.ended = 0.0

        def wait() -> None:
            event.synchronize()
            self.ended = time.monotonic()

        self.thread = threading.Thread(target=wait)
        self.thread.start()


def median(values) -> float:
    values = list(values)
    return statistics.median(values) if values else float("nan")


def ours(peer: Peer, transport: str, protocol: str, caches, lengths) -> list[dict[str, Any]]:
    from vllm_tilert.connector.config import ConnectorConfig
    from vllm_tilert.connector.plan import Order, Progress, StepPlan
    from vllm_tilert.connector.worker import HandoffWorker

    port = peer.read("port")["port"]
    extra = {
        "tilert_profile": "glm5",
        "tilert_transport": transport,
        "tilert_protocol": protocol,
        "tilert_local_host": HOST,
        "tilert_allowed_hosts": [HOST],
        "tilert_staging_bytes": 4 << 30,
        "tilert_checksum": False,
    }
    worker = HandoffWorker(ConnectorConfig.parse(extra, max(lengths)), 0)
    worker.register(caches)
    rows, number = [], 0
    for tokens in lengths:
        seen: dict[str, list[float]] = {
            "after end": [],
            "open": [],
            "gather step": [],
            "poll": [],
            "land": [],
        }
        parts = 0
        for repeat in range(REPEAT):
            generation = peer.read("generation")["generation"]
            req, rid = f"r{number}", rid_of(number)
            number += 1
            table = array("i", random.Random(number).sample(range(BLOCKS), -(-tokens // 64)))
            order = Order(req, rid, generation, HOST, port, tokens, 7)
            opened, steps, polls = 0.0, [], []
            for stop in [*range(CHUNK, tokens, CHUNK), tokens]:
                plan = StepPlan(
                    opened=() if opened else (order,),
                    progress=(Progress(req, stop, table[: -(-stop // 64)]),),
                    ended=frozenset({req}) if stop == tokens else frozenset(),
                )
                began = time.perf_counter()
                worker.before_forward(plan)
                opened = opened or time.perf_counter() - began
                forward = Forward(8.0 if stop <= CHUNK else 12.0)
                began = time.perf_counter()
                worker.after_forward(plan)
                steps.append(time.perf_counter() - began)
                began = time.perf_counter()
                done = worker.finished(plan)
                polls.append(time.perf_counter() - began)
                forward.thread.join()
            limit = time.monotonic() + 30
            while req not in done and time.monotonic() < limit:
                time.sleep(0.001)
                done |= worker.finished(StepPlan())
            told = peer.read("ready")
            if told["error"]:
                print("  failed:", told["error"], flush=True)
                continue
            if repeat >= 2:
                seen["after end"].append(1e3 * (told["ready"] - forward.ended))
                seen["open"].append(1e3 * opened)
                seen["gather step"].append(1e3 * max(steps))
                seen["poll"].append(1e3 * max(polls))
                seen["land"].append(told["timing"].get("inject", 0))
            parts = len(steps)
        rows.append({"tokens": tokens, "parts": parts, **{k: median(v) for k, v in seen.items()}})
        print("ours", transport, rows[-1], flush=True)
    return rows


def stock(peer: Peer, transport_name: str, caches, lengths) -> list[dict[str, Any]]:
    import socket

    from tilert.pd_vllm import wire
    from tilert.pd_vllm.profiles import base
    from tilert.pd_vllm.transport import make_transport

    logging.getLogger().setLevel(logging.WARNING)
    profile = base.get_profile("glm5")
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=list(caches))])
    registered = profile.classify_layers(caches, groups)
    limit = max(lengths)
    staging = torch.zeros(profile.staging_bytes(registered, 0, limit), dtype=torch.uint8, device="cuda:0")
    transport = make_transport(transport_name)
    transport.init(HOST)
    transport.register(staging.data_ptr(), staging.numel(), 0)
    port = peer.read("port")["port"]
    rows, number = [], 0
    for tokens in lengths:
        seen: dict[str, list[float]] = {"after end": [], "extract": [], "convert": [], "inject": []}
        for repeat in range(REPEAT):
            peer.read("generation")
            number += 1
            table = random.Random(number).sample(range(BLOCKS), -(-tokens // 64))
            request = SimpleNamespace(num_tokens=tokens, block_ids_per_group=[table])
            forward = Forward(8.0)
            began = time.perf_counter()
            sections = profile.extract(registered, request, 0, staging, limit)
            extracted = time.perf_counter()
            # What the connector's sender thread does then.
            with socket.create_connection((HOST, port)) as sock:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                hello = wire.recv_msg(sock)
                wire.send_msg(
                    sock, {"rid": f"r{number}", "rank": 0, "seq_len": tokens, "last_prompt_token": 7}
                )
                parts = profile.rdma_plan(hello, sections, 0, tokens, staging.data_ptr())
                transport.write(hello, *parts)
                wire.send_msg(sock, {"done": True, "rid": f"r{number}", "rank": 0})
                told = peer.read("ready")
            forward.thread.join()
            if repeat >= 2:
                seen["after end"].append(1e3 * (told["ready"] - forward.ended))
                seen["extract"].append(1e3 * (extracted - began))
                seen["convert"].append(told["timing"]["convert"])
                seen["inject"].append(told["timing"]["inject"])
        rows.append({"tokens": tokens, "parts": len(parts[0]), **{k: median(v) for k, v in seen.items()}})
        print("stock", transport_name, rows[-1], flush=True)
    return rows


def parts_cost(transport_name: str, protocol: str, peer: Peer) -> None:
    """One write of the bytes of 1k and 8k tokens, cut into so many parts."""
    from vllm_tilert.transports import make_transport

    meta = peer.read("address")
    transport = make_transport(transport_name, protocol)
    transport.init(HOST)
    size = 8192 * 62252
    source = torch.ones(size, dtype=torch.uint8, device="cuda:0")
    transport.register(source.data_ptr(), size, "cuda:0")
    for tokens in (1024, 8192):
        total = tokens * 62252
        for parts in (1, 2, 15, 79, 237):
            length = total // parts // 16 * 16
            at = [i * length for i in range(parts)]
            times = []
            for _ in range(8):
                began = time.perf_counter()
                transport.write(
                    meta,
                    [source.data_ptr() + a for a in at],
                    [meta["address"] + a for a in at],
                    [length] * parts,
                    20.0,
                )
                times.append(1e3 * (time.perf_counter() - began))
            print(
                f"write {transport_name} {tokens} tokens, {total / 1e6:.0f} MB, {parts} parts: "
                f"{median(times[2:]):.3f} ms",
                flush=True,
            )


def sink(transport_name: str, protocol: str, device: torch.device) -> None:
    from vllm_tilert.transports import make_transport

    transport = make_transport(transport_name, protocol)
    transport.init(HOST)
    target = torch.zeros(8192 * 62252, dtype=torch.uint8, device=device)
    transport.register(target.data_ptr(), target.numel(), str(device))
    say(address=target.data_ptr(), **transport.local_meta())
    time.sleep(600)


def main() -> int:
    node_device = torch.device("cuda", torch.cuda.device_count() - 1)
    os.environ.setdefault("TILERT_PD_PROBE_ADDR", HOST)
    arguments = sys.argv[1:]
    if arguments[:1] == ["node"]:
        kind, transport, protocol, count = arguments[1], arguments[2], arguments[3], int(arguments[4])
        torch.cuda.set_device(node_device)
        if kind == "ours":
            asyncio.run(our_node(transport, protocol, node_device, count))
        elif kind == "stock":
            stock_node(transport, node_device, count)
        else:
            sink(transport, protocol, node_device)
        return 0
    from unit.profiles.caches import nsa_caches

    print(torch.cuda.get_device_name(0), f"node on {node_device}", "torch", torch.__version__)
    caches = nsa_caches(LAYERS, BLOCKS, "fp8_ds_mla", device="cuda")
    for transport in arguments or ["nixl", "mooncake"]:
        protocol = {"nixl": "UCX", "mooncake": "tcp"}[transport]
        lengths = LENGTHS if transport == "nixl" else LENGTHS[:2]
        runs = {
            "sink": lambda peer: parts_cost(transport, protocol, peer),  # noqa: B023
            "ours": lambda peer: ours(peer, transport, protocol, caches, lengths),  # noqa: B023
            "stock": lambda peer: stock(peer, transport, caches, lengths),  # noqa: B023
        }
        for kind, run in runs.items():
            peer = Peer(kind, transport, protocol, str(REPEAT * len(lengths)))
            try:
                run(peer)
            except Exception as error:
                print(f"{kind} {transport}: {type(error).__name__}: {error}", flush=True)
            finally:
                peer.close()
    return 0


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(main())

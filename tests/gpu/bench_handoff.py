"""From the end of a prefill to the state ready in the engine: ours beside TileRT's own code, in one run.

usage: PYTHONPATH=plugin:tests:SITE python3 tests/gpu/bench_handoff.py [nixl] [mooncake] [--checksum]

This process has caches of 79 layers as vLLM registers them and runs the connector's worker side, or TileRT's
extract and send; the decode hosts are those of `nodes`. With one GPU both are on it; with two, the second is
the node's. The forward is a kernel that only waits, so that admission runs beside it, as it does beside a real
one. "After end" is from its end, as a thread sees it that waits for nothing else, to the state in the engine.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import statistics
import sys
import time
from array import array
from types import SimpleNamespace
from typing import Any

import torch

from gpu.nodes import HOST, LAYERS, Ended, Peer
from unit.profiles.caches import nsa_caches

MODEL = "glm5"
BLOCKS, CHUNK = 2100, 8192
LENGTHS = (1024, 8192, 32768, 131072)
REPEAT = 16
TOKEN_BYTES = 62252


def rid_of(number: int) -> str:
    return f"{number:032x}"


def forward(watch: bool = True, milliseconds: float = 12.0) -> Ended | None:
    """A step's forward: a kernel that only waits, while this thread works on, as vLLM's does.

    The thread that watches for its end is in the way of this one, so it is there only where asked for.
    """
    torch.cuda._sleep(int(milliseconds * 1.7e6))
    ended = Ended() if watch else None
    limit = time.perf_counter() + 0.005
    while time.perf_counter() < limit:
        torch.cuda.current_stream()
    return ended


def median(values) -> float:
    values = list(values)
    return statistics.median(values) if values else float("nan")


def ours(peer: Peer, caches, lengths) -> None:
    from vllm_tilert.connector.config import ConnectorConfig
    from vllm_tilert.connector.plan import Order, Progress, StepPlan
    from vllm_tilert.connector.steps import HandoffSteps
    from vllm_tilert.connector.worker import HandoffWorker

    extra = {
        "tilert_profile": MODEL,
        "tilert_transport": peer.transport,
        "tilert_protocol": peer.protocol,
        "tilert_local_host": HOST,
        "tilert_allowed_hosts": [HOST],
        "tilert_staging_bytes": 4 << 30,
        "tilert_checksum": CHECKSUM,
    }
    worker = HandoffWorker(ConnectorConfig.parse(extra, max(lengths)), 0)
    hooks = HandoffSteps(worker)
    hooks.register(caches)
    assert worker.transport is not None
    write, writes = worker.transport.write, []

    def timed(*arguments) -> None:
        began = time.monotonic()

        def ready() -> float:
            nonlocal began
            left = arguments[-1]()
            began = time.monotonic()
            return left

        write(*arguments[:-1], ready)
        writes.append((began, time.monotonic(), len(arguments[1])))

    worker.transport.write = timed
    number = 0
    for tokens in lengths:
        seen: dict[str, list[float]] = {}
        parts = ahead = 0
        for repeat in range(REPEAT):
            req, rid = f"r{number}", rid_of(number)
            number += 1
            generation = peer.reserve(rid)
            table = array("i", random.Random(number).sample(range(BLOCKS), -(-tokens // 64)))
            order = Order(req, rid, generation, HOST, peer.port, tokens, 7)
            opened, steps, polls = 0.0, [], []
            writes.clear()
            for stop in [*range(CHUNK, tokens, CHUNK), tokens]:
                plan = StepPlan(
                    opened=() if opened else (order,),
                    progress=(Progress(req, stop, table[: -(-stop // 64)]),),
                    ended=frozenset({req}) if stop == tokens else frozenset(),
                )
                began = time.perf_counter()
                hooks.before_forward(plan)
                opened = opened or time.perf_counter() - began
                ended = forward(repeat % 2 == 1 and stop == tokens)
                began = time.perf_counter()
                hooks.after_forward(plan)
                steps.append(time.perf_counter() - began)
                began = time.perf_counter()
                done = hooks.finished(plan)
                polls.append(time.perf_counter() - began)
                torch.cuda.synchronize()
            limit = time.monotonic() + 30
            while req not in done and time.monotonic() < limit:
                time.sleep(0.001)
                done |= hooks.finished(StepPlan())
            told = peer.ready(rid)
            if told["error"]:
                print("  failed:", told["error"], flush=True)
                continue
            parts = sum(write[2] for write in writes)
            ahead = told["ahead"]
            if repeat < 2:
                continue
            if ended is not None:
                ended.thread.join()
                began, written, _ = writes[-1]
                found = {
                    "after end": told["ready"] - ended.at,
                    "to write": began - ended.at,
                    "write": written - began,
                    "to done": told["done"] - written,
                    "to land": told["land_began"] - told["done"],
                    "queue landing": told["land_queued"] - told["land_began"],
                    "landing": told["ready"] - told["land_queued"],
                }
            else:
                found = {
                    "open": opened,
                    "gather step": statistics.median(steps),
                    "worst step": max(steps),
                    "poll": max(polls),
                }
            for name, value in found.items():
                seen.setdefault(name, []).append(1e3 * value)
        means = {k: f"{median(v):.3f}" for k, v in seen.items()}
        about = f"{tokens} tokens, {parts} parts, {ahead} landed before the end"
        print("ours", peer.transport, about, means, flush=True)


def stock(peer: Peer, caches, lengths) -> None:
    from tilert.pd_vllm import wire
    from tilert.pd_vllm.profiles import base
    from tilert.pd_vllm.transport import make_transport

    logging.getLogger().setLevel(logging.WARNING)
    profile = base.get_profile(MODEL)
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=list(caches))])
    registered = profile.classify_layers(caches, groups)
    limit = max(LENGTHS)
    staging = torch.zeros(profile.staging_bytes(registered, 0, limit), dtype=torch.uint8, device="cuda:0")
    transport = make_transport(peer.transport)
    transport.init(HOST)
    transport.register(staging.data_ptr(), staging.numel(), 0)
    number = 0
    for tokens in lengths:
        seen: dict[str, list[float]] = {}
        for repeat in range(REPEAT):
            number += 1
            rid = f"s{number}"
            table = random.Random(number).sample(range(BLOCKS), -(-tokens // 64))
            request = SimpleNamespace(num_tokens=tokens, block_ids_per_group=[table])
            ended = forward()
            assert ended is not None
            began = time.perf_counter()
            sections = profile.extract(registered, request, 0, staging, limit)
            extracted = time.perf_counter()
            # What the connector's sender thread does then.
            with socket.create_connection((HOST, peer.port)) as sock:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                hello = wire.recv_msg(sock)
                wire.send_msg(sock, {"rid": rid, "rank": 0, "seq_len": tokens, "last_prompt_token": 7})
                parts = profile.rdma_plan(hello, sections, 0, tokens, staging.data_ptr())
                writing = time.perf_counter()
                transport.write(hello, *parts)
                written = time.perf_counter()
                wire.send_msg(sock, {"done": True, "rid": rid, "rank": 0})
                told = peer.ready(rid)
            ended.thread.join()
            if repeat >= 2:
                for name, value in {
                    "after end": 1e3 * (told["ready"] - ended.at),
                    "extract, the forward's end included": 1e3 * (extracted - began),
                    "write": 1e3 * (written - writing),
                    **told["timing"],
                }.items():
                    seen.setdefault(name, []).append(value)
        means = {k: f"{median(v):.3f}" for k, v in seen.items()}
        print("stock", peer.transport, tokens, "tokens,", len(parts[0]), "parts", means, flush=True)


def parts_cost(peer: Peer) -> None:
    """One write of the bytes of 1k and 8k tokens, cut into so many parts."""
    from vllm_tilert.transports import make_transport

    transport = make_transport(peer.transport, peer.protocol)
    transport.init(HOST)
    size = 8192 * TOKEN_BYTES
    source = torch.ones(size, dtype=torch.uint8, device="cuda:0")
    transport.register(source.data_ptr(), size, "cuda:0")
    for tokens in (1024, 8192):
        total = tokens * TOKEN_BYTES
        for parts in (1, 2, 15, 79, 237):
            length = total // parts // 16 * 16
            at = [i * length for i in range(parts)]
            times = []
            for _ in range(12):
                began = time.perf_counter()
                transport.write(
                    peer.hello,
                    [source.data_ptr() + a for a in at],
                    [peer.hello["address"] + a for a in at],
                    [length] * parts,
                    20.0,
                )
                times.append(1e3 * (time.perf_counter() - began))
            print(
                f"write {peer.transport} {tokens} tokens, {total / 1e6:.0f} MB, {parts} parts: "
                f"{median(times[2:]):.3f} ms",
                flush=True,
            )


def main() -> int:
    os.environ.setdefault("TILERT_PD_PROBE_ADDR", HOST)
    print(torch.cuda.get_device_name(0), "GPUs", torch.cuda.device_count(), "torch", torch.__version__)
    caches = nsa_caches(LAYERS[MODEL], BLOCKS, "fp8_ds_mla", device="cuda")
    for transport in [a for a in sys.argv[1:] if a[0] != "-"] or ["nixl", "mooncake"]:
        lengths = LENGTHS if transport == "nixl" else LENGTHS[:2]
        runs: dict[str, Any] = {
            "sink": parts_cost,
            "ours": lambda peer: ours(peer, caches, lengths),  # noqa: B023
            "stock": lambda peer: stock(peer, caches, lengths),  # noqa: B023
        }
        for kind, run in runs.items():
            longest = 8192 if kind == "sink" else max(LENGTHS)
            flags = ["--checksum"] if CHECKSUM and kind == "ours" else []
            peer = Peer(kind, MODEL, transport, longest, *flags)
            try:
                run(peer)
            except Exception as error:
                print(f"{kind} {transport}: {type(error).__name__}: {error}", flush=True)
            finally:
                peer.close()
    return 0


CHECKSUM = "--checksum" in sys.argv

if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(main())

"""Decode hosts for the GPU runs, each a process of its own that is spoken to by lines of JSON.

`ours`   a whole decode node (slots, receiver, engine's turns). Its engine has TileRT's cache tensors of one
         device and lands state in them; where dumps are asked for it writes down the bytes it was given.
`stock`  TileRT's receive server, conversion and inject loop (the generator's, for one device).

Both say `ready`, on the clock all processes of a host share, when the engine has the state.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from functools import cached_property
from queue import Empty, SimpleQueue
from typing import Any

import torch

HOST = "127.0.0.1"
LAYERS = {"glm5": 79, "dsv32": 62}


def config_of(model: str) -> dict[str, int]:
    return {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "index_head_dim": 128,
        "num_hidden_layers": LAYERS[model] - 1,
        "num_nextn_predict_layers": 1,
    }


class CacheTensors:
    """TileRT's cache tensors of one device, all three planes."""

    num_devices = 1

    def __init__(self, model: str, rows: int, device: torch.device) -> None:
        self.tensors = [
            torch.zeros(1, rows, dim, dtype=torch.bfloat16, device=device)
            for _ in range(LAYERS[model])
            for dim in (128, 512, 64)
        ]
        self.decode_layer = self

    def _get_device_result(self, device_id: int):
        return None, self.tensors, None, None


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


async def our_node(a: argparse.Namespace, device: torch.device) -> None:
    from vllm_tilert.decode.engines.base import Decoded, Sampling
    from vllm_tilert.decode.node import Decode, End, Node
    from vllm_tilert.decode.receiver import Receiver
    from vllm_tilert.decode.slots import Outcome
    from vllm_tilert.kernels.inject import Injector
    from vllm_tilert.profiles.base import get_profile
    from vllm_tilert.transports import make_transport

    profile = get_profile(a.model)
    layout = profile.layout_from_config(config_of(a.model), os.environ.get("CACHE_DTYPE", "fp8_ds_mla"))
    transport = make_transport(a.transport, a.protocol)
    transport.init(HOST)

    class Engine:
        takes_bytes, max_seq_len = True, a.max_seq_len + 8

        def __init__(self) -> None:
            self.injector = Injector(CacheTensors(a.model, a.max_seq_len + 8, device), layout.layers)
            self.injector.warm_up(layout)
            self.began = self.queued = self.ready = 0.0
            self.ahead = 0

        def land(self, state, first=0) -> None:
            self.began = time.monotonic()
            self.injector.queue(state.slot, state.layout, state.segments, first)
            self.queued = time.monotonic()
            self.ahead = first

        def settle(self) -> None:
            self.injector.finish()

        def inject(self, state, last) -> None:
            self.settle()
            self.ready = time.monotonic()
            if a.dumps:
                rid = node.slots.engine.rid
                state.slot[: layout.segment_bytes(state.seq_len)].cpu().numpy().tofile(f"{a.dumps}/{rid}.bin")

        def decode(self, *arguments) -> Decoded:
            return Decoded(0, "length")

        def reset(self) -> None: ...

        def self_check(self) -> None: ...

    engine = Engine()
    node = Node(
        slots=2,
        max_seq_len=a.max_seq_len,
        layout=layout,
        profile=profile,
        engine=lambda: engine,
        transport=transport,
        device=str(device),
        verify_checksums=a.checksum,
    )
    await node.start()
    receiver = Receiver(node, None)
    connections = 0
    serve_one = receiver._serve

    async def counted(*streams) -> None:
        nonlocal connections
        connections += 1
        await serve_one(*streams)

    receiver._serve = counted
    say(port=await receiver.start(HOST, 0))
    running = asyncio.ensure_future(node.run())
    done_at: dict[str, float] = {}
    accept = node.accept_state

    async def accept_state(handoff, segments, *more) -> None:
        done_at[handoff.rid] = time.monotonic()
        handoff.facts["lengths"] = list(segments)
        await accept(handoff, segments, *more)

    node.accept_state = accept_state

    async def ended(call: Decode) -> End:
        while not isinstance(item := await call.tokens.get(), End):
            pass
        return item

    async def serve(rid: str) -> None:
        def reserve():
            try:
                return node.slots.reserve(rid, 60, ahead=True)
            except Exception:
                return None

        handoff = await node.signal.until(reserve)
        call = Decode(1, 1, Sampling())
        node.attach(rid, call, 60.0)
        say(rid=rid, generation=handoff.generation)
        told = asyncio.ensure_future(ended(call))
        over = asyncio.ensure_future(node.signal.until(lambda: handoff.over))
        await asyncio.wait([told, over], return_when=asyncio.FIRST_COMPLETED)
        if handoff.outcome is not Outcome.DONE and not told.done():  # it never had the engine
            told.cancel()
            error = str(handoff.outcome)
        else:
            item = await told
            error = str(item.error) if item.error else None
        over.cancel()
        say(
            rid=rid,
            ready=engine.ready,
            land_began=engine.began,
            land_queued=engine.queued,
            ahead=engine.ahead,
            connections=connections,
            done=done_at.get(rid, 0.0),
            error=error,
            timing=handoff.timing_ms,
            segments=handoff.facts.get("lengths"),
        )

    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    tasks = []
    while line := (await reader.readline()).decode().strip():
        if line == "no dumps":
            a.dumps = ""
        else:
            tasks.append(asyncio.ensure_future(serve(line)))
    running.cancel()
    os._exit(0)


def stock_node(a: argparse.Namespace, device: torch.device) -> None:
    from tilert.pd_vllm.profiles import base
    from tilert.pd_vllm.receive_server import ReceiveServer

    logging.getLogger().setLevel(logging.WARNING)
    profile = base.get_profile(a.model)
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    server = ReceiveServer(
        profile, a.max_seq_len, port, hostname=HOST, device=str(device), transport=a.transport
    )
    engine = CacheTensors(a.model, a.max_seq_len + 8, device)
    say(port=port)
    while True:
        received = server.completed.get()
        arrived = time.monotonic()
        state = profile.convert(server.buffer, server.base_ptr, a.max_seq_len, received)
        torch.cuda.synchronize()
        converted = time.monotonic()
        for i, layer in enumerate(state.layers):
            for offset, source in enumerate(layer):
                engine.tensors[3 * i + offset][0, : source.shape[0], :].copy_(source.to(device))
        torch.cuda.synchronize()
        ready = time.monotonic()
        server.release()
        timing = {"convert": 1e3 * (converted - arrived), "inject": 1e3 * (ready - converted)}
        say(rid=received.rid, ready=ready, error=None, timing=timing, seq_len=received.seq_len)


def sink(a: argparse.Namespace, device: torch.device) -> None:
    """Memory that may be written to."""
    from vllm_tilert.transports import make_transport

    transport = make_transport(a.transport, a.protocol)
    transport.init(HOST)
    target = torch.zeros(a.max_seq_len * 62252, dtype=torch.uint8, device=device)
    transport.register(target.data_ptr(), target.numel(), str(device))
    say(port=0, address=target.data_ptr(), **transport.local_meta())
    sys.stdin.read()


class Peer:
    """One of these processes, seen from the prefill host."""

    def __init__(self, kind: str, model: str, transport: str, max_seq_len: int, *more: str) -> None:
        protocol = {"nixl": "UCX", "mooncake": "tcp"}[transport]
        command = [sys.executable, __file__, kind, "--model", model, "--transport", transport]
        command += ["--protocol", protocol, "--max-seq-len", str(max_seq_len), *more]
        self.transport, self.protocol = transport, protocol
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._said: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._kept: list[dict[str, Any]] = []
        threading.Thread(target=self._read, daemon=True).start()

    @cached_property
    def hello(self) -> dict[str, Any]:
        """What it says when it is up."""
        return self.wait(lambda said: "port" in said, 240)

    @property
    def port(self) -> int:
        """Its control port."""
        return int(self.hello["port"])

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._said.put(json.loads(line))
        self._said.put({"over": True})

    def wait(self, wanted, timeout_s: float = 60.0) -> dict[str, Any]:
        """The first thing said that is `wanted`; what else is said is kept for later."""
        limit = time.monotonic() + timeout_s
        for said in self._kept:
            if wanted(said):
                self._kept.remove(said)
                return said
        while True:
            try:
                said = self._said.get(timeout=max(0.01, limit - time.monotonic()))
            except Empty:
                raise RuntimeError("the node does not answer") from None
            if "over" in said:
                raise RuntimeError("the node has ended")
            if wanted(said):
                return said
            self._kept.append(said)

    def reserve(self, rid: str) -> int:
        """Reserve, attach a decode call, and return the generation (of our node)."""
        assert self._process.stdin is not None
        self._process.stdin.write(rid + "\n")
        return int(self.wait(lambda said: said.get("rid") == rid and "generation" in said)["generation"])

    def no_dumps(self) -> None:
        """From now on our node writes nothing down."""
        assert self._process.stdin is not None
        self._process.stdin.write("no dumps\n")

    def ready(self, rid: str | None = None) -> dict[str, Any]:
        """What the node says of a request (the next, for None) whose state is in the engine."""
        return self.wait(lambda said: "ready" in said and rid in (None, said["rid"]))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Ended:
    """When the work queued so far on the current stream ends, as a thread sees it that waits for it alone."""

    def __init__(self) -> None:
        event = torch.cuda.Event()
        event.record()
        self.at = 0.0

        def wait() -> None:
            event.synchronize()
            self.at = time.monotonic()

        self.thread = threading.Thread(target=wait)
        self.thread.start()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("ours", "stock", "sink"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--transport", required=True)
    parser.add_argument("--protocol", required=True)
    parser.add_argument("--max-seq-len", type=int, required=True)
    parser.add_argument("--dumps", default="")
    parser.add_argument("--checksum", action="store_true")
    a = parser.parse_args()
    os.environ.setdefault("TILERT_PD_PROBE_ADDR", HOST)
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    torch.cuda.set_device(device)
    if a.kind == "ours":
        asyncio.run(our_node(a, device))
    elif a.kind == "stock":
        stock_node(a, device)
    else:
        sink(a, device)


if __name__ == "__main__":
    main()

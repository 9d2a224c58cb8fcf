"""Start, readiness and stop of a decode node."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys

import torch
import uvicorn

from vllm_tilert.decode.config import ConfigError, DecodeConfig
from vllm_tilert.decode.engines.base import Engine, EngineUnavailable
from vllm_tilert.decode.http import build_app
from vllm_tilert.decode.node import Node
from vllm_tilert.decode.receiver import Receiver
from vllm_tilert.profiles import stock
from vllm_tilert.profiles.base import ProfileError, get_profile
from vllm_tilert.profiles.layout import Layout
from vllm_tilert.staging import free_bytes
from vllm_tilert.transports.base import TransportUnavailable, make_transport
from vllm_tilert.wire.notify import sd_notify

log = logging.getLogger(__name__)


def check_regions(config: DecodeConfig, layout: Layout) -> None:
    """Raise ConfigError unless the slots (and the landing zone of stock senders) can be and fit what is free."""
    if config.allow_stock_senders:
        try:
            stock.check_layout(layout)
        except ProfileError as error:
            raise ConfigError("--allow-stock-senders", layout.profile, str(error)) from None
    regions = config.slots + (1 if config.allow_stock_senders else 0)
    need = regions * layout.segment_bytes(config.max_seq_len)
    free = free_bytes(torch.device(config.device))
    if need > free:
        raise ConfigError(
            "--max-seq-len",
            config.max_seq_len,
            f"{regions} {'slots and landing zone' if config.allow_stock_senders else 'slots'} of that length "
            f"need {need} bytes, {free} are free on {config.device}: lower it or --slots",
        )


def build_engine(config: DecodeConfig, layout: Layout) -> Engine:
    """The engine that was asked for. Raises EngineUnavailable. Called on the engine's thread."""
    if config.engine == "reference":
        from vllm_tilert.decode.engines.reference import ReferenceEngine

        return ReferenceEngine(config.weights, layout.dtype, config.max_seq_len, config.device)
    from vllm_tilert.decode.engines.tilert import TileRTEngine

    return TileRTEngine(layout, config.weights, config.max_seq_len, config.with_mtp)


async def serve(config: DecodeConfig) -> None:
    """Run one decode node until SIGTERM, which drains it first."""
    profile = get_profile(config.profile)
    layout = profile.layout_from_config(config.model_config(), config.kv_cache_dtype)
    check_regions(config, layout)
    transport = make_transport(config.transport, config.protocol, config.rdma_devices)
    transport.init(config.host)
    node = Node(
        slots=config.slots,
        max_seq_len=config.max_seq_len,
        layout=layout,
        profile=profile,
        engine=lambda: build_engine(config, layout),
        transport=transport,
        device=config.device,
        verify_checksums=config.checksum,
        engine_name=config.engine,
        allow_stock_senders=config.allow_stock_senders,
    )
    await node.start()
    receiver = Receiver(node, config.secret.encode() if config.secret else None)
    await receiver.start(config.host, config.ctrl_port)
    web = _Web(
        uvicorn.Config(
            build_app(node, config.secret),
            host=config.host,
            port=config.http_port,
            log_level="warning",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=5,
        )
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    running = asyncio.ensure_future(node.run())
    serving = asyncio.ensure_future(web.serve())
    stopping = asyncio.ensure_future(stop.wait())
    try:
        while not web.started and not serving.done():  # noqa: ASYNC110 (uvicorn has no event for it)
            await asyncio.sleep(0.01)
        if not serving.done():
            log.info("decode node ready: %s", layout.describe())
            sd_notify("READY=1")
        await asyncio.wait([running, serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            sd_notify("STOPPING=1")
            node.slots.drain(True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(config.drain_s):
                    await node.signal.until(lambda: node.slots.idle)
    finally:
        await receiver.close()
        web.should_exit = True
        running.cancel()
        stopping.cancel()
        results = await asyncio.gather(running, serving, return_exceptions=True)
        node.abort()
        if node.stuck:
            # Its thread cannot be stopped, and the interpreter would wait for it at exit.
            log.critical("the engine does not return; leaving it to the service manager to start anew")
            os._exit(1)
        node.close()
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result


class _Web(uvicorn.Server):
    """uvicorn without its own signal handling: this module drains first."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


def run(arguments: argparse.Namespace) -> int:
    """`tilertctl decode`: 0 after a clean stop, 1 when it cannot run, 2 on a wrong option."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "0")) or (os.cpu_count() or 1)))
    try:
        asyncio.run(serve(DecodeConfig.from_arguments(arguments)))
    except (ConfigError, ProfileError) as error:
        print(f"tilertctl decode: {error}", file=sys.stderr)
        return 2
    except (EngineUnavailable, TransportUnavailable, OSError, RuntimeError) as error:
        print(f"tilertctl decode: {error}", file=sys.stderr)
        return 1
    return 0

"""Start, signals and stop of one router process."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import signal
import time
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from tilert_router.app import Router
from tilert_router.config import Config, ConfigError, Listen, load
from vllm_tilert.wire.notify import sd_notify

log = logging.getLogger(__name__)

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, event, and what the call added."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        line |= {k: v for k, v in vars(record).items() if k not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up_logging(level: str) -> None:
    """JSON lines on standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)


async def _listen(runner: web.AppRunner, where: Listen) -> None:
    await runner.setup()
    await web.TCPSite(runner, where.host, where.port, backlog=2048).start()


async def serve(path: Path, config: Config) -> None:
    """Serve until SIGTERM; then running requests end (at most `timeouts.drain_s`). SIGHUP reloads."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    router = Router(config)
    # A full collection stops every stream for as long as it takes to visit thousands of waiting requests. What is
    # there now stays; requests are freed by reference counts, so cycles are few and may wait.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)

    def reload() -> None:
        try:
            router.reload(load(path))
            log.info("configuration reloaded")
        except ConfigError as error:
            log.error("configuration not reloaded", extra={"fault": str(error)})

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, reload)
    # Cancels a request's handler when its client goes away.
    public = web.AppRunner(
        router.app(), handler_cancellation=True, access_log=None, shutdown_timeout=config.timeouts.drain_s
    )
    admin = web.AppRunner(router.admin(), access_log=None, shutdown_timeout=1)
    try:
        await _listen(public, config.listen)
        if config.admin:
            await _listen(admin, config.admin)
        log.info("router ready", extra={"addresses": [str(a) for a in public.addresses]})
        sd_notify("READY=1")
        await stop.wait()
        sd_notify("STOPPING=1")
        log.info("draining")
    finally:
        await public.cleanup()
        await admin.cleanup()
        await router.close()

"""The stock decode server, from the published wheel, with an engine whose pace the test sets."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import uvicorn

from fakes.nodes import PROMPT_TOKENS


class PacedEngine:
    """The wheel's engine seam: tokens at a pace, stoppable."""

    def __init__(self) -> None:
        self.token_s = 0.0
        self.ended = 0  # decodes
        self.last_stats: dict[str, Any] = {}

    def inject(self, request: Any) -> None:
        pass

    def reset(self) -> None:
        pass

    def decode(
        self,
        first_token_id: int,
        max_tokens: int,
        sampling: dict[str, Any] | None,
        on_token: Callable[[int], None] | None = None,
        cancel_event: threading.Event | None = None,
    ) -> list[int]:
        made: list[int] = []
        self.last_stats = {"finish_reason": "length"}
        for i in range(max_tokens):
            if cancel_event is not None and cancel_event.is_set():
                self.last_stats = {"finish_reason": "cancelled"}
                break
            made.append(first_token_id if not i else 66 + (i - 1) % 20)
            if on_token:
                on_token(made[-1])
            time.sleep(self.token_s)
        self.ended += 1
        return made


class StockNode:
    """A running stock server. `receive` is what its control port does when a handoff is complete."""

    def __init__(self, server: Any, received: Any, engine: PacedEngine, url: str) -> None:
        self.server, self.engine, self.url = server, engine, url
        self._received = received
        self.ctrl_port = int(server.ctrl_port)

    def receive(self, rid: str, generation: int) -> None:
        self.server.completed.put(self._received(rid, PROMPT_TOKENS, 0, None, None))


@contextlib.contextmanager
def stock_node(folder: Path, ctrl_port: int) -> Iterator[StockNode]:
    """The stock application under uvicorn, in a thread, with its own receive server."""
    sys.path.insert(0, str(folder))
    synchronize = torch.cuda.synchronize
    torch.cuda.synchronize = lambda *args: None
    try:
        from tilert.pd_vllm import decode_server, receive_server
        from tilert.pd_vllm.profiles import base

        profile = base.get_profile("glm5").configure("fp8_ds_mla")
        server = receive_server.ReceiveServer(
            profile, max_seq_len=64, ctrl_port=ctrl_port, hostname="127.0.0.1", device="cpu"
        )
        engine = PacedEngine()
        app = decode_server.build_app(server, engine)
        web = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
        thread = threading.Thread(target=web.run, daemon=True)
        thread.start()
        while not web.started:
            time.sleep(0.01)
        url = f"http://127.0.0.1:{web.servers[0].sockets[0].getsockname()[1]}"
        yield StockNode(server, receive_server.ReceivedRequest, engine, url)
        web.should_exit = True
        thread.join(10)
        server.close()
    finally:
        torch.cuda.synchronize = synchronize
        sys.path.remove(str(folder))

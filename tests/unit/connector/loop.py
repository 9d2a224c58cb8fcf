"""A transport within this process whose writes can be held up or fail, and what a handoff needs around it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from integration.connector.fake_node import FakeNode
from vllm_tilert.connector.metrics import HandoffReport
from vllm_tilert.connector.plan import Order
from vllm_tilert.connector.sender import Handoff, Link, Segment
from vllm_tilert.profiles.base import LANDED, get_profile
from vllm_tilert.profiles.layout import Layout
from vllm_tilert.small_model import CONFIG
from vllm_tilert.staging import StagingPool
from vllm_tilert.transports import TransportError, WriteOutstanding
from vllm_tilert.wire.api import new_rid

LAYOUT: Layout = get_profile("mla").layout_from_config(CONFIG, "float32")


class LoopTransport:
    """Copies at once. `hold`: writes run out of time, and end when `held` is set. `fail`: writes fail."""

    name = "mooncake"

    def __init__(self) -> None:
        self.writes: list[tuple[int, int]] = []  # (target, bytes)
        self.hold = self.fail = False
        self.held = threading.Event()

    def init(self, host: str) -> None:
        pass

    def register(self, ptr: int, nbytes: int, device: str) -> None:
        pass

    def local_meta(self) -> dict[str, Any]:
        return {"session_id": "loop"}

    def prepare(self, remote_meta: Mapping[str, Any]) -> None:
        pass

    def write(
        self,
        remote_meta: Mapping[str, Any],
        srcs: Sequence[int],
        dsts: Sequence[int],
        lens: Sequence[int],
        timeout_s: float,
        ready: Callable[[], float] | None = None,
    ) -> None:
        if ready is not None:
            ready()
        if self.fail:
            raise TransportError("the write failed")
        if self.hold:
            raise WriteOutstanding("the write has not ended", self.held.is_set)
        for source, target, length in zip(srcs, dsts, lens, strict=True):
            self.writes.append((target, length))
            ctypes.memmove(target, source, length)

    def close(self) -> None:
        pass


class Sending:
    """One handoff of `seq_len` tokens to `node`, its staging pool and its report."""

    def __init__(
        self,
        node: FakeNode,
        seq_len: int = 40,
        layout: Layout = LAYOUT,
        pool_bytes: int = 4 << 20,
        **link: Any,
    ) -> None:
        self.layout = layout
        self.transport = LoopTransport()
        self.pool = StagingPool(pool_bytes, torch.device("cpu"))
        self.reports: list[HandoffReport] = []
        settings = {
            "rank": 0,
            "secret": None,
            "admission_timeout_s": 2.0,
            "send_timeout_s": 10.0,
            "checksum": True,
        }
        self.order = Order("a", new_rid(), 7, "127.0.0.1", node.port, seq_len, 65)
        self.handoff = Handoff(
            self.order,
            Link(transport=self.transport, layout=layout, **(settings | link)),
            self.reports.append,
        )

    def put(self, start: int, tokens: int) -> torch.Tensor:
        """Stage random bytes for tokens [start, start + tokens); returns a copy of them."""
        piece = self.pool.try_take(self.layout.segment_bytes(tokens))
        assert piece is not None
        piece.tensor.random_(0, 256)
        copy = piece.tensor.clone()
        self.handoff.put(Segment(start, tokens, piece, LANDED, 0.0, 0.0))
        return copy

    @property
    def reason(self) -> str | None:
        """The reason it ended for; it must have ended."""
        (report,) = self.reports
        return report.reason

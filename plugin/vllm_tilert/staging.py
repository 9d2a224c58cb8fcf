"""The staging pool: where gathered segments wait to be written to a decode node.

One buffer, allocated and registered with the transport at start. A segment gets a piece of exactly its
size; the piece is its own until released, so nothing overwrites bytes that have not been sent.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Final

import torch

ALIGNMENT: Final = 256
"""Pieces start at multiples of this many bytes, so that any dtype and vector width may view them."""


class StagingError(ValueError):
    """A pool or piece that can never be: which size, and what to change."""


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    with open("/proc/meminfo") as meminfo:
        fields = dict(line.split(":", 1) for line in meminfo)
    return int(fields["MemAvailable"].split()[0]) * 1024


class Piece:
    """A part of the pool that belongs to one segment until `release`."""

    def __init__(self, pool: StagingPool, start: int, nbytes: int) -> None:
        self._pool = pool
        self._start = start
        self.nbytes = nbytes

    @property
    def tensor(self) -> torch.Tensor:
        """uint8 [nbytes], contiguous, a view of the pool's buffer."""
        return self._pool.buffer[self._start : self._start + self.nbytes]

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return self._pool.buffer.data_ptr() + self._start

    def release(self) -> None:
        """Give the bytes back. Raises RuntimeError when they have been given back before."""
        self._pool._release(self._start)


class StagingPool:
    """First fit over one buffer. Safe to use from several threads; never blocks.

    `capacity` bytes on `device`. Raises StagingError when they do not fit into what is free there.
    """

    def __init__(
        self,
        capacity: int,
        device: torch.device,
        available: Callable[[torch.device], int] = free_bytes,
    ) -> None:
        free = available(device)
        if capacity > free:
            raise StagingError(
                f"tilert_staging_bytes is {capacity}, but only {free} bytes are free on {device}: lower "
                "it, or give vLLM's own cache less (--gpu-memory-utilization on a GPU, VLLM_CPU_KVCACHE_SPACE on "
                "a CPU)"
            )
        if device.type == "cuda" and "expandable_segments:true" in _allocator_settings():
            raise StagingError(
                "PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True: such memory cannot be registered for "
                "RDMA; set it to False"
            )
        self.buffer = torch.empty(capacity, dtype=torch.uint8, device=device)
        self.buffer.zero_()  # touches every page: the memory is taken now, not at the first request
        self.capacity = capacity
        self._lock = threading.Lock()
        self._holes: list[tuple[int, int]] = [(0, capacity)]  # (start, size), by start, never adjacent
        self._taken: dict[int, int] = {}  # start -> size, alignment included

    @property
    def in_use(self) -> int:
        """Bytes that belong to pieces."""
        with self._lock:
            return sum(self._taken.values())

    def try_take(self, nbytes: int) -> Piece | None:
        """A piece of exactly `nbytes` bytes, or None while there is no room for it.

        Raises StagingError when the pool could never hold it.
        """
        if not 0 < nbytes <= self.capacity:
            raise StagingError(
                f"a piece of {nbytes} bytes never fits into tilert_staging_bytes = {self.capacity}: raise it"
            )
        with self._lock:
            for index, (start, size) in enumerate(self._holes):
                if nbytes <= size:
                    taken = min(-(-nbytes // ALIGNMENT) * ALIGNMENT, size)
                    self._holes[index : index + 1] = [(start + taken, size - taken)] if taken < size else []
                    self._taken[start] = taken
                    return Piece(self, start, nbytes)
        return None

    def _release(self, start: int) -> None:
        with self._lock:
            size = self._taken.pop(start, None)
            if size is None:
                raise RuntimeError(f"the staging piece at {start} was released twice")
            holes = sorted([*self._holes, (start, size)])
            merged = holes[:1]
            for at, length in holes[1:]:
                last, span = merged[-1]
                if last + span == at:
                    merged[-1] = (last, span + length)
                else:
                    merged.append((at, length))
            self._holes = merged


def _allocator_settings() -> str:
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    return ",".join(os.environ.get(name, "") for name in names).replace(" ", "").lower()

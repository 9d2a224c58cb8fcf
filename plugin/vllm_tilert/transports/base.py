"""The Transport seam and the factory that picks one by configuration."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

PROTOCOLS: Final[dict[str, tuple[str, ...]]] = {
    "mooncake": ("rdma", "tcp", "efa"),
    "nixl": ("UCX", "LIBFABRIC"),
}
"""The protocols (Mooncake) or backends (NIXL) of each transport."""

INFINIBAND: Final = Path("/sys/class/infiniband")
"""Where the kernel lists RDMA and EFA devices."""


class TransportUnavailable(RuntimeError):
    """A transport that cannot work on this host or was never known: what, why, and the remedy."""


class TransportError(RuntimeError):
    """A write that ended in failure. Nothing of it is under way any more."""


class WriteOutstanding(TransportError):
    """A write whose time ran out while it may still be under way.

    The source memory must not be reused, and the destination must be taken as still being written,
    until `settle` has returned True.
    """

    def __init__(self, message: str, poll: Callable[[], bool]) -> None:
        super().__init__(message)
        self._poll = poll

    def settle(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for the write to end, well or badly; whether it has ended."""
        end = time.monotonic() + timeout_s
        while not self._poll():
            if time.monotonic() >= end:
                return False
            time.sleep(0.05)
        return True


class Transport(Protocol):
    """Registered memory and one-sided writes. `write` may be called from several threads at once."""

    @property
    def name(self) -> str:
        """`mooncake` or `nixl`, as in Hello's `transport` field."""

    def init(self, host: str) -> None:
        """Start, announcing `host` (an address peers can reach, no brackets) to peers.

        Raises TransportUnavailable.
        """

    def register(self, ptr: int, nbytes: int, device: str) -> None:
        """Make [ptr, ptr + nbytes) a source or target of writes. `device`: `cpu` or `cuda:N`.

        All regions of one transport are on the same device. Raises TransportUnavailable.
        """

    def local_meta(self) -> dict[str, Any]:
        """What a peer needs to write here, as fields of Hello. Call it after `register`."""

    def prepare(self, remote_meta: Mapping[str, Any]) -> None:
        """Do ahead what a first `write` to this peer would do. Raises TransportError."""

    def write(
        self,
        remote_meta: Mapping[str, Any],
        srcs: Sequence[int],
        dsts: Sequence[int],
        lens: Sequence[int],
        timeout_s: float,
        ready: Callable[[], float] | None = None,
    ) -> None:
        """Copy lens[i] bytes from local address srcs[i] to the peer's dsts[i]; returns once all have landed.

        `ready` is called once all but the copying has been prepared: it waits for the bytes and returns the
        seconds that are left, in place of `timeout_s`. What it raises ends the write with nothing copied.
        Raises TransportError when the write failed, WriteOutstanding when the time ran out.
        """

    def close(self) -> None:
        """Let go of memory and connections. No write may be under way."""


def make_transport(name: str, protocol: str, devices: Sequence[str] = ()) -> Transport:
    """The transport called `name` over `protocol`, not started yet.

    `devices` are the NICs to use (Mooncake over rdma or efa), best first; empty means all.
    Raises TransportUnavailable when either is unknown.
    """
    protocols = PROTOCOLS.get(name)
    if protocols is None:
        raise TransportUnavailable(f"unknown transport {name!r}: choose one of {', '.join(PROTOCOLS)}")
    if protocol not in protocols:
        raise TransportUnavailable(
            f"transport {name} has no protocol {protocol!r}: choose one of {', '.join(protocols)}"
        )
    if name == "mooncake":
        from vllm_tilert.transports.mooncake import MooncakeTransport

        return MooncakeTransport(protocol, devices)
    from vllm_tilert.transports.nixl import NixlTransport

    return NixlTransport(protocol)


def rdma_devices() -> list[str]:
    """Names of the RDMA and EFA devices the kernel shows."""
    return sorted(entry.name for entry in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []


def device_index(device: str) -> int | None:
    """N of `cuda:N`, or None for `cpu`. Raises TransportUnavailable for anything else."""
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return None
    if kind == "cuda" and (index.isdigit() or not index):
        return int(index or 0)
    raise TransportUnavailable(f"memory on device {device!r} cannot be registered: it must be cpu or cuda:N")


def poll_until(done: Callable[[], bool], timeout_s: float) -> bool:
    """Poll `done` until it is true or `timeout_s` has passed, closely at first; whether it was true."""
    start = time.monotonic()
    while not done():
        spent = time.monotonic() - start
        if spent >= timeout_s:
            return False
        # A write of a few megabytes ends within a fraction of a millisecond; a long one need not be hurried.
        time.sleep(0.00002 if spent < 0.002 else 0.0005)
    return True

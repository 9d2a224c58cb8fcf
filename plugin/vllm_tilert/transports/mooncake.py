"""Mooncake's transfer engine: one-sided writes over RDMA verbs, TCP or AWS EFA."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any, Final

from vllm_tilert.transports.base import (
    TransportError,
    TransportUnavailable,
    WriteOutstanding,
    device_index,
    poll_until,
    rdma_devices,
)
from vllm_tilert.wire.address import authority

_WHEEL: Final = "mooncake-transfer-engine"
_BAD_HANDLES: Final = frozenset({0, -1, 2**64 - 1})
"""What `transfer_submit_write` returns when it could not submit (it differs between releases)."""
_PENDING: Final = frozenset({0, -2})
"""Values of `transfer_check_status` for a part that has not ended."""


def installed_wheel() -> str:
    """The distribution that provides Mooncake here, or an empty string."""
    names = (dist.metadata["Name"] or "" for dist in metadata.distributions())
    return next((name.lower() for name in sorted(names) if name.lower().startswith(_WHEEL)), "")


def _import_engine() -> Any:
    try:
        from mooncake.engine import TransferEngine
    except ModuleNotFoundError as error:
        raise TransportUnavailable(
            f"transport mooncake needs a wheel that is not installed ({error}): install {_WHEEL} (CUDA 12), "
            f"{_WHEEL}-cuda13, {_WHEEL}-efa (AWS) or {_WHEEL}-non-cuda (no GPU)"
        ) from None
    except ImportError as error:
        raise TransportUnavailable(
            f"Mooncake's library does not load ({error}): install the system packages libibverbs1, "
            "librdmacm1, libnuma1 and libcurl4 (Debian's names), and a wheel built for this CUDA release"
        ) from None
    return TransferEngine


class MooncakeTransport:
    """See `base.Transport`. Parts are submitted without blocking and polled, so a time limit holds."""

    name: Final = "mooncake"

    def __init__(self, protocol: str, devices: Sequence[str] = ()) -> None:
        self._protocol = protocol
        self._devices = tuple(devices)
        self._engine: Any = None
        self._session = ""
        self._host = ""
        self._regions: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    def init(self, host: str) -> None:
        """Start the engine on `host`; its port is picked by the engine."""
        if self._protocol != "tcp":
            self._check_devices()
        elif rdma_devices():
            os.environ["MC_FORCE_TCP"] = "1"  # Mooncake prefers a NIC to what it is told.
        if ":" in host:
            os.environ["MC_USE_IPV6"] = "1"
        self._host = host
        self._engine = engine = self._start()
        self._session = authority(host, engine.get_rpc_port())

    def _start(self) -> Any:
        engine = _import_engine()()
        if engine.initialize(self._host, "P2PHANDSHAKE", self._protocol, ",".join(self._devices)) != 0:
            raise TransportUnavailable(
                f"Mooncake does not start on {self._host} over {self._protocol}: the address must be one of "
                "this host's, and its log above names what failed"
            )
        return engine

    def _check_devices(self) -> None:
        """Refuse what Mooncake would answer by falling back to TCP in silence."""
        present = rdma_devices()
        if not present:
            raise TransportUnavailable(
                f"protocol {self._protocol} needs an RDMA device and this host shows none in "
                "/sys/class/infiniband: load its driver, pass the device into the container, or use tcp"
            )
        missing = [name for name in self._devices if name not in present]
        if missing:
            raise TransportUnavailable(
                f"RDMA devices {', '.join(missing)} do not exist here: present are {', '.join(present)}"
            )
        wheel = installed_wheel()
        if self._protocol == "efa" and wheel and not wheel.endswith("-efa"):
            raise TransportUnavailable(
                f"protocol efa needs the wheel {_WHEEL}-efa, but {wheel} is installed: EFA has no RC verbs"
            )

    def register(self, ptr: int, nbytes: int, device: str) -> None:
        """Register one region with every NIC in use."""
        if device_index(device) is not None and installed_wheel().endswith("-non-cuda"):
            raise TransportUnavailable(
                f"memory on {device} cannot be registered with {_WHEEL}-non-cuda: install the CUDA wheel"
            )
        if self._engine.register_memory(ptr, nbytes) != 0:
            raise TransportUnavailable(
                f"Mooncake cannot register {nbytes} bytes on {device}: raise the memlock limit to unlimited, "
                "and for GPU memory load nvidia-peermem or use a kernel with dma-buf"
            )
        self._regions.append((ptr, nbytes))

    def local_meta(self) -> dict[str, Any]:
        """`session_id`: the engine's host and port."""
        return {"session_id": self._session}

    def prepare(self, remote_meta: Mapping[str, Any]) -> None:
        """Check the metadata; Mooncake opens a peer's segment at the first write."""
        _session_id(remote_meta)

    def write(
        self,
        remote_meta: Mapping[str, Any],
        srcs: Sequence[int],
        dsts: Sequence[int],
        lens: Sequence[int],
        timeout_s: float,
        ready: Callable[[], float] | None = None,
    ) -> None:
        """Submit every part, then poll them until all have ended."""
        session = _session_id(remote_meta)
        engine = self._engine
        parts = list(zip(srcs, dsts, lens, strict=True))
        if ready is not None:
            timeout_s = ready()
        pending: set[int] = set()
        failed = 0
        for src, dst, length in parts:
            handle = engine.transfer_submit_write(session, src, dst, length)
            if handle in _BAD_HANDLES:
                failed += 1
                break
            pending.add(handle)

        def ended() -> bool:
            nonlocal failed
            for handle in tuple(pending):
                status = engine.transfer_check_status(handle)
                if status not in _PENDING:
                    # A handle is freed by the check that reports its end: never ask again.
                    pending.discard(handle)
                    failed += status != 1
            return not pending

        if not poll_until(ended, timeout_s):
            raise WriteOutstanding(
                f"{len(pending)} of {len(parts)} parts have not reached {session} after {timeout_s:.1f} s",
                ended,
            )
        if failed:
            self._renew(engine)
            raise TransportError(f"{failed} of {len(parts)} parts could not be written to {session}")

    def _renew(self, failed: Any) -> None:
        """Replace the engine in which a write failed.

        An engine keeps a peer's description for ever, so it would go on failing if another process came
        up at the peer's address. Writes under way elsewhere keep the old engine until they end.
        """
        with self._lock:
            if self._engine is not failed:
                return  # another thread's failed write has done it
            try:
                engine = self._start()
            except TransportUnavailable:
                return
            if all(engine.register_memory(ptr, nbytes) == 0 for ptr, nbytes in self._regions):
                self._engine = engine

    def close(self) -> None:
        """Unregister all regions and drop the engine."""
        if self._engine is not None:
            for ptr, _ in self._regions:
                self._engine.unregister_memory(ptr)
            self._regions.clear()
            self._engine = None


def _session_id(remote_meta: Mapping[str, Any]) -> str:
    session = remote_meta.get("session_id")
    if not isinstance(session, str) or not session:
        raise TransportError(f"the peer's session_id is {session!r}, not HOST:PORT")
    return session

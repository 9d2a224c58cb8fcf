"""NIXL: one-sided writes over UCX (verbs, TCP, shared memory, NVLink) or LIBFABRIC (AWS EFA)."""

from __future__ import annotations

import base64
import binascii
import importlib
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from vllm_tilert.transports.base import (
    TransportError,
    TransportUnavailable,
    WriteOutstanding,
    device_index,
    poll_until,
)

_MODULES: Final = ("nixl._api", "nixl_cu12._api", "nixl_cu13._api")
"""The meta package picks the CUDA release by itself; the wheels may also be there without it."""


def _import_api() -> Any:
    reasons = []
    for module in _MODULES:
        try:
            return importlib.import_module(module)
        except ImportError as error:
            reasons.append(f"{module}: {error}")
    raise TransportUnavailable(
        "transport nixl needs the wheel nixl, nixl-cu12 or nixl-cu13, for this host's CUDA release; "
        f"none loads: {'; '.join(reasons)}"
    )


class NixlTransport:
    """See `base.Transport`. One agent; a lock guards it, since an agent is not safe to share by itself."""

    name: Final = "nixl"

    def __init__(self, protocol: str) -> None:
        self._protocol = protocol
        self._agent: Any = None
        self._device = 0
        self._memory = "DRAM"
        self._regions: list[Any] = []
        self._peers: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def init(self, host: str) -> None:
        """Start an agent with one backend. Its name is unique even if a host reuses process ids."""
        api = _import_api()
        remedy = (
            "install libfabric with its efa provider on a host with EFA devices, or use UCX"
            if self._protocol == "LIBFABRIC"
            else "install a wheel that has the plugin"
        )
        try:
            agent = api.nixl_agent(
                f"{host}:{secrets.token_hex(8)}", api.nixl_agent_config(backends=[self._protocol])
            )
        except Exception as error:
            raise TransportUnavailable(
                f"NIXL's backend {self._protocol} does not start here ({error}): {remedy}"
            ) from error
        if self._protocol not in agent.backends:
            raise TransportUnavailable(
                f"NIXL has no backend {self._protocol}, only {', '.join(agent.plugin_list)}: {remedy}"
            )
        self._agent = agent

    def register(self, ptr: int, nbytes: int, device: str) -> None:
        """Register one region as DRAM or VRAM."""
        index = device_index(device)
        self._memory, self._device = ("DRAM", 0) if index is None else ("VRAM", index)
        try:
            with self._lock:
                region = self._agent.register_memory([(ptr, nbytes, self._device, "")], self._memory)
        except Exception as error:
            raise TransportUnavailable(
                f"NIXL cannot register {nbytes} bytes on {device} ({error}): raise the memlock limit to "
                "unlimited, and for GPU memory load nvidia-peermem or use a kernel with dma-buf"
            ) from error
        self._regions.append(region)

    def local_meta(self) -> dict[str, Any]:
        """`nixl_meta`: the agent's metadata (base64); `nixl_dev`, `nixl_mem`: where the memory is."""
        with self._lock:
            meta = self._agent.get_agent_metadata()
        return {
            "nixl_meta": base64.b64encode(meta).decode(),
            "nixl_dev": self._device,
            "nixl_mem": self._memory,
        }

    def prepare(self, remote_meta: Mapping[str, Any]) -> None:
        """Load the peer's metadata and connect to it."""
        try:
            with self._lock:
                peer = self._peer(remote_meta)
                self._agent.make_connection(peer)
        except TransportError:
            raise
        except Exception as error:
            raise TransportError(f"NIXL cannot connect to the peer: {error}") from error

    def _peer(self, remote_meta: Mapping[str, Any]) -> str:
        """The agent name of a peer; loads its metadata when it is new or has changed."""
        try:
            meta = base64.b64decode(remote_meta["nixl_meta"], validate=True)
        except (KeyError, TypeError, ValueError, binascii.Error):
            raise TransportError("the peer's nixl_meta is missing or not base64") from None
        for name, known in self._peers.items():
            if known == meta:
                return name
        name = self._agent.add_remote_agent(meta)
        if isinstance(name, bytes):
            name = name.decode()
        self._peers[name] = meta
        return str(name)

    def write(
        self,
        remote_meta: Mapping[str, Any],
        srcs: Sequence[int],
        dsts: Sequence[int],
        lens: Sequence[int],
        timeout_s: float,
        ready: Callable[[], float] | None = None,
    ) -> None:
        """Post one transfer of all parts and poll it."""
        parts = list(zip(srcs, dsts, lens, strict=True))
        remote_dev = int(remote_meta.get("nixl_dev", 0))
        remote_mem = str(remote_meta.get("nixl_mem", "VRAM"))  # the stock server has GPU memory only
        peer: str | None = None
        state = "PROC"
        try:
            with self._lock:
                agent = self._agent
                peer = self._peer(remote_meta)
                handle = agent.initialize_xfer(
                    "WRITE",
                    agent.get_xfer_descs([(src, n, self._device) for src, _, n in parts], self._memory),
                    agent.get_xfer_descs([(dst, n, remote_dev) for _, dst, n in parts], remote_mem),
                    peer,
                )
        except TransportError:
            raise
        except Exception as error:
            self._forget(peer)
            raise TransportError(f"NIXL refuses the write: {error}") from error

        if ready is not None:
            try:
                timeout_s = ready()
            except BaseException:
                with self._lock:
                    agent.release_xfer_handle(handle)
                raise

        def ended() -> bool:
            nonlocal state
            with self._lock:
                if state == "PROC":
                    try:
                        state = agent.check_xfer_state(handle)
                    except Exception:
                        state = "ERR"  # the bindings raise where the peer is gone
                    if state != "PROC":
                        agent.release_xfer_handle(handle)
            return state != "PROC"

        with self._lock:
            try:
                state = agent.transfer(handle)
            except Exception:
                state = "ERR"
            if state != "PROC":
                agent.release_xfer_handle(handle)
        if not poll_until(ended, timeout_s):
            raise WriteOutstanding(f"the write to {peer} has not ended after {timeout_s:.1f} s", ended)
        if state != "DONE":
            self._forget(peer)
            raise TransportError(f"the write to {peer} failed")

    def _forget(self, peer: str | None) -> None:
        """Drop a peer whose write failed, so that the next handoff connects anew."""
        with self._lock:
            if peer is not None and self._peers.pop(peer, None) is not None:
                try:
                    self._agent.remove_remote_agent(peer)
                except Exception:
                    return  # already gone

    def close(self) -> None:
        """Disconnect from all peers and deregister all regions."""
        with self._lock:
            if self._agent is None:
                return
            for peer in self._peers:
                self._agent.remove_remote_agent(peer)
            for region in self._regions:
                self._agent.deregister_memory(region)
            self._peers.clear()
            self._regions.clear()
            self._agent = None

"""Put a request's state into the cache tensors of every device of a TileRT engine.

TileRT keeps, per device and layer, three bfloat16 tensors [1, rows, dim]: index (dim 128), kv (512) and
pe (64), in that order. A device that does not use a plane holds a tensor of one row for it: GLM-5 has the
index on its first device and kv and pe on the others. The generator's own `inject_cache` copies tensor by
tensor; here a device takes one copy a plane and one launch, or, straight from the received bytes, one copy
and one conversion. Where the tensors are not as expected, `Injector` says so and uses `inject_cache`.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch

from vllm_tilert.profiles import base, mla_nsa
from vllm_tilert.profiles.base import ConvertedState
from vllm_tilert.profiles.layout import Layout
from vllm_tilert.profiles.mla_nsa import DIMS, ORDER

logger = logging.getLogger(__name__)

UNUSED: Final = 1
"""Rows of a tensor that stands for a plane its device does not use."""


class DecodeLayer(Protocol):
    """What is used of TileRT's decode layer."""

    num_devices: int

    def _get_device_result(self, device_id: int) -> Any:
        """(intermediates, caches, params, profile logs) of one device."""


class Generator(Protocol):
    """What is used of TileRT's generator."""

    decode_layer: DecodeLayer

    def inject_cache(self, layer_caches: list[tuple[torch.Tensor, ...]], start_pos: int = 0) -> None:
        """The generator's own way, one copy a tensor and device."""


class UnexpectedCaches(Exception):
    """The engine's cache tensors are not of the shape, dtype or place that direct injection needs."""


@dataclass(frozen=True)
class _Device:
    """One device's cache tensors by plane (planes it does not use left out), and their addresses."""

    device: torch.device
    caches: dict[str, list[torch.Tensor]]
    targets: torch.Tensor | None
    stream: Any
    rows: int
    kernels: dict[Layout, Any] = field(default_factory=dict)
    marks: dict[torch.device, Any] = field(default_factory=dict)

    def follow(self, place: torch.device) -> None:
        """Let the stream's next work wait for what is queued on `place` so far."""
        event = self.marks.get(place)
        if event is None:
            event = self.marks[place] = torch.cuda.Event()
        event.record(torch.cuda.current_stream(place))
        self.stream.wait_event(event)


class Injector:
    """Writes requests into one engine. Build it when the engine is built; use it from one thread.

    `layers` are the engine's; of what is handed over, `unused` layers more come last (the draft layer's,
    where the engine decodes without it). `direct` tells whether the fast way is used, `reason` why not.
    """

    def __init__(self, generator: Generator, layers: int, unused: int = 0) -> None:
        self._generator = generator
        self._layers = layers
        self.reason = ""
        self._devices: list[_Device] = []
        try:
            count = generator.decode_layer.num_devices
            self._devices = [_inspect(generator.decode_layer, i, layers, unused) for i in range(count)]
            if not self._devices:
                raise UnexpectedCaches("the engine has no device")
        except (UnexpectedCaches, AttributeError, TypeError, ValueError) as error:
            self.reason = str(error)
            self._devices = []
            logger.warning("state is injected tensor by tensor (slow): %s", self.reason)

    @property
    def direct(self) -> bool:
        """Whether state is written straight into the cache tensors."""
        return bool(self._devices)

    @property
    def rows(self) -> int | None:
        """Tokens the cache tensors hold; None where the fast way is not used."""
        return min((device.rows for device in self._devices), default=None)

    def warm_up(self, layout: Layout) -> None:
        """Compile what `land` runs, on every device, before the first request has to wait for it."""
        for device in self._devices:
            if device.device.type == "cuda":
                from vllm_tilert.kernels.convert import ConvertKernel

                with _on(device, device.device):
                    segment = torch.zeros(layout.segment_bytes(1), dtype=torch.uint8, device=device.device)
                    kernel = device.kernels[layout] = ConvertKernel(layout, device.device)
                    kernel.compile(segment)
        self.finish()

    def inject(self, state: ConvertedState, first_row: int = 0) -> None:
        """Write converted planes as rows `first_row` onwards; over on return. Raises ValueError if too long."""
        if not self.direct:
            self._generator.inject_cache(state.layers[: self._layers], start_pos=first_row)
            return
        self._check(first_row + state.seq_len)
        rows_of = slice(first_row, first_row + state.seq_len)
        source = state.planes["kv"].device
        for device in self._devices:
            with _on(device, source):
                planes = {
                    name: state.planes[name][: self._layers].to(device.device, non_blocking=True)
                    for name in device.caches
                }
                into = [cache[0, rows_of] for name in planes for cache in device.caches[name]]
                rows = [row for plane in planes.values() for row in plane.unbind(0)]
                torch._foreach_copy_(into, rows)
        self.finish()

    def queue(self, slot: torch.Tensor, layout: Layout, segments: Sequence[int], first: int = 0) -> None:
        """Begin to convert received bytes straight into the cache tensors, token n as row n; see `finish`.

        Each device gets the bytes as they came (about half of what they become) and converts the planes it
        uses. Segments before `first` are left out. On a GPU nothing is waited for, so that any thread may
        call it, and what is queued later comes later. Raises ValueError, with nothing queued, when the
        segments do not fit the slot or the engine.
        """
        seq_len = base.check_slot(slot, layout, segments)
        at = sum(segments[:first])
        if at == seq_len:
            return
        begin = layout.offset(at)
        if not self.direct or not slot.is_cuda:
            profile = mla_nsa.PROFILES[layout.profile]
            self.inject(profile.convert(slot[begin:], layout, segments[first:]), at)
            return
        self._check(seq_len)
        if layout not in self._devices[0].kernels:
            self.warm_up(layout)
        for device in self._devices:
            assert device.targets is not None
            with torch.cuda.device(device.device):
                # The default stream of the engine's device also stands for the engine's own blocking streams.
                device.follow(device.device)
                local, start = slot, slot.data_ptr()
                if device.device != slot.device:
                    device.follow(slot.device)
                    with torch.cuda.stream(device.stream):
                        local = slot[begin : layout.segment_bytes(seq_len)].to(
                            device.device, non_blocking=True
                        )
                    start = local.data_ptr() - begin
                kernel, row, targets = device.kernels[layout], at, device.targets.data_ptr()
                for tokens in segments[first:]:
                    kernel.launch(start + layout.offset(row), tokens, tokens, targets, row, device.stream)
                    row += tokens

    def finish(self) -> None:
        """Wait for what was queued."""
        for device in self._devices:
            if device.stream is not None:
                device.stream.synchronize()

    def land(self, slot: torch.Tensor, layout: Layout, segments: Sequence[int]) -> None:
        """`queue` and `finish`."""
        self.queue(slot, layout, segments)
        self.finish()

    def _check(self, seq_len: int) -> None:
        rows = self.rows
        assert rows is not None
        if seq_len > rows:
            raise ValueError(f"{seq_len} tokens exceed the engine's cache of {rows} rows")


def _inspect(decode_layer: DecodeLayer, number: int, layers: int, unused: int) -> _Device:
    """One device's caches, checked. Raises UnexpectedCaches."""
    _, tensors, *_ = decode_layer._get_device_result(number)
    if len(tensors) < 3 * layers:
        raise UnexpectedCaches(f"device {number} has {len(tensors)} cache tensors, expected {3 * layers}")
    caches: dict[str, list[torch.Tensor]] = {}
    rows: set[int] = set()
    place = tensors[0].device
    for offset, name in enumerate(ORDER):
        plane = list(tensors[offset : 3 * layers : 3])
        first = plane[0]
        for tensor in plane:
            if tensor.shape != first.shape or tensor.device != place or not tensor.is_contiguous():
                raise UnexpectedCaches(f"device {number}: the {name} tensors are not alike and contiguous")
        if first.dim() != 3 or first.shape[0] != 1:
            raise UnexpectedCaches(
                f"device {number}: {name} has shape {list(first.shape)}, not [1, rows, dim]"
            )
        if first.shape[1] == UNUSED:
            continue
        if first.shape[2] != DIMS[name] or first.dtype != torch.bfloat16:
            raise UnexpectedCaches(
                f"device {number}: {name} is {first.dtype} x {first.shape[2]}, not bfloat16 x {DIMS[name]}"
            )
        rows.add(first.shape[1])
        caches[name] = plane
    if not rows:
        raise UnexpectedCaches(f"device {number} uses no plane")
    targets = stream = None
    if place.type == "cuda":
        addresses = [
            [caches[name][layer].data_ptr() if name in caches else 0 for name in ORDER]
            for layer in range(layers)
        ]
        addresses += [[0] * len(ORDER)] * unused
        targets = torch.tensor(addresses, dtype=torch.int64, device=place)
        stream = torch.cuda.Stream(place)
    return _Device(place, caches, targets, stream, min(rows))


@contextmanager
def _on(device: _Device, source: torch.device) -> Iterator[None]:
    """Work on a device's own stream, behind what `source` and the engine have queued so far."""
    if device.stream is None:
        yield
        return
    # The default stream of the engine's device also stands for the engine's own blocking streams.
    for place in {source, device.device}:
        if place.type == "cuda":
            device.stream.wait_stream(torch.cuda.current_stream(place))
    with torch.cuda.stream(device.stream):
        yield

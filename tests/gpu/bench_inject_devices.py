"""Injection into engines of several devices: straight from the bytes, from converted planes, and TileRT's loop.

usage: PYTHONPATH=plugin:tests python3 tests/gpu/bench_inject_devices.py

`dsv32`: every device has all three planes; `glm5`: the first has the index, the others kv and pe. Uses all GPUs
there are; what lands is compared with the converted state on every device.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch

from gpu.nodes import LAYERS, config_of
from unit.profiles.caches import nsa_caches
from vllm_tilert.kernels.inject import Injector
from vllm_tilert.profiles.base import get_profile
from vllm_tilert.profiles.mla_nsa import DIMS, ORDER


class Engine:
    """Cache tensors on every GPU; a plane its device does not use has one row."""

    def __init__(self, model: str, rows: int) -> None:
        self.decode_layer, self.num_devices = self, torch.cuda.device_count()
        self.tensors = []
        for number in range(self.num_devices):
            used = set(ORDER) if model == "dsv32" else ({"index"} if number == 0 else {"kv", "pe"})
            make = {name: (1, rows if name in used else 1, DIMS[name]) for name in ORDER}
            self.tensors.append(
                [
                    torch.full(make[name], float("nan"), dtype=torch.bfloat16, device=f"cuda:{number}")
                    for _ in range(LAYERS[model])
                    for name in ORDER
                ]
            )

    def _get_device_result(self, device_id: int):
        return None, self.tensors[device_id], None, None

    def poison(self) -> None:
        for tensors in self.tensors:
            torch._foreach_mul_(tensors, float("nan"))

    def right(self, state) -> bool:
        found = True
        for tensors in self.tensors:
            for i, layer in enumerate(state.layers):
                for k, row in enumerate(layer):
                    cache = tensors[3 * i + k]
                    if cache.shape[1] > 1:
                        found &= torch.equal(cache[0, : state.seq_len], row.to(cache.device))
        return found

    def loop(self, state) -> None:
        """TileRT's generator: tensor by tensor, device by device."""
        for number, tensors in enumerate(self.tensors):
            for i, layer in enumerate(state.layers):
                for k, row in enumerate(layer):
                    source = row.to(f"cuda:{number}")
                    if tensors[3 * i + k].shape[1] >= state.seq_len:
                        tensors[3 * i + k][0, : state.seq_len].copy_(source)
            torch.cuda.synchronize(number)


def median_ms(work, repeat: int = 9) -> float:
    times = []
    for _ in range(repeat):
        for number in range(torch.cuda.device_count()):
            torch.cuda.synchronize(number)
        began = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times[2:])


def main() -> int:
    print(torch.cuda.get_device_name(0), "GPUs", torch.cuda.device_count())
    fine = True
    for model in ("dsv32", "glm5"):
        if model == "glm5" and torch.cuda.device_count() == 1:
            continue
        profile = get_profile(model)
        layout = profile.layout_from_config(config_of(model), "fp8_ds_mla")
        caches = nsa_caches(LAYERS[model], 130, "fp8_ds_mla", device="cuda")
        engine = Engine(model, 8200)
        injector = Injector(engine, layout.layers)
        injector.warm_up(layout)
        assert injector.direct, injector.reason
        for tokens in (1024, 8192):
            slot = torch.empty(layout.segment_bytes(tokens), dtype=torch.uint8, device="cuda:0")
            profile.gatherer(caches, layout).gather(range(tokens // 64), 0, tokens, slot).wait()
            state = profile.convert(slot, layout, [tokens])
            torch.cuda.synchronize()
            said = {}
            for name, work in {
                "from the bytes": lambda: injector.land(slot, layout, [tokens]),  # noqa: B023
                "converted planes": lambda: injector.inject(state),  # noqa: B023
                "TileRT's loop": lambda: engine.loop(state),  # noqa: B023
            }.items():
                engine.poison()
                said[name] = f"{median_ms(work):.3f}"
                fine &= engine.right(state)
            print(model, tokens, "tokens:", said, "right", fine, flush=True)
    return 0 if fine else 1


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(main())

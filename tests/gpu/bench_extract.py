"""Gather, convert, inject and checksum on one GPU, beside TileRT's own code and the copy limit, in one run.

usage: PYTHONPATH=plugin:tests:SITE python3 tests/gpu/bench_extract.py     (SITE holds TileRT's Python)
Every length is also checked: bytes equal to the stock extract, tensors to the stock convert.
"""

from __future__ import annotations

import logging
import random
import statistics
import sys
import time
from array import array
from types import SimpleNamespace

import torch

from unit.profiles.caches import nsa_caches
from vllm_tilert.checksum import plane_checksums
from vllm_tilert.kernels.convert import ConvertKernel, dense_targets
from vllm_tilert.kernels.inject import Injector
from vllm_tilert.profiles.base import get_profile

LAYERS, LENGTHS, BLOCKS = 79, (1024, 8192, 32768, 131072), 2100
DEVICE = torch.device("cuda:0")


def on_gpu(work, repeat: int = 20) -> float:
    """Median milliseconds of device time, and warm."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeat):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(1_000_000)  # the device is busy while the work is queued, so launching is not timed
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def on_thread(work, settle, repeat: int = 20) -> float:
    """Median milliseconds that `work` keeps the calling thread; `settle` runs outside the clock."""
    times = []
    for _ in range(repeat + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = work()
        times.append(1e3 * (time.perf_counter() - start))
        settle(result)
    return statistics.median(times[3:])


def stock_parts():
    from tilert.pd_vllm.profiles import base

    logging.getLogger().setLevel(logging.WARNING)
    return base.get_profile("glm5")


class Layer:
    """TileRT's cache tensors of one device, all three planes."""

    num_devices = 1

    def __init__(self, rows: int) -> None:
        make = lambda dim: torch.zeros(1, rows, dim, dtype=torch.bfloat16, device=DEVICE)  # noqa: E731
        self.tensors = [make(dim) for _ in range(LAYERS) for dim in (128, 512, 64)]

    def _get_device_result(self, device_id: int):
        return None, self.tensors, None, None


def stock_inject(layer: Layer, layers) -> None:
    """What the stock generator does: a copy a tensor, then a device-wide wait."""
    for i, state in enumerate(layers):
        for offset, source in enumerate(state):
            layer.tensors[3 * i + offset][0, : source.shape[0], :].copy_(source)
    torch.cuda.synchronize(0)


def main() -> int:
    print(torch.cuda.get_device_name(0), "torch", torch.__version__)
    profile, stock = get_profile("glm5"), stock_parts()
    ok = True
    for dtype in ("bfloat16", "fp8_ds_mla"):
        caches = nsa_caches(LAYERS, BLOCKS if dtype != "bfloat16" else 140, dtype, device="cuda")
        layout = profile.layout_from_caches(caches)
        gatherer = profile.gatherer(caches, layout)
        groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=list(caches))])
        registered = stock.classify_layers(caches, groups)
        blocks = next(iter(caches.values())).shape[0]
        for tokens in (1, 63, 64, 65, 4097):
            table = random.Random(tokens).sample(range(blocks), -(-tokens // 64))
            ok &= check(profile, layout, gatherer, stock, registered, table, tokens)
    print("bytes and tensors equal to stock's:", ok, flush=True)
    print(
        "tokens | MB | gather ms, limit ms, ratio | forward thread ms | stock extract ms | checksum ms",
        flush=True,
    )
    for tokens in LENGTHS:
        ok &= extract(profile, layout, gatherer, stock, registered, tokens)
    host = torch.empty(layout.segment_bytes(1000), dtype=torch.uint8).random_()
    there = host.cuda()
    torch.cuda.synchronize()
    ok &= plane_checksums(host, layout, 1000) == plane_checksums(there, layout, 1000)
    print("checksums equal on CPU and GPU; all checks:", ok)
    return 0 if ok else 1


def extract(profile, layout, gatherer, stock, registered, tokens) -> bool:
    table = random.Random(tokens).sample(range(BLOCKS), tokens // 64)
    size = layout.segment_bytes(tokens)
    out, twin = (torch.empty(size, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    ids = torch.tensor(table, dtype=torch.int32, device=DEVICE)
    stream = torch.cuda.current_stream().cuda_stream
    at = (gatherer._caches.data_ptr(), ids.data_ptr(), out.data_ptr())
    kernel = on_gpu(lambda: gatherer._kernel.launch(*at, tokens, stream))
    limit = on_gpu(lambda: twin.copy_(out))
    packed = array("i", table)
    thread = on_thread(lambda: gatherer.gather(packed, 0, tokens, out), lambda c: c.wait())
    request = SimpleNamespace(num_tokens=tokens, block_ids_per_group=[table])
    staging = twin  # at a stride of `tokens` the stock layout has the segment's size
    theirs = on_thread(lambda: stock.extract(registered, request, 0, staging, tokens), lambda c: None, 5)
    equal = torch.equal(staging, out)
    sums = on_thread(lambda: plane_checksums(out, layout, tokens), lambda c: None)
    print(
        f"{tokens} | {size / 1e6:.0f} | {kernel:.3f}, {limit:.3f}, {kernel / limit:.2f} | {thread:.3f} | "
        f"{theirs:.2f} | {sums:.3f} | equal {equal}",
        flush=True,
    )
    if tokens <= 32768:
        convert(profile, layout, stock, out, tokens)
    return equal


def check(profile, layout, gatherer, stock, registered, table, tokens) -> bool:
    out = torch.full((layout.segment_bytes(tokens),), 0xA5, dtype=torch.uint8, device=DEVICE)
    gatherer.gather(table, 0, tokens, out).wait()
    staging = torch.zeros(stock.buffer_bytes(tokens), dtype=torch.uint8, device=DEVICE)
    request = SimpleNamespace(num_tokens=tokens, block_ids_per_group=[table])
    stock.extract(registered, request, 0, staging, tokens)
    received = SimpleNamespace(
        rid="r", seq_len=tokens, last_prompt_token=0, first_token_id=None, sampling=None
    )
    want = stock.convert(staging, 0, tokens, received).layers
    mine = profile.convert(out, layout, [tokens])
    cpu = profile.convert(out.cpu(), layout, [tokens])
    rows = all(
        torch.equal(m[1], w[1]) and torch.equal(m[2], w[2]) for m, w in zip(mine.layers, want, strict=True)
    )

    def off(a, b) -> tuple[float, float]:
        a, b = a.float(), b.float()
        return ((a != b).float().mean().item(), ((a - b).norm() / b.norm()).item())

    index = torch.stack([w[0] for w in want])
    fine = torch.equal(out, staging) and rows
    against = (off(mine.planes["index"], index), off(mine.planes["index"].cpu(), cpu.planes["index"]))
    fine &= all(part < 0.02 and error < 1e-3 for part, error in against)
    fine &= torch.equal(mine.planes["kv"].cpu(), cpu.planes["kv"])
    if tokens == 4097 or not fine:
        print(
            f"  {layout.dtype} {tokens}: {fine}; index (part that differs, rel. error) vs stock, vs CPU: {against}"
        )
    return fine


def convert(profile, layout, stock, out, tokens) -> None:
    state = profile.convert(out, layout, [tokens])
    written = sum(p.numel() * 2 for p in state.planes.values())
    half = (out.numel() + written) // 2
    one, two = (torch.empty(half, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    limit = on_gpu(lambda: one.copy_(two))
    targets = dense_targets(state.planes, LAYERS)
    converter = ConvertKernel(layout, DEVICE)
    kernel = on_gpu(lambda: converter.interpret(out, tokens, tokens, targets, 0))
    received = SimpleNamespace(
        rid="r", seq_len=tokens, last_prompt_token=0, first_token_id=None, sampling=None
    )
    theirs = on_thread(lambda: stock.convert(out, 0, tokens, received), lambda c: None, 5)
    layer = Layer(tokens + 8)
    injector = Injector(SimpleNamespace(decode_layer=layer), LAYERS)
    assert injector.direct, injector.reason
    loop = on_thread(lambda: stock_inject(layer, state.layers), lambda c: None, 5)
    inject = on_thread(lambda: injector.inject(state), lambda c: None)
    for tensor in layer.tensors:
        tensor.fill_(float("nan"))
    land = on_thread(lambda: injector.land(out, layout, [tokens]), lambda c: None)
    right = all(
        torch.equal(layer.tensors[3 * i + k][0, :tokens], row)
        for i, rows in enumerate(state.layers)
        for k, row in enumerate(rows)
    )
    print(
        f"   convert {kernel:.3f}, limit {limit:.3f}, ratio {kernel / limit:.2f}; stock convert {theirs:.2f} | "
        f"inject: straight from bytes {land:.3f}, converted {inject:.3f}, stock loop {loop:.2f} ms; "
        f"landed right {right}",
        flush=True,
    )
    assert right


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(main())

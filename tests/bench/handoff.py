"""The handoff's CPU work beside the stock code's, in one run: bytes, gather, checksum, convert.

usage: bin/bench handoff      GLM-5's 79 layers, fp8_ds_mla; fetches the stock wheel when it is not there yet
"""

from __future__ import annotations

import logging
import random
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from contract.conftest import CACHE, stock_path
from unit.profiles.caches import nsa_caches
from vllm_tilert.checksum import plane_checksums
from vllm_tilert.profiles.base import get_profile

BLOCKS, LENGTHS = 70, (64, 1024)


def median_ms(work: Callable[[], Any], repeat: int = 3) -> float:
    """Median milliseconds of `work`, once warm."""
    work()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def row(ours: Any, stock: Any, caches: dict[str, torch.Tensor], tokens: int) -> str:
    """One line of the table, with the bytes checked."""
    table = random.Random(tokens).sample(range(BLOCKS), tokens // 64)
    layout = ours.layout_from_caches(caches)
    gatherer = ours.gatherer(caches, layout)
    out = torch.empty(layout.segment_bytes(tokens), dtype=torch.uint8)
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=list(caches))])
    registered = stock.classify_layers(caches, groups)
    staging = torch.empty(stock.buffer_bytes(tokens), dtype=torch.uint8)
    request = SimpleNamespace(num_tokens=tokens, block_ids_per_group=[table])
    received = SimpleNamespace(
        rid="", seq_len=tokens, last_prompt_token=0, first_token_id=None, sampling=None
    )
    times = (
        median_ms(lambda: gatherer.gather(table, 0, tokens, out).wait()),
        median_ms(lambda: stock.extract(registered, request, 0, staging, tokens)),
        median_ms(lambda: plane_checksums(out, layout, tokens)),
        median_ms(lambda: ours.convert(out, layout, [tokens])),
        median_ms(lambda: stock.convert(staging, 0, tokens, received)),
    )
    if not torch.equal(out, staging):
        raise SystemExit(f"{tokens} tokens: the bytes differ from the stock code's")
    return f"{tokens:>7} {out.numel() / 1e6:>7.1f} " + " ".join(f"{t:>14.2f}" for t in times)


def main() -> None:
    stock_path.__wrapped__()
    sys.path.insert(0, str(CACHE))
    torch.cuda.synchronize = lambda *args: None  # the stock code calls it on any device
    from tilert.pd_vllm.profiles import base as stock_profiles

    logging.getLogger().setLevel(logging.WARNING)
    caches = nsa_caches(79, BLOCKS, "fp8_ds_mla")
    heads = ("gather", "stock extract", "checksum", "convert", "stock convert")
    print(f"{'tokens':>7} {'MB':>7} " + " ".join(f"{head + ' ms':>14}" for head in heads))
    for tokens in LENGTHS:
        print(row(get_profile("glm5"), stock_profiles.get_profile("glm5"), caches, tokens), flush=True)


if __name__ == "__main__":
    main()

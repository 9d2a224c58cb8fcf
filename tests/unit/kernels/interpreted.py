"""The GPU kernels in Triton's interpreter, on the CPU: run with TRITON_INTERPRET=1. Says what differs and fails."""

from __future__ import annotations

import sys
from array import array

import torch

from unit.profiles.caches import nsa_caches
from vllm_tilert.checksum import _word_sum
from vllm_tilert.kernels.checksum import word_sums
from vllm_tilert.kernels.convert import ConvertKernel, dense_targets
from vllm_tilert.kernels.gather import GatherKernel
from vllm_tilert.profiles.base import get_profile
from vllm_tilert.profiles.mla_nsa import empty_planes


def check(name: str, right: bool) -> None:
    print(name, "right" if right else "WRONG", flush=True)
    check.failed |= not right


check.failed = False


def main() -> int:
    profile = get_profile("glm5")
    for dtype in ("fp8_ds_mla", "bfloat16"):
        caches = nsa_caches(2, 5, dtype, generator=torch.Generator().manual_seed(3))
        layout = profile.layout_from_caches(caches)
        attention, index = list(caches.values())[::2], list(caches.values())[1::2]
        addresses = [[a.data_ptr(), i.data_ptr()] for a, i in zip(attention, index, strict=True)]
        table = [4, 0, 3]
        for tokens in (1, 64, 65, 130):
            out = torch.full((layout.segment_bytes(tokens),), 0xA5, dtype=torch.uint8)
            want = out.clone()
            ids = torch.tensor(table, dtype=torch.int32)
            GatherKernel(layout).compile(torch.tensor(addresses), ids, out, tokens)
            profile.gatherer(caches, layout).gather(array("i", table), 0, tokens, want)
            check(f"gather {dtype} {tokens}", torch.equal(out, want))

            planes = empty_planes(2, 200, torch.device("cpu"))
            for plane in planes.values():
                plane.fill_(-7.0)
            kernel = ConvertKernel(layout, torch.device("cpu"))
            kernel.interpret(want, tokens, tokens, dense_targets(planes, 2), 20)
            state = profile.convert(want, layout, [tokens])
            for name, plane in planes.items():
                rows = plane[:, 20 : 20 + tokens]
                # The interpreter cuts float32 to bfloat16 where the GPU rounds, so what was computed is near.
                want_rows = state.planes[name]
                error = (rows.float() - want_rows.float()).norm() / want_rows.float().norm()
                moved = name == "pe" or (name == "kv" and dtype == "bfloat16")
                same = torch.equal(rows, want_rows) if moved else bool(error < 0.02)
                check(f"convert {dtype} {tokens} {name} (off by {error:.0e})", same)
                untouched = torch.cat([plane[:, :20], plane[:, 20 + tokens :]], 1)
                check(f"convert {dtype} {tokens} {name} keeps to its rows", bool((untouched == -7.0).all()))
    data = torch.randint(0, 256, (8 * 5000,), dtype=torch.uint8)
    spans = [(0, 8), (8, 8 * 4096), (8 * 4096, 8 * 5000)]
    want = [_word_sum(data[low:high].numpy()) for low, high in spans]
    check("checksum", word_sums(data, spans) == want)
    return int(check.failed)


if __name__ == "__main__":
    sys.exit(main())

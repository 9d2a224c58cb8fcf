"""The connector under test, which also writes down what the cache holds when a prompt is complete.

It reads the rows one by one through the block table, by none of the code that gathers them. It also turns
on prefix caching and chunked prefill, which vLLM's own CPU platform turns off for MLA models though its
attention has both. (With them off, a prompt longer than --max-num-scheduled-tokens is never scheduled and
vLLM steps for ever, with or without a connector; so the CPU needs this to chunk at all.)
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from vllm_tilert.connector import connector


class TileRTConnector(connector.TileRTConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        vllm_config.cache_config.enable_prefix_caching = True
        super().__init__(vllm_config, role, kv_cache_config)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        # Here, since the platform's check runs again after this connector is made.
        self._vllm_config.scheduler_config.enable_chunked_prefill = True
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self.caches = kv_caches
        self.orders: dict[str, Any] = {}

    def wait_for_save(self) -> None:
        plan = self._plan
        self.orders |= {order.req_id: order for order in plan.opened}
        for progress in plan.progress:
            order = self.orders[progress.req_id]
            if progress.computed == order.seq_len:
                self.dump(order.rid, order.seq_len, progress.blocks)
        super().wait_for_save()

    def dump(self, rid: str, seq_len: int, blocks: tuple[int, ...]) -> None:
        layers = []
        for _, cache in sorted(self.caches.items(), key=lambda item: int(item[0].split(".")[2])):
            pages = cache.reshape(cache.shape[0], -1, cache.shape[-1])
            size = pages.shape[1]
            layers.append(torch.stack([pages[blocks[i // size], i % size] for i in range(seq_len)]))
        target = Path(os.environ["TILERT_TEST_DUMPS"]) / f"{rid}.pt"
        torch.save(torch.stack(layers), target.with_suffix(".part"))
        target.with_suffix(".part").rename(target)

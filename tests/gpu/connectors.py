"""Connectors for the runs on a real vLLM: ours and TileRT's, watched; and one that puts state in.

`Watched`       ours; times its hooks on the forward thread and keeps what vLLM's own cache holds of a prompt
`WatchedStock`  TileRT's, timed likewise
`Oracle`        gives a second vLLM the state a decode node was handed, so that it continues from there
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

from gpu.nodes import Ended
from vllm_tilert.connector.connector import TileRTConnector

CACHE_DTYPE = os.environ.get("CACHE_DTYPE", "fp8_ds_mla")
PAGE, INDEX_PAGE, KEYS = 64, 8448, 8192
ROW, KV = (656, 528) if CACHE_DTYPE == "fp8_ds_mla" else (1152, 1024)

TIMES: dict[str, list[float]] = {}
"""Milliseconds each hook kept the forward thread, in steps that had to do with a claimed request."""
ENDED: list[Ended] = []
"""The forward's end of each step in which a claimed prompt became complete."""
OWN: dict[str, dict[str, torch.Tensor]] = {}
TOGETHER: list[int] = []
"""How many claimed requests each step opened."""
KEEP, WATCH = False, False
"""Whether to keep vLLM's own state, and to watch for the forward's end."""
SNAPSHOTS = os.environ.get("SNAPSHOTS")
"""A folder: every rank writes down there what its cache holds of each claimed prompt after each step."""


def ordered(caches: dict[str, torch.Tensor], index: bool) -> list[torch.Tensor]:
    """Attention or indexer caches in layer order, as bytes."""
    names = [name for name in caches if ("indexer" in name) == index]
    names.sort(key=lambda name: int(name.split("layers.")[1].split(".")[0]))
    return [caches[name].view(torch.uint8) for name in names]


def own_state(caches: dict[str, torch.Tensor], table: list[int], tokens: int) -> dict[str, torch.Tensor]:
    """What vLLM's cache holds of a prompt, [layers, tokens, bytes] each, by none of the code that gathers."""
    ids = torch.tensor(table[: -(-tokens // PAGE)], device=next(iter(caches.values())).device)
    rows = [cache.reshape(-1, PAGE, ROW)[ids].flatten(0, 1)[:tokens] for cache in ordered(caches, False)]
    pages = [cache.reshape(-1, INDEX_PAGE)[ids] for cache in ordered(caches, True)]
    keys = [page[:, :KEYS].reshape(-1, 128)[:tokens] for page in pages]
    scales = [page[:, KEYS:].reshape(-1, 4)[:tokens] for page in pages]
    return {"rows": torch.stack(rows), "keys": torch.stack(keys), "scales": torch.stack(scales)}


def landed_state(path: Path, layers: int, segments: list[int]) -> dict[str, torch.Tensor]:
    """The same of the bytes a decode node was given; also its pages, [layers, pages, 8448]."""
    data, at = torch.from_numpy(np.fromfile(path, dtype=np.uint8)), 0
    rows, pages, keys, scales = [], [], [], []
    for tokens in segments:
        planes = []
        for units, size in ((tokens, KV), (tokens, ROW - KV), (-(-tokens // PAGE), INDEX_PAGE)):
            planes.append(data[at : at + layers * units * size].view(layers, units, size))
            at += layers * units * size
        rows.append(torch.cat(planes[:2], -1))
        pages.append(planes[2])
        keys.append(planes[2][..., :KEYS].reshape(layers, -1, 128)[:, :tokens])
        scales.append(planes[2][..., KEYS:].reshape(layers, -1, 4)[:, :tokens])
    assert at == data.numel(), (at, data.numel())
    parts = {"rows": rows, "keys": keys, "scales": scales, "pages": pages}
    return {name: torch.cat(part, 1) for name, part in parts.items()}


@contextlib.contextmanager
def timed(hook: str, counts: bool = True):
    began = time.perf_counter()
    yield
    if counts and not WATCH:
        TIMES.setdefault(hook, []).append(1e3 * (time.perf_counter() - began))


class Watched(TileRTConnector):
    """Ours."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        assert self._worker is not None
        gatherer = self._worker._gatherer
        if gatherer is not None:  # a rank that does not send has none
            gather = gatherer.gather

            def timed_gather(*arguments: Any, **more: Any) -> Any:
                with timed("launch, beside it"):
                    return gather(*arguments, **more)

            gatherer.gather = timed_gather
        self._caches = kv_caches
        self._orders: dict[str, Any] = {}

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        plan = connector_metadata.plan
        self.busy = bool(plan.opened or plan.progress or plan.ended)
        with timed("open", bool(plan.opened)):
            super().bind_connector_metadata(connector_metadata)
        if plan.opened:
            TOGETHER.append(len(plan.opened))
        if self._steps is not None:
            self._orders |= {order.req_id: order for order in plan.opened}

    def wait_for_save(self) -> None:
        plan = self._plan
        whole = [p for p in plan.progress if p.computed == self._orders[p.req_id].seq_len]
        if whole and WATCH:
            ENDED.append(Ended())
        with timed("gather", bool(plan.progress)):
            super().wait_for_save()
        for progress in plan.progress if SNAPSHOTS else ():
            rid, rank = self._orders[progress.req_id].rid, get_tensor_model_parallel_rank()
            number = len(list(Path(SNAPSHOTS).glob(f"{rid}-{rank}-*.pt")))
            state = own_state(self._caches, list(progress.blocks), progress.computed)
            whole_state = {name: part.cpu() for name, part in state.items()}
            torch.save(whole_state, Path(SNAPSHOTS) / f"{rid}-{rank}-{number}.pt")
        if KEEP:
            for progress in whole:
                order = self._orders[progress.req_id]
                OWN[order.rid] = own_state(self._caches, list(progress.blocks), order.seq_len)

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        with timed("poll", self.busy):
            return super().get_finished(finished_req_ids)


@cache
def watched_stock() -> type:
    """TileRT's connector; made on demand, since its package turns debug logging on."""
    from tilert.pd_vllm.prefill_connector import TileRTConnector as Stock
    from tilert.pd_vllm.prefill_connector import TileRTMetadata

    class WatchedStock(Stock):
        def wait_for_save(self) -> None:
            metadata = self._get_connector_metadata()
            busy = isinstance(metadata, TileRTMetadata) and bool(metadata.requests)
            if busy and WATCH:
                ENDED.append(Ended())
            with timed("gather", busy):
                super().wait_for_save()

    return WatchedStock


def __getattr__(name: str) -> Any:
    if name == "WatchedStock":
        return watched_stock()
    raise AttributeError(name)


@dataclass
class Loads(KVConnectorMetadata):
    """rid -> (tokens, blocks) of what a step is to be given."""

    loads: dict[str, tuple[int, list[int]]] = field(default_factory=dict)


class Oracle(KVConnectorBase_V1):
    """`kv_transfer_params {"oracle": rid}`: all tokens but the last come from the dump of that handoff."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._folder = Path(vllm_config.kv_transfer_config.kv_connector_extra_config["folder"])
        self._wanted: dict[str, tuple[str, int]] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        rid = (request.kv_transfer_params or {}).get("oracle")
        if rid is None:
            return 0, False
        tokens = request.num_prompt_tokens - 1
        self._wanted[request.request_id] = (rid, tokens)
        return tokens - num_computed_tokens, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        loads = {}
        for new in scheduler_output.scheduled_new_reqs:
            if new.req_id in self._wanted:
                rid, tokens = self._wanted.pop(new.req_id)
                loads[rid] = (tokens, list(new.block_ids[0]))
        return Loads(loads)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._attention, self._index = ordered(kv_caches, False), ordered(kv_caches, True)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for rid, (tokens, blocks) in self._get_connector_metadata().loads.items():
            about = json.loads((self._folder / f"{rid}.json").read_text())
            state = landed_state(self._folder / f"{rid}.bin", len(self._attention), about["segments"])
            device = self._attention[0].device
            ids = torch.tensor(blocks[: -(-tokens // PAGE)], device=device)
            at = (ids[:, None] * PAGE + torch.arange(PAGE, device=device)).flatten()[:tokens]
            rows, pages = state["rows"].to(device), state["pages"].to(device)
            for layer, (attention, index) in enumerate(zip(self._attention, self._index, strict=True)):
                attention.view(-1, ROW)[at] = rows[layer]
                index.view(-1, INDEX_PAGE)[ids] = pages[layer]

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

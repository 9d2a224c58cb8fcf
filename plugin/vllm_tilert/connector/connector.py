"""TileRTConnector: the class vLLM loads. It only translates between vLLM's hooks and the parts beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.request import RequestStatus

from vllm_tilert.connector import metrics
from vllm_tilert.connector.config import ConnectorConfig
from vllm_tilert.connector.plan import StepPlan
from vllm_tilert.connector.register import register
from vllm_tilert.connector.scheduler import HandoffScheduler
from vllm_tilert.connector.steps import HandoffSteps
from vllm_tilert.connector.worker import HandoffWorker


@dataclass
class TileRTMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's plan, on its way from the scheduler to the workers."""

    plan: StepPlan = field(default_factory=StepPlan)


class TileRTConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Hands claimed requests' attention state to TileRT decode nodes; leaves all others alone."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        """Raises ConfigError on a wrong setting, ValueError on a vLLM set-up that cannot hand off."""
        super().__init__(vllm_config, role, kv_cache_config)
        _check(vllm_config, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        config = ConnectorConfig.parse(
            transfer.kv_connector_extra_config or {}, vllm_config.model_config.max_model_len
        )
        self._scheduler: HandoffScheduler | None = None
        self._worker: HandoffWorker | None = None
        self._steps: HandoffSteps | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = HandoffScheduler(config)
        else:
            from vllm.distributed import get_tensor_model_parallel_rank

            self._worker = HandoffWorker(config, int(get_tensor_model_parallel_rank()))
            self._steps = HandoffSteps(self._worker)

    # The scheduler's side.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Nothing is ever loaded."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks are followed through the scheduler's output instead."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The step's plan."""
        assert self._scheduler is not None
        return TileRTMetadata(self._scheduler.step(scheduler_output))

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Keep a claimed request's blocks until the worker has copied them."""
        assert self._scheduler is not None
        aborted = request.status == RequestStatus.FINISHED_ABORTED
        return self._scheduler.finished(request.request_id, aborted)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """See `request_finished`."""
        return self.request_finished(request, block_ids)

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Start the worker side; see HandoffWorker.register."""
        assert self._steps is not None
        self._steps.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Blocks of preempted requests are about to be reused."""
        assert self._steps is not None
        self._steps.preempting(kv_connector_metadata.plan)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """vLLM binds a step's metadata before the step's forward."""
        super().bind_connector_metadata(connector_metadata)
        if self._steps is not None:
            self._steps.before_forward(self._plan)

    @property
    def _plan(self) -> StepPlan:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, TileRTMetadata)
        return metadata.plan

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is ever loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is ever loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Layers are gathered together, after the step's last forward."""

    def wait_for_save(self) -> None:
        """All forwards of the step have run or are queued: gather."""
        assert self._steps is not None
        self._steps.after_forward(self._plan)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose blocks may be freed."""
        assert self._steps is not None
        return self._steps.finished(self._plan) or None, None

    def shutdown(self) -> None:
        """Give up what is under way."""
        if self._steps is not None:
            self._steps.close()

    # Metrics.

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What was counted since the last step."""
        data = self._worker.drain_counts() if self._worker is not None else None
        return TileRTStats(data=data) if data is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Stats from their serialised form."""
        return TileRTStats(data=data or metrics.empty())

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """The metrics on vLLM's /metrics."""
        return TileRTPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class TileRTStats(KVConnectorStats):  # type: ignore[misc]
    """`metrics` data in vLLM's container."""

    def reset(self) -> None:
        """Forget everything."""
        self.data = metrics.empty()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the later `other`."""
        self.data = metrics.add(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """A few numbers for the log."""
        return metrics.summary(self.data)

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return metrics.is_empty(self.data)


class TileRTPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """`vllm:tilert_*` metrics, by engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, gauge, histogram = self._counter_cls, self._gauge_cls, self._histogram_cls
        self._handoffs = counter(
            name="vllm:tilert_handoffs",
            documentation="Handoffs that a decode node has confirmed.",
            labelnames=labelnames,
        )
        self._bytes = counter(
            name="vllm:tilert_handoff_bytes",
            documentation="Bytes of state written to decode nodes by confirmed handoffs.",
            labelnames=labelnames,
        )
        self._failures = counter(
            name="vllm:tilert_handoff_failures",
            documentation="Handoffs that failed or were refused, by reason.",
            labelnames=[*labelnames, "reason"],
        )
        self._staging = gauge(
            name="vllm:tilert_staging_bytes_in_use",
            documentation="Bytes of the staging pool that hold state not sent yet.",
            labelnames=labelnames,
        )
        self._times = {
            name: histogram(
                name=f"vllm:tilert_handoff_{name.removesuffix('_s')}_seconds",
                documentation=text,
                buckets=[0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30],
                labelnames=labelnames,
            )
            for name, text in {
                "gather_s": "Time staging and launching its gathers took, beside the forward, per handoff.",
                "queue_s": "Time gathered segments waited for the wire, per handoff.",
                "wire_s": "Time writing took, per handoff.",
                "total_s": "Time from a handoff's opening to the node's verdict.",
            }.items()
        }

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's counts."""
        labels = self.per_engine_labelvalues[engine_idx]
        self._handoffs.labels(*labels).inc(transfer_stats_data["handoffs"])
        self._bytes.labels(*labels).inc(transfer_stats_data["bytes"])
        self._staging.labels(*labels).set(transfer_stats_data["staging_bytes_in_use"])
        for reason, count in transfer_stats_data["failures"].items():
            self._failures.labels(*labels, reason).inc(count)
        for name, series in self._times.items():
            for value in transfer_stats_data[name]:
                series.labels(*labels).observe(value)


def _check(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse what could only fail later, or hand off half of the state."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    if not transfer.is_kv_producer:
        raise ValueError(f"kv_role is {transfer.kv_role!r}: TileRTConnector needs kv_producer (or kv_both)")
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ValueError(
                f"{name} is {getattr(parallel, name)}: a handoff needs all layers and tokens on "
                "one rank; use tensor parallelism"
            )
    groups = getattr(kv_cache_config, "kv_cache_groups", None) or []
    if len(groups) > 1:
        raise ValueError(
            f"this model's cache has {len(groups)} groups with block tables of their own: TileRTConnector "
            "takes models whose layers share one"
        )


# MultiConnector looks its children's statistics up by name, also where a child was loaded by module path
# from an environment that lacks the entry point.
register()

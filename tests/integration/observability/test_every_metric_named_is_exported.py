"""Alerts and panels name only metrics, labels and states that the running code really exports."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
import yaml
from prometheus_client import CollectorRegistry

from tilert_router.leases import Bounds, Pool
from tilert_router.metrics import Metrics as RouterMetrics
from tilert_router.queue import FairQueue
from vllm_tilert.connector import worker
from vllm_tilert.decode.metrics import Metrics as NodeMetrics
from vllm_tilert.decode.slots import Limits, Slots
from vllm_tilert.small_model import make_small_model
from vllm_tilert.wire.api import ErrorCode

HERE = Path(__file__).parent
FILES = HERE.parents[2] / "roles/observability/files"

TARGET_LABELS = {"job", "instance", "host"}
"""What Prometheus adds to every series, by the role's own configuration."""
SUFFIXES = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}
KEYWORDS = {"by", "without", "on", "ignoring", "group_left", "group_right", "and", "or", "unless", "bool"} | {
    "offset"
}
VALUES = {"state", "reason", "outcome", "pool"}
"""Labels whose values are checked too, where the exporter or the code lists them all."""


def named(expression: str) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """Each metric of a PromQL expression with its matchers: label -> the values it asks for."""
    strings: list[str] = []

    def keep(match: re.Match[str]) -> str:
        strings.append(match[1])
        return f'"{len(strings) - 1}"'

    text = re.sub(r'"((?:[^"\\]|\\.)*)"', keep, expression)
    text = re.sub(r"\[[^\]]*\]", "", text)
    text = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", text)
    text = re.sub(r"\boffset\s+\w+", " ", text)
    for match in re.finditer(r"(?<![\w:\"])([A-Za-z_:][\w:]*)\s*(\{[^}]*\})?(?!\s*\(|[\w:\"{])", text):
        if match[1] in KEYWORDS:
            continue
        asked: dict[str, list[str]] = {}
        for label, index in re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"(\d+)"', match[2] or ""):
            asked.setdefault(label, []).extend(strings[int(index)].split("|"))
        yield match[1], asked


def grouped(expression: str) -> set[str]:
    """The labels that an expression groups or matches by."""
    lists = re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expression)
    return {label.strip() for words in lists for label in words.split(",")}


def families(registry: CollectorRegistry) -> dict[str, tuple[set[str], dict[str, set[str]]]]:
    """What a registry exports: name of the series -> its labels, and the values of each that are there now."""
    declared: dict[str, set[str]] = {}
    for collector, names in registry._collector_to_names.items():
        for name in names:
            declared[name] = set(getattr(collector, "_labelnames", ()))
    found: dict[str, tuple[set[str], dict[str, set[str]]]] = {}
    for metric in registry.collect():
        values: dict[str, set[str]] = {}
        for sample in metric.samples:
            for label, value in sample.labels.items():
                values.setdefault(label, set()).add(value)
        for suffix in SUFFIXES.get(metric.type, []):
            labels = (
                set(values) | declared.get(metric.name, set()) | declared.get(metric.name + suffix, set())
            )
            found[metric.name + suffix] = (labels | ({"le"} if suffix == "_bucket" else set()), values)
    return found


async def routers() -> dict[str, tuple[set[str], dict[str, set[str]]]]:
    """What a router exports."""
    pool = Pool(FairQueue(8), Bounds())
    return families(RouterMetrics(lambda: pool)._registry)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[set[str], dict[str, set[str]]]]:
    """Every series of the real exporters: router, decode node, vLLM with our connector; and the recorded ones."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    node: Any = SimpleNamespace(slots=Slots(2, lambda: 0.0, Limits(30, 60, 30, 30)), broken=False)
    decode = NodeMetrics(node)

    transfer = KVTransferConfig(
        kv_connector="TileRTConnector",
        kv_role="kv_producer",
        kv_connector_module_path="vllm_tilert.connector.connector",
    )
    model = str(make_small_model(tmp_path_factory.mktemp("small")))
    arguments = EngineArgs(model=model, dtype="float32", enforce_eager=True, kv_transfer_config=transfer)
    PrometheusStatLogger(arguments.create_engine_config(), [0])

    found = asyncio.run(routers()) | families(decode._registry) | families(prometheus_client.REGISTRY)
    # Node exporter 1.5.0 and DCGM exporter 4 with its default counters: the names as they were exported.
    for recorded in ("node_exporter_1.5.txt", "dcgm_exporter_4.txt"):
        for name in (HERE / recorded).read_text().split():
            found[name] = ({"device", "fstype", "mountpoint", "mode", "cpu", "gpu"}, {})
    found["up"] = (set(), {})
    # Values that only appear once they have happened.
    reasons = {str(code) for code in ErrorCode} | {worker.STAGING_FULL}
    found["vllm:tilert_handoff_failures_total"][1]["reason"] = reasons
    found["tilert_decode_handoffs_total"][1]["outcome"] = reasons | {"done", "expired"}
    return found


def alerts() -> list[tuple[str, str]]:
    groups = yaml.safe_load((FILES / "alerts.yml").read_text())["groups"]
    return [(rule["alert"], rule["expr"]) for group in groups for rule in group["rules"]]


def panels() -> list[tuple[str, str]]:
    found = json.loads((FILES / "dashboard.json").read_text())["panels"]
    return [(panel["title"], target["expr"]) for panel in found for target in panel.get("targets", [])]


def wrong(expression: str, exported: dict[str, tuple[set[str], dict[str, set[str]]]]) -> list[str]:
    """What an expression names that does not exist."""
    found, labels = [], set(TARGET_LABELS)
    for name, asked in named(expression):
        if name not in exported:
            found.append(f"{name} is exported by nothing")
            continue
        known, values = exported[name]
        labels |= known
        for label, wanted in asked.items():
            if label not in known | TARGET_LABELS:
                found.append(f"{name} has no label {label}, only {sorted(known)}")
            elif label in VALUES and values.get(label):
                unknown = [w for w in wanted if not any(re.fullmatch(w, v) for v in values[label])]
                found += [f"{name}: {label} is never {value}" for value in unknown]
    return found + [f"nothing here has the label {label}" for label in grouped(expression) - labels]


def test_alerts_name_what_is_exported(exported: dict[str, tuple[set[str], dict[str, set[str]]]]) -> None:
    assert len(alerts()) > 10
    found = {name: problems for name, expr in alerts() if (problems := wrong(expr, exported))}
    assert not found


def test_panels_name_what_is_exported(exported: dict[str, tuple[set[str], dict[str, set[str]]]]) -> None:
    assert len(panels()) > 30
    found = {name: problems for name, expr in panels() if (problems := wrong(expr, exported))}
    assert not found


@pytest.mark.parametrize(
    ("expression", "complaint"),
    [
        ("rate(tilert_router_request_total[5m])", "exported by nothing"),
        ('tilert_router_nodes{state="SETTELING"} > 0', "state is never SETTELING"),
        ('tilert_router_waiting{node="a"}', "no label node"),
        ("sum by (node) (tilert_router_waiting)", "label node"),
        ('increase(vllm:tilert_handoff_failures_total{reason="full"}[5m])', "reason is never full"),
        ("vllm:tilert_handoffs", "exported by nothing"),
    ],
)
def test_a_name_that_does_not_exist_is_found(
    exported: dict[str, tuple[set[str], dict[str, set[str]]]], expression: str, complaint: str
) -> None:
    assert any(complaint in problem for problem in wrong(expression, exported))

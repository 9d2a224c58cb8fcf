"""Every host of the inventory is scraped where it answers; alerts fire on what they are for; the dashboard imports."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from roles.playbook import ROOT, needs_ansible
from roles.test_units_say_what_was_meant import GPU, HOSTS, LOCAL, render, rendering

pytestmark = needs_ansible

FILES = ROOT / "roles/observability/files"
HERE = Path(__file__).parent
needs_promtool = pytest.mark.skipif(
    not shutil.which("promtool"), reason="promtool (package prometheus) is not installed here"
)
PLAY = [rendering("observability", "observability", ["prometheus.yml", "prometheus.default"])]


def config(tmp_path: Path, site: dict[str, Any], hosts: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    out = render(tmp_path, site, hosts, PLAY)
    (path,) = out.glob("*-prometheus.yml")
    return path, yaml.safe_load(path.read_text())


def targets(found: dict[str, Any]) -> dict[str, dict[str, str]]:
    """job -> host -> where it is scraped."""
    return {
        job["job_name"]: {entry["labels"]["host"]: entry["targets"][0] for entry in job["static_configs"]}
        for job in found["scrape_configs"]
    }


@needs_promtool
def test_every_host_is_scraped_where_it_answers(tmp_path: Path) -> None:
    hosts = {
        **HOSTS,
        "native": {"n1": {"address": "10.0.0.9"}},
        "observability": {"m1": {"address": "10.0.0.8"}},
    }
    site = GPU | {"observability_alertmanagers": ["alerts.example:9093"]}
    path, found = config(tmp_path, site, hosts)
    assert targets(found) == {
        "router": {"g1": "10.0.0.4:8081"},
        "decode": {"d1": "10.1.0.2:5557", "d2": "[2001:db8::3]:5557"},
        "prefill": {"p1": "10.0.0.1:8000"},
        "native": {"n1": "10.0.0.9:8100"},
        "node": {
            "d1": "10.0.0.2:9100",
            "d2": "10.0.0.3:9100",
            "g1": "10.0.0.4:9100",
            "m1": "10.0.0.8:9100",
            "n1": "10.0.0.9:9100",
            "p1": "10.0.0.1:9100",
        },
        "dcgm": {"d1": "10.0.0.2:9400", "d2": "10.0.0.3:9400", "p1": "10.0.0.1:9400"},
        "prometheus": {"m1": "10.0.0.8:9090"},
    }
    assert found["alerting"]["alertmanagers"] == [{"static_configs": [{"targets": ["alerts.example:9093"]}]}]
    checked = subprocess.run(
        ["promtool", "check", "config", "--syntax-only", path], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_hosts_without_gpus_have_no_gpu_exporter(tmp_path: Path) -> None:
    hosts = {**HOSTS, "prefill": {"p1": {"address": "10.0.0.1", "gpus": 0}}, "observability": {"m1": {}}}
    hosts["decode"] = {"d1": {"address": "10.0.0.2", "gpus": 0}}
    _, found = config(tmp_path, LOCAL, hosts)
    assert "dcgm" not in targets(found)
    assert "native" not in targets(found)
    assert set(targets(found)["node"]) == {"p1", "d1", "g1", "m1"}


@needs_promtool
def test_alerts_fire_on_what_they_are_for_and_on_nothing_else(tmp_path: Path) -> None:
    text = (HERE / "alerts.test.yml").read_text().replace("ALERTS", str(FILES / "alerts.yml"))
    (tmp_path / "alerts.test.yml").write_text(text)
    done = subprocess.run(
        ["promtool", "test", "rules", tmp_path / "alerts.test.yml"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_says_what_is_wrong_and_what_to_do() -> None:
    for group in yaml.safe_load((FILES / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in {"warning", "critical"}, rule["alert"]
            assert {"summary", "action"} <= set(rule["annotations"]), rule["alert"]


def test_the_dashboard_imports_anywhere() -> None:
    board = json.loads((FILES / "dashboard.json").read_text())
    assert board["uid"]
    assert "id" not in board, "an id of one Grafana clashes with another's"
    variables = {variable["name"]: variable["type"] for variable in board["templating"]["list"]}
    assert variables == {"datasource": "datasource", "host": "query"}
    ids, taken = set(), set()
    for panel in board["panels"]:
        assert panel["id"] not in ids
        ids.add(panel["id"])
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, f"{panel['title']} lies over another panel"
        assert max(x for x, _ in cells) < 24
        taken |= cells
        for part in (panel, *panel.get("targets", [])):
            if panel["type"] != "row":
                assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}

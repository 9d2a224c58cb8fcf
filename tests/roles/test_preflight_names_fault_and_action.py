"""preflight.yml: every fault has a number, a severity, an action and a remedy; reports for people and for programs."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from roles.playbook import ROOT, needs_ansible, run_playbook, write_inventory

pytestmark = needs_ansible


def load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


preflight = load("preflight_filter", ROOT / "ansible/plugins/filter/preflight.py")
trees = load("rdma_trees_preflight", ROOT / "tests/roles/rdma/sysfs.py")
rdma_facts = load("rdma_facts_preflight", ROOT / "ansible/plugins/modules/rdma_facts.py")
DATA = yaml.safe_load((ROOT / "ansible/vars/preflight.yml").read_text())
CHECKS, LIMITS, ACTIONS = DATA["preflight_checks"], DATA["preflight_limits"], DATA["preflight_actions"]
SHAPES = json.loads((ROOT / "ansible/vars/shapes.json").read_text()) | DATA["preflight_own_shapes"]


def b200(**changed: Any) -> dict[str, Any]:
    """Facts of a faultless HGX B200 with RoCE."""
    gpu = {"name": "NVIDIA B200", "memory_bytes": 183359 << 20, "compute_capability": "10.0"}
    return {
        "shape": "hgx-b200-roce",
        "vcpus": 224,
        "memory_mb": 2_000_000,
        "system": ["Ubuntu", "24.04"],
        "clock": "yes",
        "unattended_upgrades": True,
        "not_held": [],
        "gpu": {"fault": "", "gpus": [gpu | {"index": i} for i in range(8)]},
        "driver": {"problems": [], "reboot": []},
        "rdma_enabled": True,
        "rdma": {
            "problems": [],
            "fabric": [f"mlx5_{i}" for i in range(8)],
            "rate_gbps": 3200.0,
            "kind": "roce",
            "gpus": [{"index": i, "distance": "PIX"} for i in range(8)],
        },
        "weights_there": True,
        "weights_free_bytes": 0,
        "measured": {},
    } | changed


def results(facts: dict[str, Any], suite: str = "light") -> dict[int, dict[str, Any]]:
    found = preflight.preflight_results(facts, CHECKS, SHAPES, LIMITS, suite)
    return {r["number"]: r for r in found}


def failed(facts: dict[str, Any], suite: str = "light") -> set[int]:
    return {number for number, r in results(facts, suite).items() if r["status"] == "fail"}


def test_a_faultless_host_passes_every_check_that_applies_to_it() -> None:
    found = results(b200())
    assert failed(b200()) == set()
    assert {n for n, r in found.items() if r["status"] == "skip"} == {401}  # weights are there
    assert min(found) == 101
    assert max(found) < 500


def gpus(count: int = 8, **values: Any) -> dict[str, Any]:
    good = b200()["gpu"]["gpus"][:count]
    return {"fault": "", "gpus": [gpu | values for gpu in good]}


def nics(**values: Any) -> dict[str, Any]:
    return b200()["rdma"] | values


@pytest.mark.parametrize(
    ("changed", "number"),
    [
        ({"shape": "dgx-one"}, 101),
        ({"vcpus": 112}, 102),
        ({"memory_mb": 1_000_000}, 103),
        ({"system": ["Ubuntu", "22.04"]}, 104),
        ({"clock": "no"}, 105),
        ({"not_held": ["nvidia-driver-595"]}, 106),
        ({"gpu": gpus(name="NVIDIA H200")}, 201),
        ({"gpu": gpus(7)}, 202),
        ({"gpu": gpus(memory_bytes=100 << 30)}, 203),
        ({"gpu": gpus(compute_capability="9.0")}, 204),
        ({"driver": {"problems": [], "reboot": ["module 595.45 is installed and 580.1 is loaded"]}}, 212),
        ({"rdma": nics(fabric=["mlx5_0"])}, 307),
        ({"rdma": nics(rate_gbps=2800.0)}, 308),
        ({"rdma": nics(kind="infiniband")}, 309),
        ({"rdma": nics(gpus=[{"index": 0, "distance": "SYS"}])}, 310),
        ({"weights_there": False, "weights_free_bytes": 10**11}, 401),
        ({"measured": {"tcp": {"d1": 0.1}}}, 501),
        ({"measured": {"rdma": {"mlx5_4->d1": 90.0}}}, 502),
        ({"measured": {"dcgm": {"rc": 226, "summary": "Memory: Fail"}}}, 503),
        ({"measured": {"disk": {"weights": 0.2}}}, 504),
    ],
)
def test_each_fault_is_found_by_the_check_of_its_own(changed: dict[str, Any], number: int) -> None:
    assert failed(b200(**changed), "intensive") == {number}
    row = results(b200(**changed), "intensive")[number]
    assert row["remedy"]
    assert row["severity"] in ACTIONS


def codes(module: str) -> set[str]:
    """The codes that a module's calls of `problem` can give."""
    tree = ast.parse((ROOT / f"ansible/plugins/modules/{module}.py").read_text())
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "problem"]
    return {str(ast.literal_eval(call.args[0])) for call in calls if isinstance(call.args[0], ast.Constant)}


@pytest.mark.parametrize(("source", "module"), [("driver", "gpu_facts"), ("rdma", "rdma_facts")])
def test_every_problem_that_a_module_knows_has_a_number(source: str, module: str) -> None:
    known = codes(module)
    assert len(known) > 5
    numbered = {code for check in CHECKS if check.get("from") == source for code in check["codes"]}
    assert numbered == known
    for code in known:
        problem = {"code": code, "message": "m", "remedy": "r"}
        facts = b200(**{source: b200()[source] | {"problems": [problem]}})
        assert len(failed(facts)) == 1, code


def test_a_problem_nobody_numbered_is_shown_all_the_same() -> None:
    problem = {"code": "brand_new", "message": "m", "remedy": "r"}
    assert failed(b200(rdma=nics(problems=[problem]))) == {999}


def test_numbers_are_unique_and_severities_have_actions() -> None:
    numbers = [check["number"] for check in CHECKS]
    assert len(set(numbers)) == len(numbers)
    assert {check["severity"] for check in CHECKS} <= set(ACTIONS)
    assert all("codes" in check or (check["rule"] in preflight.RULES and check["remedy"]) for check in CHECKS)
    assert {check["rule"] for check in CHECKS if "rule" in check} == set(preflight.RULES)


def test_what_is_expected_of_a_shape_is_the_catalogues() -> None:
    command = [sys.executable, ROOT / "ansible/vars/write_shapes.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_real_facts_of_a_half_broken_host_give_their_numbers(tmp_path: Path) -> None:
    host = trees.b200_roce(tmp_path)
    broken = host.sys / "class/infiniband/mlx5_11/ports/1/state"
    broken.write_text("1: DOWN\n")
    found = rdma_facts.gather(host.sys, host.proc, host.dev, [])
    assert failed(b200(rdma=found)) == {307, 308, 310}
    named = rdma_facts.gather(host.sys, host.proc, host.dev, [f"mlx5_{i}" for i in range(4, 12)])
    assert failed(b200(rdma=named)) == {302}


def run(tmp_path: Path, *arguments: str, **host: Any) -> subprocess.CompletedProcess[str]:
    """preflight.yml on this machine as prefill p1 and decode d1."""
    given = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "ansible_become": False,
        "tilert_model_dir": str(tmp_path),
        "tilert_protocol": "tcp",
    }
    groups: dict[str, Any] = {g: {} for g in ("router", "ingress", "native", "observability")}
    groups |= {"prefill": {"p1": {"address": "127.0.0.1"}}, "decode": {"d1": {"address": "127.0.0.2"}}}
    inventory = write_inventory(tmp_path, groups, given | host)
    report = ["-e", f"preflight_report={tmp_path}/report.json"]
    return run_playbook(ROOT / "ansible/preflight.yml", inventory, *report, *arguments)


def test_check_mode_reports_where_there_is_no_gpu(tmp_path: Path) -> None:
    done = run(tmp_path, "--check", shape="hgx-b200-roce", gpus=8)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report["hosts"]) == {"p1", "d1"}
    found = {r["number"]: r for r in report["hosts"]["d1"]}
    assert found[202]["status"] == "fail"
    assert "nvidia-smi" in found[202]["found"]
    assert (
        report["actions"]["critical"]["action"] in done.stdout.replace("\n", " ")
        or "critical:" in done.stdout
    )


def test_the_same_host_stops_a_deployment_by_number(tmp_path: Path) -> None:
    done = run(tmp_path, shape="hgx-b200-roce", gpus=8)
    assert done.returncode != 0
    assert "d1: 202 GPU count" in " ".join(done.stdout.split())


def test_an_ordinary_host_passes_the_intensive_suite_with_a_measured_path(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "-e",
        "preflight_suite=intensive",
        "-e",
        "preflight_tcp_bytes=67108864",
        shape="container",
        gpus=0,
    )
    report = json.loads((tmp_path / "report.json").read_text())
    found = {r["number"]: r for r in report["hosts"]["p1"]}
    assert found[501]["status"] == "pass", done.stdout
    assert "d1" in found[501]["found"]
    stopping = {r["number"] for r in found.values() if r["status"] == "fail" and r["severity"] != "minor"}
    assert (done.returncode == 0) == (not stopping)


@pytest.mark.parametrize("given", ["rack-7", "rack-7/hosts.yml"])
def test_the_report_is_named_after_the_pool_where_localhost_is_in_no_inventory(
    tmp_path: Path, given: str
) -> None:
    (tmp_path / "rack-7").mkdir()
    (tmp_path / "rack-7/hosts.yml").write_text("all: {children: {tilert: {}}}\n")
    done = run_playbook(Path("preflight.yml"), tmp_path / given, "--check", cwd=ROOT / "ansible", timeout=300)
    assert done.returncode == 0, done.stdout
    report = ROOT / ".local/preflight/rack-7.json"
    assert json.loads(report.read_text())["hosts"] == {}
    report.unlink()

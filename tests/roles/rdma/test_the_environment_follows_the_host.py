"""The role's file, parsed: devices in the order of the sending GPU, and refusals with the field's name."""

from __future__ import annotations

import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from roles.playbook import needs_ansible, run_playbook

pytestmark = needs_ansible

spec = importlib.util.spec_from_file_location("rdma_trees", Path(__file__).with_name("sysfs.py"))
assert spec
assert spec.loader
trees = importlib.util.module_from_spec(spec)
spec.loader.exec_module(trees)


def apply(tmp_path: Path, host: Any, *arguments: str, **variables: Any) -> subprocess.CompletedProcess[str]:
    config = tmp_path / "etc"
    config.mkdir(exist_ok=True)
    given = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "tilert_config_dir": str(config),
        "tilert_protocol": "rdma",
        "tilert_fabric_address": "10.0.0.1",
        "gpus": 8,
        "rdma_sysfs_root": str(host.sys),
        "rdma_proc_root": str(host.proc),
        "rdma_dev_root": str(host.dev),
    } | variables
    play = [{"name": "Role", "hosts": "p1", "gather_facts": False, "roles": ["rdma"]}]
    (tmp_path / "play.yml").write_text(json.dumps(play))
    groups = {
        "prefill": {"hosts": {"p1": {}}},
        "decode": {"hosts": {"d1": {"tilert_fabric_address": "10.0.0.2"}}},
    }
    (tmp_path / "hosts.yml").write_text(json.dumps({"all": {"children": groups, "hosts": {"p1": given}}}))
    return run_playbook(tmp_path / "play.yml", tmp_path / "hosts.yml", *arguments)


def written(tmp_path: Path) -> dict[str, str]:
    lines = (tmp_path / "etc/rdma.env").read_text().splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return dict(word.split("=", 1) for line in words for word in line)


def test_the_sending_gpus_nic_comes_first_and_a_second_run_changes_nothing(tmp_path: Path) -> None:
    host = trees.b200_roce(tmp_path)
    checked = apply(tmp_path, host, "--check")
    assert checked.returncode == 0, checked.stdout
    assert not (tmp_path / "etc/rdma.env").exists()
    first = apply(tmp_path, host)
    assert first.returncode == 0, first.stdout
    found = written(tmp_path)
    devices = found.pop("UCX_NET_DEVICES").split(",")
    assert devices[0] == "mlx5_11:1"
    assert set(devices) == {f"mlx5_{i}:1" for i in range(4, 12)}
    assert found == {
        "MC_FORCE_HCA": "1",
        "MC_GID_INDEX": "3",
        "MC_MTU": "4096",
        "RDMAV_FORK_SAFE": "1",
        "TILERT_PD_PROBE_ADDR": "10.0.0.2",
        "UCX_MEMTYPE_CACHE": "n",
        "UCX_MEMTYPE_REG_WHOLE": "n",
    }
    assert "changed=0" in apply(tmp_path, host).stdout


def test_what_cannot_work_is_refused_by_name(tmp_path: Path) -> None:
    host = trees.b200_roce(tmp_path)
    bad = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    for variables, words in [
        ({"vllm_prefill_env": bad}, "expandable_segments"),
        ({"tilert_protocol": "efa"}, "tilert_protocol: efa"),
        ({"rdma_devices": ["mlx5_4", "mlx5_99"]}, "mlx5_99"),
    ]:
        run = apply(tmp_path, host, **variables)
        assert run.returncode != 0, run.stdout
        assert words in run.stdout
        assert not (tmp_path / "etc/rdma.env").exists()


def test_tcp_asks_nothing_of_the_host(tmp_path: Path) -> None:
    run = apply(tmp_path, trees.Host(tmp_path), tilert_protocol="tcp", gpus=0)
    assert run.returncode == 0, run.stdout


def test_oracles_network_needs_its_authentication(tmp_path: Path) -> None:
    host = trees.b200_roce(tmp_path)
    host.write(host.sys / "class/dmi/id/chassis_asset_tag", "OracleCloud.com")
    run = apply(tmp_path, host)
    assert run.returncode != 0
    assert "oci-cn-auth" in run.stdout

"""The NICs that carry handoffs are found, GPUs get their nearest, and what is missing is named."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
MODULE = ROOT / "ansible/plugins/modules/rdma_facts.py"


def load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


rdma_facts = load("rdma_facts", MODULE)
sysfs = load("rdma_sysfs", Path(__file__).with_name("sysfs.py"))


def facts(host: Any, devices: list[str] | None = None) -> dict[str, Any]:
    found: dict[str, Any] = rdma_facts.gather(host.sys, host.proc, host.dev, devices or [])
    return found


def codes(found: dict[str, Any]) -> list[str]:
    return [p["code"] for p in found["problems"]]


def test_ethernet_nics_stay_out_and_every_gpu_gets_the_nic_of_its_switch(tmp_path: Path) -> None:
    found = facts(sysfs.b200_roce(tmp_path))
    assert codes(found) == []
    assert found["fabric"] == [f"mlx5_{i}" for i in range(4, 12)]
    assert "default route" in found["left_out"]["mlx5_0"]
    assert "slower (100 Gb/s)" in found["left_out"]["mlx5_1"]
    assert [gpu["nics"][0] for gpu in found["gpus"]] == [f"mlx5_{11 - i}" for i in range(8)]
    assert {gpu["distance"] for gpu in found["gpus"]} == {"PIX"}
    assert (found["kind"], found["gid_index"], found["mtu"], found["gpu_direct"]) == (
        "roce",
        3,
        4096,
        "dmabuf",
    )
    assert found["rate_gbps"] == 3200


def test_a_hidden_topology_still_gives_each_gpu_a_nic_of_its_own(tmp_path: Path) -> None:
    host = sysfs.Host(tmp_path)
    host.open_driver()
    for i in range(4):
        host.gpu(f"pci0000:00/0000:00:{i:02x}.0")
        host.nic(f"mlx5_{i}", f"pci0000:00/0000:00:1{i}.0", netdev=f"r{i}", gids=sysfs.roce_gids(i + 1))
    found = facts(host)
    assert sorted(gpu["nics"][0] for gpu in found["gpus"]) == [f"mlx5_{i}" for i in range(4)]


def test_infiniband_needs_no_gid_index(tmp_path: Path) -> None:
    host = sysfs.Host(tmp_path)
    host.open_driver()
    host.gpu("pci0000:00/0000:00:01.0/0000:01:00.0")
    host.nic("mlx5_0", "pci0000:00/0000:00:02.0/0000:02:00.0", link="InfiniBand")
    host.nic("mlx5_1", "pci0000:00/0000:00:03.0/0000:03:00.0", netdev="eth0", gids=sysfs.roce_gids(1))
    found = facts(host)
    assert (found["fabric"], found["kind"], found["gid_index"], codes(found)) == (
        ["mlx5_0"],
        "infiniband",
        None,
        [],
    )
    assert "the fabric is infiniband" in found["left_out"]["mlx5_1"]


def test_efa_is_known_by_its_driver(tmp_path: Path) -> None:
    host = sysfs.Host(tmp_path)
    (host.dev / "infiniband/rdma_cm").unlink()
    host.open_driver()
    host.gpu("pci0000:00/0000:00:01.0")
    host.nic("rdmap0s6", "pci0000:00/0000:00:06.0", driver="efa", link="Unspecified")
    found = facts(host)
    assert (found["kind"], found["fabric"], found["gid_index"], codes(found)) == (
        "efa",
        ["rdmap0s6"],
        None,
        [],
    )


def test_a_host_without_a_nic_says_so(tmp_path: Path) -> None:
    found = facts(sysfs.Host(tmp_path))
    assert (found["kind"], codes(found)) == ("none", ["no_device"])
    assert "tcp" in found["problems"][0]["remedy"]


def test_half_broken_hosts_name_each_missing_item(tmp_path: Path) -> None:
    host = sysfs.Host(tmp_path)
    (host.dev / "infiniband/rdma_cm").unlink()
    host.gpu("pci0000:00/0000:00:01.0")
    host.nic(
        "mlx5_0",
        "pci0000:00/0000:00:02.0",
        netdev="r0",
        mtu=300,
        gids=sysfs.roce_gids(1, v4=False),
        node=False,
    )
    host.nic("mlx5_1", "pci0000:00/0000:00:03.0", netdev="r1", state="1: DOWN", gids=sysfs.roce_gids(2))
    found = facts(host)
    assert codes(found) == ["no_device_node", "no_rdma_cm", "no_gid", "mtu", "no_gpu_direct"]
    assert found["left_out"] == {"mlx5_1": "port is DOWN"}
    assert all(p["message"] and p["remedy"] for p in found["problems"])


def test_named_devices_are_taken_and_a_wrong_or_disconnected_one_is_named(tmp_path: Path) -> None:
    host = sysfs.b200_roce(tmp_path)
    assert facts(host, ["mlx5_4", "mlx5_5"])["fabric"] == ["mlx5_4", "mlx5_5"]
    found = facts(host, ["mlx5_4", "mlx5_77"])
    assert codes(found) == ["device_missing"]
    assert "mlx5_77" in found["problems"][0]["message"]
    host.write(host.sys / "class/infiniband/mlx5_4/ports/1/state", "1: DOWN")
    assert codes(facts(host, ["mlx5_4"])) == ["port_down"]


def test_gid_tables_that_differ_are_refused_rather_than_guessed(tmp_path: Path) -> None:
    host = sysfs.Host(tmp_path)
    host.nic("mlx5_0", "pci0000:00/0000:00:02.0", netdev="r0", gids=sysfs.roce_gids(1))
    host.nic("mlx5_1", "pci0000:00/0000:00:03.0", netdev="r1", gids=sysfs.roce_gids(2)[2:])
    assert codes(facts(host)) == ["gid_differs"]


@pytest.mark.parametrize(("ethernet", "rdma"), [(1500, 1024), (4200, 4096), (9000, 4096), (2200, 2048)])
def test_the_rdma_mtu_fits_into_the_ethernet_mtu(tmp_path: Path, ethernet: int, rdma: int) -> None:
    host = sysfs.Host(tmp_path)
    host.nic("mlx5_0", "pci0000:00/0000:00:02.0", netdev="r0", mtu=ethernet, gids=sysfs.roce_gids(1))
    assert facts(host)["mtu"] == rdma


def test_it_runs_as_an_ansible_module(tmp_path: Path) -> None:
    host = sysfs.b200_roce(tmp_path)
    arguments = {"sysfs_root": str(host.sys), "proc_root": str(host.proc), "dev_root": str(host.dev)}
    run = subprocess.run(
        [
            str(Path(sys.executable).with_name("ansible")),
            "localhost",
            "-m",
            "rdma_facts",
            "-a",
            json.dumps(arguments),
            "-o",
        ],
        env={
            "ANSIBLE_LIBRARY": str(MODULE.parent),
            "PATH": "/usr/bin:/bin",
            "HOME": str(tmp_path),
            "LC_ALL": "C.UTF-8",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert json.loads(run.stdout.partition("=> ")[2])["rdma"]["kind"] == "roce"

"""`site.yml --check` on hosts to which nothing was done: it says what it would do, fails at nothing, changes nothing.

The hosts are a small second cluster with a name, network and port of its own, so that it can stand beside another one.
They are deployed to twice: as the local stack's hosts, and as hosts of a rack (stacks/onprem), which needs no provider.
"""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cluster import ROOT, podman, recap, shell

from roles.gpu_driver.hosts import write as driver
from roles.rdma.sysfs import b200_roce

pytestmark = pytest.mark.timeout(1800)

NAME, SUBNET = "tilert-check", "10.89.93.0/24"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@dataclass(frozen=True)
class Stack:
    """A stack in a private copy of terraform/, and the inventory folder that reads it."""

    folder: Path
    inventory: Path

    def terraform(self, command: str) -> str:
        """Run terraform in the stack."""
        return shell(f'STACK="{self.folder}"; tf {command} -no-color').stdout

    def apply(self, variables: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Apply with these variables; the output `nodes`."""
        (self.folder / "test.auto.tfvars.json").write_text(json.dumps(variables))
        self.terraform("init -input=false")
        self.terraform("apply -input=false -auto-approve")
        return dict(json.loads(self.terraform("output -json nodes")))

    def check(self) -> str:
        """`ansible-playbook site.yml --check` from the stack's output; what it said."""
        done = shell(
            'cd "$ROOT/ansible"; . "$STACK/scripts/podman-env.sh"; PATH="$OPS/bin:$PATH" '
            f'ansible-playbook -i "{self.inventory}" site.yml --check --diff '
            f'-e tilert_secrets_dir="{self.inventory.parent}/secrets"',
            check=False,
        )
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        return done.stdout


def make(name: str, tmp: Path, group_vars: str) -> Stack:
    """A private copy of a stack with an inventory of its own."""
    generated = shutil.ignore_patterns(
        ".terraform*", "*.tfstate*", "*.auto.tfvars*", "terraform.tfvars", "backend.tf"
    )
    shutil.copytree(ROOT / "terraform", tmp / "terraform", ignore=generated)
    folder, inventory = tmp / "terraform/stacks" / name, tmp / "inventory"
    (inventory / "group_vars").mkdir(parents=True)
    (inventory / "terraform.yml").write_text(f"plugin: tilert_terraform\nstack: {folder}\n")
    (inventory / "group_vars/tilert.yml").write_text(group_vars)
    return Stack(folder, inventory)


def left() -> dict[str, list[str]]:
    """What there is of the second cluster on this machine: containers, networks, processes, host addresses."""
    names = podman("ps", "--all", "--format", "{{.Names}}").split()
    networks = podman("network", "ls", "--format", "{{.Name}}").split()
    processes = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"{NAME}-" in command and "conmon" in command:
            processes.append(command)
    addresses = shell("ip -o -4 address show").stdout
    return {
        "containers": [name for name in names if name.startswith(f"{NAME}-")],
        "networks": [name for name in networks if name == NAME],
        "processes": processes,
        "addresses": [line for line in addresses.splitlines() if SUBNET.rsplit(".", 1)[0] + "." in line],
    }


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The second cluster's hosts, fresh."""
    shell("ops_venv; wheelhouse; small_model; host_image", timeout=1500)
    paths = json.loads(shell('printf \'["%s", "%s"]\' "$WHEELHOUSE" "$LOCAL/models"').stdout)
    stack = make(
        "local",
        tmp_path_factory.mktemp("local"),
        (ROOT / "inventory/local/group_vars/tilert.yml").read_text(),
    )
    try:
        stack.apply(
            {
                "name": NAME,
                "subnet": SUBNET,
                "decode_count": 1,
                "ingress_port": free_port(),
                "image": shell('cat "$LOCAL/host-image"').stdout.strip(),
                "wheelhouse_dir": paths[0],
                "models_dir": paths[1],
            }
        )
        yield stack
    finally:
        stack.terraform("destroy -input=false -auto-approve")


def hosts_of(stack: Stack) -> dict[str, dict[str, Any]]:
    return dict(json.loads(stack.terraform("output -json nodes")))


def untouched(host: str) -> bool:
    """Whether nothing of the product is on the host."""
    places = (
        "/opt/tilert /etc/tilert /usr/local/lib/tilert /etc/systemd/system/*tilert* /etc/systemd/system/vllm*"
    )
    return podman("exec", host, "sh", "-c", f"(ls -d {places}; id tilert) 2>/dev/null || true").strip() == ""


def test_on_fresh_hosts_of_the_local_stack_it_fails_at_nothing_and_changes_nothing(local: Stack) -> None:
    nodes = hosts_of(local)
    assert len(nodes) == 3
    said = local.check()
    counts = recap(said)
    assert set(counts) == {*nodes, "localhost"}, said[-3000:]
    for host, count in counts.items():
        assert count["failed"] == count["unreachable"] == count["rescued"] == count["ignored"] == 0, (
            host,
            count,
        )
    # It went through the roles, to their units, rather than past them.
    assert all(counts[host]["changed"] >= 5 for host in nodes), counts
    for unit in ("vllm-prefill.service", "tilert-decode.service", "tilert-router.service", "nginx.conf"):
        assert unit in said, f"{unit} is nowhere in what the check would change"
    assert all(untouched(host) for host in nodes)


def test_on_fresh_hosts_of_a_rack_it_fails_at_nothing_and_changes_nothing(
    local: Stack, tmp_path: Path
) -> None:
    containers = hosts_of(local)
    # What the kernel and the driver of an 8 x B200 host with a RoCE fabric show, where the modules are told to look.
    machine = tmp_path / "machine"
    (machine / "fabric").mkdir(parents=True)
    b200_roce(machine / "fabric")
    commands = driver(machine / "driver")
    for host in containers:
        podman("exec", host, "mkdir", "-p", str(machine))
        podman("cp", f"{machine}/.", f"{host}:{machine}")
    site = {
        "tilert_decode_engine": "tilert",
        "vllm_prefill_device": "cuda",
        # The rack's hosts are containers, entered through podman.
        "ansible_connection": "containers.podman.podman",
        "gpu_driver_root": commands.pop("root"),
        "gpu_driver_commands": commands,
        "rdma_sysfs_root": str(machine / "fabric/sys"),
        "rdma_proc_root": str(machine / "fabric/proc"),
        "rdma_dev_root": str(machine / "fabric/dev"),
    }
    rack = make("onprem", tmp_path / "rack", json.dumps(site))
    shapes = {"prefill": "hgx-b200-roce", "decode": "hgx-b200-roce", "router": "cpu-server"}
    nodes = rack.apply(
        {
            "ssh_user": "root",
            "transport": {"library": "mooncake", "protocol": "rdma"},
            "hosts": {
                name.removeprefix(f"{NAME}-"): {
                    "role": node["role"],
                    "shape": shapes[node["role"]],
                    "address": node["address"],
                    "rdma_devices": [] if node["role"] == "router" else [f"mlx5_{i}" for i in range(4, 12)],
                    "ansible_host": name,
                    "also": ["ingress"] if node["role"] == "router" else [],
                }
                for name, node in containers.items()
            },
        }
    )
    assert not (rack.folder / ".terraform/providers").exists(), "an existing rack needs no provider"
    said = rack.check()
    counts = recap(said)
    assert set(counts) == {*nodes, "localhost"}
    for host, count in counts.items():
        assert count["failed"] == count["unreachable"] == count["rescued"] == count["ignored"] == 0, (
            host,
            count,
        )
    assert all(counts[host]["changed"] >= 5 for host in nodes), counts
    for unit in ("vllm-prefill.service", "tilert-decode.service", "tilert-router.service", "rdma.env"):
        assert unit in said, f"{unit} is nowhere in what the check would change"
    assert all(untouched(host) for host in containers)


def test_destroy_leaves_no_container_network_or_process(local: Stack) -> None:
    before = left()
    assert len(before["containers"]) == 3, before
    assert before["networks"] == [NAME]
    assert len(before["processes"]) == 3, before
    assert before["addresses"], before
    local.terraform("destroy -input=false -auto-approve")
    assert left() == {"containers": [], "networks": [], "processes": [], "addresses": []}
    # Nothing left to destroy is no failure either.
    local.terraform("destroy -input=false -auto-approve")

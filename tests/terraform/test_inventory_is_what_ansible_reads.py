"""The inventory that Ansible reads from each applied stack: as recorded in golden/, and accepted by validate.yml.

Run with TILERT_WRITE_GOLDEN=1 to record it anew.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import CLOUDS, HERE, REPOSITORY, Workspace

# The hosts do not exist: what validate.yml asks of them is asked of this machine, and no wheelhouse is looked for.
PRETEND = json.dumps({"ansible_connection": "local", "tilert_wheelhouse": ""})

# docs/contracts.md: one shape of `nodes` for every stack.
NODE = ("address", "also", "fabric_address", "gpus", "rdma_devices", "role", "shape", "vars")
GROUPS = ["decode", "ingress", "native", "observability", "prefill", "router"]


def ansible(program: str, inventory: Path, stack: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TILERT_STACK": str(stack), "ANSIBLE_NOCOLOR": "1"}
    command = [str(Path(sys.executable).with_name(program)), "-i", str(inventory), *arguments]
    return subprocess.run(
        command, cwd=REPOSITORY / "ansible", env=environment, capture_output=True, text=True, check=False
    )


def recorded(workspace: Workspace, inventory: Path, stack: Path, name: str) -> dict[str, Any]:
    """What Ansible reads from the stack, and what golden/ has of it (recorded anew if that is asked for)."""
    listed = ansible("ansible-inventory", inventory, stack, "--list")
    assert listed.returncode == 0, listed.stderr
    # Ansible marks text from outside as unsafe to template.
    seen = json.loads(listed.stdout, object_hook=lambda found: found.get("__ansible_unsafe", found))
    own = json.loads(workspace.terraform(stack, "output", "-json", "inventory").out)
    assert sorted(own) == GROUPS
    hosts = sorted({host for group in own.values() for host in group})
    nodes = json.loads(workspace.terraform(stack, "output", "-json", "nodes").out)
    assert sorted(nodes) == hosts
    assert {tuple(sorted(node)) for node in nodes.values()} == {NODE}
    read = {
        "groups": {group: sorted(seen.get(group, {}).get("hosts", [])) for group in GROUPS},
        # group_vars are Ansible's; what the stack says of a host is looked at.
        "hosts": {
            host: {
                key: seen["_meta"]["hostvars"][host][key]
                for group in own.values()
                for key, value in group.get(host, {}).items()
                if value is not None
            }
            for host in hosts
        },
    }
    golden = HERE / "golden" / f"{name}.json"
    if os.environ.get("TILERT_WRITE_GOLDEN") == "1":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(json.dumps(read, indent=2, sort_keys=True) + "\n")
    assert read == json.loads(golden.read_text())
    return read


def secrets(value: Any, at: str = "") -> Iterator[str]:
    """Where a state holds something that is named, or looks, like a secret."""
    if isinstance(value, dict):
        for key, inner in value.items():
            # EC2 fills password_data only where get_password_data asks for it; the double always does.
            if re.search(r"password(?!_data$)|secret|private_key|(^|_)token($|_)|credential", key) and inner:
                yield f"{at}.{key}"
            yield from secrets(inner, f"{at}.{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from secrets(inner, f"{at}[{index}]")
    elif isinstance(value, str) and "PRIVATE KEY" in value:
        yield at


VALIDATED: set[str] = set()


def validate(name: str, inventory: Path, stack: Path) -> None:
    """validate.yml takes the inventory. It is the same from either core (golden/ says so), so it is asked once."""
    if name in VALIDATED:
        return
    done = ansible("ansible-playbook", inventory, stack, "validate.yml", "-e", PRETEND)
    assert done.returncode == 0, done.stdout + done.stderr
    VALIDATED.add(name)


@pytest.mark.parametrize("cloud", [*CLOUDS, "onprem"])
def test_applied_stack(workspace: Workspace, tmp_path: Path, cloud: str) -> None:
    stack = workspace.copy(f"stacks/{cloud}", tmp_path / "terraform")
    assert workspace.terraform(stack, "init", "-input=false").code == 0
    applied = workspace.terraform(stack, "apply", "-auto-approve", "-var-file=terraform.tfvars.example")
    assert applied.code == 0, applied.said
    again = workspace.terraform(stack, "plan", "-detailed-exitcode", "-var-file=terraform.tfvars.example")
    assert again.code == 0, again.said
    assert list(secrets(json.loads((stack / "terraform.tfstate").read_text()))) == []

    inventory = REPOSITORY / "inventory/terraform"
    recorded(workspace, inventory, stack, cloud)

    validate(cloud, inventory, stack)

    gone = workspace.terraform(stack, "destroy", "-auto-approve", "-var-file=terraform.tfvars.example")
    assert gone.code == 0, gone.said


def test_the_local_stack_without_its_hosts(workspace: Workspace, tmp_path: Path) -> None:
    """Its outputs need no container: they are written to a state that holds nothing else. (Containers: tests/e2e.)"""
    stack = workspace.copy("stacks/local", tmp_path / "terraform")
    assert workspace.terraform(stack, "init", "-input=false").code == 0
    variables = ["-var-file=terraform.tfvars.example"]
    applied = workspace.terraform(stack, "apply", "-refresh-only", "-auto-approve", *variables)
    assert applied.code == 0, applied.said

    inventory = tmp_path / "inventory"
    shutil.copytree(REPOSITORY / "inventory/local", inventory)
    (inventory / "terraform.yml").write_text(f"plugin: tilert_terraform\nstack: {stack}\n")
    recorded(workspace, inventory, stack, "containers/local")
    validate("local", inventory, stack)

"""The inventory that Ansible reads from each applied stack: as recorded in golden/, and accepted by validate.yml.

Run with TILERT_WRITE_GOLDEN=1 to record it anew.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import CLOUDS, HERE, REPOSITORY, Workspace

# The hosts do not exist: what validate.yml asks of them is asked of this machine, and no wheelhouse is looked for.
PRETEND = json.dumps({"ansible_connection": "local", "tilert_wheelhouse": ""})

GROUPS = ["decode", "ingress", "native", "observability", "prefill", "router"]


def ansible(program: str, stack: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TILERT_STACK": str(stack), "ANSIBLE_NOCOLOR": "1"}
    command = [
        str(Path(sys.executable).with_name(program)),
        "-i",
        str(REPOSITORY / "inventory/terraform"),
        *arguments,
    ]
    return subprocess.run(
        command, cwd=REPOSITORY / "ansible", env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("cloud", [*CLOUDS, "onprem"])
def test_applied_stack(workspace: Workspace, tmp_path: Path, cloud: str) -> None:
    stack = workspace.copy(f"stacks/{cloud}", tmp_path / "terraform")
    assert workspace.terraform(stack, "init", "-input=false").code == 0
    applied = workspace.terraform(stack, "apply", "-auto-approve", "-var-file=terraform.tfvars.example")
    assert applied.code == 0, applied.said
    again = workspace.terraform(stack, "plan", "-detailed-exitcode", "-var-file=terraform.tfvars.example")
    assert again.code == 0, again.said

    listed = ansible("ansible-inventory", stack, "--list")
    assert listed.returncode == 0, listed.stderr
    # Ansible marks text from outside as unsafe to template.
    seen = json.loads(listed.stdout, object_hook=lambda found: found.get("__ansible_unsafe", found))
    own = json.loads(workspace.terraform(stack, "output", "-json", "inventory").out)
    assert sorted(own) == GROUPS
    hosts = sorted({host for group in own.values() for host in group})
    inventory = {
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
    golden = HERE / "golden" / f"{cloud}.json"
    if os.environ.get("TILERT_WRITE_GOLDEN") == "1":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(json.dumps(inventory, indent=2, sort_keys=True) + "\n")
    assert inventory == json.loads(golden.read_text())

    # Which packages a GPU host installs is the site's to lock; that the files are there is all that is asked here.
    locks = tmp_path / "locks"
    locks.mkdir()
    for name in ("prefill-cuda.txt", "decode-tilert.txt", "router.txt"):
        (locks / name).touch()
    validated = ansible(
        "ansible-playbook",
        stack,
        "validate.yml",
        "-e",
        PRETEND,
        "-e",
        f"tilert_requirements_dir={locks}",
    )
    assert validated.returncode == 0, validated.stdout + validated.stderr

    gone = workspace.terraform(stack, "destroy", "-auto-approve", "-var-file=terraform.tfvars.example")
    assert gone.code == 0, gone.said

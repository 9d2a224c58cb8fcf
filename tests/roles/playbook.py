"""Runs real playbooks from tests, on every machine in the same way, and writes the inventories that they get."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLAYBOOK = Path(sys.executable).with_name("ansible-playbook")
needs_ansible = pytest.mark.skipif(not PLAYBOOK.exists(), reason="ansible is not installed here")


def run_playbook(
    playbook: Path,
    inventory: Path | str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 240,
) -> subprocess.CompletedProcess[str]:
    """Run `playbook` on `inventory` with the project's configuration; exit status and what it said.

    `environment` goes on top of the caller's own. Raises subprocess.TimeoutExpired after `timeout` seconds.
    """
    # What could differ between machines: whose configuration is found, colours, and the language of messages.
    fixed = {
        "ANSIBLE_CONFIG": str(ROOT / "ansible/ansible.cfg"),
        "ANSIBLE_NOCOLOR": "1",
        "LC_ALL": "C.UTF-8",
    }
    return subprocess.run(
        [PLAYBOOK, "-i", inventory, playbook, *arguments],
        cwd=cwd,
        env={**os.environ, **fixed, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def write_inventory(
    folder: Path,
    groups: Mapping[str, Mapping[str, Any]],
    variables: Mapping[str, Any],
    *,
    defaults: bool = False,
) -> Path:
    """Write hosts.yml and group_vars of a pool into `folder`; the path of hosts.yml.

    `groups` is group -> host -> variables, `variables` are those of all its hosts. `defaults` brings
    ansible/group_vars/all.yml along: playbooks in ansible/ find it beside them, a play of the test's own does not.
    """
    (folder / "group_vars").mkdir(parents=True, exist_ok=True)
    link = folder / "group_vars/all.yml"
    if defaults and not link.exists():
        link.symlink_to(ROOT / "ansible/group_vars/all.yml")
    (folder / "group_vars/tilert.yml").write_text(json.dumps(variables))
    children = {group: {"hosts": hosts} for group, hosts in groups.items()}
    path = folder / "hosts.yml"
    path.write_text(json.dumps({"tilert": {"children": children}}))
    return path

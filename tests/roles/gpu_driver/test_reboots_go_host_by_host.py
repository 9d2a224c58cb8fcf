"""gpu.yml: hosts that may reboot have their turn one after the other, wherever that was said; the rest go together."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from roles.playbook import ROOT, needs_ansible, run_playbook, write_inventory

pytestmark = needs_ansible

ROLE = [
    {
        "name": "Whose turn it is",
        "ansible.builtin.shell": {"cmd": "echo {{ ansible_play_batch | join(' ') }} >>{{ calls }}"},
    }
]


@pytest.mark.parametrize(
    ("reboot", "turns"),
    [(False, {"d1 d2 p1"}), (True, {"d1", "d2", "p1"})],
)
def test_turns_follow_the_inventory(tmp_path: Path, reboot: bool, turns: set[str]) -> None:
    (tmp_path / "roles/gpu_driver/tasks").mkdir(parents=True)
    (tmp_path / "roles/gpu_driver/tasks/main.yml").write_text(json.dumps(ROLE))
    given = {
        "ansible_connection": "local",
        "ansible_become": False,
        "ansible_python_interpreter": sys.executable,
        "gpu_driver_reboot": reboot,
        "calls": str(tmp_path / "calls"),
    }
    groups = {
        "prefill": {"p1": {"gpus": 8}},
        "decode": {"d1": {"gpus": 8}, "d2": {"gpus": 8}},
        "native": {"n1": {"gpus": 0}},
    }
    inventory = write_inventory(tmp_path, groups, given)
    roles = {"ANSIBLE_ROLES_PATH": str(tmp_path / "roles")}
    done = run_playbook(ROOT / "ansible/gpu.yml", inventory, environment=roles)
    assert done.returncode == 0, done.stdout + done.stderr
    # That a host was put into its group is no change of it.
    assert re.search(r"^n1 .*changed=0 ", done.stdout, re.M), done.stdout
    lines = (tmp_path / "calls").read_text().splitlines()
    assert {" ".join(sorted(line.split())) for line in lines} == turns
    assert len(lines) == 3

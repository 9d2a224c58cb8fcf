"""gpu.yml: hosts that may reboot have their turn one after the other, wherever that was said; the rest go together."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PLAYBOOK = Path(sys.executable).with_name("ansible-playbook")
pytestmark = pytest.mark.skipif(not PLAYBOOK.exists(), reason="ansible is not installed here")

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
    (tmp_path / "group_vars").mkdir()
    given = {
        "ansible_connection": "local",
        "ansible_become": False,
        "ansible_python_interpreter": sys.executable,
        "gpu_driver_reboot": reboot,
        "calls": str(tmp_path / "calls"),
    }
    (tmp_path / "group_vars/tilert.yml").write_text(json.dumps(given))
    groups = {
        "prefill": {"p1": {"gpus": 8}},
        "decode": {"d1": {"gpus": 8}, "d2": {"gpus": 8}},
        "native": {"n1": {"gpus": 0}},
    }
    children = {group: {"hosts": hosts} for group, hosts in groups.items()}
    (tmp_path / "hosts.yml").write_text(json.dumps({"tilert": {"children": children}}))
    done = subprocess.run(
        [PLAYBOOK, "-i", tmp_path / "hosts.yml", ROOT / "ansible/gpu.yml"],
        env=os.environ
        | {
            "ANSIBLE_CONFIG": str(ROOT / "ansible/ansible.cfg"),
            "ANSIBLE_ROLES_PATH": str(tmp_path / "roles"),
            "ANSIBLE_NOCOLOR": "1",
            "LC_ALL": "C.UTF-8",
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # That a host was put into its group is no change of it.
    assert re.search(r"^n1 .*changed=0 ", done.stdout, re.M), done.stdout
    lines = (tmp_path / "calls").read_text().splitlines()
    assert {" ".join(sorted(line.split())) for line in lines} == turns
    assert len(lines) == 3

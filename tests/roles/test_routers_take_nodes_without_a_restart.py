"""pd_router: a changed list of nodes reloads the router, anything else of its file restarts it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PLAYBOOK = Path(sys.executable).with_name("ansible-playbook")
pytestmark = pytest.mark.skipif(not PLAYBOOK.exists(), reason="ansible is not installed here")


def render(folder: Path, decode: int, *arguments: str, **variables: Any) -> set[str]:
    """Run the role's configuration for so many decode hosts; the handlers that were called."""
    (folder / "group_vars").mkdir(exist_ok=True)
    (folder / "etc").mkdir(exist_ok=True)
    shutil.copy(ROOT / "ansible/group_vars/all.yml", folder / "group_vars/all.yml")
    check = folder / "venv/bin/tilert-router"
    check.parent.mkdir(parents=True, exist_ok=True)
    check.write_text('#!/bin/sh\ntest -s "$2"\n')
    check.chmod(0o755)
    given = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "tilert_config_dir": str(folder / "etc"),
        "tilert_user": str(os.getgid()),
        "pd_router_venv": str(folder / "venv"),
        "tilert_secret": "s" * 40,
        "tilert_prefill_key": "",
    }
    (folder / "group_vars/tilert.yml").write_text(json.dumps(given | variables))
    groups: dict[str, Any] = {g: {} for g in ("ingress", "native", "observability")}
    groups |= {
        "prefill": {"hosts": {"p1": {"address": "10.0.0.1"}}},
        "decode": {"hosts": {f"d{n}": {"address": f"10.0.1.{n}"} for n in range(decode)}},
        "router": {"hosts": {"g1": {"address": "10.0.0.9"}}},
    }
    inventory = {g: h or {"hosts": {}} for g, h in groups.items()}
    (folder / "hosts.yml").write_text(json.dumps({"tilert": {"children": inventory}}))
    task = {"ansible.builtin.include_role": {"name": "pd_router", "tasks_from": "nodes.yml"}}
    (folder / "play.yml").write_text(
        json.dumps([{"hosts": "router", "gather_facts": False, "tasks": [task]}])
    )
    done = subprocess.run(
        [PLAYBOOK, "-i", folder / "hosts.yml", folder / "play.yml", *arguments],
        env=os.environ
        | {"ANSIBLE_CONFIG": str(ROOT / "ansible/ansible.cfg"), "ANSIBLE_NOCOLOR": "1", "LC_ALL": "C.UTF-8"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    # The handlers themselves need systemd: in check mode they are called and do nothing.
    if "--check" in arguments:
        assert done.returncode == 0, done.stdout
    return set(re.findall(r"RUNNING HANDLER \[pd_router : (\w+) the router\]", done.stdout))


def test_only_what_a_router_reads_at_start_restarts_it(tmp_path: Path) -> None:
    assert render(tmp_path, 2, "--check") == {"Restart"}  # there was none
    render(tmp_path, 2)
    there = yaml.safe_load((tmp_path / "etc/router.yaml").read_text())
    assert [node["name"] for node in there["decode"]] == ["d0", "d1"]
    assert render(tmp_path, 2, "--check") == set()
    assert render(tmp_path, 3, "--check") == {"Reload"}
    assert render(tmp_path, 2, "--check", tilert_max_seq_len=4096) == {"Restart"}
    assert render(tmp_path, 3, "--check", tilert_max_seq_len=4096) == {"Restart"}

"""pd_router: a changed list of nodes reloads the router, anything else of its file restarts it."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from roles.playbook import needs_ansible, run_playbook, write_inventory

pytestmark = needs_ansible


def render(folder: Path, decode: int, *arguments: str, **variables: Any) -> set[str]:
    """Run the role's configuration for so many decode hosts; the handlers that were called."""
    (folder / "etc").mkdir(exist_ok=True)
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
    groups: dict[str, Any] = {g: {} for g in ("ingress", "native", "observability")}
    groups |= {
        "prefill": {"p1": {"address": "10.0.0.1"}},
        "decode": {f"d{n}": {"address": f"10.0.1.{n}"} for n in range(decode)},
        "router": {"g1": {"address": "10.0.0.9"}},
    }
    inventory = write_inventory(folder, groups, given | variables, defaults=True)
    task = {"ansible.builtin.include_role": {"name": "pd_router", "tasks_from": "nodes.yml"}}
    (folder / "play.yml").write_text(
        json.dumps([{"hosts": "router", "gather_facts": False, "tasks": [task]}])
    )
    done = run_playbook(folder / "play.yml", inventory, *arguments)
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

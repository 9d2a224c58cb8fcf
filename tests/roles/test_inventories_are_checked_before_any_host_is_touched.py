"""validate.yml takes the inventories that each stack makes, and refuses wrong ones by field, value and remedy."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from roles.playbook import ROOT, needs_ansible, run_playbook, write_inventory

pytestmark = needs_ansible

SITE = yaml.safe_load((ROOT / "inventory/terraform/group_vars/tilert.yml").read_text())
GOLDEN = sorted((ROOT / "tests/terraform/golden").glob("*.json"))
Hosts = dict[str, dict[str, dict[str, Any]]]


def golden(path: Path) -> Hosts:
    """group -> host -> variables, as the inventory plugin gives them."""
    found = json.loads(path.read_text())
    return {group: {host: found["hosts"][host] for host in hosts} for group, hosts in found["groups"].items()}


def validate(folder: Path, hosts: Hosts, site: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Run validate.yml in check mode. The hosts of the second play are this machine."""
    given = SITE | {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "tilert_wheelhouse": "",
        "tilert_secret": "s" * 40,
    }
    inventory = write_inventory(folder, hosts, given | site)
    return run_playbook(ROOT / "ansible/validate.yml", inventory, "--check")


@pytest.mark.parametrize("path", GOLDEN, ids=[path.stem for path in GOLDEN])
def test_the_inventory_that_each_stack_makes_is_accepted(tmp_path: Path, path: Path) -> None:
    done = validate(tmp_path, golden(path), {})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "changed=0" in done.stdout


def change(hosts: Hosts, group: str, host: str, **values: Any) -> Hosts:
    """The inventory with other variables of one host, in every group it is in."""
    new = copy.deepcopy(hosts)
    new[group].setdefault(host, {})
    for members in new.values():
        if host in members:
            members[host].update(values)
    return new


BASE = golden(ROOT / "tests/terraform/golden/onprem.json")
D1, D2 = sorted(BASE["decode"])[:2]
P1 = sorted(BASE["prefill"])[0]


@pytest.mark.parametrize(
    ("hosts", "site", "words"),
    [
        (change(BASE, "decode", D1, gpus=4), {}, f"{D1}.gpus = 4: engine tilert runs on 8 x B200 alone"),
        (change(BASE, "decode", D1, tilert_max_seq_len=4096), {}, "tilert_max_seq_len: {"),
        (change(BASE, "decode", D2, tilert_kv_cache_dtype="bf16"), {}, "tilert_kv_cache_dtype: {"),
        (change(BASE, "decode", D1, tilert_transport="nixl"), {}, "tilert_transport: {"),
        (
            change(BASE, "decode", D1, fabric_address="[2001:db8::1]"),
            {},
            "write the bare address, without brackets",
        ),
        (
            change(BASE, "decode", D1, fabric_address=BASE["decode"][D2]["fabric_address"]),
            {},
            "Give every host its own",
        ),
        (
            change(BASE, "router", "g2", address="192.0.2.77"),
            {"tilert_decode_server": "stock"},
            "would book it twice",
        ),
        (BASE | {"prefil": {P1: {}}}, {}, "group prefil: no play knows it"),
        (BASE | {"decode": {}}, {}, "group decode: it has no host"),
        (BASE, {"tilert_decode_engine": "stub"}, "tilert_decode_engine = stub: set it to tilert"),
        (
            BASE,
            {"tilert_kv_cache_dtype": "fp8"},
            "tilert_kv_cache_dtype = fp8: use one of float32, bf16, fp8_ds_mla",
        ),
        (BASE, {"tilert_decode_http_port": 5556}, "port 5556 is used by"),
        (BASE, {"tilert_decode_server": "stock", "pd_router_processes": 2}, "would book it twice"),
        (BASE, {"pd_router_processes": "many"}, "pd_router_processes = many: use a whole number, at least 1"),
        (
            BASE,
            {"pd_router_processes": 3, "tilert_router_port_step": 1},
            "is used by tilert_router_admin_port and tilert_router_port of ",
        ),
        (
            change(BASE, "router", "g2", address="192.0.2.78", pd_router_tool_parser="glm47"),
            {},
            "pd_router_reasoning_parser, pd_router_tool_parser: {",
        ),
        (BASE, {"tilert_requirements_dir": "/nowhere"}, "/nowhere/router.txt: there is no such lock file"),
        (BASE, {"tilert_secret": "short"}, "shorter than 32 characters"),
        (BASE, {"tilert_wheelhouse": "/nowhere"}, "tilert_wheelhouse = /nowhere: there is no such folder"),
    ],
    ids=lambda value: value.split(":")[0][:40] if isinstance(value, str) else "",
)
def test_a_wrong_inventory_is_refused_with_field_value_and_remedy(
    tmp_path: Path, hosts: Hosts, site: dict[str, Any], words: str
) -> None:
    done = validate(tmp_path, hosts, site)
    assert done.returncode != 0
    assert words in " ".join(done.stdout.split()), done.stdout

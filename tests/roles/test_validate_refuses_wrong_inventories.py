"""validate.yml, run for real, refuses inventories in which hosts get in each other's way: by field, value and remedy.

(What single fields must be is in test_inventories_are_checked_before_any_host_is_touched.py.)
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roles.playbook import ROOT, needs_ansible, run_playbook

pytestmark = needs_ansible

Inventory = dict[str, dict[str, dict[str, Any]]]
Change = Callable[[Inventory], None]

GOOD: Inventory = {
    "prefill": {
        "p1": {"address": "10.0.0.1", "fabric_address": "10.1.0.1", "gpus": 8},
        "p2": {"address": "10.0.0.2", "fabric_address": "10.1.0.2", "gpus": 8},
    },
    "decode": {
        "d1": {"address": "10.0.0.3", "fabric_address": "10.1.0.3", "gpus": 8},
        "d2": {"address": "10.0.0.4", "fabric_address": "2001:db8::4", "gpus": 8},
    },
    "router": {"g1": {"address": "10.0.0.5"}},
    "ingress": {"g1": {}},
    "native": {},
    "observability": {},
}


def validate(folder: Path, inventory: Inventory) -> tuple[int, str]:
    """Run the playbook on this inventory; exit code, and what it said with white space folded."""
    children = {group: {"hosts": hosts} for group, hosts in inventory.items()}
    given = {
        "tilert_decode_engine": "tilert",
        "vllm_prefill_device": "cuda",
        "tilert_wheelhouse": "",
        "tilert_secret": "s" * 40,
    }
    # The second play asks the hosts themselves, which are not there: it is left out.
    here = {"hosts": {"localhost": {"ansible_connection": "local"}}}
    groups = {"all": here, "tilert": {"vars": given, "children": children}}
    (folder / "hosts.yml").write_text(json.dumps(groups))
    playbook = Path("validate.yml")
    done = run_playbook(playbook, folder / "hosts.yml", "--limit", "localhost", cwd=ROOT / "ansible")
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def setting(group: str, host: str, **values: Any) -> Change:
    return lambda inventory: inventory[group].setdefault(host, {}).update(values)


def without(group: str) -> Change:
    return lambda inventory: inventory.pop(group) and None  # type: ignore[func-returns-value]


MLX = ["mlx5_0", "mlx5_1"]
EFA = ["rdmap79s0", "rdmap80s0"]
WRONG: dict[str, tuple[list[Change], str]] = {
    "no group for ordinary vLLM": (
        [without("native")],
        "group native: it is missing from the inventory. Add it",
    ),
    "an address twice": (
        [setting("prefill", "p2", address="10.0.0.1")],
        "p1.address and p2.address = 10.0.0.1: hosts behind one address",
    ),
    "an address that is another's fabric address": (
        [setting("decode", "d1", fabric_address="10.0.0.1")],
        "d1.fabric_address and p1.address = 10.0.0.1: hosts behind one address",
    ),
    "one IPv6 address in two spellings": (
        [setting("prefill", "p1", fabric_address="2001:DB8:0::4")],
        "d2.fabric_address and p1.fabric_address = 2001:db8::4: hosts behind one address",
    ),
    "one machine under two names": (
        [
            setting("decode", "d1", ansible_host="192.0.2.9"),
            setting("router", "g1", ansible_host="192.0.2.9"),
        ],
        "ansible_host = 192.0.2.9:22: d1 and g1 are one machine",
    ),
    "an address with a port": (
        [setting("decode", "d1", fabric_address="10.1.0.3:5556")],
        "d1.fabric_address = 10.1.0.3:5556: write the bare address",
    ),
    "a bracketed IPv6 address": (
        [setting("decode", "d2", fabric_address="[2001:db8::4]")],
        "d2.fabric_address = [2001:db8::4]: write the bare address",
    ),
    "a port in words": (
        [setting("decode", "d1", tilert_decode_http_port="http")],
        "d1.tilert_decode_http_port = http: use a whole number",
    ),
    "router and prefill on one port of one host": (
        [setting("router", "p1", tilert_router_port=8000)],
        "p1: port 8000 is used by tilert_prefill_port and tilert_router_port. Give each service",
    ),
    "EFA and a verbs transport": (
        [setting("decode", "d1", rdma_devices=EFA)],
        "tilert_protocol = rdma does not go over rdmap79s0, rdmap80s0. On EFA use mooncake/efa or nixl/LIBFABRIC",
    ),
    "Mellanox and the EFA transport": (
        [
            *(
                setting(group, host, tilert_protocol="efa")
                for group in ("prefill", "decode")
                for host in GOOD[group]
            ),
            setting("prefill", "p1", rdma_devices=MLX),
        ],
        "tilert_protocol = efa does not go over mlx5_0, mlx5_1",
    ),
    "NICs of a fabric and TCP": (
        [
            *(
                setting(group, host, tilert_protocol="tcp")
                for group in ("prefill", "decode")
                for host in GOOD[group]
            ),
            setting("decode", "d1", rdma_devices=MLX),
        ],
        "tilert_protocol = tcp does not go over mlx5_0, mlx5_1",
    ),
    "another layout on one host": (
        [setting("prefill", "p2", tilert_profile="dsv32")],
        "tilert_profile: {'d1': 'glm5'",
    ),
    "the draft layer on one end only": (
        [setting("decode", "d2", tilert_with_mtp=False)],
        "tilert_with_mtp: {'d1': True",
    ),
    "another model on one host": (
        [setting("decode", "d2", tilert_model_name="glm-5.1")],
        "tilert_model_name: {'d1': 'glm-5', 'd2': 'glm-5.1'",
    ),
    "another model at the router": (
        [setting("router", "g1", tilert_model_name="glm")],
        "tilert_model_name: {'g1': 'glm', 'p1': 'glm-5', 'p2': 'glm-5'}. A router that names another",
    ),
    "another version on one host": (
        [setting("decode", "d2", tilert_decode_lock="/srv/old/decode-tilert.txt")],
        "tilert_decode_lock: {'d1': \"(the role's own)\", 'd2': '/srv/old/decode-tilert.txt'}. Hosts of group decode",
    ),
    "lock files of another release on one host": (
        [setting("router", "g1", tilert_requirements_dir="/srv/old")],
        "tilert_requirements_dir: {",
    ),
    "another longest length at one decode node": (
        [setting("decode", "d1", tilert_decode_max_seq_len=4096)],
        "tilert_max_seq_len: {'p1': 131072, 'p2': 131072, 'd1': 4096",
    ),
    "the engine and vLLM on the same GPUs": (
        [setting("prefill", "d1")],
        "d1: it is in the groups prefill and decode, and engine tilert takes all 8 GPUs",
    ),
}


def test_the_inventory_they_are_made_from_is_accepted(tmp_path: Path) -> None:
    code, said = validate(tmp_path, GOOD)
    assert code == 0, said


@pytest.mark.parametrize("what", WRONG)
def test_refused_with_field_value_and_remedy(tmp_path: Path, what: str) -> None:
    changes, words = WRONG[what]
    inventory = copy.deepcopy(GOOD)
    for change in changes:
        change(inventory)
    code, said = validate(tmp_path, inventory)
    assert code != 0, said
    assert words in said, said

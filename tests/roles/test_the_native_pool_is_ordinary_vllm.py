"""vllm_native: whole requests without a connector, or decoding behind the proxy; routers and prefill hosts know it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from roles.playbook import needs_ansible
from roles.test_units_say_what_was_meant import GPU, HOSTS, LOCAL, SECRET, argv, option, render, rendering

pytestmark = needs_ansible

POOL = {
    **HOSTS,
    "native": {"n1": {"address": "10.0.0.9", "gpus": 8}, "n2": {"address": "2001:db8::9", "gpus": 8}},
}
PLAY = [
    rendering("vllm_native", "native", ["vllm-native.service", "vllm-router.service", "native.env"]),
    rendering("pd_router", "router", ["router.yaml"]),
    rendering("vllm_prefill", "prefill", ["vllm-prefill.service"]),
]


def rendered(tmp_path: Path, site: dict[str, Any]) -> Path:
    return render(tmp_path, site, POOL, PLAY)


@pytest.mark.parametrize("kind", ["local", "gpu"])
def test_an_aggregated_pool_has_no_connector_and_listens_where_routers_ask(tmp_path: Path, kind: str) -> None:
    out = rendered(tmp_path, {"local": LOCAL, "gpu": GPU}[kind])
    words = argv(out / "n1-vllm-native.service")
    assert "--kv-transfer-config" not in words
    assert option(words, "--port") == "8100"
    assert option(words, "--host") == "10.0.0.9"
    prefill = argv(out / "p1-vllm-prefill.service")
    for name in ("--served-model-name", "--max-model-len", "--dtype"):
        assert option(words, name) == option(prefill, name)
    if kind == "gpu":
        assert words[1] == "serve"
        assert option(words, "--tensor-parallel-size") == "8"
        assert "--enforce-eager" not in words
    else:
        assert json.loads(option(words, "--compilation-config")) == {"custom_ops": ["none"]}
    config = json.loads(option(prefill, "--kv-transfer-config"))
    assert config["kv_connector"] == "TileRTConnector"
    router = yaml.safe_load((out / "g1-router.yaml").read_text())
    assert router["native"] == [
        {"name": "n1", "url": "http://10.0.0.9:8100"},
        {"name": "n2", "url": "http://[2001:db8::9]:8100"},
    ]


def test_a_decoding_pool_pulls_from_the_prefill_hosts_behind_its_proxy(tmp_path: Path) -> None:
    out = rendered(tmp_path, GPU | {"tilert_native_mode": "decode"})
    words = argv(out / "n1-vllm-native.service")
    config = json.loads(option(words, "--kv-transfer-config"))
    assert config == {"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_buffer_device": "cuda"}
    assert option(words, "--port") == "8200"
    prefill = argv(out / "p1-vllm-prefill.service")
    inner = json.loads(option(prefill, "--kv-transfer-config"))["kv_connector_extra_config"]["connectors"]
    assert [c["kv_connector"] for c in inner] == ["NixlConnector", "TileRTConnector"]
    assert inner[0]["kv_buffer_device"] == config["kv_buffer_device"]
    for name in ("--block-size", "--kv-cache-dtype", "--dtype"):
        assert option(words, name) == option(prefill, name)

    proxy = argv(out / "n1-vllm-router.service")
    assert "--vllm-pd-disaggregation" in proxy
    assert option(proxy, "--port") == "8100"
    assert [proxy[i + 1] for i, word in enumerate(proxy) if word == "--prefill"] == ["http://10.0.0.1:8000"]
    assert [proxy[i + 1] for i, word in enumerate(proxy) if word == "--decode"] == [
        "http://10.0.0.9:8200",
        "http://[2001:db8::9]:8200",
    ]


def test_no_key_stands_in_a_unit_or_an_environment_that_others_can_read(tmp_path: Path) -> None:
    out = rendered(tmp_path, GPU | {"tilert_native_mode": "decode"})
    for file in out.iterdir():
        assert SECRET not in file.read_text(), file.name
        assert "--api-key" not in file.read_text()
    router = yaml.safe_load((out / "g1-router.yaml").read_text())
    assert router["secrets"]["native_file"] == "/etc/tilert/credentials/prefill"
    for unit in ("n1-vllm-native.service", "n1-vllm-router.service"):
        assert "EnvironmentFile=-/etc/tilert/native-key.env" in (out / unit).read_text()


def test_its_firewall_lets_routers_in_and_clients_not(tmp_path: Path) -> None:
    play = [rendering("base_host", "native", ["firewall.nft"])]
    hosts = {**POOL, "observability": {"m1": {"address": "10.0.0.8"}}}
    out = render(tmp_path, GPU | {"base_host_firewall_admin_addresses": []}, hosts, play)
    text = (out / "n1-firewall.nft").read_text()
    (line,) = [x for x in text.splitlines() if "native vLLM" in x and "ip saddr" in x]
    assert "dport { 8100, 8200 }" in line
    assert all(address in line for address in ("10.0.0.4", "10.0.0.8"))
    assert "10.0.0.1," not in line
    checked = subprocess.run(
        ["nft", "--check", "--file", out / "n1-firewall.nft"], capture_output=True, text=True
    )
    assert checked.returncode == 0 or "Operation not permitted" in checked.stderr, checked.stderr

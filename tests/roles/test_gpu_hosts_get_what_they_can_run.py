"""GPU hosts: what the roles compute from the GPUs they find, and the hosts that they refuse, in words."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from roles.gpu_driver.hosts import capabilities, smi
from roles.playbook import ROOT, needs_ansible, run_playbook, write_inventory

pytestmark = needs_ansible

spec = importlib.util.spec_from_file_location("rdma_trees", ROOT / "tests/roles/rdma/sysfs.py")
assert spec
assert spec.loader
trees = importlib.util.module_from_spec(spec)
spec.loader.exec_module(trees)

B200, H200 = ("NVIDIA B200", 183359, "10.0"), ("NVIDIA H200", 143771, "9.0")
MIB = 1 << 20


def nvidia_smi(folder: Path, gpus: list[tuple[str, int, str]], name: str = "nvidia-smi") -> Path:
    """A command that answers as nvidia-smi does for these GPUs: (name, MiB, compute capability)."""
    changes = {
        i: {"product_name": model, "fb_memory_usage/total": f"{mib} MiB"}
        for i, (model, mib, _) in enumerate(gpus)
    }
    command = folder / f"smi-{name}"
    xml, query = folder / f"smi-{name}.xml", folder / f"smi-{name}.csv"
    xml.write_text(smi(count=len(gpus), changes=changes))
    query.write_text(capabilities(xml.read_text(), gpus[0][2] if gpus else ""))
    command.write_text(f'#!/bin/sh\ncase "$*" in *--query-gpu=*) cat {query} ;; *) cat {xml} ;; esac\n')
    command.chmod(0o755)
    return command


class Site:
    """One prefill and one decode host, both this machine, with GPUs and a fabric made of files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "out"
        self.out.mkdir()
        (folder / "etc").mkdir()
        self.host = trees.b200_roce(folder)
        self.hosts: dict[str, Any] = {}
        self.weights = folder / "weights"
        self.weights.mkdir()
        (self.weights / "config.json").write_text("{}")
        for number in range(8):
            with (self.weights / f"model_dev_{number}").open("wb") as shard:
                shard.truncate(90 << 30)  # sparse

    def play(
        self,
        tasks: list[dict[str, Any]],
        roles: list[Any],
        *arguments: str,
        handlers: list[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Run roles and tasks on both hosts; the output. `rc` has the exit status."""
        given = {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            "tilert_config_dir": str(self.folder / "etc"),
            "tilert_model_dir": str(self.weights),
            "tilert_decode_weights_dir": str(self.weights),
            "tilert_decode_engine": "tilert",
            "tilert_decode_python": sys.executable,
            "tilert_secret": "s" * 40,
            "tilert_prefill_key": "k" * 40,
            "gpus": 8,
            "rdma_sysfs_root": str(self.host.sys),
            "rdma_proc_root": str(self.host.proc),
            "rdma_dev_root": str(self.host.dev),
            "vllm_prefill_device": "cuda",
            "out": str(self.out),
        } | variables
        groups: dict[str, Any] = {
            "prefill": {"p1": {"address": "10.0.0.1", "fabric_address": "10.1.0.1"}},
            "decode": {"d1": {"address": "10.0.0.2", "fabric_address": "10.1.0.2"}},
            "router": {"g1": {"address": "10.0.0.3"}},
            "ingress": {},
            "native": {},
            "observability": {},
        } | self.hosts
        inventory = write_inventory(self.folder, groups, given, defaults=True)
        hosts = "prefill" if any("prefill" in json.dumps(role) for role in [*roles, tasks]) else "decode"
        play = {"hosts": hosts, "gather_facts": False, "roles": roles, "post_tasks": tasks}
        play["handlers"] = handlers or []
        (self.folder / "play.yml").write_text(json.dumps([play]))
        done = run_playbook(self.folder / "play.yml", inventory, *arguments)
        self.rc = done.returncode
        return " ".join((done.stdout + done.stderr).split())

    def unit(self, role: str, template: str, **variables: Any) -> Path:
        """A template of `role`, rendered after role rdma and the role's look at the GPUs have run."""
        tasks = [
            {
                "ansible.builtin.template": {
                    "src": f"{ROOT}/roles/{role}/templates/{template}.j2",
                    "dest": f"{self.out}/{{{{ inventory_hostname }}}}-{template}",
                    "mode": "0600",
                }
            }
        ]
        gpus = [
            {
                "gpu_facts": {"nvidia_smi": f"{{{{ {role}_nvidia_smi }}}}", "health": False},
                "register": f"{role}_gpu",
            },
            *tasks,
        ]
        host = "p1" if role == "vllm_prefill" else "d1"
        out = self.play(gpus, ["rdma", {"role": role, "when": False}], **variables)
        assert self.rc == 0, out
        return self.out / f"{host}-{template}"

    def preflight(self, role: str, *arguments: str, **variables: Any) -> str:
        """Run the role's preflight alone."""
        task = {"ansible.builtin.include_role": {"name": role, "tasks_from": "preflight"}}
        return self.play([task], [], *arguments, **variables)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def argv(unit: Path) -> list[str]:
    (line,) = re.findall(r"^ExecStart=(.*)$", unit.read_text(), re.M)
    return [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(line)]


def option(words: list[str], name: str) -> str:
    assert words.count(name) == 1, f"{name} in {words}"
    return words[words.index(name) + 1]


def extra(unit: Path) -> dict[str, Any]:
    config = json.loads(option(argv(unit), "--kv-transfer-config"))
    if config["kv_connector"] == "MultiConnector":
        config = config["kv_connector_extra_config"]["connectors"][-1]
    return dict(config["kv_connector_extra_config"])


def test_the_fabric_that_was_found_reaches_both_ends(site: Site) -> None:
    smi = str(nvidia_smi(site.folder, [B200] * 8))
    prefill = site.unit("vllm_prefill", "vllm-prefill.service", vllm_prefill_nvidia_smi=smi)
    decode = site.unit("tilert_decode", "tilert-decode.service", tilert_decode_nvidia_smi=smi)
    devices = extra(prefill)["tilert_rdma_devices"]
    # The sending GPU's own NIC first, and none that is not of the fabric.
    assert devices[0] == "mlx5_11"
    assert set(devices) == {f"mlx5_{i}" for i in range(4, 12)}
    assert option(argv(decode), "--rdma-devices").split(",") == devices
    assert option(argv(decode), "--device") == "cuda:0"
    for unit in (prefill, decode):
        files = re.findall(r"^EnvironmentFile=(.*)$", unit.read_text(), re.M)
        # Optional: without a fabric there is no such file. Last of the open ones, so what was found wins.
        assert f"-{site.folder}/etc/rdma.env" in files
        assert "LimitMEMLOCK=infinity" in unit.read_text().splitlines()
        assert "PrivateDevices=yes" not in unit.read_text().splitlines()
    environment = dict(
        word.split("=", 1)
        for line in (site.folder / "etc/rdma.env").read_text().splitlines()
        for word in shlex.split(line, comments=True)
    )
    assert environment["UCX_NET_DEVICES"].split(",") == [f"{name}:1" for name in devices]


def test_without_rdma_no_device_is_named(site: Site) -> None:
    smi = str(nvidia_smi(site.folder, [B200] * 8))
    unit = site.unit(
        "vllm_prefill",
        "vllm-prefill.service",
        vllm_prefill_nvidia_smi=smi,
        tilert_transport="mooncake",
        tilert_protocol="tcp",
    )
    assert "tilert_rdma_devices" not in extra(unit)
    assert not (site.folder / "etc/rdma.env").exists()


def test_vllm_leaves_room_for_what_is_staged(site: Site) -> None:
    cases = {
        "p1": (B200, 131072, 0.86, 16),
        "p2": (H200, 131072, 0.82, 16),
        "p3": (B200, 202752, 0.82, 24),
    }
    site.hosts["prefill"] = {
        host: {
            "vllm_prefill_nvidia_smi": str(nvidia_smi(site.folder, [gpu] * 8, host)),
            "vllm_prefill_max_model_len": length,
        }
        for host, (gpu, length, _, _) in cases.items()
    }
    unit = site.unit("vllm_prefill", "vllm-prefill.service")
    for host, (gpu, length, share, staging_gib) in cases.items():
        words = argv(unit.with_name(f"{host}-vllm-prefill.service"))
        assert float(option(words, "--gpu-memory-utilization")) == share, host
        staging = extra(unit.with_name(f"{host}-vllm-prefill.service"))["tilert_staging_bytes"]
        assert staging == staging_gib << 30
        # Two whole prompts fit, and with vLLM's share and the reserve the GPU is not overbooked.
        assert staging >= 2 * 62_252 * length
        assert share * gpu[1] * MIB + staging + (8 << 30) <= gpu[1] * MIB
        assert option(words, "--tensor-parallel-size") == "8"
        assert option(words, "--block-size") == "64"
        assert option(words, "--kv-cache-dtype") == "fp8_ds_mla"
        assert "--enforce-eager" in words
        speculative = json.loads(option(words, "--speculative-config"))
        assert speculative == {"method": "mtp", "num_speculative_tokens": 1}
        assert not any("k" * 40 in word for word in words)


def test_one_template_serves_tilert_alone_and_a_native_pool_around_it(site: Site) -> None:
    smi = str(nvidia_smi(site.folder, [B200] * 8))

    def config(**changes: str) -> dict[str, Any]:
        unit = site.unit("vllm_prefill", "vllm-prefill.service", vllm_prefill_nvidia_smi=smi, **changes)
        return dict(json.loads(option(argv(unit), "--kv-transfer-config")))

    alone = config()
    site.hosts["native"] = {"n1": {"address": "10.0.0.9"}}
    # A native pool that prefills for itself needs nothing from these hosts.
    assert config(tilert_native_mode="aggregated") == alone
    both = config(tilert_native_mode="decode")
    assert both["kv_connector"] == "MultiConnector"
    nixl, ours = both["kv_connector_extra_config"]["connectors"]
    assert ours == alone
    assert nixl == {"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_buffer_device": "cuda"}
    assert {alone["kv_role"], both["kv_role"]} == {"kv_producer"}


def test_the_stock_server_is_started_on_its_real_engine_with_every_length_said(site: Site) -> None:
    smi = str(nvidia_smi(site.folder, [B200] * 8))
    unit = site.unit(
        "tilert_decode", "tilert-decode.service", tilert_decode_nvidia_smi=smi, tilert_decode_server="stock"
    )
    words = argv(unit)
    assert words[1:3] == ["-m", "tilert.pd_vllm.decode_server"]
    assert option(words, "--engine") == "tilert"
    assert option(words, "--max-seq-len") == "131072"
    assert option(words, "--kv-cache-dtype") == "fp8_ds_mla"
    assert "--with-mtp" in words
    known = {
        "--engine",
        "--model",
        "--max-seq-len",
        "--ctrl-port",
        "--http-port",
        "--model-weights-dir",
        "--with-mtp",
    }
    assert {w for w in words if w.startswith("--")} == known | {"--transport", "--kv-cache-dtype"}
    assert "Type=exec" in unit.read_text().splitlines()
    assert "ExecStartPost=" in unit.read_text()


def test_a_decode_host_that_cannot_run_the_engine_is_refused_with_the_remedy(site: Site) -> None:
    python = site.folder / "python3.12"
    python.write_text("#!/bin/sh\necho 3.12\n")
    python.chmod(0o755)
    good = [B200] * 8
    cases: dict[str, tuple[list[tuple[str, int, str]], dict[str, Any], str]] = {
        "d1": (good, {}, ""),
        "hopper": (
            [H200] * 8,
            {},
            "hopper has 8 GPUs (NVIDIA H200; compute capability 9.0). Engine tilert is compiled for exactly 8 GPUs",
        ),
        "half": ([B200] * 4, {}, "half has 4 GPUs (NVIDIA B200; compute capability 10.0)"),
        "none": ([], {}, "none has 0 GPUs"),
        "old": (
            good,
            {"tilert_decode_python": "/bin/false"},
            "/bin/false on old is not there, and TileRT's wheel is for CPython 3.12",
        ),
        "long": (
            good,
            {"tilert_decode_max_seq_len": 400000},
            "long: 2 receive slots of 400000 tokens take 47,495 MiB",
        ),
        "tcp": (
            good,
            {"tilert_protocol": "tcp", "tilert_decode_server": "stock"},
            "tilert_decode_server: stock takes",
        ),
        "mla": (good, {"tilert_profile": "mla"}, "tilert_decode_engine: tilert does not decode profile mla"),
    }
    site.hosts["decode"] = {
        host: {
            "tilert_decode_python": str(python),
            "tilert_decode_nvidia_smi": str(nvidia_smi(site.folder, gpus, host)),
        }
        | changed
        for host, (gpus, changed, _) in cases.items()
    }
    out = site.preflight("tilert_decode")
    assert site.rc != 0
    for host, (_, _, words) in cases.items():
        assert words in out
        assert bool(re.search(rf"\[{host}\]: FAILED!", out)) == bool(words), host


def test_a_prefill_host_without_room_or_gpus_is_refused(site: Site) -> None:
    smis = {
        "p1": str(nvidia_smi(site.folder, [("NVIDIA L4", 23034, "8.9")] * 8, "p1")),
        "p2": str(nvidia_smi(site.folder, [B200] * 2, "p2")),
        "p3": "/nowhere/nvidia-smi",
    }
    site.hosts["prefill"] = {host: {"vllm_prefill_nvidia_smi": smi} for host, smi in smis.items()}
    out = site.preflight("vllm_prefill")
    assert site.rc != 0
    assert "vllm_prefill_staging_bytes: 16,384 MiB" in out
    assert "p2 has 2 GPUs, and vllm_prefill_tensor_parallel is 8" in out
    assert "there is no /nowhere/nvidia-smi on this host" in out
    site.hosts = {}
    # Check mode answers for a host that will have its driver later.
    site.preflight("vllm_prefill", "--check", vllm_prefill_nvidia_smi="/nowhere/nvidia-smi")
    assert site.rc == 0


def test_the_bytes_of_a_token_are_the_layouts_own() -> None:
    python = ROOT / ".venv/bin/python"
    if not python.exists():
        pytest.skip("the product's own environment is not here")
    script = """
import json
from vllm_tilert.profiles.base import get_profile
base = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "num_nextn_predict_layers": 1}
for profile, layers in (("glm5", 78), ("dsv32", 61)):
    for dtype in ("fp8_ds_mla", "bf16"):
        layout = get_profile(profile).layout_from_config(base | {"num_hidden_layers": layers}, dtype)
        print(json.dumps([profile, dtype, layout.segment_bytes(64) / 64]))
"""
    out = subprocess.run(
        [python, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "plugin")},
    ).stdout
    sys.path.insert(0, str(ROOT / "ansible/plugins/filter"))
    from tilert import STATE_BYTES

    assert {(p, d): n for p, d, n in map(json.loads, out.splitlines())} == STATE_BYTES


@pytest.mark.parametrize(
    ("role", "handler"),
    [("tilert_decode", "Restart the decode node"), ("vllm_prefill", "Restart vLLM prefill")],
)
def test_a_changed_fabric_restarts_what_uses_it(site: Site, role: str, handler: str) -> None:
    tasks = yaml.safe_load((ROOT / f"roles/{role}/tasks/service.yml").read_text())
    flush = next(i for i, task in enumerate(tasks) if "ansible.builtin.meta" in task)
    watched = json.loads(json.dumps(tasks[:flush]).replace('"owner": "root", "group": "root", ', ""))
    variable = f"{role}_venv"
    folder = site.folder / "etc"
    runs = []
    for text in ("MC_MTU=4096\n", "MC_MTU=4096\n", None):
        if text is None:
            (folder / "rdma.env").unlink()
        else:
            (folder / "rdma.env").write_text(text)
        handlers = [{"name": handler, "ansible.builtin.debug": {"msg": "it restarts"}}]
        variables = {
            variable: str(folder / "venv"),
            f"{role}_service": "no-such",
            "tilert_credentials_dir": str(folder),
        }
        out = site.play(watched, [], handlers=handlers, **variables)
        assert site.rc == 0, out
        runs.append("it restarts" in out)
    assert runs == [True, False, True]

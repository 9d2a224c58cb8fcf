"""gpu_facts on recorded output: a healthy host passes, and each fault is named with its GPU and its remedy."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from roles.gpu_driver.hosts import CUDA, DRIVER, KERNEL, KINDS, RECORDED, XID, write

ROOT = Path(__file__).resolve().parents[3]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_facts", ROOT / "ansible/plugins/modules/gpu_facts.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for their module
    spec.loader.exec_module(module)
    return module


facts = load()


def ask(folder: Path, question: dict[str, Any] | None = None, **host: Any) -> dict[str, Any]:
    parameters = {"cuda": CUDA, "gpus": 8, "fabric": True, "ignored_xids": [13, 31, 43, 45]}
    return facts.gather(parameters | write(folder, **host) | (question or {}))


def codes(found: dict[str, Any]) -> list[str]:
    return [problem["code"] for problem in found["problems"]]


@pytest.mark.parametrize("kind", ["healthy", "program"])
def test_a_healthy_host_has_no_problem(tmp_path: Path, kind: str) -> None:
    found = ask(tmp_path, **KINDS[kind])
    assert found["problems"] == []
    assert found["reboot"] == []
    assert found["loaded"] == found["library"] == found["fabric_manager"] == DRIVER
    assert found["open_module"]
    assert len(found["gpus"]) == 8
    assert {card["name"] for card in found["gpus"]} == {"NVIDIA B200"}
    assert [card["index"] for card in found["gpus"]] == list(range(8))
    assert {card["memory_bytes"] for card in found["gpus"]} == {143771 << 20}  # as recorded
    assert {card["compute_capability"] for card in found["gpus"]} == {"10.0"}


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [
        ("mismatch", "mismatch", "version mismatch"),
        ("manager", "manager_version", f"595.58.03 and the driver is {DRIVER}"),
        ("fabric", "fabric", "GPU 3 (00000000:4B:00.0): fabric state is In Progress"),
        ("xid", "xid", "Xid 79"),
        ("old", "cuda", "driver 580.159.04 runs CUDA up to 13.0, and 13.2 is needed"),
    ],
)
def test_each_fault_is_named(tmp_path: Path, kind: str, code: str, words: str) -> None:
    found = ask(tmp_path, **KINDS[kind])
    problems = [problem for problem in found["problems"] if problem["code"] == code]
    assert problems, found["problems"]
    assert words in problems[0]["message"]
    assert problems[0]["remedy"]


def test_only_one_fault_is_named_where_there_is_one(tmp_path: Path) -> None:
    for kind in ("fabric", "xid", "old"):
        folder = tmp_path / kind
        assert len(codes(ask(folder, **KINDS[kind]))) == 1, kind


@pytest.mark.parametrize("kind", ["mismatch", "upgraded"])
def test_a_driver_that_is_installed_and_not_loaded_asks_for_a_reboot(tmp_path: Path, kind: str) -> None:
    found = ask(tmp_path, **KINDS[kind])
    assert any("595.58.03 is installed and 595.45.04 is loaded" in reason for reason in found["reboot"])


@pytest.mark.parametrize(
    ("element", "text", "code"),
    [
        ("persistence_mode", "Disabled", "persistence"),
        ("ecc_mode/current_ecc", "Disabled", "ecc_off"),
        ("ecc_errors/volatile/dram_uncorrectable", "2", "ecc"),
        ("ecc_errors/volatile/sram_uncorrectable_parity", "1", "ecc"),
        ("remapped_rows/remapped_row_failure", "Yes", "remap"),
        ("mig_mode/current_mig", "Enabled", "mig"),
        ("gpu_recovery_action", "Drain and Reset", "recovery"),
        ("fabric/status", "Insufficient Resources", "fabric"),
    ],
)
def test_each_gpu_is_looked_at(tmp_path: Path, element: str, text: str, code: str) -> None:
    found = ask(tmp_path, changes={7: {element: text}})
    assert codes(found) == [code]
    assert "GPU 7 " in found["problems"][0]["message"]


def test_corrected_memory_errors_and_aggregates_of_the_past_are_no_fault(tmp_path: Path) -> None:
    changes = {
        0: {
            "ecc_errors/volatile/dram_correctable": "12",
            "ecc_errors/aggregate/dram_uncorrectable": "3",
            "remapped_rows/remapped_row_unc": "1",
        }
    }
    assert codes(ask(tmp_path, changes=changes)) == []


def test_rows_that_wait_for_a_reset_ask_for_a_reboot(tmp_path: Path) -> None:
    found = ask(tmp_path, changes={2: {"remapped_rows/remapped_row_pending": "Yes"}})
    assert found["reboot"] == ["GPU 2 (00000000:3B:00.0) has memory rows to set aside"]


def test_a_gpu_that_is_missing_is_missed(tmp_path: Path) -> None:
    found = ask(tmp_path, count=7)
    assert codes(found) == ["count"]
    assert "7 GPUs, and the inventory says 8" in found["problems"][0]["message"]


def test_a_new_kernel_without_modules_is_found_before_the_boot_that_would_choose_it(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "lib/modules/6.8.0-49-generic").mkdir(parents=True)
    assert codes(ask(tmp_path)) == []  # modules without a kernel are left-overs
    (tmp_path / "boot/vmlinuz-6.8.0-49-generic").write_text("")
    found = ask(tmp_path)
    assert codes(found) == ["kernel"]
    assert "6.8.0-49-generic" in found["problems"][0]["message"]
    assert KERNEL not in found["problems"][0]["message"]


def test_a_host_without_a_driver_is_told_so(tmp_path: Path) -> None:
    missing = {"smi": ["/nonexistent/nvidia-smi"], "fabric_manager": ["/nonexistent/nv-fabricmanager"]}
    write(tmp_path)
    (tmp_path / "proc/driver/nvidia/version").unlink()
    found = ask(tmp_path, missing, loaded="")
    assert codes(found) == ["no_driver"]


def test_the_system_asking_for_a_reboot_is_heard(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/reboot-required").write_text("*** System restart required ***\n")
    (tmp_path / "run/reboot-required.pkgs").write_text("linux-image-6.8.0-49-generic\nlinux-base\n")
    found = ask(tmp_path)
    assert found["reboot"] == ["the system asks for one (linux-base linux-image-6.8.0-49-generic)"]


def test_an_xid_is_counted_once_a_gpu_and_number(tmp_path: Path) -> None:
    found = ask(tmp_path, log=XID.format(63, "Row Remapper") * 3 + XID.format(48, "DBE"))
    assert [(entry["xid"], entry["count"]) for entry in found["xids"]] == [(63, 3), (48, 1)]
    assert codes(found) == ["xid", "xid"]


def test_gpus_without_nvswitch_need_no_fabric_manager(tmp_path: Path) -> None:
    """As it was recorded: one H200 whose machine has no fabric."""
    (tmp_path / "as-it-was").write_text(RECORDED.read_text())
    question = {
        "smi": ["cat", str(tmp_path / "as-it-was")],
        "fabric_manager": ["/nonexistent/nv-fabricmanager"],
        "gpus": 1,
        "fabric": False,
        "cuda": "13.0",
    }
    found = ask(tmp_path, question)
    assert found["problems"] == []
    assert found["gpus"][0]["name"] == "NVIDIA H200"
    assert codes(ask(tmp_path, question | {"fabric": True})) == ["no_manager", "fabric"]

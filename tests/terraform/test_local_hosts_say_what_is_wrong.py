"""The local stack's scripts fail with what is wrong and what to do, and leave nothing that the state does not know."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import TERRAFORM

SCRIPTS = TERRAFORM / "stacks/local/scripts"
# A name no cluster has, and networks nothing else here uses.
NAME, SUBNET, OTHER_SUBNET = f"tilert-scripts-{os.getpid()}", "10.89.201.0/24", "10.89.202.0/24"

needs_podman = pytest.mark.skipif(
    not shutil.which("podman") or os.geteuid() != 0,
    reason="needs podman and root (bin/demo installs the one and asks for the other)",
)


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script of the stack with these variables added to ours."""
    command = [shutil.which("bash") or "bash", str(SCRIPTS / script), *arguments]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )


def podman(*arguments: str) -> str:
    """podman with the settings that the stack finds for this machine."""
    script = f'. "{SCRIPTS}/podman-env.sh"; podman "$@"'
    done = subprocess.run(["bash", "-c", script, "podman", *arguments], capture_output=True, text=True)
    return done.stdout


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image that holds one file, which no host can boot from."""
    folder = tmp_path_factory.mktemp("image")
    (folder / "empty").touch()
    with tarfile.open(folder / "image.tar", "w") as tar:
        tar.add(folder / "empty", "empty")
    name = f"localhost/{NAME}:test"
    podman("import", str(folder / "image.tar"), name)
    yield name
    podman("image", "rm", "--force", name)


@pytest.fixture(scope="module")
def network() -> Iterator[str]:
    made = run("network.sh", ACTION="create", NETWORK=NAME, SUBNET=SUBNET)
    assert made.returncode == 0, made.stderr
    yield NAME
    gone = run("network.sh", ACTION="destroy", NETWORK=NAME)
    assert gone.returncode == 0, gone.stderr
    assert NAME not in podman("network", "ls", "--format", "{{.Name}}").split()


def test_without_podman_the_remedy_is_named(tmp_path: Path) -> None:
    for tool in ("dirname", "awk", "stat", "cat", "mkdir", "mv"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    made = run("network.sh", PATH=str(tmp_path), ACTION="create", NETWORK=NAME, SUBNET=SUBNET)
    assert made.returncode == 1
    assert "podman is not installed. Remedy: run bin/demo" in made.stderr
    # What is not there cannot hold a host: destroying goes through.
    assert run("network.sh", PATH=str(tmp_path), ACTION="destroy", NETWORK=NAME).returncode == 0
    assert run("host.sh", PATH=str(tmp_path), ACTION="destroy", HOST=NAME).returncode == 0


@pytest.mark.parametrize("script", ["network.sh", "host.sh"])
def test_an_unknown_action_is_refused(script: str) -> None:
    done = run(script, ACTION="restart", NETWORK=NAME, HOST=NAME)
    assert done.returncode == 1
    assert "ACTION=restart: use create or destroy" in done.stderr


def test_an_unknown_argument_of_the_image_builder_is_refused() -> None:
    done = run("build-image.sh", "--fast")
    assert done.returncode == 1
    assert "unknown argument '--fast'" in done.stderr


def test_a_tree_without_the_hosts_packages_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "var/lib/dpkg").mkdir(parents=True)
    (tmp_path / "var/lib/dpkg/status").write_text("Package: systemd\nPackage: python3\n")
    done = run("build-image.sh", "--rootfs", str(tmp_path))
    assert done.returncode == 1
    assert "lacks " in done.stderr
    assert "nginx-light" in done.stderr
    assert "debootstrap it with --include=" in done.stderr


@needs_podman
def test_a_network_with_another_subnet_is_not_taken_over(network: str) -> None:
    again = run("network.sh", ACTION="create", NETWORK=network, SUBNET=SUBNET)
    assert again.returncode == 0, again.stderr
    other = run("network.sh", ACTION="create", NETWORK=network, SUBNET=OTHER_SUBNET)
    assert other.returncode == 1
    assert f"network '{network}' exists with subnet {SUBNET}, not {OTHER_SUBNET}" in other.stderr
    assert "bin/demo --destroy, or give the stack another name" in other.stderr


@needs_podman
def test_a_subnet_in_use_is_named(network: str) -> None:
    done = run("network.sh", ACTION="create", NETWORK=f"{network}-2", SUBNET=SUBNET)
    assert done.returncode == 1
    assert f"cannot create network '{network}-2' ({SUBNET})" in done.stderr
    assert "set the variable subnet to a free private one" in done.stderr


def host(image: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Try to boot a host from the image."""
    given = {
        "HOST": NAME,
        "NETWORK": NAME,
        "ADDRESS": "10.89.201.9",
        "IMAGE": image,
        "WHEELHOUSE": "/",
        "MODELS": "/",
        "SHM_SIZE": "64m",
        "CPU_SHARES": "1024",
    }
    return run("host.sh", **{**given, "ACTION": "create", **environment})


@needs_podman
def test_a_missing_image_is_named_with_the_remedy() -> None:
    done = host("localhost/none:1")
    assert done.returncode == 1
    assert "image 'localhost/none:1' is missing. Remedy: run bin/demo, or" in done.stderr


@needs_podman
def test_a_missing_folder_is_named_with_the_remedy(image: str) -> None:
    done = host(image, WHEELHOUSE="/nowhere/wheels")
    assert done.returncode == 1
    assert "folder '/nowhere/wheels' is missing. Remedy: run bin/demo, or set" in done.stderr


@needs_podman
def test_a_host_that_cannot_start_leaves_no_container(image: str, network: str) -> None:
    done = host(image)
    assert done.returncode == 1
    assert f"cannot start host '{NAME}'" in done.stderr
    assert NAME not in podman("ps", "--all", "--format", "{{.Names}}").split()


@needs_podman
def test_a_host_that_was_removed_by_hand_is_named_with_the_way_back() -> None:
    done = run("start.sh", NAME)
    assert done.returncode == 1
    assert f"no such host: {NAME}. Remedy: terraform apply -replace='terraform_data.host" in done.stderr

"""Checkov finds nothing in terraform/ that is not explained beside the resource it concerns."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import REPOSITORY, TERRAFORM

LOCK = REPOSITORY / "requirements" / "checkov.txt"


@pytest.fixture(scope="session")
def checkov() -> Path:
    """The command, in an environment of its own: checkov pins what Ansible needs otherwise."""
    place, wanted = REPOSITORY / ".venv-checkov", hashlib.sha256(LOCK.read_bytes()).hexdigest()
    stamp = place / "lock.sha256"
    if not stamp.is_file() or stamp.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
        subprocess.run(
            [str(place / "bin" / "pip"), "install", "--quiet", "--no-deps", "-r", str(LOCK)], check=True
        )
        stamp.write_text(wanted)
    return place / "bin" / "checkov"


def test_nothing_is_found(checkov: Path) -> None:
    command = [
        str(checkov),
        "-d",
        str(TERRAFORM),
        "--framework",
        "terraform",
        "--compact",
        "--quiet",
        "--skip-download",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    for path in sorted(TERRAFORM.glob("modules/*/*.tf")):
        for line in re.findall("checkov:skip.*", path.read_text()):
            assert re.fullmatch(r"checkov:skip=CKV2?_[A-Z]+_[0-9]+:.{10,}", line), (
                f"{path}: give a reason: {line}"
            )

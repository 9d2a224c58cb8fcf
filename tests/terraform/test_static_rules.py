"""Checkov finds nothing in terraform/ that is not explained beside the resource it concerns."""

from __future__ import annotations

import re
import subprocess

from .conftest import REPOSITORY, TERRAFORM

CHECKOV = REPOSITORY / ".venv-checkov/bin/checkov"


def test_nothing_is_found() -> None:
    assert CHECKOV.exists(), (
        f"{CHECKOV} is missing: bin/test terraform installs it, from requirements/checkov.txt"
    )
    command = [
        str(CHECKOV),
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

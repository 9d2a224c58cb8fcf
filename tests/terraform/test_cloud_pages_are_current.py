"""The generated tables and diagrams of docs/clouds/ say what terraform/ says."""

from __future__ import annotations

import subprocess
import sys

from .conftest import REPOSITORY


def test_generated_parts_are_current() -> None:
    script = REPOSITORY / "terraform" / "write_docs.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

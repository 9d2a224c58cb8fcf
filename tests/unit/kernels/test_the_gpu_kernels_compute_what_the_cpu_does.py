"""Gather, convert and checksum kernels in Triton's interpreter against the code the CPU runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_in_tritons_interpreter() -> None:
    """In a process of its own: the interpreter is switched on when Triton is imported."""
    pytest.importorskip("triton")
    script = Path(__file__).with_name("interpreted.py")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-2000:]
    assert "WRONG" not in ran.stdout
    assert ran.stdout.count("right") == 57

"""The published TileRT wheel, unpacked for the tests; nothing of it is kept in the repository."""

from __future__ import annotations

import logging
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

VERSION = "0.1.5.post3"
CACHE = Path(__file__).parents[2] / ".cache" / f"tilert-{VERSION}"


@pytest.fixture(scope="session")
def stock_path() -> Path:
    """Folder with the stock package. Skips when the wheel cannot be had."""
    if not (CACHE / "done").exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--python-version", "3.12"]
        command += ["--platform", "manylinux_2_28_x86_64", "--only-binary=:all:", "-d", str(CACHE)]
        fetched = subprocess.run([*command, f"tilert=={VERSION}"], capture_output=True, text=True)
        if fetched.returncode:
            pytest.skip(f"the TileRT wheel cannot be fetched: {fetched.stderr.strip()[-300:]}")
        with zipfile.ZipFile(next(CACHE.glob("*.whl"))) as wheel:
            wheel.extractall(CACHE)
        (CACHE / "done").touch()
    return CACHE


@pytest.fixture
def stock(stock_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`tilert.pd_vllm.profiles.base`, usable on the CPU."""
    monkeypatch.syspath_prepend(str(stock_path))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: None)
    level = logging.getLogger().level
    from tilert.pd_vllm.profiles import base

    logging.getLogger().setLevel(level)  # importing tilert turns everything to DEBUG
    return base

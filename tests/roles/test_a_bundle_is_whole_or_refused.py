"""bin/bundle --check: what was carried to a site is what was made, or is named."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A folder as bin/bundle leaves it."""
    folder = tmp_path / "bundle"
    for name in ("wheels/a-1.0-py3-none-any.whl", "debs/b_1.0_amd64.deb", "debs/Packages", "manifest.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name * 100)
    sums = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  ./{path.relative_to(folder)}\n"
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    ]
    (folder / "SHA256SUMS").write_text("".join(sums))
    return folder


def check(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([ROOT / "bin/bundle", *map(str, arguments)], capture_output=True, text=True)


def test_a_whole_bundle_passes(bundle: Path) -> None:
    done = check("--check", bundle)
    assert done.returncode == 0, done.stderr


def test_a_changed_a_missing_and_an_unfinished_one_are_refused(bundle: Path) -> None:
    wheel = bundle / "wheels/a-1.0-py3-none-any.whl"
    whole = wheel.read_text()
    wheel.write_text(whole[:-1])
    assert check("--check", bundle).returncode == 1
    assert wheel.name in check("--check", bundle).stdout + check("--check", bundle).stderr
    wheel.unlink()
    assert check("--check", bundle).returncode == 1
    wheel.write_text(whole)
    (bundle / "SHA256SUMS").unlink()
    assert "its making did not end" in check("--check", bundle).stderr


def test_unknown_locks_and_missing_folders_are_named(tmp_path: Path) -> None:
    assert "no requirements/nothing.txt" in check("--locks", "nothing", tmp_path / "out").stderr
    assert check().returncode == 2
    assert check("--what", tmp_path).returncode == 2

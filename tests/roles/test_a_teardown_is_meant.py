"""teardown.yml, run for real, stops before any host unless the pool is named, by its folder or a file in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLAYBOOK = Path(sys.executable).with_name("ansible-playbook")
pytestmark = pytest.mark.skipif(not PLAYBOOK.exists(), reason="ansible is not installed here")


@pytest.mark.parametrize("given", ["rack-7", "rack-7/hosts.yml"])
@pytest.mark.parametrize("meant", ["", "teardown=rack-8", "teardown=rack-7"])
def test_only_the_pools_own_name_means_it(tmp_path: Path, given: str, meant: str) -> None:
    (tmp_path / "rack-7").mkdir()
    (tmp_path / "rack-7/hosts.yml").write_text("all: {}\n")
    done = subprocess.run(
        [str(PLAYBOOK), "-i", str(tmp_path / given), "teardown.yml", *(["-e", meant] if meant else [])],
        cwd=ROOT / "ansible",
        env=os.environ | {"ANSIBLE_NOCOLOR": "1", "LC_ALL": "C.UTF-8"},
        capture_output=True,
        text=True,
    )
    said = " ".join(done.stdout.split())
    if meant == "teardown=rack-7":
        assert done.returncode == 0, said  # and there is no host
    else:
        assert done.returncode != 0
        assert "Say -e teardown=rack-7 to mean it" in said
        assert f"teardown = {meant.partition('=')[2] or '(not set)'}:" in said

"""teardown.yml, run for real, stops before any host unless the pool is named, by its folder or a file in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from roles.playbook import ROOT, needs_ansible, run_playbook

pytestmark = needs_ansible


@pytest.mark.parametrize("given", ["rack-7", "rack-7/hosts.yml"])
@pytest.mark.parametrize("meant", ["", "teardown=rack-8", "teardown=rack-7"])
def test_only_the_pools_own_name_means_it(tmp_path: Path, given: str, meant: str) -> None:
    (tmp_path / "rack-7").mkdir()
    (tmp_path / "rack-7/hosts.yml").write_text("all: {}\n")
    arguments = ["-e", meant] if meant else []
    done = run_playbook(Path("teardown.yml"), tmp_path / given, *arguments, cwd=ROOT / "ansible", timeout=300)
    said = " ".join(done.stdout.split())
    if meant == "teardown=rack-7":
        assert done.returncode == 0, said  # and there is no host
    else:
        assert done.returncode != 0
        assert "Say -e teardown=rack-7 to mean it" in said
        assert f"teardown = {meant.partition('=')[2] or '(not set)'}:" in said

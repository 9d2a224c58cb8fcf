"""validate.yml compares a bundle with the hosts and the lock files that it is meant for, before anything is changed."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from roles.playbook import ROOT, needs_ansible
from roles.test_inventories_are_checked_before_any_host_is_touched import BASE, validate

pytestmark = needs_ansible

BOOKWORM = 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nVERSION_CODENAME=bookworm\nID=debian\n'
NOBLE = 'PRETTY_NAME="Ubuntu 24.04.1 LTS"\nVERSION_CODENAME=noble\nID=ubuntu\nID_LIKE=debian\n'
GPU = ("router", "prefill-cuda", "decode-tilert")


def sha256(lock: str) -> str:
    return hashlib.sha256((ROOT / f"requirements/{lock}.txt").read_bytes()).hexdigest()


def run(folder: Path, release: str, host: str, locks: dict[str, str], **site: Any) -> tuple[int, str]:
    """validate.yml for hosts with a bundle; exit status and what it said."""
    bundle = folder / "bundle"
    (bundle / "wheels").mkdir(parents=True)
    (bundle / "manifest.json").write_text(json.dumps({"release": release, "locks": locks}))
    (folder / "os-release").write_text(host)
    given = {
        "tilert_bundle": str(bundle),
        "tilert_wheelhouse": str(bundle / "wheels"),
        "tilert_os_release": str(folder / "os-release"),
    }
    done = validate(folder, BASE, given | site)
    return done.returncode, " ".join(done.stdout.split())


def test_the_hosts_own_release_and_lock_files_are_accepted(tmp_path: Path) -> None:
    code, said = run(tmp_path, "ubuntu noble", NOBLE, {lock: sha256(lock) for lock in GPU})
    assert code == 0, said
    assert "changed=0" in said


@pytest.mark.parametrize(
    ("release", "host", "locks", "site", "words"),
    [
        (
            "debian bookworm",
            NOBLE,
            {lock: sha256(lock) for lock in GPU},
            {},
            "was made for debian bookworm, and .* runs ubuntu noble. Nothing was changed. "
            "Make a bundle on a connected machine with ubuntu noble",
        ),
        (
            "debian bookworm",
            BOOKWORM,
            {lock: sha256(lock) for lock in GPU},
            {"pd_router_tool_parser": "glm47"},
            r"has no wheels of requirements/router-parsing.txt \(only of decode-tilert, prefill-cuda, router\). "
            "Make it anew from this checkout: bin/bundle --parsing DIR",
        ),
        (
            "debian bookworm",
            BOOKWORM,
            {lock: sha256(lock) for lock in GPU} | {"router": "0" * 64},
            {},
            "was made from another requirements/router.txt than this one",
        ),
    ],
    ids=["release", "no-parsing", "other-lock"],
)
def test_another_bundle_is_refused(
    tmp_path: Path, release: str, host: str, locks: dict[str, str], site: dict[str, Any], words: str
) -> None:
    code, said = run(tmp_path, release, host, locks, **site)
    assert code != 0
    assert re.search(words, said), said


def test_a_folder_that_is_no_bundle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    site = {"tilert_bundle": str(tmp_path), "tilert_wheelhouse": str(tmp_path / "wheels")}
    done = validate(tmp_path, BASE, site)
    assert done.returncode != 0
    assert "there is no manifest.json in it" in " ".join(done.stdout.split())


def test_every_lock_file_that_hosts_install_is_in_a_bundle() -> None:
    text = (ROOT / "bin/bundle").read_text()
    bundled = set(" ".join(re.findall(r"(?:locks|parsing)=\(([a-z -]+)\)", text)).split())
    sources = [ROOT / "ansible/validate.yml", *sorted(ROOT.glob("roles/*/defaults/main.yml"))]
    named = "".join(path.read_text() for path in sources)
    installed = {
        path.stem
        for path in (ROOT / "requirements").glob("*.txt")
        if path.stem not in ("test", "ops", "checkov", "overrides", "overrides-cuda")
    }
    assert {lock.split("-")[0] for lock in installed} <= set(re.findall(r"[a-z]+", named))
    assert installed == bundled

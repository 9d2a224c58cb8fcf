"""python_venv: a new product wheel costs seconds; a broken one leaves the old environment; else nothing happens."""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import yaml

from roles.playbook import ROOT, needs_ansible, run_playbook

pytestmark = needs_ansible


def wheel(folder: Path, name: str, version: str, source: str) -> None:
    """A real wheel of one module, `name`, that holds `source`."""
    folder.mkdir(exist_ok=True)
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    files = {
        f"{module}.py": source,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b'=').decode()},{len(text)}"
        for path, text in files.items()
    ]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""])
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


class Site:
    """One host, this one, with an environment, a lock and a wheelhouse in a folder of the test's."""

    def __init__(self, folder: Path) -> None:
        self.wheels, self.venv, self.lock = folder / "wheels", folder / "venv", folder / "some.txt"
        self.play, self.folder = folder / "play.yml", folder
        wheel(self.wheels, "packaged", "1.0", "value = 'packaged 1'\n")
        wheel(self.wheels, "packaged", "2.0", "value = 'packaged 2'\n")
        self.release("value = 1\n")
        self.lock.write_text("packaged==1.0\n")
        variables = {
            "python_venv_path": str(self.venv),
            "python_venv_lock": str(self.lock),
            "python_venv_python": sys.executable,
            "python_venv_imports": ["vllm_tilert", "packaged"],
            "tilert_wheelhouse": str(self.wheels),
            "tilert_index_url": "",
            "ansible_python_interpreter": sys.executable,
        }
        play = {
            "hosts": "localhost",
            "connection": "local",
            "gather_facts": False,
            "become": False,
            "vars": variables,
            "roles": ["python_venv"],
        }
        self.play.write_text(yaml.safe_dump([play]))

    def release(self, source: str) -> None:
        wheel(self.wheels, "vllm-tilert", "0.1.0", source)

    def run(self) -> tuple[int, int, str]:
        """Exit status, changed tasks and output of the role."""
        done = run_playbook(
            self.play,
            "localhost,",
            environment={"ANSIBLE_ROLES_PATH": str(ROOT / "roles")},
            cwd=ROOT / "ansible",
            timeout=300,
        )
        changed = re.search(r"changed=(\d+)", done.stdout)
        return done.returncode, int(changed[1]) if changed else -1, done.stdout + done.stderr

    def value(self, module: str, venv: Path | None = None) -> str:
        """`module.value` as the environment's own Python reads it."""
        python = (venv or self.venv) / "bin/python"
        code = f"import {module}; print({module}.value)"
        return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_an_environment_through_its_life(tmp_path: Path) -> None:
    site = Site(tmp_path)

    rc, changed, out = site.run()
    assert rc == 0, out
    assert changed > 0
    assert (site.value("packaged"), site.value("vllm_tilert")) == ("packaged 1", "1")

    rc, changed, out = site.run()
    assert (rc, changed) == (0, 0), out

    # A new product wheel: the packages stay, untouched; the former environment waits beside it, as it was.
    packaged = next(site.venv.glob("lib/*/site-packages/packaged.py")).stat()
    site.release("value = 2\n")
    rc, changed, out = site.run()
    assert rc == 0, out
    assert site.value("vllm_tilert") == "2"
    assert next(site.venv.glob("lib/*/site-packages/packaged.py")).stat().st_ino == packaged.st_ino
    old = next(site.venv.with_name("venv.old").glob("lib/*/site-packages/vllm_tilert.py"))
    assert old.read_text() == "value = 1\n"
    assert site.run()[:2] == (0, 0)

    # A product wheel that does not import: refused, and the one before is what runs.
    site.release("raise ImportError('half a release')\n")
    rc, _, out = site.run()
    assert rc != 0
    assert "half a release" in out
    assert "the former environment is back in its place" in " ".join(out.split())
    assert site.value("vllm_tilert") == "2"

    # New packages: made anew.
    site.release("value = 3\n")
    site.lock.write_text("packaged==2.0\n")
    rc, _, out = site.run()
    assert rc == 0, out
    assert (site.value("packaged"), site.value("vllm_tilert")) == ("packaged 2", "3")

    # Packages that cannot be had: refused before anything is lost.
    site.lock.write_text("packaged==3.0\n")
    rc, _, out = site.run()
    assert rc != 0
    assert (site.value("packaged"), site.value("vllm_tilert")) == ("packaged 2", "3")

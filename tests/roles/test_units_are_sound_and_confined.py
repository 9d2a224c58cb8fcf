"""systemd's own judgement of every unit: nothing it would ignore or refuse, and an exposure below a bound."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from roles.playbook import needs_ansible

ANALYZE = shutil.which("systemd-analyze")
pytestmark = [
    needs_ansible,
    pytest.mark.skipif(not ANALYZE, reason="systemd-analyze is not installed here"),
]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_units", Path(__file__).with_name(f"{name}.py"))
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


units = load("test_units_say_what_was_meant")

# systemd-analyze security's exposure: 0 is the best, 10 an unconfined service. Vendors' daemons are mostly at 8 to 9.6.
# What is left is needed: prefill and decode reach GPUs and NICs (no PrivateDevices), and make code at run time (no
# MemoryDenyWriteExecute); every service talks IP to peers that the firewall, not the unit, decides on.
BOUNDS = {
    ("local", "p1-vllm-prefill.service"): 1.7,
    ("local", "d1-tilert-decode.service"): 1.7,
    ("local", "g1-tilert-router.service"): 1.4,
    ("gpu", "p1-vllm-prefill.service"): 2.0,
    ("gpu", "d1-tilert-decode.service"): 2.0,
    ("gpu", "g1-tilert-router.service"): 1.4,
}


@pytest.fixture(scope="module", params=["local", "gpu"])
def rendered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    site = {"local": units.LOCAL, "gpu": units.GPU}[request.param]
    return request.param, units.render(tmp_path_factory.mktemp(request.param), site)


def services(kind: str, out: Path) -> list[Path]:
    return [out / name for where, name in BOUNDS if where == kind]


def test_systemd_takes_every_line_of_every_unit(rendered: tuple[str, Path], tmp_path: Path) -> None:
    kind, out = rendered
    folder = tmp_path / "etc/systemd/system"
    folder.mkdir(parents=True)
    for file in services(kind, out):
        unit = folder / file.name.split("-", 1)[1]
        shutil.copy(file, unit)
        # What it starts is not installed here; anything executable there will do.
        for line in re.findall(r"^Exec\w+=-?(\S+)", file.read_text(), re.M):
            program = tmp_path / line.strip('"').lstrip("/")
            program.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy("/bin/true", program)
    for name in (
        "network-online.target",
        "multi-user.target",
        "sysinit.target",
        "basic.target",
        "shutdown.target",
    ):
        (folder / name).write_text("[Unit]\nDescription=stand-in\n")
    (tmp_path / "etc/passwd").write_text("root:x:0:0::/:/bin/sh\ntilert:x:990:990::/:/bin/sh\n")
    (tmp_path / "etc/group").write_text("root:x:0:\ntilert:x:990:\n")
    names = [file.name.split("-", 1)[1] for file in services(kind, out)]
    done = subprocess.run(
        [str(ANALYZE), "verify", f"--root={tmp_path}", "--man=no", "--recursive-errors=no", *names],
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_a_line_that_systemd_would_ignore_is_noticed(tmp_path: Path) -> None:
    unit = tmp_path / "broken.service"
    unit.write_text("[Service]\nExecStart=/bin/true\nProtectHomes=yes\n")
    done = subprocess.run([str(ANALYZE), "verify", "--man=no", str(unit)], capture_output=True, text=True)
    assert "ProtectHomes" in done.stderr


def test_every_unit_is_confined(rendered: tuple[str, Path]) -> None:
    kind, out = rendered
    for file in services(kind, out):
        text = subprocess.run(
            [str(ANALYZE), "security", "--offline=yes", "--no-pager", file], capture_output=True, text=True
        ).stdout
        score = re.search(r"Overall exposure level for .*: ([\d.]+)", text)
        assert score, text
        print(f"{kind} {file.name}: exposure {score[1]}")
        assert float(score[1]) <= BOUNDS[kind, file.name], text

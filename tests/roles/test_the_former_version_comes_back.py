"""files/version.sh: what a service ran with is kept through an upgrade, and changes places with what it runs with."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "ansible/files/version.sh"


class Service:
    """An environment with its stamp, a unit and an optional file, as version.sh sees them."""

    def __init__(self, folder: Path) -> None:
        self.venv, self.kept = folder / "decode", folder / "decode.version"
        self.unit, self.fabric = folder / "decode.service", folder / "rdma.env"
        self.make(self.venv, "1")
        self.unit.write_text("unit 1")

    @staticmethod
    def make(venv: Path, version: str) -> None:
        venv.mkdir()
        (venv / ".stamp").write_text(version)
        (venv / "program").write_text(version)

    def __call__(self, action: str) -> str:
        command = ["sh", SCRIPT, action, self.venv, self.kept, self.unit, self.fabric]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def upgrade(self, version: str) -> None:
        """What the roles do: the former environment stays at .old."""
        old = self.venv.with_name("decode.old")
        if old.exists():
            for file in old.iterdir():
                file.unlink()
            old.rmdir()
        self.venv.rename(old)
        self.make(self.venv, version)
        self.unit.write_text(f"unit {version}")
        self.fabric.write_text(f"fabric {version}")

    def runs(self) -> tuple[str, str, bool]:
        return (self.venv / "program").read_text(), self.unit.read_text(), self.fabric.exists()


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path)


def test_an_upgrade_that_fails_is_undone_whole(service: Service) -> None:
    service("keep")
    service.upgrade("2")
    assert service("undo") == "changed"
    assert service.runs() == ("1", "unit 1", False)
    assert not service.kept.exists()


def test_a_rollback_goes_back_and_a_second_one_forward_again(service: Service) -> None:
    service("keep")
    service.upgrade("2")
    assert service("settle") == ""
    assert service("swap") == "changed"
    assert service.runs() == ("1", "unit 1", False)
    assert service("swap") == "changed"
    assert service.runs() == ("2", "unit 2", True)


def test_an_upgrade_of_settings_alone_has_its_way_back_too(service: Service) -> None:
    service("keep")
    service.unit.write_text("unit 1, faster")
    service("settle")
    assert service("swap") == "changed"
    assert service.runs() == ("1", "unit 1", False)


def test_an_upgrade_that_changes_nothing_keeps_the_way_back_of_the_one_before(service: Service) -> None:
    service("keep")
    service.upgrade("2")
    service("settle")
    service("keep")
    service("settle")
    service("swap")
    assert service.runs() == ("1", "unit 1", False)


def test_nothing_is_restarted_for_an_upgrade_that_failed_before_it_changed_anything(service: Service) -> None:
    service("keep")
    assert service("undo") == ""


def test_an_upgrade_that_was_cut_off_still_has_its_way_back(service: Service) -> None:
    service("keep")
    service.upgrade("2")  # and here the operator's connection broke
    service("keep")
    assert service("undo") == "changed"
    assert service.runs() == ("1", "unit 1", False)


def test_a_copy_that_was_cut_off_is_not_taken_for_a_version(service: Service, tmp_path: Path) -> None:
    # The stamp is copied, and then the disk is full: the unit is not.
    part = service.kept.with_name("decode.version.new.part")
    failing = tmp_path / "bin"
    failing.mkdir()
    (failing / "cp").write_text('#!/bin/sh\ncase "$2" in *.service) exit 1 ;; esac\nexec /bin/cp "$@"\n')
    (failing / "cp").chmod(0o755)
    command = ["sh", SCRIPT, "keep", service.venv, service.kept, service.unit, service.fabric]
    done = subprocess.run(command, env={"PATH": f"{failing}:/usr/bin:/bin"}, capture_output=True)
    assert done.returncode != 0
    assert part.exists()
    service("keep")
    service.upgrade("2")
    assert service("undo") == "changed"
    assert service.runs() == ("1", "unit 1", False)


@pytest.mark.parametrize(
    ("action", "words"), [("swap", "no upgrade has left"), ("undo", "nothing was kept"), ("go", "usage")]
)
def test_what_cannot_be_done_is_said(service: Service, action: str, words: str) -> None:
    command = ["sh", SCRIPT, action, service.venv, service.kept, service.unit]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert words in done.stderr or action == "go"
    assert service.runs() == ("1", "unit 1", False)


def test_a_lost_environment_is_not_taken_for_the_former_one(service: Service) -> None:
    service("keep")
    service.upgrade("2")
    service("settle")
    (service.venv.with_name("decode.old") / ".stamp").write_text("something else")
    command = ["sh", SCRIPT, "swap", service.venv, service.kept, service.unit, service.fabric]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 4
    assert "is not the environment" in done.stderr
    assert service.runs() == ("2", "unit 2", True)

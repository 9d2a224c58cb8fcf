"""docs/operations.md: every playbook that it names is there, every alert and every refusal has its row."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/operations.md").read_text()


def test_every_playbook_named_is_there() -> None:
    named = set(re.findall(r"ansible-playbook (\S+\.yml)", TEXT)) | set(re.findall(r"`(\w+\.yml)", TEXT))
    assert len(named) >= 10
    assert {name for name in named if not (ROOT / "ansible" / name).exists()} == set()


def test_every_alert_has_an_action() -> None:
    groups = yaml.safe_load((ROOT / "roles/observability/files/alerts.yml").read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"]}
    assert {alert for alert in alerts if f"`{alert}`" not in TEXT} == set()


def test_severities_are_the_preflights_own() -> None:
    actions = yaml.safe_load((ROOT / "ansible/vars/preflight.yml").read_text())["preflight_actions"]
    for severity, row in actions.items():
        assert f"| {severity} | {'yes' if row['stops'] else 'no'} |" in TEXT


SOURCE = "".join(
    path.read_text() for top in ("plugin", "router") for path in sorted((ROOT / top).rglob("*.py"))
)


def test_every_metric_named_is_exported() -> None:
    named = set(
        re.findall(
            r"[`(](?:vllm:)?(tilert_(?:router|handoff)_\w+|tilert_decode_(?:slots|handoffs|phase)\w*)", TEXT
        )
    )
    assert len(named) >= 8
    assert {name for name in named if f'{name.removesuffix("_total")}"' not in SOURCE} == set()


def test_every_reason_of_a_failed_handoff_has_a_row() -> None:
    codes = set(re.findall(r'^[A-Z_]+: Final = "([a-z_]+)"$', _read("connector"), re.M))
    codes |= set(
        re.findall(r'^    [A-Z_]+ = "([a-z_]+)"$', _read("wire/api.py").split("class ErrorCode")[1], re.M)
    )
    assert len(codes) > 15
    rows = "".join(line.split("|")[1] for line in TEXT.splitlines() if line.startswith("| `"))
    assert {code for code in codes if f"`{code}`" not in rows} == set()


def _read(part: str) -> str:
    at = ROOT / "plugin/vllm_tilert" / part
    return at.read_text() if at.is_file() else "".join(path.read_text() for path in sorted(at.glob("*.py")))

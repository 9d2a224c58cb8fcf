"""Writes every role's README.md from its meta/argument_specs.yml, defaults and molecule scenarios.

usage: python roles/write_docs.py [--check]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROLES = Path(__file__).resolve().parent


def load(path: Path) -> Any:
    """A YAML file's content; an empty mapping where there is none."""
    return (yaml.safe_load(path.read_text()) if path.is_file() else None) or {}


def cell(text: Any) -> str:
    """Text on one line that ends no table cell early."""
    return " ".join(str(text).split()).replace("|", "\\|")


def default(option: dict[str, Any], name: str, defaults: dict[str, Any]) -> str:
    """What the option is when nobody sets it."""
    if name in defaults:
        value = defaults[name]
        return f"`{cell(value if isinstance(value, str) and value else json.dumps(value))}`"
    return "**required**" if option.get("required") else ""


def rows(options: dict[str, Any], defaults: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """A table row for each option, and one for each of its own options below it."""
    for name, option in options.items():
        kind = option.get("type", "str")
        if kind == "list" and "elements" in option:
            kind = f"list of {option['elements']}"
        text = option["description"]
        text = " ".join(text) if isinstance(text, list) else text
        if "choices" in option:
            text += " One of " + ", ".join(f"`{choice}`" for choice in option["choices"]) + "."
        shown = default(option, name, {} if prefix else defaults)
        yield f"| `{prefix}{name}` | {kind} | {cell(text)} | {shown} |"
        yield from rows(
            option.get("options", {}), {}, f"{prefix}{name}{'[]' if kind.startswith('list') else ''}."
        )


def heading(path: Path) -> str:
    """The comment that a file opens with, as one line."""
    words = []
    for line in path.read_text().splitlines():
        if not line.startswith("# "):
            break
        words.append(line[2:].strip())
    return " ".join(words)


def page(role: Path) -> str:
    """The role's README."""
    specs = load(role / "meta/argument_specs.yml")["argument_specs"]
    defaults = load(role / "defaults/main.yml")
    lines = [f"<!-- Written by roles/write_docs.py. -->\n# {role.name}", ""]
    for entry, spec in specs.items():
        if entry != "main":
            lines += [f"## Entry point `{entry}`", ""]
        described = spec.get("description", [])
        described = [described] if isinstance(described, str) else described
        lines += [f"{spec['short_description']}.", ""]
        for paragraph in described:
            lines += [paragraph, ""]
        if spec.get("options"):
            lines += ["| variable | type | what it is | default |", "|---|---|---|---|"]
            lines += [*rows(spec["options"], defaults), ""]
    scenarios = sorted(path.parent for path in role.glob("molecule/*/molecule.yml"))
    if scenarios:
        lines += ["## Molecule scenarios", "", "`bin/test roles` runs them.", ""]
        lines += [f"- `{path.name}`: {heading(path / 'molecule.yml')}" for path in scenarios] + [""]
    return "\n".join(lines)


def main() -> int:
    """Write the pages, or with --check say which are not current."""
    stale = []
    for specs in sorted(ROLES.glob("*/meta/argument_specs.yml")):
        role = specs.parents[1]
        readme, made = role / "README.md", page(role)
        if not readme.is_file() or readme.read_text() != made:
            stale.append(role.name)
            if "--check" not in sys.argv:
                readme.write_text(made)
    if stale and "--check" in sys.argv:
        print(
            f"README.md of {', '.join(stale)}: not what the role says. Run python roles/write_docs.py.",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

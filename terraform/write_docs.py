"""Writes the generated parts of docs/clouds/*.md (between `<!-- NAME -->` and `<!-- end -->`) from terraform/ itself.

usage: python terraform/write_docs.py [--check]
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

TERRAFORM = Path(__file__).resolve().parent
REPOSITORY = TERRAFORM.parent
PAGES = REPOSITORY / "docs" / "clouds"

VARIABLE = re.compile(r'^variable "(\w+)" \{\n(.*?)^\}', re.M | re.S)
OUTPUT = re.compile(r'^output "(\w+)" \{\n\s*description = "(.*)"$', re.M)
RESOURCE = re.compile(r'^resource "(\w+)" "(\w+)" \{\n(.*?)^\}', re.M | re.S)


def shapes() -> dict[str, dict[str, object]]:
    """The catalogue's rows, as Terraform evaluates them."""
    done = subprocess.run(
        [str(REPOSITORY / "bin" / "terraform"), "console"],
        cwd=TERRAFORM / "modules" / "catalog",
        input="jsonencode({ for shape, row in local.rows : shape => merge(row, local.fabrics[row.fabric]) })\n",
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(json.loads(done.stdout.strip().splitlines()[-1]))


def inputs(stack: Path) -> str:
    """The stack's variables as a table."""
    lines = ["| variable | what it is | default |", "|---|---|---|"]
    for name, body in VARIABLE.findall((stack / "variables.tf").read_text()):
        found = re.search(r'description = "((?:[^"\\]|\\.)*)"', body)
        heredoc = re.search(r"description = <<-EOT\n(.*?)\n\s*EOT", body, re.S)
        text = found[1].replace('\\"', '"') if found else " ".join(heredoc[1].split()) if heredoc else ""
        default = re.search(r"^  default\s*= (.*)$", body, re.M)
        lines.append(
            f"| `{name}` | {text.replace('|', chr(92) + '|')} | {f'`{default[1]}`' if default else 'required'} |"
        )
    return "\n".join(lines)


def outputs(stack: Path) -> str:
    """The stack's outputs as a table."""
    rows = [f"| `{name}` | {text} |" for name, text in OUTPUT.findall((stack / "outputs.tf").read_text())]
    return "\n".join(["| output | what it is |", "|---|---|", *rows])


def shape_table(provider: str, rows: dict[str, dict[str, object]]) -> str:
    """The catalogue's rows of one provider."""
    lines = [
        "| shape | GPUs | fabric | NICs (ordinary + RDMA) | transports | source |",
        "|---|---|---|---|---|---|",
    ]
    for shape, row in rows.items():
        if row["provider"] == provider:
            gpus = (
                f"{row['gpus']} x {row['gpu']} (compute {row['compute_capability']})"
                if row["gpus"]
                else "none"
            )
            nics = f"{row['ordinary_nics']} + {row['rdma_nics']}"
            lines.append(
                f"| `{shape}` | {gpus} | {row['fabric']} | {nics} | {', '.join(row['transports'])} | {row['source']} |"
            )
    return "\n".join(lines)


def diagram(module: Path) -> str:
    """What the module makes and what refers to what."""
    resources = RESOURCE.findall((module / "main.tf").read_text())
    names = {f"{kind}.{name}" for kind, name, _ in resources}
    lines = ["```mermaid", "flowchart LR"]
    lines += [f'  {full.replace(".", "__")}["{full}"]' for full in sorted(names)]
    for kind, name, body in resources:
        for target in sorted(names - {f"{kind}.{name}"}):
            if re.search(rf"\b{re.escape(target)}\b", body):
                lines.append(f"  {target.replace('.', '__')} --> {kind}__{name}")
    return "\n".join([*lines, "```"])


def page(text: str, cloud: str, rows: dict[str, dict[str, object]]) -> str:
    """The page with its generated parts made anew."""
    stack, module = TERRAFORM / "stacks" / cloud, TERRAFORM / "modules" / cloud
    parts = {"inputs": inputs(stack), "outputs": outputs(stack), "shapes": shape_table(cloud, rows)}
    if module.is_dir():
        parts["diagram"] = diagram(module)
    for name, part in parts.items():
        before, rest = text.split(f"<!-- {name} -->\n", 1)
        text = f"{before}<!-- {name} -->\n{part}\n<!-- end -->{rest.split('<!-- end -->', 1)[1]}"
    return text


def main() -> int:
    rows, stale = shapes(), []
    for path in sorted(PAGES.glob("*.md")):
        made = page(path.read_text(), path.stem, rows)
        if made != path.read_text():
            stale.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(made)
    if stale and "--check" in sys.argv:
        print(
            f"docs/clouds: {', '.join(stale)} is not what terraform/ says. Run python terraform/write_docs.py.",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

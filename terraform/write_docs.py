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
MODULE = re.compile(r'^module "(\w+)" \{\n(.*?)^\}', re.M | re.S)
LOCALS = re.compile(r"^locals \{\n(.*?)^\}", re.M | re.S)
RESOURCE = re.compile(r'^resource "(\w+)" "(\w+)" \{\n(.*?)^\}', re.M | re.S)


Row = dict[str, object]


def catalog() -> dict[str, dict[str, Row]]:
    """The catalogue as Terraform evaluates it: `shapes` and `prices`, rows by shape."""
    done = subprocess.run(
        [str(REPOSITORY / "bin" / "terraform"), "console"],
        cwd=TERRAFORM / "modules" / "catalog",
        input="jsonencode({ prices = local.prices, "
        "shapes = { for shape, row in local.rows : shape => merge(row, local.fabrics[row.fabric]) } })\n",
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


def shape_table(provider: str, rows: dict[str, Row]) -> str:
    """The catalogue's rows of one provider."""
    lines = [
        "| shape | GPUs | fabric | NICs (ordinary + RDMA) | transports | vCPUs | memory GB | disk GB | known zones |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for shape, row in rows.items():
        if row["provider"] == provider:
            gpus = (
                f"{row['gpus']} x {row['gpu']} (compute {row['compute_capability']})"
                if row["gpus"]
                else "none"
            )
            lines.append(
                f"| `{shape}` | {gpus} | {row['fabric']}, {row['fabric_gbps']} Gbit/s "
                f"| {row['ordinary_nics']} + {row['rdma_nics']} | {', '.join(row['transports'])} | {row['vcpus']} "
                f"| {row['memory_gb']} | {row['local_disk_gb'] or 'none'} | {', '.join(row['zones']) or 'not stated'} |"
            )
    return "\n".join(lines)


def source_table(provider: str, rows: dict[str, Row]) -> str:
    """Where each row of one provider was read, and when it was compared."""
    lines = ["| shape | figures from | compared on |", "|---|---|---|"]
    for shape, row in rows.items():
        if row["provider"] == provider:
            lines.append(f"| `{shape}` | {row['source']} | {row['checked'] or 'not yet'} |")
    return "\n".join(lines)


def price_table(provider: str, rows: dict[str, Row], prices: dict[str, Row]) -> str:
    """The list prices of one provider's shapes."""
    lines = ["| shape | US dollars an hour | read on | source |", "|---|---|---|---|"]
    for shape, row in rows.items():
        if row["provider"] == provider:
            price = prices.get(shape)
            lines.append(
                f"| `{shape}` | {price['usd_per_hour']} | {price['as_of']} | {price['source']} |"
                if price
                else f"| `{shape}` | not stated | | |"
            )
    return "\n".join(lines)


def diagram(folder: Path) -> str:
    """What a module or stack makes or calls, and what refers to what."""
    text = (folder / "main.tf").read_text()
    parts = {f"{kind}.{name}": body for kind, name, body in RESOURCE.findall(text)}
    parts |= {f"module.{name}": body for name, body in MODULE.findall(text)}
    locals_ = " ".join(LOCALS.findall(text))
    lines = ["```mermaid", "flowchart LR"]
    lines += [f'  {full.replace(".", "__")}["{full}"]' for full in sorted(parts)]
    for full, body in parts.items():
        # What reaches a module by way of a local value is drawn too.
        seen = body + (locals_ if full.startswith("module.") and "local." in body else "")
        for target in sorted(set(parts) - {full}):
            if re.search(rf"\b{re.escape(target)}\b", seen):
                lines.append(f"  {target.replace('.', '__')} --> {full.replace('.', '__')}")
    return "\n".join([*lines, "```"])


def page(text: str, cloud: str, known: dict[str, dict[str, Row]]) -> str:
    """The page with its generated parts made anew."""
    stack, module = TERRAFORM / "stacks" / cloud, TERRAFORM / "modules" / cloud
    rows, prices = known["shapes"], known["prices"]
    parts = {
        "diagram": diagram(module if module.is_dir() else stack),
        "shapes": shape_table(cloud, rows),
        "sources": source_table(cloud, rows),
        "prices": price_table(cloud, rows, prices),
        "inputs": inputs(stack),
        "outputs": outputs(stack),
    }
    for name, part in parts.items():
        if f"<!-- {name} -->" not in text:
            continue
        before, rest = text.split(f"<!-- {name} -->\n", 1)
        text = f"{before}<!-- {name} -->\n{part}\n<!-- end -->{rest.split('<!-- end -->', 1)[1]}"
    return text


def main() -> int:
    known, stale = catalog(), []
    for path in sorted(PAGES.glob("*.md")):
        made = page(path.read_text(), path.stem, known)
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

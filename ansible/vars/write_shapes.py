"""Writes ansible/vars/shapes.json, what preflight.yml expects of each shape, from Terraform's catalogue.

usage: python ansible/vars/write_shapes.py [--check]
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
OUT = Path(__file__).with_name("shapes.json")
FIELDS = (
    "gpu", "gpus", "compute_capability", "gpu_memory_gb", "fabric", "rdma_nics", "fabric_gbps", "vcpus", "memory_gb",
)  # fmt: skip


def main() -> int:
    """0 when the file is current or was written."""
    done = subprocess.run(
        [REPOSITORY / "bin/terraform", "console"],
        cwd=REPOSITORY / "terraform/modules/catalog",
        input="jsonencode(local.rows)\n",
        capture_output=True,
        text=True,
        check=True,
    )
    rows = json.loads(json.loads(done.stdout))
    shapes = {shape: {field: row[field] for field in FIELDS} for shape, row in sorted(rows.items())}
    text = "{\n" + ",\n".join(f'  "{shape}": {json.dumps(row)}' for shape, row in shapes.items()) + "\n}\n"
    if "--check" in sys.argv:
        if not OUT.exists() or OUT.read_text() != text:
            print(
                f"{OUT.name} is not what the catalogue says. Run python ansible/vars/write_shapes.py.",
                file=sys.stderr,
            )
            return 1
        return 0
    OUT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

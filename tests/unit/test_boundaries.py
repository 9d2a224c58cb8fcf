"""Which part may import which: read from the source, so that no import is needed to find out."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ROOT / "plugin/vllm_tilert"
ROUTER = ROOT / "router/tilert_router"


def imports(folder: Path) -> Iterator[tuple[Path, str]]:
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((path, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative import"
                yield from ((path, f"{node.module}.{alias.name}") for alias in node.names)


def test_the_router_knows_only_the_wire_of_the_plugin() -> None:
    seen = [(p.name, n) for p, n in imports(ROUTER) if n.split(".")[0] == "vllm_tilert"]
    assert seen, "the router speaks to decode nodes, so it uses the wire's names"
    assert [s for s in seen if not s[1].startswith("vllm_tilert.wire")] == []


def test_the_plugin_does_not_know_the_router() -> None:
    assert [(p, n) for p, n in imports(PLUGIN) if n.split(".")[0] == "tilert_router"] == []


def test_the_wire_is_standard_library_only() -> None:
    allowed = sys.stdlib_module_names | {"vllm_tilert"}
    outside = [(p.name, n) for p, n in imports(PLUGIN / "wire") if n.split(".")[0] not in allowed]
    assert outside == []


def test_vllm_is_imported_in_as_few_files_as_possible() -> None:
    files = {p.relative_to(PLUGIN).as_posix() for p, n in imports(PLUGIN) if n.split(".")[0] == "vllm"}
    assert files <= {"connector/connector.py", "connector/register.py", "connector/metrics.py"}, files

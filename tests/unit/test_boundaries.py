"""Which part may import which: read from the source, so that no import is needed to find out."""

import ast
import re
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    ("lock", "folders"),
    [
        ("router", [ROUTER]),
        ("router-parsing", [ROUTER]),
        ("decode-reference", [PLUGIN / "decode", PLUGIN / "profiles", PLUGIN / "transports"]),
        (
            "prefill-cpu",
            [PLUGIN / "connector", PLUGIN / "staging", PLUGIN / "profiles", PLUGIN / "transports"],
        ),
    ],
)
def test_each_kind_of_host_installs_what_its_code_imports(lock: str, folders: list[Path]) -> None:
    installed = {
        re.split(r"[=\[;]", line)[0].strip().lower().replace("_", "-")
        for line in (ROOT / f"requirements/{lock}.txt").read_text().splitlines()
        if line.strip() and not line.startswith("#")
    }
    distributions = packages_distributions()
    missing = set()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            if lock == "router" and path.name == "vllm_parsing.py":
                continue  # imported where that extra is installed
            for module in unconditional_imports(path):
                if module in sys.stdlib_module_names | {"vllm_tilert", "tilert_router"}:
                    continue
                names = {name.lower().replace("_", "-") for name in distributions.get(module, [module])}
                if not names & installed:
                    missing.add((path.relative_to(ROOT).as_posix(), module))
    assert missing == set()


def unconditional_imports(path: Path) -> Iterator[str]:
    """Top-level names of what importing the file imports: not what stands in functions, `try` or `if`."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module).split(".")[0]

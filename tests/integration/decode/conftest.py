from __future__ import annotations

from pathlib import Path

import pytest

from integration.decode.parts import Oracle, Prefill
from vllm_tilert.small_model import make_small_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small_model(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def prefill(model_dir: Path) -> Prefill:
    return Prefill(Oracle(model_dir))

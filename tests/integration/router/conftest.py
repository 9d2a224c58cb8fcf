from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from integration.router.parts import Bench, Up, write_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
async def up(tokenizer_folder: Path) -> AsyncIterator[Up]:
    async with AsyncExitStack() as stack:

        async def make(nodes: int) -> Bench:
            bench = Bench(stack, tokenizer_folder)
            await bench.up(nodes)
            return bench

        yield make

"""Real vLLM prefills and hands off through the connector; the node decodes what vLLM itself would have said."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from integration.connector.vllm_server import connector_config, vllm_server
from integration.decode.parts import HOST, engine_of, prompt_of, running, tokens_of
from vllm_tilert.wire import api

LENGTHS = (1, 2, 15, 16, 17, 64, 65, 200, 500, 900)


@pytest.mark.vllm
async def test_64_greedy_tokens_are_vllms_own(model_dir: Path, tmp_path: Path) -> None:
    transfer = connector_config()
    async with running(engine_of(model_dir), secret=None) as node:
        loop = asyncio.get_running_loop()
        context = vllm_server(model_dir, tmp_path, transfer, "--no-enable-prefix-caching")
        vllm = await loop.run_in_executor(None, context.__enter__)
        try:
            for length in LENGTHS:
                prompt, rid = prompt_of(length, length), api.new_rid()
                own = await vllm.prefill(prompt, max_tokens=64, return_token_ids=True)
                grant = await node.reserve(rid)
                asked = {
                    "tilert_host": HOST,
                    "tilert_ctrl_port": node.control_port,
                    "tilert_rid": rid,
                    "tilert_generation": grant["generation"],
                }
                first = await vllm.prefill(prompt, return_token_ids=True, kv_transfer_params=asked)
                token = first["choices"][0]["token_ids"][0]
                status, lines = await node.stream(rid, token, 64)
                assert status == 200, lines
                assert tokens_of(lines) == own["choices"][0]["token_ids"], length
        finally:
            await loop.run_in_executor(None, context.__exit__, None, None, None)

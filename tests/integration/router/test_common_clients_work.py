"""The official OpenAI client, synchronous and asynchronous, and `vllm bench serve`, against a router process."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from integration.router.parts import CHAT, Up
from integration.router.test_operators_see_and_steer_it import process

BENCH = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


async def test_the_synchronous_client_reads_answers_streams_and_errors(up: Up) -> None:
    bench = await up(1)
    url = await bench.router()
    ask: Any = CHAT

    def use() -> None:
        with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
            assert [m.id for m in client.models.list()] == ["small", "small-fast"]
            answer = client.chat.completions.create(**ask)
            assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 5)
            with client.chat.completions.create(
                **ask, stream=True, stream_options={"include_usage": True}
            ) as stream:
                chunks = list(stream)
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            assert text == answer.choices[0].message.content
            assert chunks[-1].usage == answer.usage
            done = client.completions.create(model="small", prompt="hi", max_tokens=5, temperature=0)
            assert done.choices[0].text == text
            parts = client.completions.create(
                model="small", prompt="hi", max_tokens=5, temperature=0, stream=True
            )
            assert "".join(part.choices[0].text for part in parts) == text
            with pytest.raises(openai.BadRequestError) as refused:
                client.chat.completions.create(**ask, n=2)
            assert refused.value.param == "n"

    await asyncio.to_thread(use)


async def test_the_clients_own_retries_and_timeouts_leave_nothing_behind(up: Up) -> None:
    bench = await up(1)
    url = await bench.router(queue={"max_waiting": 0, "timeout_s": 30}, prefill_ahead=False)
    bench.nodes[0].token_s = 0.1
    ask: Any = CHAT
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=5) as client:
        answers = await asyncio.gather(*(client.chat.completions.create(**ask) for _ in range(2)))
        assert all(answer.usage.completion_tokens == 5 for answer in answers)
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.3, max_retries=0).chat.completions.create(
                **ask | {"max_tokens": 500}
            )
        assert (await client.chat.completions.create(**ask)).usage.completion_tokens == 5


async def test_vllm_bench_serve_counts_every_token(up: Up, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    bench = await up(2)
    folder = Path(bench.config()["model"]["tokenizer"])
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "config.json").write_text('{"model_type": "llama"}')
    # Not its random data set: that sets ignore_eos, which no TileRT engine has, so it is refused by name.
    prompts = tmp_path / "prompts.json"
    turns = [
        [{"from": "human", "value": f"a question {i}"}, {"from": "gpt", "value": "an answer"}]
        for i in range(12)
    ]
    prompts.write_text(json.dumps([{"conversations": each} for each in turns]))
    for node in bench.nodes:
        node.token_s = 0.001
    async with process(bench.config(), tmp_path / "router.yaml") as (_, url):
        for backend, path in (("openai-chat", "/v1/chat/completions"), ("openai", "/v1/completions")):
            result = f"{backend}.json"
            running = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", BENCH, "--backend", backend, "--base-url", url, "--endpoint", path),
                *("--model", "small", "--tokenizer", str(folder), "--dataset-name", "sharegpt"),
                *("--dataset-path", str(prompts), "--sharegpt-output-len", "16", "--num-prompts", "12"),
                *("--max-concurrency", "4", "--save-result", "--result-dir", str(tmp_path)),
                *("--result-filename", result, "--disable-tqdm", "--save-detailed"),
                env=os.environ
                | {"CUDA_VISIBLE_DEVICES": "", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            out, _ = await running.communicate()
            assert running.returncode == 0, out.decode()[-3000:]
            seen = json.loads((tmp_path / result).read_text())
            assert (seen["completed"], seen["failed"]) == (12, 0), seen["errors"]
            assert seen["total_output_tokens"] == 12 * 16
            assert seen["median_ttft_ms"] > 0

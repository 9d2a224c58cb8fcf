"""Token rates, Retry-After, overflow by expected wait, and the stream's grain, as a client sees them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from aiohttp import web

from integration.router.parts import CHAT, Up, events
from integration.router.test_keys_say_who_may_ask_and_how_much import ask, write_keys


async def test_a_key_over_its_token_rate_is_told_when_to_come_back(up: Up, tmp_path: Path) -> None:
    write_keys(tmp_path / "keys.yaml", alice={"tokens_per_minute": 20}, bob={})
    bench = await up(1)
    url = await bench.router(keys_file=tmp_path / "keys.yaml")
    statuses = [(await ask(bench, url, "alice"))[0] for _ in range(2)]  # 7 + 5 tokens each
    assert statuses == [200, 200]
    status, headers, answer = await ask(bench, url, "alice")
    assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 10 <= int(headers["Retry-After"]) <= 20
    assert (await ask(bench, url, "bob"))[0] == 200


async def test_retry_after_is_the_time_the_queue_needs(up: Up) -> None:
    bench = await up(1)
    url = await bench.router(queue={"max_waiting": 8, "timeout_s": 300}, prefill_ahead=False)
    bench.nodes[0].token_s = 0.1  # half a second a request
    for _ in range(2):
        await bench.post(url, CHAT)
    asked = [asyncio.create_task(bench.post(url, CHAT)) for _ in range(12)]
    done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    refused = done.pop().result()
    assert refused[0] == 429
    assert (
        3 <= int(refused[1]["Retry-After"]) <= 9
    )  # nine requests of half a second; not 30, a tenth of the timeout
    for task in asked:
        task.cancel()


async def test_who_would_wait_too_long_goes_native_at_once(up: Up) -> None:
    bench = await up(1)
    native = web.Application()

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"native": True})

    native.router.add_post("/v1/chat/completions", answer)
    url = await bench.router(
        native=[{"name": "n", "url": await bench.site(native)}],
        classes={"fast": {"policy": "tilert_then_native", "max_wait_s": 1.0}},
        prefill_ahead=False,
    )
    fast = CHAT | {"model": "small-fast"}
    bench.nodes[0].token_s = 0.2
    assert b"native" not in (await bench.post(url, fast))[2]  # one second each is now known
    running = [asyncio.create_task(bench.post(url, fast)) for _ in range(2)]
    await asyncio.sleep(0.1)
    loop = asyncio.get_running_loop()
    start = loop.time()
    assert b"native" in (await bench.post(url, fast))[2]
    assert loop.time() - start < 0.9  # it did not wait first
    await asyncio.gather(*running)


async def test_stream_interval_makes_larger_chunks_of_the_same_answer(up: Up) -> None:
    bench = await up(1)
    url = await bench.router()
    bench.nodes[0].token_s = 0.005

    async def chunks(**more: Any) -> tuple[list[int], str]:
        body = CHAT | {"stream": True, "max_tokens": 12, "return_token_ids": True} | more
        seen = events((await bench.post(url, body))[2])[:-1]
        counts = [len(c.get("token_ids") or []) for e in seen for c in e["choices"]]
        return [n for n in counts if n], "".join(
            c["delta"].get("content", "") for e in seen for c in e["choices"]
        )

    each, text = await chunks()
    assert sum(each) == 12
    larger, same = await chunks(stream_interval=5)
    assert same == text
    assert larger == [1, 5, 5, 1]
    larger, cut = await chunks(stream_interval=5, stop=[text[7]])
    assert cut == text[:7]
    status, _, raw = await bench.post(url, CHAT | {"stream_interval": 0})
    assert (status, json.loads(raw)["error"]["param"]) == (400, "stream_interval")

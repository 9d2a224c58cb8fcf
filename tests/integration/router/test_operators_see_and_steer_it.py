"""The admin interface, reload on SIGHUP and drain on SIGTERM, on a router process of its own."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from integration.router.parts import CHAT, Bench, Up, events, settled
from tilert_router.config import Config

ROOT = Path(__file__).parents[3]


@asynccontextmanager
async def process(
    config: dict[str, Any], file: Path
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A router process; yields it and its address once it listens."""
    file.write_text(yaml.safe_dump({"listen": {"port": 0}} | config))
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tilert_router.cli", "serve", str(file)),
        env={"PYTHONPATH": f"{ROOT}/plugin:{ROOT}/router"},
        stderr=asyncio.subprocess.PIPE,
    )
    assert running.stderr is not None
    try:
        async for line in running.stderr:
            if json.loads(line)["event"] == "router ready":
                break
        else:
            raise AssertionError("the router did not start")
        port = json.loads(line)["addresses"][0].split(",")[1].strip(" ')")
        yield running, f"http://127.0.0.1:{port}"
    finally:
        if running.returncode is None:
            running.kill()
            await running.wait()


async def said(running: asyncio.subprocess.Process, event: str) -> dict[str, Any]:
    assert running.stderr is not None
    async with asyncio.timeout(5):
        async for line in running.stderr:
            found = json.loads(line)
            if found["event"] == event:
                return dict(found)
    raise AssertionError(event)


async def get(bench: Bench, url: str) -> Any:
    async with bench.http.get(url) as answer:
        return answer.status, json.loads(await answer.read())


async def test_nodes_and_queue_are_shown_as_they_are(up: Up) -> None:
    bench = await up(2)
    _, url, admin = await bench.whole_router(prefill_ahead=False)
    for node in bench.nodes:
        node.token_s = 0.1
    asked = [asyncio.create_task(bench.post(url, CHAT)) for _ in range(5)]
    await asyncio.sleep(0.25)
    _, shown = await get(bench, admin + "/nodes")
    assert [n["state"] for n in shown["nodes"]] == ["LEASED", "LEASED"]
    rids = {lease["rid"] for n in shown["nodes"] for lease in n["leases"]}
    assert rids == {rid for node in bench.nodes for rid in node.slots}
    assert (await get(bench, admin + "/queue"))[1] == {"waiting": 3, "by_key": {"anybody": 3}}
    async with bench.http.get(admin + "/metrics") as answer:
        text = await answer.text()
    assert "tilert_router_waiting 3.0" in text
    assert 'tilert_router_nodes{state="LEASED"} 2.0' in text
    assert {status for status, _, _ in await asyncio.gather(*asked)} == {200}
    async with bench.http.get(url + "/nodes") as answer:
        assert answer.status == 404  # not on the clients' port


async def test_a_drained_node_ends_what_it_has_and_takes_nothing_new(up: Up) -> None:
    bench = await up(2)
    _, url, admin = await bench.whole_router()
    bench.nodes[0].token_s = bench.nodes[1].token_s = 0.05
    running = [asyncio.create_task(bench.post(url, CHAT)) for _ in range(2)]
    await asyncio.sleep(0.1)
    async with bench.http.post(admin + "/nodes/d0/drain") as answer:
        assert (await answer.json())["state"] == "DRAINING"
    assert bench.nodes[0].draining
    assert {status for status, _, _ in await asyncio.gather(*running)} == {200}
    before = len(bench.nodes[0].decoded)
    for _ in range(3):
        assert (await bench.post(url, CHAT))[0] == 200
    assert len(bench.nodes[0].decoded) == before
    async with bench.http.post(admin + "/nodes/d0/undrain") as answer:
        assert (await answer.json())["state"] == "FREE"
    for _ in range(3):
        assert (await bench.post(url, CHAT))[0] == 200
    assert len(bench.nodes[0].decoded) > before
    async with bench.http.post(admin + "/nodes/unknown/drain") as answer:
        assert answer.status == 404


async def test_ready_only_while_a_node_is_in_service(up: Up) -> None:
    bench = await up(1)
    _, url, admin = await bench.whole_router()
    assert (await bench.post(url, CHAT))[0] == 200
    assert (await get(bench, url + "/ready"))[0] == 200
    async with bench.http.post(admin + "/nodes/d0/drain"):
        pass
    status, answer = await get(bench, url + "/ready")
    assert (status, answer["error"]["code"]) == (503, "not_ready")
    assert (await get(bench, url + "/health"))[0] == 200


async def test_sighup_takes_nodes_and_keys_and_drops_nothing(up: Up, tmp_path: Path) -> None:
    bench = await up(2)
    config, file = bench.config(), tmp_path / "router.yaml"
    both = config["decode"]
    config["decode"] = both[:1]
    bench.nodes[0].token_s = 0.05
    async with process(config, file) as (running, url):
        stream = asyncio.create_task(bench.post(url, CHAT | {"stream": True, "max_tokens": 30}))
        await asyncio.sleep(0.5)
        file.write_text(yaml.safe_dump({"listen": {"port": 0}} | config | {"decode": both[1:]}))
        running.send_signal(signal.SIGHUP)
        await said(running, "configuration reloaded")
        for _ in range(3):
            assert (await bench.post(url, CHAT))[0] == 200
        assert len(bench.nodes[1].decoded) == 3
        seen = events((await stream)[2])
        assert seen[-1] == "[DONE]"
        assert len(bench.nodes[0].decoded) == 1

        file.write_text("decode: [")
        running.send_signal(signal.SIGHUP)
        fault = await said(running, "configuration not reloaded")
        assert "not YAML" in fault["fault"]
        assert (await bench.post(url, CHAT))[0] == 200


@pytest.mark.parametrize("changed", [False, True])
async def test_a_node_put_back_while_it_ends_what_it_had_serves_again(up: Up, changed: bool) -> None:
    bench = await up(2)
    router, url, admin = await bench.whole_router(prefill_ahead=False)
    both = bench.config()["decode"]
    back = [dict(both[0]), both[1]]
    if changed:  # Another definition of the same server: it must not be leased twice.
        back[0]["url"] = both[0]["url"].replace("127.0.0.1", "localhost")
    for node in bench.nodes:
        node.token_s = 0.05
    streams = [asyncio.create_task(bench.post(url, CHAT | {"stream": True, "max_tokens": 30})) for _ in both]
    await asyncio.sleep(0.4)
    router.reload(Config.model_validate(bench.config(decode=both[1:])))
    router.reload(Config.model_validate(bench.config(decode=back)))
    _, shown = await get(bench, admin + "/nodes")
    states = {n["name"]: n["state"] for n in shown["nodes"]}
    assert states[both[0]["name"]] == ("DRAINING" if changed else "LEASED")
    assert all(len(node.slots) == 1 for node in bench.nodes)
    for stream in streams:
        assert events((await stream)[2])[-1] == "[DONE]"
    for node in bench.nodes:
        node.decoded.clear()
    for _ in range(4):
        await asyncio.gather(*(bench.post(url, CHAT) for _ in both))
    assert all(node.decoded for node in bench.nodes), "one of them serves nothing"


async def test_sigterm_ends_running_answers_and_takes_no_new_ones(up: Up, tmp_path: Path) -> None:
    bench = await up(1)
    bench.nodes[0].token_s = 0.05
    async with process(bench.config(), tmp_path / "router.yaml") as (running, url):
        stream = asyncio.create_task(bench.post(url, CHAT | {"stream": True, "max_tokens": 40}))
        await asyncio.sleep(0.7)
        running.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        with pytest.raises(aiohttp.ClientConnectionError):
            async with aiohttp.ClientSession() as other, other.get(url + "/health"):
                pass
        assert events((await stream)[2])[-1] == "[DONE]"
        async with asyncio.timeout(5):
            assert await running.wait() == 0
    await settled(bench.nodes[0])


async def test_no_line_of_the_log_has_prompt_text(up: Up, tmp_path: Path) -> None:
    bench = await up(1)
    body = CHAT | {"messages": [{"role": "user", "content": "a very private question"}]}
    bench.nodes[0].fail_after = 2
    config = bench.config(logs={"level": "debug"})
    async with process(config, tmp_path / "router.yaml") as (running, url):
        await bench.post(url, body)
        await bench.post(url, body | {"max_tokens": "a very private question"})
        running.send_signal(signal.SIGTERM)
        assert running.stderr is not None
        log = await running.stderr.read()
    assert b"attempt failed" in log or b"lease abandoned" in log
    assert b"private" not in log


async def test_each_answer_has_a_line_with_its_handoff_and_the_clients_id(up: Up, tmp_path: Path) -> None:
    bench = await up(1)
    async with process(bench.config(), tmp_path / "router.yaml") as (running, url):
        _, headers, _ = await bench.post(url, CHAT)
        line = await said(running, "request ended")
    assert line["rid"] == headers["x-tilert-rid"]
    assert (line["client_id"], line["key"], line["outcome"]) == ("job-42", "anybody", "length")
    assert (line["pool"], line["node"]) == ("tilert", bench.config()["decode"][0]["name"])
    assert 0 <= line["queued_s"] <= line["seconds"]
    assert (line["prompt_tokens"], line["completion_tokens"]) == (7, 5)
    # docs/router.md names each field.
    section = (ROOT / "docs/router.md").read_text().split("## What it logs")[1].split("\n## ")[0]
    named = {
        name for row in re.findall(r"^\| (`.*?) \|", section, re.M) for name in re.findall(r"`(\w+)`", row)
    }
    assert named == set(line) - {"time", "level", "logger", "event"}


async def test_native_answers_have_their_line_too(up: Up, tmp_path: Path) -> None:
    bench = await up(1)
    config = bench.config(native=[{"name": "n", "url": "http://127.0.0.1:9"}])
    async with process(config, tmp_path / "router.yaml") as (running, url):
        assert (await bench.post(url, CHAT))[0] == 503
        line = await said(running, "request ended")
    assert (line["pool"], line["outcome"], line["client_id"]) == ("native", "503", "job-42")

"""API keys: who may ask, in which class, with which priority, how many at once; changed without a restart."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from integration.router.parts import CHAT, Bench, Up
from tilert_router.config import ConfigError


def write_keys(path: Path, **keys: dict[str, Any]) -> None:
    entries = [
        {"name": n, "sha256": hashlib.sha256(n.encode()).hexdigest(), **more} for n, more in keys.items()
    ]
    path.write_text(yaml.safe_dump(entries))


async def ask(bench: Bench, url: str, key: str | None, **more: Any) -> Any:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with bench.http.post(url + "/v1/chat/completions", json=CHAT | more, headers=headers) as answer:
        return answer.status, answer.headers, json.loads(await answer.read())


async def test_without_a_known_key_nothing_is_said(up: Up, tmp_path: Path) -> None:
    write_keys(tmp_path / "keys.yaml", alice={})
    bench = await up(1)
    url = await bench.router(keys_file=tmp_path / "keys.yaml")
    for key in (None, "", "bob", "ALICE", hashlib.sha256(b"alice").hexdigest()):
        status, _, answer = await ask(bench, url, key)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    async with bench.http.get(url + "/v1/models") as answer:
        assert answer.status == 401
    async with bench.http.get(url + "/health") as answer:
        assert answer.status == 200
    assert bench.prefill.bodies == []
    assert (await ask(bench, url, "alice"))[0] == 200


async def test_keys_change_while_requests_run(up: Up, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    write_keys(keys, alice={})
    bench = await up(1)
    router, url, _ = await bench.whole_router(keys_file=keys)
    bench.nodes[0].token_s = 0.05
    running = asyncio.create_task(ask(bench, url, "alice", max_tokens=10))
    await asyncio.sleep(0.2)
    write_keys(keys, bob={})
    router.reload(router.config)
    assert (await ask(bench, url, "alice"))[0] == 401
    assert (await running)[0] == 200
    assert (await ask(bench, url, "bob"))[0] == 200
    keys.write_text("- {name: carol, sha256: carols-own-key}")
    with pytest.raises(ConfigError) as fault:
        router.reload(router.config)
    assert "carols-own-key" not in str(fault.value)
    assert (await ask(bench, url, "bob"))[0] == 200  # a wrong file changes nothing


async def test_a_key_has_its_own_limit_of_requests_at_once(up: Up, tmp_path: Path) -> None:
    write_keys(tmp_path / "keys.yaml", alice={"max_concurrent": 2}, bob={})
    bench = await up(1)
    url = await bench.router(keys_file=tmp_path / "keys.yaml")
    bench.nodes[0].token_s = 0.02
    answers = await asyncio.gather(*(ask(bench, url, "alice") for _ in range(4)), ask(bench, url, "bob"))
    assert sorted(status for status, _, _ in answers[:4]) == [200, 200, 429, 429]
    refused = next(a for a in answers if a[0] == 429)
    assert refused[2]["error"]["code"] == "rate_limit_exceeded"
    assert int(refused[1]["Retry-After"]) >= 1
    assert answers[4][0] == 200
    assert (await ask(bench, url, "alice"))[0] == 200


async def test_a_lower_priority_number_goes_first(up: Up, tmp_path: Path) -> None:
    write_keys(tmp_path / "keys.yaml", batch={"priority": 5}, person={"priority": -5})
    bench = await up(1)
    url = await bench.router(keys_file=tmp_path / "keys.yaml", prefill_ahead=False)
    bench.nodes[0].token_s = 0.04
    ended: list[str] = []

    async def one(key: str) -> None:
        assert (await ask(bench, url, key))[0] == 200
        ended.append(key)

    tasks = [asyncio.create_task(one("batch")) for _ in range(4)]
    await asyncio.sleep(0.1)  # one decodes, three wait
    tasks.append(asyncio.create_task(one("person")))
    await asyncio.gather(*tasks)
    assert ended.index("person") == 1


async def test_a_keys_class_is_its_default(up: Up, tmp_path: Path) -> None:
    write_keys(tmp_path / "keys.yaml", fast={"class": "fast"}, plain={})
    bench = await up(1)
    url = await bench.router(
        keys_file=tmp_path / "keys.yaml", native=[{"name": "n", "url": "http://127.0.0.1:9"}]
    )
    assert (await ask(bench, url, "fast"))[0] == 200
    assert (await ask(bench, url, "plain"))[0] == 503  # the native pool, which is not there
    assert (await ask(bench, url, "plain", model="small-fast"))[0] == 200

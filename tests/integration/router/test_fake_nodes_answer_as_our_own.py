"""The fake decode node gives the answers of the real one, to the same requests in the same order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from fakes.nodes import FakeDecode
from integration.decode.parts import engine_of, running
from vllm_tilert.small_model import make_small_model
from vllm_tilert.wire import api


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small_model(tmp_path_factory.mktemp("small"))


async def transcript(url: str) -> list[Any]:
    """Status and what a router reads of each answer."""
    first, second, third, unknown = (api.new_rid() for _ in range(4))
    late = {
        "rid": first,
        "first_token_id": 65,
        "max_tokens": 4,
        "timeout_s": 0.2,
        "stream": True,
        "sampling": {"temperature": 0},
    }
    found: list[Any] = []
    async with aiohttp.ClientSession() as http:

        async def call(method: str, path: str, body: Any = None) -> dict[str, Any]:
            async with http.request(method, url + path, json=body) as answer:
                read = await answer.json()
                kept = ("error", "ahead", "status", "draining", "cancelled")
                shown = {k: read[k] for k in kept if k in read and path != api.DRAIN and path != api.UNDRAIN}
                found.append(
                    (method, path, answer.status, shown | {k: "rid" for k in shown if k == "cancelled"})
                )
                return dict(read)

        status = await call("GET", api.STATUS)
        found.append([slot["state"] for slot in status["slots"]])
        granted = await call("POST", api.RESERVE, {"rid": first, "ttl_s": 100})
        assert granted.keys() >= {"rid", "slot", "generation", "expires_in_s", "wanted"}
        assert not granted["wanted"]
        status = await call("GET", api.STATUS)
        found.append(sorted((slot["state"], slot["rid"] == first) for slot in status["slots"]))
        found.append([slot["remaining"] for slot in status["slots"]])
        await call("POST", api.RESERVE, {"rid": second})
        granted = await call("POST", api.RESERVE, {"rid": second, "ahead": True})
        found.append(granted["wanted"])
        await call("POST", api.RESERVE, {"rid": third, "ahead": True})
        await call("POST", api.DECODE, late | {"rid": unknown})
        await call("POST", api.CANCEL, {"rid": unknown})
        await call("POST", api.CANCEL, {"rid": second})
        await call("POST", api.CANCEL, {"rid": second})
        await call("POST", api.DECODE, late)
        await call("GET", api.STATUS)
        await call("POST", api.DRAIN, {})
        await call("POST", api.RESERVE, {"rid": third})
        await call("GET", api.STATUS)
        await call("POST", api.UNDRAIN, {})
        await call("POST", api.RESERVE, {"rid": third})
    return found


async def test_same_requests_same_answers(model_dir: Path) -> None:
    fake = FakeDecode(5001)
    async with fake.site:
        faked = await transcript(fake.site.url)
    async with running(engine_of(model_dir), secret=None) as node:
        assert faked == await transcript(node.url)

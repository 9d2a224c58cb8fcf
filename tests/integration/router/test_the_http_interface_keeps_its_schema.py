"""Whatever is posted, the answer is one that the OpenAPI document promises, and the router does not fail."""

from __future__ import annotations

import asyncio

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from integration.router.parts import CHAT, Up, settled
from tilert_router.fields import TABLE, Kind, Treatment
from tilert_router.openapi import document

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
MODES = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]


@pytest.mark.parametrize("mode", MODES, ids=["valid", "invalid"])
async def test_fuzzed_calls_get_what_was_promised(up: Up, mode: schemathesis.GenerationMode) -> None:
    bench = await up(2)
    url = await bench.router()
    statuses: set[int] = set()

    def fuzz() -> None:
        schema = schemathesis.openapi.from_url(url + "/openapi.json")
        for result in schema.get_all_operations():
            operation = result.ok()
            if mode is schemathesis.GenerationMode.NEGATIVE and operation.method != "post":
                continue  # there is nothing to get wrong

            @settings(
                max_examples=60 if operation.path.startswith("/v1/c") else 5,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def check(case: schemathesis.Case) -> None:
                if isinstance(case.body, dict) and case.body.get("model"):
                    case.body["model"] = "small"  # a random name is only ever a 404
                response = case.call()
                statuses.add(response.status_code)
                case.validate_response(response, checks=CHECKS)

            check()

    await asyncio.to_thread(fuzz)
    for node in bench.nodes:
        await settled(node)
    assert (await bench.post(url, CHAT))[0] == 200
    assert 400 in statuses
    if mode is schemathesis.GenerationMode.POSITIVE:
        assert 200 in statuses


async def test_bodies_that_are_no_requests_are_refused(up: Up) -> None:
    bench = await up(1)
    url = await bench.router(limits={"body_bytes": 4096})

    def post(data: bytes, path: str = "/v1/chat/completions") -> tuple[int, str]:
        answer = requests.post(url + path, data=data, timeout=10)
        return answer.status_code, answer.json()["error"]["code"]

    bodies = {
        b"": "invalid_json",
        b"{": "invalid_json",
        b"[]": "invalid_json",
        b"null": "invalid_json",
        b'"x"': "invalid_json",
        b"\xff\xfe{}": "invalid_json",
        b"[" * 4000: "invalid_json",
    }
    for body, code in bodies.items():
        assert await asyncio.to_thread(post, body) == (400, code), body[:20]
    assert await asyncio.to_thread(post, b" " * 5000) == (413, "request_too_large")
    assert (await asyncio.to_thread(post, b"{}", "/v1/unknown"))[0] == 404
    assert bench.prefill.bodies == []


def test_the_document_has_every_field_but_those_no_client_may_set() -> None:
    for kind in Kind:
        body = document()["paths"][kind.path]["post"]["requestBody"]
        shown = set(body["content"]["application/json"]["schema"]["properties"])
        table = {row.name for row in TABLE if kind in row.kinds and row.treatment is not Treatment.STRIPPED}
        assert shown == table

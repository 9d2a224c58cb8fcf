"""Whatever is posted, the node answers with what its OpenAPI description promises, and never with a 500."""

from __future__ import annotations

from pathlib import Path

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error

from integration.decode.parts import HOST, LAYOUT, MAX_SEQ_LEN, engine_of
from vllm_tilert.decode.http import build_app
from vllm_tilert.decode.node import Node
from vllm_tilert.profiles.base import get_profile
from vllm_tilert.transports import make_transport
from vllm_tilert.wire import api


def test_fuzzed_calls_never_break_it(model_dir: Path) -> None:
    transport = make_transport("mooncake", "tcp")
    transport.init(HOST)
    node = Node(
        slots=2,
        max_seq_len=MAX_SEQ_LEN,
        layout=LAYOUT,
        profile=get_profile("mla"),
        engine=engine_of(model_dir),
        transport=transport,
    )
    node.broken = None  # its engine is not started: no call here gets as far as decoding
    app = build_app(node, None)
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    called = 0
    operations = [result.ok() for result in schema.get_all_operations()]
    # Reservations last: a decode call for a reserved rid would wait for its state.
    for operation in sorted(operations, key=lambda operation: operation.path == api.RESERVE):

        @settings(
            max_examples=40,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def check(case: schemathesis.Case) -> None:
            nonlocal called
            called += 1
            response = case.call()
            case.validate_response(response, checks=[not_a_server_error])
            assert response.status_code in (200, 400, 404, 409, 429, 503), response.status_code

        check()
    assert called > 150
    node.close()

"""Control messages survive the wire, and broken ones end in a ProtocolError, never in something else."""

import asyncio
import contextlib
import json
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tilert.wire import api, control

json_objects = st.dictionaries(
    st.text(max_size=8),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda x: st.lists(x, max_size=3),
        max_leaves=5,
    ),
    max_size=5,
)


def read_bytes(data: bytes, limit: int = control.MAX_REQUEST) -> dict[str, object]:
    async def go() -> dict[str, object]:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await control.read(reader, limit)

    return asyncio.run(go())


@given(json_objects)
def test_a_message_arrives_as_it_was_sent(message: dict[str, object]) -> None:
    assert read_bytes(control.pack(message)) == message


@given(json_objects)
def test_the_blocking_reader_reads_the_same(message: dict[str, object]) -> None:
    a, b = socket.socketpair()
    with a, b:
        a.sendall(control.pack(message))
        assert control.recv(b) == message


def test_the_stock_framing_is_kept() -> None:
    assert control.pack({"done": True})[:4] == struct.pack(
        "!I", len(json.dumps({"done": True}, separators=(",", ":")))
    )


@given(st.binary(max_size=64))
def test_garbage_is_a_protocol_error(data: bytes) -> None:
    with contextlib.suppress(control.ProtocolError):
        assert isinstance(read_bytes(data), dict)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"null", b"{", b'"x"', b"\xff\xff", b"[" * 100_000], ids=lambda b: repr(b[:5])
)
def test_what_is_not_an_object_is_refused(body: bytes) -> None:
    with pytest.raises(control.ProtocolError):
        read_bytes(struct.pack("!I", len(body)) + body, limit=1 << 20)


def test_an_oversized_message_is_refused_before_it_is_read() -> None:
    with pytest.raises(control.ProtocolError, match="exceeds the limit of 10"):
        read_bytes(struct.pack("!I", 11), limit=10)


def test_a_truncated_message_is_refused() -> None:
    with pytest.raises(control.ProtocolError, match="closed"):
        read_bytes(control.pack({"a": 1})[:-1])


def test_a_proof_holds_for_its_own_handoff_only() -> None:
    rid = api.new_rid()
    good = control.proof(b"secret", "nonce", rid, 0)
    assert control.proof_holds(b"secret", "nonce", rid, 0, good)
    assert not control.proof_holds(b"other", "nonce", rid, 0, good)
    assert not control.proof_holds(b"secret", "another", rid, 0, good)
    assert not control.proof_holds(b"secret", "nonce", api.new_rid(), 0, good)
    assert not control.proof_holds(b"secret", "nonce", rid, 1, good)
    assert not control.proof_holds(b"secret", "nonce", rid, 0, None)


def test_handoff_ids_are_ours_alone() -> None:
    assert api.is_rid(api.new_rid())
    assert api.new_rid() != api.new_rid()
    for bad in ("job-42", "A" * 32, "0" * 31, "0" * 33, "0" * 32 + "\n", None, 7):
        assert not api.is_rid(bad)


def test_every_error_code_has_a_status() -> None:
    assert set(api.HTTP_STATUS) == set(api.ErrorCode)

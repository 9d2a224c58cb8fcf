"""The control plane: framing and messages of one handoff.

One TCP connection per handoff and sender rank. Each message is a 4-byte big-endian length, then a
JSON object. The order is the stock TileRT 0.1.5 order with two replies of our own in it::

    node   -> Hello       who I am, my layout, a nonce
    sender -> Request     rid, length, layout, proof of the shared secret
    node   -> Accept      the slot's address and generation   (or Refusal; then nothing is written)
    sender    one-sided writes into the slot
    sender -> Segment     one of several is written           (where Accept asks for it)
    sender -> Done        segment lengths and checksums       (or Abort, with a reason)
    node   -> Verdict     what arrived is whole               (or Refusal)

A node may send `Abort` at any time after `Accept`; the sender stops writing and answers with its own
`Abort` once no write is outstanding. `EXTENSION` in Hello and Request says that both ends speak this;
a stock peer leaves it out and gets the stock order.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import socket
import struct
from collections.abc import Mapping
from typing import Any, Final

MAGIC: Final = "tilert-pd"
EXTENSION: Final = 1
"""Version of our extension of the control plane (field `ext` of Hello and Request)."""
MAX_MESSAGE: Final = 16 << 20
"""Largest message in bytes, as in the stock server: a NIXL agent's metadata can take megabytes."""
MAX_REQUEST: Final = 64 << 10
"""Largest message a node reads from a sender, who is not yet known when it sends its first."""

_LENGTH: Final = struct.Struct("!I")


class ProtocolError(Exception):
    """A peer broke the control protocol: truncated, oversized, not JSON, or a wrong field."""


class Closed(ProtocolError):
    """The peer closed the connection instead of sending a message."""


def pack(message: Mapping[str, Any]) -> bytes:
    """Frame `message`: 4-byte big-endian length, then compact JSON."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


def _length(header: bytes, limit: int) -> int:
    (size,) = _LENGTH.unpack(header)
    if size > limit:
        raise ProtocolError(f"control message of {size} bytes exceeds the limit of {limit}")
    return int(size)


def _parse(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"control message is not JSON: {error}") from None
    if not isinstance(message, dict):
        raise ProtocolError(f"control message is a {type(message).__name__}, not an object")
    return message


async def read(reader: asyncio.StreamReader, limit: int = MAX_MESSAGE) -> dict[str, Any]:
    """Read one message. Raises ProtocolError on a truncated, oversized or malformed one."""
    try:
        header = await reader.readexactly(_LENGTH.size)
        return _parse(await reader.readexactly(_length(header, limit)))
    except asyncio.IncompleteReadError as error:
        if error.expected == _LENGTH.size and not error.partial:
            raise Closed("connection closed before a message") from None
        raise ProtocolError(f"connection closed after {len(error.partial)} bytes of a message") from None


def recv(sock: socket.socket, limit: int = MAX_MESSAGE) -> dict[str, Any]:
    """Blocking twin of `read`; the socket's timeout bounds each receive."""
    return _parse(_recv_exactly(sock, _length(_recv_exactly(sock, _LENGTH.size), limit)))


def _recv_exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise ProtocolError(f"connection closed after {len(data)} of {size} bytes")
        data += part
    return bytes(data)


def proof(secret: bytes, nonce: str, rid: str, rank: int) -> str:
    """HMAC-SHA256 (hex) by which a sender shows that it holds the shared secret."""
    return hmac.new(secret, f"{nonce}:{rid}:{rank}".encode(), hashlib.sha256).hexdigest()


def proof_holds(secret: bytes, nonce: str, rid: str, rank: int, given: object) -> bool:
    """Whether `given` is the proof for this nonce, rid and rank; compared in constant time."""
    return isinstance(given, str) and hmac.compare_digest(proof(secret, nonce, rid, rank), given)

"""The decode node's HTTP interface: paths, states, error codes, ports and the handoff id."""

from __future__ import annotations

import re
import secrets
from enum import StrEnum
from typing import Final

HTTP_PORT: Final = 5557
"""Default port of the decode HTTP interface (the stock server's)."""
CONTROL_PORT: Final = 5556
"""Default port of the control plane (the stock server's)."""

RESERVE: Final = "/pd/reserve"
DECODE: Final = "/pd/decode"
CANCEL: Final = "/pd/cancel"
HISTORY: Final = "/pd/history"
DRAIN: Final = "/pd/drain"
UNDRAIN: Final = "/pd/undrain"
STATUS: Final = "/decode_status"
HEALTH: Final = "/health"
METRICS: Final = "/metrics"

ASK_AGAIN_S: Final = 0.1
"""How long at most a router waits before it asks a node again that had no room."""

_RID = re.compile(r"[0-9a-f]{32}")


def new_rid() -> str:
    """A fresh handoff id: 32 hex digits, unguessable (128 bits)."""
    return secrets.token_hex(16)


def is_rid(value: object) -> bool:
    """Whether `value` is a handoff id as `new_rid` makes them."""
    return isinstance(value, str) and _RID.fullmatch(value) is not None


class SlotState(StrEnum):
    """The life of one receive slot. A slot leaves `QUARANTINED` only when no writer can reach it."""

    FREE = "free"
    RESERVED = "reserved"
    RECEIVING = "receiving"
    READY = "ready"
    DECODING = "decoding"
    QUARANTINED = "quarantined"


class ErrorCode(StrEnum):
    """The `error` field of every refusal, on HTTP and on the control port."""

    BAD_REQUEST = "bad_request"
    UNAUTHORIZED = "unauthorized"
    BUSY = "busy"
    DRAINING = "draining"
    NOT_RESERVED = "not_reserved"
    RID_REUSED = "rid_reused"
    SEQ_LEN_EXCEEDED = "seq_len_exceeded"
    LAYOUT_MISMATCH = "layout_mismatch"
    KV_TRANSFER_TIMEOUT = "kv_transfer_timeout"
    HANDOFF_FAILED = "handoff_failed"
    CHECKSUM_MISMATCH = "checksum_mismatch"
    ENGINE_FAILED = "engine_failed"
    CANCELLED = "cancelled"


HTTP_STATUS: Final[dict[ErrorCode, int]] = {
    ErrorCode.BAD_REQUEST: 400,
    ErrorCode.UNAUTHORIZED: 401,
    ErrorCode.BUSY: 429,
    ErrorCode.DRAINING: 503,
    ErrorCode.NOT_RESERVED: 409,
    ErrorCode.RID_REUSED: 409,
    ErrorCode.SEQ_LEN_EXCEEDED: 400,
    ErrorCode.LAYOUT_MISMATCH: 409,
    ErrorCode.KV_TRANSFER_TIMEOUT: 504,
    ErrorCode.HANDOFF_FAILED: 502,
    ErrorCode.CHECKSUM_MISMATCH: 502,
    ErrorCode.ENGINE_FAILED: 500,
    ErrorCode.CANCELLED: 409,
}
"""The HTTP status that carries each error code."""

"""One-sided writes between a prefill host and a decode host.

Both ends use the same Transport: the decode node registers its receive slots and tells its metadata in
Hello; the connector registers its staging pool and writes.
"""

from vllm_tilert.transports.base import (
    Transport,
    TransportError,
    TransportUnavailable,
    WriteOutstanding,
    make_transport,
)

__all__ = ["Transport", "TransportError", "TransportUnavailable", "WriteOutstanding", "make_transport"]

"""One handoff on the wire: a thread of its own from connect to verdict.

A handoff opens before its prompt's first chunk is computed, so that connecting and admission cost the
request nothing, and its segments are written as the worker puts them. Two handoffs to one node run side
by side, as the node's slots do.

What keeps the other end safe: no byte is written before Accept; no write starts after the node's
deadline, counted from before it could have started its own clock; an Abort is sent only when no write is
outstanding; and a staging piece is given back only when nothing can read it any more.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeGuard, cast

from vllm_tilert.checksum import plane_checksums
from vllm_tilert.connector.metrics import HandoffReport
from vllm_tilert.connector.plan import Order
from vllm_tilert.connector.threads import Threads
from vllm_tilert.profiles import stock
from vllm_tilert.profiles.base import Completion, ProfileError
from vllm_tilert.profiles.layout import Layout
from vllm_tilert.staging import Piece
from vllm_tilert.transports import Transport, TransportError, WriteOutstanding
from vllm_tilert.wire import control
from vllm_tilert.wire.api import ErrorCode

logger = logging.getLogger(f"vllm.{__name__}")  # below vLLM's logger, whose handler and level it takes

CONNECT_FAILED: Final = "connect_failed"
DEADLINE: Final = "deadline"
WRITE_FAILED: Final = "write_failed"
WRITE_OUTSTANDING: Final = "write_outstanding"
PROTOCOL: Final = "protocol_error"
INTERNAL: Final = "internal_error"

STOCK_REFUSAL_GRACE_S: Final = 0.05
"""A stock node answers a Request only to refuse it. It does so at once; this long we listen for it."""
SETTLE_S: Final = 600.0
"""How long a write whose time ran out is waited for before its staging memory is given up for lost."""
THREADS: Final = Threads()


class HandoffFailed(Exception):
    """The handoff cannot go on: a code for counting, and the reason in words."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Link:
    """What all handoffs of one worker share."""

    transport: Transport
    layout: Layout
    rank: int
    secret: bytes | None
    admission_timeout_s: float
    send_timeout_s: float
    checksum: bool | None
    """Whether checksums are sent: always, never (a node that wants them refuses), or None: where the node
    wants them."""


@dataclass(frozen=True)
class Segment:
    """A gathered run of tokens, in a staging piece of exactly its size."""

    start: int
    tokens: int
    piece: Piece
    completion: Completion
    gather_s: float
    gathered_at: float


@dataclass(frozen=True)
class _Admission:
    """Where and how long the node lets us write, and whether it wants to know of each segment. `stock`: the
    Hello of a node that lacks the extension."""

    address: int
    deadline: float
    checksums: bool = False
    segments: bool = False
    stock: Mapping[str, Any] | None = None


class Handoff:
    """One handoff. `put`, `abort` and `failed` are for the worker; everything else runs in its thread."""

    def __init__(self, order: Order, link: Link, on_end: Callable[[HandoffReport], None]) -> None:
        self.order = order
        self._link = link
        self._on_end = on_end
        self._opened = time.monotonic()
        self._deadline = self._opened + link.send_timeout_s
        self._lock = threading.Lock()
        self._queue: deque[Segment] = deque()
        self._abort: HandoffFailed | None = None
        self._failure: HandoffFailed | None = None
        self._ended = False
        self._asked = False
        self._wake_read, self._wake_write = socket.socketpair()
        self._sent: list[int] = []
        self._checksums: list[list[int]] = []
        self._nbytes = 0
        self._gather_s = self._queue_s = self._wire_s = 0.0
        self._over = threading.Event()

    def start(self) -> None:
        """Open the handoff."""
        THREADS.run(self._work)

    @property
    def failed(self) -> bool:
        """Whether nothing more will be sent; segments put from now on are dropped."""
        return self._failure is not None

    @property
    def alive(self) -> bool:
        """Whether its thread still runs."""
        return not self._over.is_set()

    def put(self, segment: Segment) -> None:
        """Hand over the next segment, in order. Its piece is the handoff's from here on."""
        with self._lock:
            if not self._ended:
                self._queue.append(segment)
                self._wake()
                return
        segment.completion.wait()
        segment.piece.release()

    def abort(self, code: str, message: str) -> None:
        """Give the handoff up, telling the node why. Without effect once it has ended."""
        with self._lock:
            if not self._ended and self._abort is None:
                self._abort = HandoffFailed(code, message)
                self._wake()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; whether it has."""
        return self._over.wait(timeout_s)

    def _wake(self) -> None:
        self._wake_write.send(b"\0")

    # The thread.

    def _work(self) -> None:
        try:
            self._run()
        finally:
            self._over.set()

    def _run(self) -> None:
        order = self.order
        outstanding: tuple[WriteOutstanding, Piece] | None = None
        sock: socket.socket | None = None
        turn: threading.Lock | None = None
        settled = True
        try:
            sock, hello = self._connect()
            if hello.get("ext") is None:
                turn = self._take_stock_turn()
                self._send(sock, self._admit_stock(sock, hello), hello)
            else:
                self._send(sock, self._admit(sock, hello), hello)
                self._conclude(sock)
        except _Outstanding as error:
            outstanding = (error.write, error.piece)
            self._failure = HandoffFailed(WRITE_OUTSTANDING, str(error.write))
        except HandoffFailed as error:
            self._failure = error
        except Exception as error:
            logger.exception("handoff %s: unexpected failure", order.rid)
            self._failure = HandoffFailed(INTERNAL, type(error).__name__)
        self._report()
        self._drop_queue()
        try:
            if outstanding is not None:
                settled = self._settle(*outstanding)
            if sock is not None and self._asked and settled and self._failure is not None:
                self._tell(sock, self._failure)
        finally:
            if turn is not None and settled:  # else a write may be under way to where the next would go
                turn.release()
            if sock is not None:
                sock.close()
            self._wake_read.close()
            self._wake_write.close()

    def _take_stock_turn(self) -> threading.Lock:
        """A stock node takes one request at a time and cannot say no in time: one handoff at a time goes
        there. Raises HandoffFailed."""
        turn = _stock_turn(self.order.host, self.order.port)
        if not turn.acquire(timeout=self._link.admission_timeout_s):
            self._fail(ErrorCode.BUSY, "another handoff to this stock node is under way")
        return turn

    def _connect(self) -> tuple[socket.socket, dict[str, Any]]:
        """Connect and read Hello. Raises HandoffFailed."""
        order, limit = self.order, time.monotonic() + self._link.admission_timeout_s
        try:
            sock = socket.create_connection((order.host, order.port), self._link.admission_timeout_s)
        except OSError as error:
            self._fail(CONNECT_FAILED, f"{order.host}:{order.port}: {error.strerror or error}")
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock, self._receive(sock, limit, abortable=True)
        except BaseException:
            sock.close()
            raise

    def _admit(self, sock: socket.socket, hello: Mapping[str, Any]) -> _Admission:
        """Send Request and read Accept. Raises HandoffFailed, with nothing written, unless it holds."""
        link, order = self._link, self.order
        limit = time.monotonic() + link.admission_timeout_s
        self._check_hello(hello)
        if (difference := link.layout.mismatch(hello.get("layout"))) is not None:
            self._fail(ErrorCode.LAYOUT_MISMATCH, difference)
        nonce = hello.get("nonce")
        if link.secret is not None and (not isinstance(nonce, str) or not nonce):
            self._fail(ErrorCode.UNAUTHORIZED, "the node sent no nonce, so the secret cannot be proven")
        asked_at = time.monotonic()
        self._asked = True
        request = self._request() | {
            "ext": control.EXTENSION,
            "generation": order.generation,
            "layout": link.layout.describe(),
            "checksums": link.checksum is not False,
            "proof": control.proof(link.secret, str(nonce), order.rid, link.rank) if link.secret else None,
        }
        self._transmit(sock, request, limit)
        answer = self._receive(sock, limit, abortable=True)
        if answer.get("accept") is not True:
            self._fail_with(answer)
        address, room, deadline_s = (answer.get(name) for name in ("address", "bytes", "deadline_s"))
        if not _is_int(address) or not _is_int(room) or not _is_number(deadline_s) or address <= 0:
            self._fail(PROTOCOL, "Accept lacks a valid address, bytes or deadline_s")
        if room < link.layout.segment_bytes(order.seq_len):
            self._fail(PROTOCOL, f"the slot of {room} bytes is too small for {order.seq_len} tokens")
        if order.generation is not None and answer.get("generation") != order.generation:
            self._fail(PROTOCOL, f"generation {answer.get('generation')!r} accepted, not {order.generation}")
        wanted = answer.get("checksums") is True
        if wanted and link.checksum is False:
            self._fail(
                ErrorCode.LAYOUT_MISMATCH, "the node wants checksums, and tilert_checksum is false here"
            )
        checksums = wanted if link.checksum is None else link.checksum
        deadline = min(self._deadline, asked_at + deadline_s)
        return _Admission(address, deadline, checksums, segments=answer.get("segments") is True)

    def _admit_stock(self, sock: socket.socket, hello: Mapping[str, Any]) -> _Admission:
        """Send Request to a node that lacks the extension; silence for a while is consent."""
        link = self._link
        self._check_hello(hello)
        if hello.get("layout_version") != link.layout.version:
            self._fail(
                ErrorCode.LAYOUT_MISMATCH,
                f"layout_version: here {link.layout.version}, peer {hello.get('layout_version')!r}",
            )
        try:
            stock.check_layout(link.layout)
        except ProfileError as error:
            self._fail(ErrorCode.LAYOUT_MISMATCH, str(error))
        if hello.get("busy"):
            self._fail(ErrorCode.BUSY, "the node is receiving another request")
        self._transmit(sock, self._request(), time.monotonic() + link.admission_timeout_s)
        if _readable([sock], STOCK_REFUSAL_GRACE_S):
            self._fail_with(self._receive(sock, time.monotonic() + link.admission_timeout_s))
        return _Admission(0, self._deadline, stock=hello)

    def _request(self) -> dict[str, Any]:
        order = self.order
        return {
            "rid": order.rid,
            "rank": self._link.rank,
            "seq_len": order.seq_len,
            "last_prompt_token": order.last_prompt_token,
            "sampling": None,
        }

    def _check_hello(self, hello: Mapping[str, Any]) -> None:
        """What Hello must say whether the node has the extension or not."""
        if hello.get("magic") != control.MAGIC:
            self._fail(PROTOCOL, f"{self.order.host}:{self.order.port} is no decode node: wrong magic")
        if hello.get("ext") not in (None, control.EXTENSION):
            self._fail(
                PROTOCOL, f"the node speaks extension {hello.get('ext')!r}, this one {control.EXTENSION}"
            )
        if hello.get("transport") != self._link.transport.name:
            self._fail(
                PROTOCOL, f"transport: here {self._link.transport.name}, peer {hello.get('transport')!r}"
            )
        limit = hello.get("max_seq_len")
        if not _is_int(limit) or limit < self.order.seq_len:
            self._fail(
                ErrorCode.SEQ_LEN_EXCEEDED, f"{self.order.seq_len} tokens, peer's max_seq_len is {limit!r}"
            )

    def _send(self, sock: socket.socket, admission: _Admission, hello: Mapping[str, Any]) -> None:
        """Write segments as they come until all tokens are there, then send Done. Raises HandoffFailed."""
        link, order = self._link, self.order
        try:
            link.transport.prepare(hello)
        except TransportError as error:
            self._fail(WRITE_FAILED, str(error))
        while True:
            self._write(self._next_segment(sock, admission.deadline), admission, hello, sock)
            if sum(self._sent) == order.seq_len:
                break
            if admission.segments:
                sums = self._checksums[-1] if admission.checksums else None
                self._transmit(sock, {"segment": self._sent[-1], "checksums": sums}, admission.deadline)
        self._transmit(
            sock,
            {
                "done": True,
                "rid": order.rid,
                "rank": link.rank,
                "segments": self._sent,
                "checksums": self._checksums if admission.checksums else None,
            },
            admission.deadline,
        )

    def _next_segment(self, sock: socket.socket, deadline: float) -> Segment:
        """Wait for the worker's next segment, the node's Abort or the deadline."""
        while True:
            self._check_abort()
            with self._lock:
                segment = self._queue[0] if self._queue else None
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                self._fail(DEADLINE, f"not sent within {deadline - self._opened:.1f} s of its opening")
            ready = _readable([sock, self._wake_read], 0 if segment else remaining)
            if sock in ready:
                self._fail_with(self._receive(sock, time.monotonic() + self._link.admission_timeout_s))
            if segment is not None:
                return segment
            if ready:
                self._wake_read.recv(4096)

    def _write(
        self, segment: Segment, admission: _Admission, hello: Mapping[str, Any], sock: socket.socket
    ) -> None:
        """Write one segment and give its piece back."""
        link, began = self._link, 0.0

        def ready() -> float:
            """Wait for the bytes; the seconds left to write them."""
            nonlocal began
            segment.completion.wait()
            if admission.checksums:
                self._checksums.append(plane_checksums(segment.piece.tensor, link.layout, segment.tokens))
            began = time.monotonic()
            if began >= admission.deadline:
                self._fail(DEADLINE, "the node's deadline has passed")
            return admission.deadline - began

        source = segment.piece.address
        if admission.stock is None:
            parts = [
                stock.Part(0, admission.address + link.layout.offset(segment.start), segment.piece.nbytes)
            ]
        else:
            parts = stock.parts(link.layout, admission.stock, segment.start, segment.tokens)
        try:
            link.transport.write(
                hello,
                [source + part.source for part in parts],
                [part.target for part in parts],
                [part.length for part in parts],
                0.0,
                ready,
            )
        except WriteOutstanding as error:
            with self._lock:
                self._queue.popleft()
            raise _Outstanding(error, segment.piece) from error
        except TransportError as error:
            self._fail(WRITE_FAILED, str(error))
        ended = time.monotonic()
        with self._lock:
            self._queue.popleft()
        segment.piece.release()
        self._sent.append(segment.tokens)
        self._nbytes += segment.piece.nbytes
        self._gather_s += segment.gather_s
        self._queue_s += began - segment.gathered_at
        self._wire_s += ended - began

    def _conclude(self, sock: socket.socket) -> None:
        """Read the Verdict. Raises HandoffFailed unless what arrived is whole."""
        limit = max(self._deadline, time.monotonic() + self._link.admission_timeout_s)
        verdict = self._receive(sock, limit)
        if verdict.get("ok") is not True:
            self._fail_with(verdict)

    def _settle(self, write: WriteOutstanding, piece: Piece) -> bool:
        """Keep the piece of a write that may still be under way until it is not; whether it has ended."""
        if write.settle(SETTLE_S):
            piece.release()
            return True
        logger.error(
            "handoff %s: a write has not ended after %.0f s; %d bytes of staging memory are lost until "
            "the next start",
            self.order.rid,
            SETTLE_S,
            piece.nbytes,
        )
        return False

    def _tell(self, sock: socket.socket, failure: HandoffFailed) -> None:
        """Tell the node, with no write outstanding, that nothing more will come."""
        try:
            self._transmit(sock, {"abort": failure.code, "message": str(failure)}, time.monotonic() + 1.0)
        except HandoffFailed:
            return  # the connection is gone, which tells the node as much

    def _report(self) -> None:
        failure, total = self._failure, time.monotonic() - self._opened
        if failure is None:
            logger.info(
                "handoff %s: %d tokens, %d bytes in %d segments to %s, %.1f ms on the wire",
                self.order.rid,
                self.order.seq_len,
                self._nbytes,
                len(self._sent),
                self.order.host,
                self._wire_s * 1e3,
            )
        else:
            logger.warning(
                "handoff %s to %s:%d failed: %s: %s",
                self.order.rid,
                self.order.host,
                self.order.port,
                failure.code,
                failure,
            )
        self._on_end(
            HandoffReport(
                rid=self.order.rid,
                reason=failure.code if failure else None,
                nbytes=self._nbytes,
                segments=len(self._sent),
                gather_s=self._gather_s,
                queue_s=self._queue_s,
                wire_s=self._wire_s,
                total_s=total,
            )
        )

    def _drop_queue(self) -> None:
        """Give back the pieces of segments that will not be sent."""
        with self._lock:
            self._ended = True
            segments = list(self._queue)
            self._queue.clear()
        for segment in segments:
            segment.completion.wait()
            segment.piece.release()

    def _receive(self, sock: socket.socket, limit: float, abortable: bool = False) -> dict[str, Any]:
        """The node's next message. Raises HandoffFailed; with `abortable`, also as soon as we give up."""
        try:
            wake = self._wake_read if abortable else None
            return control.recv(cast(socket.socket, _Until(sock, limit, wake, self._check_abort)))
        except TimeoutError:
            self._fail(CONNECT_FAILED, "the node did not answer in time")
        except OSError as error:
            self._fail(CONNECT_FAILED, f"the connection broke: {error.strerror or error}")
        except control.ProtocolError as error:
            self._fail(PROTOCOL, str(error))

    def _check_abort(self) -> None:
        with self._lock:
            if self._abort is not None:
                raise self._abort

    def _transmit(self, sock: socket.socket, message: Mapping[str, Any], limit: float) -> None:
        try:
            sock.settimeout(max(0.001, limit - time.monotonic()))
            sock.sendall(control.pack(message))
        except OSError as error:
            self._fail(CONNECT_FAILED, f"the connection broke: {error.strerror or error}")

    @staticmethod
    def _fail(code: str, message: str) -> NoReturn:
        raise HandoffFailed(code, message)

    def _fail_with(self, answer: Mapping[str, Any]) -> NoReturn:
        """Fail with the reason of a Refusal or Abort."""
        code = answer.get("error") or answer.get("abort")
        if not isinstance(code, str):
            self._fail(PROTOCOL, f"unexpected message with fields {sorted(answer)[:8]}")
        known = code if code in set(ErrorCode) else PROTOCOL  # a label a peer may not choose freely
        self._fail(known, f"the node says {code[:64]}: {str(answer.get('message', ''))[:256]}")


class _Outstanding(Exception):
    def __init__(self, write: WriteOutstanding, piece: Piece) -> None:
        super().__init__(str(write))
        self.write = write
        self.piece = piece


def _readable(sockets: Sequence[socket.socket], timeout_s: float) -> list[socket.socket]:
    """Those that can be read, once one of them can or the time is over."""
    poll = select.poll()  # select.select takes descriptors below 1,024 only; vLLM's processes may have more
    for sock in sockets:
        poll.register(sock, select.POLLIN)
    found = {number for number, _ in poll.poll(1e3 * max(0.0, timeout_s))}
    return [sock for sock in sockets if sock.fileno() in found]


class _Until:
    """A socket's `recv` with one deadline over all calls, so that a trickle cannot hold us.

    `check` is called before it blocks and whenever `wake` can be read; it may raise.
    """

    def __init__(
        self, sock: socket.socket, limit: float, wake: socket.socket | None, check: Callable[[], None]
    ) -> None:
        self._sock = sock
        self._limit = limit
        self._wake = wake
        self._check = check

    def recv(self, size: int) -> bytes:
        waiting = [self._sock] if self._wake is None else [self._sock, self._wake]
        while True:
            if self._wake is not None:
                self._check()
            remaining = self._limit - time.monotonic()
            ready = _readable(waiting, remaining)
            if self._sock in ready:
                return self._sock.recv(size)
            if not ready:
                raise TimeoutError
            assert self._wake is not None
            self._wake.recv(4096)


_stock_turns: dict[tuple[str, int], threading.Lock] = {}
_stock_turns_lock = threading.Lock()


def _stock_turn(host: str, port: int) -> threading.Lock:
    """A stock node takes one request at a time and cannot say no in time: one handoff at a time goes there."""
    with _stock_turns_lock:
        return _stock_turns.setdefault((host, port), threading.Lock())


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)

"""The control port: who may write, and whether what was written is whole. See `wire.control`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections.abc import Mapping
from typing import Any, Final, TypeGuard

from vllm_tilert.decode.landing import NOWHERE, Lease
from vllm_tilert.decode.node import Node
from vllm_tilert.decode.slots import Handoff, Refused
from vllm_tilert.wire import control
from vllm_tilert.wire.api import ErrorCode, is_rid

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S: Final = 10.0
"""From Hello to the sender's Request."""
MAX_DONE: Final = 4 << 20
"""Largest Done in bytes: checksums of every plane of a few thousand segments."""


class Receiver:
    """Serves the control port of one node. `secret` None: any sender may ask."""

    def __init__(self, node: Node, secret: bytes | None) -> None:
        self._node = node
        self._secret = secret
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port (the one picked when `port` is 0)."""
        self._server = await asyncio.start_server(self._serve, host, port)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        rid: str | None = None
        lease = self._node.landing.lend() if self._node.landing is not None else None
        try:
            nonce = secrets.token_hex(16)
            await _send(writer, self._hello(nonce, lease))
            request = await self._request(lease, reader, writer)
            if lease is not None and request.get("ext") is not None:  # one of ours, who writes to no bases
                lease.quiet = True
                lease.end()
                lease = None
            try:
                rid = request.get("rid") if is_rid(request.get("rid")) else None
                handoff = self._admit(request, nonce, lease)
            except Refused as error:
                self._refuse(error, rid, peer)
                await _send(writer, _refusal(error))
                if lease is not None:  # it writes all the same
                    lease.quiet = _is_done(await control.read(reader, MAX_DONE), request.get("rid"))
                return
            if lease is None:
                await self._receive(handoff, reader, writer)
            else:
                await self._receive_stock(handoff, lease, reader)
        except TimeoutError:
            self._node.metrics.refused("no_request")
        except (control.ProtocolError, OSError) as error:
            self._node.metrics.refused("protocol")
            log.warning("control connection failed: %s", error, extra={"rid": rid, "peer": str(peer)})
        finally:
            if lease is not None:
                lease.end()
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _request(
        self, lease: Lease | None, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> dict[str, Any]:
        """The sender's Request. Who has a lease may write at any time, so only its own end ends the wait."""
        if lease is None:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                return await control.read(reader, control.MAX_REQUEST)
        _keep_alive(writer.get_extra_info("socket"))
        try:
            return await control.read(reader, control.MAX_REQUEST)
        except control.Closed:
            lease.quiet = True  # a stock sender asks before it writes, and this one has not asked
            raise

    def _hello(self, nonce: str, lease: Lease | None) -> dict[str, Any]:
        node = self._node
        return {
            "magic": control.MAGIC,
            "ext": control.EXTENSION,
            "transport": node.transport.name,
            "max_seq_len": node.max_seq_len,
            "busy": not node.slots.idle,
            **node.transport.local_meta(),
            "layout": node.layout.describe(),
            "nonce": nonce,
            **(lease.zone.hello() if lease is not None else NOWHERE),
        }

    def _admit(self, request: Mapping[str, Any], nonce: str, lease: Lease | None) -> Handoff:
        """Check every field, then let the sender write. Raises Refused; no slot was written to then.

        A stock sender (with a `lease`) knows of its reservation only the rid, and proves nothing.
        """
        rid, rank = request.get("rid"), request.get("rank")
        if request.get("ext") != control.EXTENSION and lease is None:
            raise Refused(
                ErrorCode.BAD_REQUEST,
                f"ext is {request.get('ext')!r}, this node speaks {control.EXTENSION}: "
                "use this project's connector on the prefill host",
            )
        if not is_rid(rid):
            raise Refused(ErrorCode.BAD_REQUEST, "rid is not 32 lower-case hex digits")
        assert isinstance(rid, str)
        if not _whole(rank) or rank != 0:
            raise Refused(
                ErrorCode.BAD_REQUEST, f"rank is {rank!r}: only rank 0 sends (the state is replicated)", rid
            )
        if lease is None:
            self._check_ours(request, nonce, rid)
        seq_len = request.get("seq_len")
        if not _whole(seq_len) or seq_len < 1:
            raise Refused(
                ErrorCode.BAD_REQUEST, f"seq_len is {seq_len!r}: expected a positive whole number", rid
            )
        if seq_len > self._node.max_seq_len:
            raise Refused(
                ErrorCode.SEQ_LEN_EXCEEDED,
                f"seq_len is {seq_len}, this node takes {self._node.max_seq_len}",
                rid,
            )
        last = request.get("last_prompt_token")
        if not _whole(last) or last < 0:
            raise Refused(ErrorCode.BAD_REQUEST, f"last_prompt_token is {last!r}: expected a token id", rid)
        slots = self._node.slots
        if lease is None:
            generation = request.get("generation")
        else:
            known = slots.find(rid)
            generation = known.generation if known is not None else 0
        if not _whole(generation):
            raise Refused(
                ErrorCode.BAD_REQUEST, f"generation is {generation!r}: expected a whole number", rid
            )
        handoff = slots.admit(rid, generation)
        handoff.last_prompt_token = last
        handoff.facts |= {"seq_len": seq_len, "bytes": self._node.layout.segment_bytes(seq_len)}
        return handoff

    def _check_ours(self, request: Mapping[str, Any], nonce: str, rid: str) -> None:
        """What only our senders say: proof of the secret, layout, checksums. Raises Refused."""
        if self._secret is not None and not control.proof_holds(
            self._secret, nonce, rid, 0, request.get("proof")
        ):
            raise Refused(
                ErrorCode.UNAUTHORIZED, "the proof does not hold: both ends need the same secret", rid
            )
        mismatch = self._node.layout.mismatch(request.get("layout"))
        if mismatch:
            raise Refused(ErrorCode.LAYOUT_MISMATCH, mismatch, rid)
        if self._node.verify_checksums and request.get("checksums") is False:
            raise Refused(
                ErrorCode.LAYOUT_MISMATCH,
                "this node wants checksums, and the sender sends none: leave tilert_checksum out on the "
                "prefill host, or start the node with --no-checksum",
                rid,
            )

    async def _receive(
        self, handoff: Handoff, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """From Accept to Verdict. Whatever happens, the slots are told how the writer ended."""
        node, slots = self._node, self._node.slots
        start = time.perf_counter()
        told = False  # whether `slots` know how the writer ended
        try:
            deadline_s = max(0.0, (handoff.writer_deadline or 0.0) - time.monotonic())
            await _send(
                writer,
                {
                    "accept": True,
                    "slot": handoff.slot,
                    "generation": handoff.generation,
                    "address": node.address(handoff),
                    "bytes": node.layout.segment_bytes(handoff.facts["seq_len"]),
                    "deadline_s": deadline_s,
                    "checksums": node.verify_checksums,
                    "segments": True,
                },
            )
            message = await self._last(handoff, reader, writer)
            if "abort" in message:
                told = True
                slots.writer_stopped(handoff, f"the sender gave up: {_text(message)}")
                return
            try:
                segments, sums = self._read_done(handoff, message)
            except Refused as error:
                # Done with nonsense in it: the sender says that it has stopped writing, no more.
                told = True
                slots.writer_stopped(handoff, error.message)
                self._refuse(error, handoff.rid, None)
                await _send(writer, _refusal(error))
                return
            told = True
            handoff.timing_ms["wire"] = 1e3 * (time.perf_counter() - start)
            handoff.facts |= {"segments": len(segments), "wire_ms": handoff.timing_ms["wire"]}
            try:
                await node.accept_state(handoff, segments, sums)
            except Refused as error:
                self._refuse(error, handoff.rid, None)
                await _send(writer, _refusal(error))
                return
            node.metrics.received(handoff)
            await _send(writer, {"ok": True})
        finally:
            if not told:
                slots.writer_vanished(handoff, "the sender vanished before it was done")

    async def _receive_stock(self, handoff: Handoff, lease: Lease, reader: asyncio.StreamReader) -> None:
        """From a stock sender's Request to its Done, which nothing answers.

        It writes to the landing zone only. So the request may end at any time and its slot with it, but the
        lease lasts until the sender is done or gone.
        """
        node, slots = self._node, self._node.slots
        start = time.perf_counter()
        told = False  # whether `slots` know how the writer ended
        reading = asyncio.ensure_future(control.read(reader, MAX_DONE))
        ending = asyncio.ensure_future(node.signal.until(lambda: handoff.over))
        try:
            await asyncio.wait([reading, ending], return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                told = True
                slots.writer_stopped(handoff, "the request ended before its state was there")
            done = _is_done(await reading, handoff.rid)
            if done and not told:
                told = True
                handoff.timing_ms["wire"] = 1e3 * (time.perf_counter() - start)
                handoff.facts |= {"segments": 1, "wire_ms": handoff.timing_ms["wire"]}
                try:
                    await node.accept_state(handoff, [handoff.facts["seq_len"]], None, lease.zone)
                    node.metrics.received(handoff)
                except Refused as error:
                    self._refuse(error, handoff.rid, None)
            lease.quiet = done
        finally:
            reading.cancel()
            ending.cancel()
            if not told:
                slots.writer_stopped(handoff, "the sender vanished before it was done")

    async def _last(
        self, handoff: Handoff, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> dict[str, Any]:
        """The sender's last message: Done or Abort. If the handoff ends first the sender is told to stop, and
        its answer is waited for: until then it may be writing."""
        telling: asyncio.Future[None] | None = None
        try:
            async with asyncio.timeout(None) as answer:
                telling = asyncio.ensure_future(self._tell_end(handoff, writer, answer))
                while "segment" in (message := await control.read(reader, MAX_DONE)):
                    await self._node.accept_segment(handoff, *self._read_segment(handoff, message))
                return message
        except TimeoutError:
            raise control.ProtocolError("the sender did not answer an abort") from None
        finally:
            if telling is not None:
                telling.cancel()

    async def _tell_end(
        self, handoff: Handoff, writer: asyncio.StreamWriter, answer: asyncio.Timeout
    ) -> None:
        await self._node.signal.until(lambda: handoff.over)
        # The slot stays quarantined until the sender answers; `limits` say for how long at most.
        limits = self._node.slots.limits
        answer.reschedule(asyncio.get_running_loop().time() + limits.transfer + limits.grace)
        with contextlib.suppress(OSError):
            await _send(writer, {"abort": handoff.outcome, "message": handoff.message})

    def _read_segment(self, handoff: Handoff, message: Mapping[str, Any]) -> tuple[int, list[int] | None]:
        """A segment, not the last, that was written whole. Raises ProtocolError: who says nonsense is writing
        we do not know what."""
        tokens, sums, layout = message.get("segment"), message.get("checksums"), self._node.layout
        arrived = sum(handoff.arrived)
        if not _whole(tokens) or tokens < 1 or tokens % layout.page:
            raise control.ProtocolError(f"segment is not a whole number of pages of {layout.page} tokens")
        if arrived + tokens >= handoff.facts["seq_len"]:
            raise control.ProtocolError(f"segment of {tokens} tokens leaves none for the last one")
        if sums is None and not self._node.verify_checksums:
            return tokens, None
        if not _sums(sums, len(layout.planes)):
            raise control.ProtocolError("the segment's checksums are not whole numbers, one a plane")
        return tokens, sums

    def _read_done(
        self, handoff: Handoff, message: Mapping[str, Any]
    ) -> tuple[list[int], list[list[int]] | None]:
        rid, layout = handoff.rid, self._node.layout
        if message.get("done") is not True or message.get("rid") != rid:
            raise Refused(ErrorCode.BAD_REQUEST, "expected Done or Abort of the same rid", rid)
        segments, sums = message.get("segments"), message.get("checksums")
        if not isinstance(segments, list) or not all(_whole(n) for n in segments):
            raise Refused(ErrorCode.BAD_REQUEST, "segments is not a list of whole numbers", rid)
        try:
            layout.check_segments(segments, handoff.facts["seq_len"])
        except ValueError as error:
            raise Refused(ErrorCode.BAD_REQUEST, f"segments: {error}", rid) from None
        if tuple(segments[: len(handoff.arrived)]) != handoff.arrived:
            raise Refused(
                ErrorCode.BAD_REQUEST, "segments are not those that were said to have been written", rid
            )
        if sums is None:
            if self._node.verify_checksums:
                raise Refused(ErrorCode.CHECKSUM_MISMATCH, "this node wants checksums, Done has none", rid)
            return segments, None
        planes = len(layout.planes)
        if (
            not isinstance(sums, list)
            or len(sums) != len(segments)
            or not all(_sums(s, planes) for s in sums)
        ):
            raise Refused(
                ErrorCode.BAD_REQUEST, f"checksums are not {planes} whole numbers for each segment", rid
            )
        return segments, sums

    def _refuse(self, error: Refused, rid: str | None, peer: object) -> None:
        self._node.metrics.refused(error.code)
        log.warning(
            "handoff refused: %s: %s", error.code, error.message, extra={"rid": rid, "peer": str(peer)}
        )


def _whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _sums(value: object, planes: int) -> TypeGuard[list[int]]:
    return isinstance(value, list) and len(value) == planes and all(_whole(n) for n in value)


def _is_done(message: Mapping[str, Any], rid: object) -> bool:
    return message.get("done") is True and message.get("rid") == rid


def _keep_alive(sock: socket.socket) -> None:
    """Notice within half a minute that the other host is gone."""
    for option, value in (
        (socket.TCP_KEEPIDLE, 15),
        (socket.TCP_KEEPINTVL, 5),
        (socket.TCP_KEEPCNT, 3),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _text(message: Mapping[str, Any]) -> str:
    return f"{str(message.get('abort'))[:64]}: {str(message.get('message', ''))[:256]}"


def _refusal(error: Refused) -> dict[str, Any]:
    return {"error": error.code, "message": error.message}


async def _send(writer: asyncio.StreamWriter, message: Mapping[str, Any]) -> None:
    writer.write(control.pack(message))
    await writer.drain()

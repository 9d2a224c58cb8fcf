"""One generation on the TileRT path: lease, prefill, decode leg, and one fresh attempt if that fails early.

A client's answer starts only when a decode leg is open, so everything before may be tried again
elsewhere: with a new handoff id, a new reservation and a new prefill.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final, Protocol

from tokenizers import Tokenizer

from tilert_router import decode
from tilert_router.config import Config
from tilert_router.decode import DecodeStream, NodeError
from tilert_router.errors import ApiError, bad_request, overloaded
from tilert_router.fields import Kind
from tilert_router.leases import Lease, Pool
from tilert_router.metrics import Metrics
from tilert_router.output import Output, StreamDetokenizer
from tilert_router.parsing import AnswerParser, Parsing
from tilert_router.prefill import Prefilled, PrefillFailed, PrefillPool
from tilert_router.queue import EXPECTED_TOKENS, QueueFull, Ticket
from tilert_router.request import Request
from tilert_router.tracing import Trace
from vllm_tilert.wire.api import ErrorCode

log = logging.getLogger(__name__)

_STATUS: Final = {
    ErrorCode.KV_TRANSFER_TIMEOUT: 504,
    decode.TIMEOUT: 504,
    ErrorCode.BUSY: 503,
    ErrorCode.DRAINING: 503,
    ErrorCode.NOT_RESERVED: 503,
    decode.UNREACHABLE: 503,
}
_LONGEST_RETRY_S: Final = 300.0


def node_answer(error: NodeError) -> ApiError:
    """What a client reads of a decode node's failure: the code, never the node's own words."""
    status = _STATUS.get(error.code, 502)
    return ApiError(status, f"Decoding failed ({error.code}).", code=error.code)


class Sink(Protocol):
    """Where an answer goes. `show` and `silent` run inside the callback that read the tokens."""

    def show(self, text: str, token_ids: list[int]) -> bool:
        """Take a part of the answer; False: nothing more before `drain` returns."""
        ...

    def silent(self) -> None:
        """Nothing came for a while."""
        ...

    async def drain(self) -> None:
        """Wait until there is room again."""
        ...


class Generation:
    """An answer whose decode leg is open (or that needs none). `run` it once, then `close`."""

    def __init__(
        self,
        request: Request,
        prefilled: Prefilled,
        lease: Lease,
        stream: DecodeStream | None,
        output: Output,
        parser: AnswerParser | None = None,
    ) -> None:
        self.request = request
        self.parser = parser
        """Tells reasoning and tool calls from content; None: all of it is content."""
        self.prefilled = prefilled
        self.rid = lease.rid
        self.node = lease.node.name
        self.queued_s = 0.0
        """Seconds from the request's arrival to its first lease."""
        self.finish_reason: str = "stop" if prefilled.ended else "length"
        self._lease = lease
        self._stream = stream
        self._output = output
        self._ended_by_eos = prefilled.ended

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or token that ended the answer, if one of the request's did."""
        return self._output.stop_reason

    def usage(self) -> dict[str, int]:
        """Token counts so far; an end-of-sequence token counts, as in vLLM."""
        prompt = self.prefilled.prompt_tokens
        completion = self._output.count + self._ended_by_eos
        return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}

    async def run(self, sink: Sink, stall_s: float, keepalive_s: float) -> None:
        """Show the answer as it grows, to its end. Raises ApiError when decoding breaks off."""
        output = self._output
        if self._stream is None:
            if not self.prefilled.ended:
                text = output.push([self.prefilled.first_token_id])
                sink.show(text if output.stopped else text + output.flush(), output.kept)
                if output.stopped:
                    self.finish_reason = "stop"
            return
        stream, lease = self._stream, self._lease
        # As in vLLM: the first chunk leaves at once, later ones with at least so many tokens, the last with the rest.
        interval, shown, text, kept = self.request.stream_interval, False, "", list[int]()

        def accept(burst: list[int]) -> bool:
            nonlocal shown, text, kept
            lease.remaining -= len(burst)
            text += output.push(burst)
            kept += output.kept
            if output.stopped:
                stream.stop()
            elif shown and len(kept) < interval:
                return True
            whole, tokens, text, kept, shown = text, kept, "", [], True
            return sink.show(whole, tokens) if whole or tokens else True

        try:
            done = await stream.run(accept, sink.drain, stall_s, keepalive_s, sink.silent)
        except NodeError as error:
            raise node_answer(error) from None
        if output.stopped:
            self.finish_reason = "stop"
            if done is None:
                lease.abandon("a stop string is complete")
            else:
                lease.finish()
            return
        assert done is not None
        if done.finish_reason not in ("stop", "length"):
            raise ApiError(502, f"Decoding ended early ({done.finish_reason}).", code=done.finish_reason)
        lease.finish()
        if done.n != output.count or done.seq_len not in (None, self.prefilled.prompt_tokens):
            # Tokens were lost on the way, or the node decoded from the state of another prompt.
            log.error(
                "the node's account does not fit the request",
                extra={
                    "rid": self.rid,
                    "node": lease.node.name,
                    "tokens": [done.n, output.count],
                    "prompt_tokens": [done.seq_len, self.prefilled.prompt_tokens],
                },
            )
            raise ApiError(502, "Decoding failed (the answer is not whole).", code="answer_mismatch")
        self.finish_reason = done.finish_reason
        self._ended_by_eos = done.finish_reason == "stop"
        text += output.flush()
        if text or kept:
            sink.show(text, kept)

    def close(self) -> None:
        """Over, however it ended: a decode that still runs is cancelled."""
        self._lease.abandon("the answer ended")
        if self._stream is not None:
            self._stream.close()


class Generator:
    """Starts generations. One per router process."""

    def __init__(
        self,
        config: Config,
        pool: Pool,
        prefill: PrefillPool,
        tokenizer: Tokenizer,
        metrics: Metrics,
        parsing: Parsing | None = None,
    ) -> None:
        self._config = config
        self._pool = pool
        self._prefill = prefill
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._parsing = parsing
        self._loop = asyncio.get_running_loop()

    async def start(
        self, request: Request, key: str, priority: int, wait_s: float, trace: Trace
    ) -> Generation:
        """Wait for a node, prefill, open the decode leg. Raises ApiError. Cancelling gives all of it back."""
        queued = self._loop.time()
        ticket = Ticket(
            key=key,
            priority=priority,
            cost=request.max_tokens or EXPECTED_TOKENS,
            deadline=queued + wait_s,
            future=self._loop.create_future(),
        )
        avoid: set[str] = set()
        failed: ApiError | None = None
        queued_s = 0.0
        for attempt in range(1 + self._config.limits.retries):
            with trace.phase("queue", attempt=attempt):
                lease = await self._lease(ticket, attempt, wait_s, failed)
            if not attempt:
                queued_s = self._loop.time() - queued
                self._metrics.phase.labels("queue").observe(queued_s)
            try:
                generation = await self._attempt(request, lease, avoid, trace)
                generation.queued_s = queued_s
                return generation
            except (PrefillFailed, NodeError) as error:
                lease.abandon(str(error))
                if isinstance(error, NodeError):
                    ticket.avoid.add(lease.node.name)
                    failed = node_answer(error)
                    fault = error.code
                else:
                    failed, fault = error.answer, str(error.answer.code)
                self._metrics.retries.labels(fault).inc()
                log.warning(
                    "attempt failed", extra={"rid": lease.rid, "node": lease.node.name, "fault": str(error)}
                )
            except BaseException:
                lease.abandon("the request ended")
                raise
        assert failed is not None
        raise failed

    async def _lease(self, ticket: Ticket, attempt: int, wait_s: float, failed: ApiError | None) -> Lease:
        try:
            return await (self._pool.reacquire(ticket) if attempt else self._pool.acquire(ticket))
        except QueueFull:
            raise overloaded("Too many requests are waiting.", self._retry_after_s(wait_s)) from None
        except TimeoutError:
            if failed is not None:
                raise failed from None
            raise overloaded(
                "No decode node became free in time.", self._retry_after_s(wait_s), code="queue_timeout"
            ) from None

    def _retry_after_s(self, wait_s: float) -> float:
        """When those who wait now will have been served; a tenth of the wait where no pace is known."""
        expected = self._pool.expected_wait_s(len(self._pool.queue))
        return wait_s / 10 if expected is None else min(expected, _LONGEST_RETRY_S)

    async def _attempt(self, request: Request, lease: Lease, avoid: set[str], trace: Trace) -> Generation:
        node, reservation = lease.node, lease.reservation
        assert reservation is not None
        handoff: dict[str, Any] = {
            "tilert_host": node.host,
            "tilert_ctrl_port": node.ctrl_port,
            "tilert_rid": lease.rid,
            "tilert_generation": reservation.generation,
        }
        start = self._loop.time()
        lease.prefilled = True
        with trace.phase("prefill", rid=lease.rid) as headers:
            prefilled = await self._prefill.run(request, lease.rid, handoff, avoid, headers)
        first = self._loop.time()
        self._metrics.phase.labels("prefill").observe(first - start)

        window = min(self._config.model.max_model_len, node.max_seq_len or self._config.model.max_model_len)
        budget = request.budget(prefilled.prompt_tokens, window)
        if budget < 1:
            raise bad_request(
                f"the prompt has {prefilled.prompt_tokens} tokens, and the context of {window} leaves none "
                "for the answer",
                "messages" if request.kind is Kind.CHAT else "prompt",
                code="context_length_exceeded",
            )
        parser = None
        if self._parsing is not None and request.kind is Kind.CHAT:
            parser = self._parsing.start(request.body, prefilled.prompt_token_ids)
        # A parser needs the markers that special tokens are.
        skip_special = request.skip_special_tokens and parser is None
        detokenizer = StreamDetokenizer(self._tokenizer, prefilled.prompt_token_ids, skip_special)
        output = Output(detokenizer, request.stop, request.stop_token_ids, request.include_stop)
        if prefilled.ended or budget == 1:
            lease.abandon("the first token is the whole answer")
            return Generation(request, prefilled, lease, None, output, parser)
        leg = {
            "rid": lease.rid,
            "first_token_id": prefilled.first_token_id,
            "max_tokens": budget,
            "sampling": request.sampling.as_json(),
            "timeout_s": self._config.timeouts.handoff_s,
        }
        with trace.phase("handoff", rid=lease.rid, node=node.name):
            stream = await self._open(lease, leg)
        lease.open(budget)
        self._metrics.phase.labels("handoff").observe(self._loop.time() - first)
        return Generation(request, prefilled, lease, stream, output, parser)

    async def _open(self, lease: Lease, body: dict[str, Any]) -> DecodeStream:
        """Open the decode leg. Behind another request it waits for that one's end, then `handoff_s`."""
        client: Any = lease.node.client
        # The node's own limit, handoff_s, ends first, with the reason.
        limit_s = self._config.timeouts.handoff_s + 2
        if lease.front.is_set():
            try:
                async with asyncio.timeout(limit_s):
                    opened: DecodeStream = await client.open(body)
                    return opened
            except TimeoutError:
                raise NodeError(decode.TIMEOUT, "the decode leg did not open") from None
        opening = self._loop.create_task(client.open(body))
        front = self._loop.create_task(lease.front.wait())
        try:
            await asyncio.wait({opening, front}, return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                await asyncio.wait({opening}, timeout=limit_s)
            if not opening.done():
                raise NodeError(decode.TIMEOUT, "the decode leg did not open")
            stream: DecodeStream = opening.result()
            return stream
        except BaseException:
            if not opening.cancel() and not opening.cancelled() and opening.exception() is None:
                opening.result().close()
            raise
        finally:
            front.cancel()

"""Ask through the ingress, ask vLLM itself, and compare the tokens: the proof that a handoff is right.

Standard library only, so that it runs wherever the wheel is installed (`tilertctl verify`).
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import ssl
import statistics
import string
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vllm_tilert.wire import api


class VerifyError(Exception):
    """An endpoint did not answer as it should; the message says which and how."""


@dataclass(frozen=True)
class Endpoint:
    """An HTTP base URL and the bearer token it wants, if any."""

    url: str
    token: str | None = None
    ca_file: str | None = None
    timeout_s: float = 300.0

    def _connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise VerifyError(f"url {self.url!r} is not http(s)://host[:port]")
        if parts.scheme == "https":
            context = ssl.create_default_context(cafile=self.ca_file)
            return http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=self.timeout_s, context=context
            )
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=self.timeout_s)

    def open(self, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
        """Send a request (POST when there is a body); raises VerifyError on anything but 200."""
        headers = {"content-type": "application/json"}
        if self.token:
            headers["authorization"] = f"Bearer {self.token}"
        connection = self._connect()
        try:
            data = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, data, headers)
            response = connection.getresponse()
        except OSError as error:
            raise VerifyError(f"{self.url}{path}: {error}") from error
        if response.status != 200:
            text = response.read(2000).decode(errors="replace")
            raise VerifyError(f"{self.url}{path}: HTTP {response.status}: {text}")
        return response

    def json(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The decoded JSON answer of `open`."""
        return json.load(self.open(path, body))


@dataclass(frozen=True)
class Answer:
    """One streamed reply. Times are seconds; `ttft` is to the first chunk that carries a token."""

    rid: str
    token_ids: list[int]
    text: str
    finish_reason: str | None
    ttft: float
    total: float
    usage: dict[str, int] | None = None


@dataclass(frozen=True)
class Comparison:
    """One prompt's reply beside vLLM's own greedy continuation.

    `margin` is vLLM's log-probability gap between its two best tokens where the replies part, in nats: the smaller of
    the two it gives, decoding and reading the same tokens as a prompt, where it was asked for both. `moves` are the
    differences of the two at each token: what rounding does to vLLM itself.
    """

    prompt_tokens: int
    answer: Answer
    expected: list[int]
    diverged_at: int | None
    margin: float | None = None
    moves: list[float] = field(default_factory=list)
    handoff: dict[str, Any] = field(default_factory=dict)

    def identical(self, tie_margin: float) -> bool:
        """Equal token for token or, where `tie_margin` > 0, up to the first near-tie below it."""
        if self.diverged_at is None:
            return True
        return self.margin is not None and tie_margin > 0 and self.margin < tie_margin


def make_prompts(lengths: Sequence[int], seed: int) -> list[str]:
    """One text of so many characters each (one token a character for a byte-level tokenizer)."""
    rng = random.Random(seed)
    alphabet = string.ascii_letters + string.digits + " .,:;-"
    return ["".join(rng.choice(alphabet) for _ in range(n)) for n in lengths]


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for raw in response:
        line = raw.strip()
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise VerifyError(f"error event in the stream: {event['error']}")
        yield event
    raise VerifyError("the stream ended without [DONE]")


def ask(ingress: Endpoint, model: str, prompt: str, max_tokens: int) -> Answer:
    """Stream one greedy chat completion with its token ids."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    start = time.perf_counter()
    response = ingress.open("/v1/chat/completions", body)
    tokens: list[int] = []
    text: list[str] = []
    ttft, finish, usage = 0.0, None, None
    for event in _events(response):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            got = choice.get("token_ids") or []
            if got and not tokens:
                ttft = time.perf_counter() - start
            tokens += got
            text.append(choice["delta"].get("content") or "")
            finish = choice.get("finish_reason") or finish
    total = time.perf_counter() - start
    rid = response.headers.get("x-tilert-rid") or ""
    return Answer(rid, tokens, "".join(text), finish, ttft, total, usage)


@dataclass(frozen=True)
class Own:
    """vLLM's own greedy continuation of a prompt, and the log-probability gap of its two best tokens at each."""

    prompt_ids: list[int]
    token_ids: list[int]
    gaps: list[float]


def own_continuation(prefill: Endpoint, model: str, prompt: str, max_tokens: int) -> Own:
    """Ask vLLM itself for its greedy continuation of a chat prompt."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
    }
    answer = prefill.json("/v1/chat/completions", body)
    choice = answer["choices"][0]
    gaps = []
    for entry in choice["logprobs"]["content"]:
        best = [top["logprob"] for top in entry["top_logprobs"]]
        gaps.append(best[0] - best[1] if len(best) > 1 else float("inf"))
    return Own(answer["prompt_token_ids"], choice["token_ids"], gaps)


def gaps_as_prompt(prefill: Endpoint, model: str, own: Own) -> list[float]:
    """The gaps of `own` where vLLM reads its tokens as a prompt: other kernels and shapes, another rounding.

    Negative where vLLM, reading, would have chosen another token than it did decoding.
    """
    body = {
        "model": model,
        "prompt": own.prompt_ids + own.token_ids,
        "temperature": 0,
        "max_tokens": 1,
        "prompt_logprobs": 2,
    }
    read = prefill.json("/v1/completions", body)["choices"][0]["prompt_logprobs"]
    gaps = []
    for token, found in zip(own.token_ids, read[len(own.prompt_ids) :], strict=True):
        chances = {int(other): entry["logprob"] for other, entry in found.items()}
        gaps.append(chances[token] - max(chance for other, chance in chances.items() if other != token))
    return gaps


def tie_margin(moves: Sequence[float]) -> float:
    """The gap below which a token is a near-tie: as far as one in a hundred of vLLM's own gaps moves.

    Replies part where rounding is at its largest, so it is the tail of `moves` that counts. Equal arithmetic moves
    nothing and leaves no room.
    """
    return statistics.quantiles(moves, n=100)[-1] if len(moves) > 1 else 0.0


def _history(decode: Sequence[Endpoint], rid: str) -> dict[str, Any]:
    for node in decode:
        try:
            found = node.json(f"{api.HISTORY}/{rid}")
        except VerifyError:
            continue
        return dict(found)
    return {}


def compare(
    ingress: Endpoint,
    prefill: Endpoint,
    decode: Sequence[Endpoint],
    model: str,
    prompts: Sequence[str],
    max_tokens: int,
    concurrency: int = 1,
    fast_model: str | None = None,
    weigh_ties: bool = False,
) -> list[Comparison]:
    """Ask every prompt through the ingress (`concurrency` at once) and of vLLM itself, and compare.

    `weigh_ties`: ask vLLM to read each continuation as well, for `margin` and `moves`.
    """
    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(lambda p: ask(ingress, fast_model or model, p, max_tokens), prompts))
    comparisons = []
    for prompt, answer in zip(prompts, answers, strict=True):
        own = own_continuation(prefill, model, prompt, max_tokens)
        gaps, moves = own.gaps, []
        if weigh_ties:
            read = gaps_as_prompt(prefill, model, own)
            moves = [abs(a - b) for a, b in zip(gaps, read, strict=True)]
            gaps = [min(a, b) for a, b in zip(gaps, read, strict=True)]
        got, expected = answer.token_ids, own.token_ids
        at = next(
            (i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b),
            None if len(got) == len(expected) else min(len(got), len(expected)),
        )
        margin = gaps[at] if at is not None and at < len(gaps) else None
        history = _history(decode, answer.rid)
        comparisons.append(Comparison(len(own.prompt_ids), answer, expected, at, margin, moves, history))
    return comparisons


def report(comparisons: Sequence[Comparison], tie_margin: float) -> Iterator[str]:
    """Lines for a terminal: one a prompt, then the verdict `handoff: N/N tokens identical`."""
    yield f"{'prompt':>7} {'tokens':>7} {'TTFT ms':>8} {'tok/s':>7} {'handoff ms':>10} {'bytes':>10}  result"
    same = total = 0
    for c in comparisons:
        n = len(c.answer.token_ids)
        agreed = len(c.expected) if c.diverged_at is None else c.diverged_at
        same += agreed
        # After a near-tie the two continuations are different texts: nothing is left to compare.
        total += agreed if c.identical(tie_margin) else len(c.expected)
        stream_s = c.answer.total - c.answer.ttft
        rate = (n - 1) / stream_s if n > 1 and stream_s > 0 else 0.0
        wire = (c.handoff.get("timing_ms") or {}).get("wire", c.handoff.get("wire_ms"))
        result = "identical"
        if c.diverged_at is not None:
            gap = "" if c.margin is None else f", margin {c.margin:.4f}"
            result = f"{'near-tie' if c.identical(tie_margin) else 'DIFFERENT'} at token {c.diverged_at}{gap}"
        yield (
            f"{c.prompt_tokens:>7} {n:>7} {c.answer.ttft * 1e3:>8.1f} {rate:>7.1f} "
            f"{'-' if wire is None else f'{wire:.1f}':>10} {c.handoff.get('bytes', '-'):>10}  {result}"
        )
    yield f"handoff: {same}/{total} tokens identical" + (
        f" (up to near-ties below {tie_margin:.3g})" if tie_margin else ""
    )


def _margin(text: str) -> float | None:
    """A gap in nats, or None for `auto`."""
    try:
        gap = None if text == "auto" else float(text)
    except ValueError:
        gap = -1.0
    if gap is not None and not 0 <= gap < float("inf"):
        raise argparse.ArgumentTypeError(
            f"{text!r}: use auto, or a gap of 0 nats or more (0 accepts no difference)"
        )
    return gap


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `tilertctl verify`."""
    parser.add_argument("--ingress", required=True, metavar="URL", help="what clients use")
    parser.add_argument("--ca-file", help="certificate authority of an https ingress")
    parser.add_argument("--key-file", help="file with an API key for the ingress")
    parser.add_argument("--prefill", required=True, metavar="URL", help="a prefill node's vLLM")
    parser.add_argument("--prefill-key-file", help="file with vLLM's API key")
    parser.add_argument(
        "--decode", action="append", default=[], metavar="URL", help="decode nodes, for timings"
    )
    parser.add_argument("--secret-file", help="file with the decode nodes' shared secret")
    parser.add_argument("--model", required=True)
    parser.add_argument("--fast-model", help="the ingress' name for the latency class (default: --model)")
    parser.add_argument("--prompts", default="1,17,64,200,900", help="prompt lengths in characters")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--tie-margin",
        type=_margin,
        default=0.0,
        help="accept a first difference where vLLM's two best log-probabilities are closer than this; auto: than one "
        "in a hundred of them moves when vLLM reads the same tokens as a prompt (default: accept none)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")


def _secret(path: str | None) -> str | None:
    return None if path is None else Path(path).read_text().strip()


def run(arguments: argparse.Namespace) -> int:
    """`tilertctl verify`: 0 when every token agrees, 1 when one does not, 2 when an endpoint fails."""
    ingress = Endpoint(arguments.ingress, _secret(arguments.key_file), arguments.ca_file)
    prefill = Endpoint(arguments.prefill, _secret(arguments.prefill_key_file))
    decode = [Endpoint(url, _secret(arguments.secret_file), timeout_s=10) for url in arguments.decode]
    prompts = make_prompts([int(n) for n in arguments.prompts.split(",")], arguments.seed)
    try:
        result = compare(
            ingress,
            prefill,
            decode,
            arguments.model,
            prompts,
            arguments.max_tokens,
            arguments.concurrency,
            arguments.fast_model,
            weigh_ties=arguments.tie_margin is None,
        )
    except VerifyError as error:
        print(f"verify: {error}", file=sys.stderr)
        return 2
    margin = arguments.tie_margin
    if margin is None:
        margin = tie_margin([move for c in result for move in c.moves])
    if arguments.json:
        print(json.dumps({"tie_margin": margin, "comparisons": [asdict(c) for c in result]}))
    else:
        for line in report(result, margin):
            print(line)
    return 0 if all(c.identical(margin) for c in result) else 1

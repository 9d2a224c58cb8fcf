"""What prefill-ahead gives: requests/s of one decode node with a queue, with it over without it.

usage: bin/bench router_ahead [--times 0.15:0.45,0.3:0.3,0.45:0.15] [--answers 16] [--realtime]

One fake prefill node, one fake decode node, the router in a process of its own, four clients that ask without pause.
With prefill time P and decode time D the ratio can be (P + D) / max(P, D): one engine decodes one request at a time,
and one more is prefilled meanwhile. The bound is computed from what P and D were on the fakes in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import uvloop

from bench.router import CORES, RATE, SYSTEMS, before_others, ours, running
from fakes.load import Reply

CLIENTS = 4
SKIPPED = 2
"""Answers that find no queue yet."""

SYSTEMS["one after the other"] = partial(ours, prefill_ahead=False)


@dataclass(frozen=True)
class Pace:
    """What was seen of one router."""

    requests_s: float
    prefill_s: float
    decode_s: float


async def pace(name: str, prefill_s: float, decode_s: float, answers: int) -> Pace:
    """Requests/s over `answers` answers that ended one after the other, from the end of the one before."""
    async with running(name, 1, RATE, prefill_s) as bench:
        bench.load.seed = 0
        replies: list[Reply] = []
        asking = [asyncio.create_task(bench.ask_on(round(RATE * decode_s), replies)) for _ in range(CLIENTS)]
        ended: list[float] = []
        while len(ended) < SKIPPED + 1 + answers:
            await asyncio.sleep(0.02)
            assert bench.process is not None
            bench.process.check()
            ended = sorted(r.ended for r in replies if r.ended)
            if failed := [r.failed for r in replies if r.failed]:
                raise SystemExit(f"an answer failed: {failed[0][:300]}")
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        first, last = ended[SKIPPED], ended[SKIPPED + answers]
        return Pace(answers / (last - first), fmean(bench.load.prefills_s), fmean(bench.load.decodes_s))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", default="0.15:0.45,0.3:0.3,0.45:0.15", help="pairs P:D in seconds")
    parser.add_argument("--answers", type=int, default=16, help="answers counted for each")
    parser.add_argument("--realtime", action="store_true", help="before every other process of this machine")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {CORES[-1]})
    print(
        "| P, ms | D, ms | requests/s without | with | ratio | bound | of the bound |\n|---|---|---|---|---|---|---|"
    )
    for pair in arguments.times.split(","):
        prefill_s, decode_s = map(float, pair.split(":"))
        with before_others(arguments.realtime):
            without, ahead = (
                uvloop.run(pace(name, prefill_s, decode_s, arguments.answers))
                for name in ("one after the other", "ours")
            )
        p, d = (fmean(x) for x in ((without.prefill_s, ahead.prefill_s), (without.decode_s, ahead.decode_s)))
        ratio, bound = ahead.requests_s / without.requests_s, (p + d) / max(p, d)
        print(
            f"| {1e3 * p:.0f} | {1e3 * d:.0f} | {without.requests_s:.2f} | {ahead.requests_s:.2f} | {ratio:.3f} "
            f"| {bound:.3f} | {ratio / bound:.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()

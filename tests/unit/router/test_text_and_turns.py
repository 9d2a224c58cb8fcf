"""Stop strings never show, characters never break, and nobody waits behind somebody else's backlog."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tilert_router.output import Output, StreamDetokenizer
from tilert_router.queue import FairQueue, QueueFull, Ticket


class Letters:
    """One character a token: its code point."""

    def step(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


def bursts(text: str, cuts: list[int]) -> list[list[int]]:
    points, found, at = [ord(c) for c in text], [], 0
    for cut in [*sorted(c % (len(text) + 1) for c in cuts), len(text)]:
        if cut > at:
            found.append(points[at:cut])
            at = cut
    return found


@example(text="ba", stops=["a", "ba"], cuts=[])
@example(text="ba", stops=["ba", "a"], cuts=[])
@given(
    text=st.text("ab\n", max_size=40),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 40), max_size=6),
)
def test_a_stop_string_never_shows_however_it_is_split(text: str, stops: list[str], cuts: list[int]) -> None:
    output = Output(Letters(), stops)
    shown = ""
    for burst in bursts(text, cuts):
        shown += output.push(burst)
        if output.stopped:
            break
    # The first stop string to be complete ends the answer; of those complete at once, the one listed first,
    # as in vLLM.
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    if ends:
        assert output.stopped
        end, start = min(ends, key=lambda found: found[0])
        assert shown == text[:start]
        assert output.count == end
    else:
        assert not output.stopped
        assert shown + output.flush() == text


def test_a_stop_token_ends_the_answer() -> None:
    output = Output(Letters(), stop_token_ids=frozenset({ord("c")}))
    assert output.push([ord(c) for c in "abcd"]) == "ab"
    assert output.stopped
    assert output.stop_reason == ord("c")
    assert output.count == 3


def byte_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@given(st.text(max_size=30))
def test_text_split_over_tokens_arrives_whole(text: str) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text).ids
    stream = StreamDetokenizer(tokenizer, [])
    pieces = [stream.step([token]) for token in ids]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def ticket(key: str, cost: int = 100, priority: int = 0) -> Ticket:
    return Ticket(key, priority, cost, 0.0, asyncio.Future())


async def test_keys_take_turns() -> None:
    queue = FairQueue(100)
    for _ in range(10):
        queue.push(ticket("greedy", 512))
    for _ in range(2):
        queue.push(ticket("modest", 512))
    order = []
    while (taken := queue.pop()) is not None:
        order.append(taken.key)
    assert order.index("modest") <= 1
    assert order[:4].count("modest") == 2


async def test_one_key_is_served_in_order_and_priority_goes_first() -> None:
    queue = FairQueue(10)
    tickets = [ticket("a") for _ in range(3)]
    urgent = ticket("a", priority=-1)
    for each in [*tickets, urgent]:
        queue.push(each)
    assert [queue.pop() for _ in range(4)] == [urgent, *tickets]


async def test_the_queue_is_bounded_and_leaving_costs_nothing() -> None:
    queue = FairQueue(2)
    first, second = ticket("a"), ticket("b")
    queue.push(first)
    queue.push(second)
    with pytest.raises(QueueFull):
        queue.push(ticket("c"))
    assert queue.discard(first)
    assert not queue.discard(first)
    assert len(queue) == 1
    assert queue.pop() is second
    assert queue.pop() is None


async def test_what_is_put_back_is_next() -> None:
    queue = FairQueue(1)
    first = ticket("a")
    queue.push(first)
    assert queue.pop() is first
    queue.push(ticket("b"))
    queue.push_front(first)
    assert queue.pop() is first

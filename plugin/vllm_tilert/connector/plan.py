"""What the scheduler side tells the worker side with each step. Plain data; it crosses processes."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Order:
    """One handoff: what to send, and to whom."""

    req_id: str
    rid: str
    generation: int | None
    host: str
    port: int
    seq_len: int
    last_prompt_token: int


@dataclass(frozen=True)
class Progress:
    """After this step the state of tokens [0, computed) of a request is final.

    `blocks` are its cache blocks from the first token on; those of earlier steps are stale. They are packed
    (type code "i"): thousands of them cross to the worker and reach the GPU without a look at each.
    """

    req_id: str
    computed: int
    blocks: array[int]


@dataclass(frozen=True)
class StepPlan:
    """The handoffs' part of one scheduler step.

    opened    handoffs that begin; before the step's forward
    closed    req_id -> reason: requests that ended before their prompt was computed
    preempted requests that lost their blocks; what was sent of them stays valid
    progress  what becomes final in this step; after its forward
    ended     requests whose blocks are kept until the worker reports them
    refused   reasons of claims that were refused, to be counted
    """

    opened: tuple[Order, ...] = ()
    closed: dict[str, str] = field(default_factory=dict)
    preempted: frozenset[str] = frozenset()
    progress: tuple[Progress, ...] = ()
    ended: frozenset[str] = frozenset()
    refused: tuple[str, ...] = ()

"""The scheduler side against the scheduler outputs vLLM makes: claims, chunks, preemption, abort, end."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_tilert.connector.config import ConnectorConfig
from vllm_tilert.connector.plan import StepPlan
from vllm_tilert.connector.scheduler import HandoffScheduler
from vllm_tilert.wire.api import new_rid

CONFIG = ConnectorConfig.parse(
    {
        "tilert_profile": "mla",
        "tilert_transport": "mooncake",
        "tilert_protocol": "tcp",
        "tilert_local_host": "127.0.0.1",
        "tilert_allowed_hosts": ["10.0.0.2", "decode-1.example", "fd00::7"],
        "tilert_staging_bytes": 1 << 20,
    },
    max_model_len=1000,
)


def params(**changes: Any) -> dict[str, Any]:
    return {
        "tilert_host": "10.0.0.2",
        "tilert_ctrl_port": 5556,
        "tilert_rid": new_rid(),
        "tilert_generation": 3,
    } | changes


def new(req_id: str, length: int, blocks: list[int], computed: int = 0, kv: Any = None, **more: Any) -> Any:
    extra = {"kv_transfer_params": kv} if kv is not None else None
    return SimpleNamespace(
        req_id=req_id,
        prompt_token_ids=list(range(100, 100 + length)),
        sampling_params=SimpleNamespace(extra_args=extra),
        block_ids=(blocks,),
        num_computed_tokens=computed,
        mm_features=[],
        lora_request=None,
        **more,
    )


@dataclass
class Output:
    """A SchedulerOutput; `cached` maps req_id to (num_computed_tokens, new blocks or None)."""

    new: list[Any] = field(default_factory=list)
    cached: dict[str, tuple[int, list[int] | None]] = field(default_factory=dict)
    scheduled: dict[str, int] = field(default_factory=dict)
    preempted: set[str] | None = None
    resumed: set[str] = field(default_factory=set)

    @property
    def scheduled_new_reqs(self) -> list[Any]:
        return self.new

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        return self.scheduled

    @property
    def preempted_req_ids(self) -> set[str] | None:
        return self.preempted

    @property
    def scheduled_cached_reqs(self) -> Any:
        return SimpleNamespace(
            req_ids=list(self.cached),
            resumed_req_ids=self.resumed,
            num_computed_tokens=[computed for computed, _ in self.cached.values()],
            new_block_ids=[None if blocks is None else (blocks,) for _, blocks in self.cached.values()],
        )


def progress(plan: StepPlan) -> dict[str, tuple[int, tuple[int, ...]]]:
    return {p.req_id: (p.computed, tuple(p.blocks)) for p in plan.progress}


@pytest.fixture
def side() -> HandoffScheduler:
    return HandoffScheduler(CONFIG)


def test_a_prompt_in_one_step(side: HandoffScheduler) -> None:
    kv = params()
    plan = side.step(Output(new=[new("a", 20, [4, 9], kv=kv)], scheduled={"a": 20}))
    (order,) = plan.opened
    assert (order.rid, order.host, order.port) == (kv["tilert_rid"], "10.0.0.2", 5556)
    assert (order.generation, order.seq_len, order.last_prompt_token) == (3, 20, 119)
    assert progress(plan) == {"a": (20, (4, 9))}
    kept, about = side.finished("a", aborted=False)
    assert kept
    assert about == {"tilert_handoff": {"rid": kv["tilert_rid"], "seq_len": 20}}
    assert side.step(Output()).ended == {"a"}
    assert side.step(Output()) == StepPlan()


def test_chunks_grow_the_block_table(side: HandoffScheduler) -> None:
    plan = side.step(Output(new=[new("a", 40, [1], kv=params())], scheduled={"a": 16}))
    assert progress(plan) == {"a": (16, (1,))}
    plan = side.step(Output(cached={"a": (16, [2])}, scheduled={"a": 16}))
    assert plan.opened == ()
    assert progress(plan) == {"a": (32, (1, 2))}
    plan = side.step(Output(cached={"a": (32, [3])}, scheduled={"a": 8}))
    assert progress(plan) == {"a": (40, (1, 2, 3))}
    plan = side.step(Output(cached={"a": (40, None)}, scheduled={"a": 1}))
    assert progress(plan) == {"a": (40, (1, 2, 3))}, "generated tokens are not handed off"


def test_a_prefix_cache_hit_counts_as_computed(side: HandoffScheduler) -> None:
    plan = side.step(Output(new=[new("a", 40, [7, 8, 5], computed=32, kv=params())], scheduled={"a": 8}))
    assert progress(plan) == {"a": (40, (7, 8, 5))}


def test_several_requests_finish_in_one_step(side: HandoffScheduler) -> None:
    news = [new(r, 10, [i], kv=params()) for i, r in enumerate("abc")]
    plan = side.step(Output(new=news, scheduled=dict.fromkeys("abc", 10)))
    assert progress(plan) == {"a": (10, (0,)), "b": (10, (1,)), "c": (10, (2,))}
    for req_id in "abc":
        assert side.finished(req_id, aborted=False)[0]
    assert side.step(Output()).ended == {"a", "b", "c"}


@pytest.mark.parametrize("as_new", [False, True], ids=["runner-v1", "runner-v2"])
def test_preempted_and_resumed_with_other_blocks(side: HandoffScheduler, as_new: bool) -> None:
    """The old blocks are never read again, and what was sent is not sent anew under another rid."""
    kv = params()
    side.step(Output(new=[new("a", 40, [1], kv=kv)], scheduled={"a": 16}))
    plan = side.step(Output(preempted={"a"}))
    assert plan.preempted == {"a"}
    assert plan.progress == ()
    assert plan.closed == {}
    if as_new:
        back = Output(new=[new("a", 40, [11, 12], kv=kv)], scheduled={"a": 32})
    else:
        back = Output(cached={"a": (0, [11, 12])}, resumed={"a"}, scheduled={"a": 32})
    plan = side.step(back)
    assert plan.opened == ()
    assert progress(plan) == {"a": (32, (11, 12))}
    plan = side.step(Output(cached={"a": (32, [13])}, scheduled={"a": 8}))
    assert progress(plan) == {"a": (40, (11, 12, 13))}
    assert plan.closed == {}


def test_resumed_with_fewer_tokens_than_before_goes_on(side: HandoffScheduler) -> None:
    side.step(Output(new=[new("a", 40, [1, 2], kv=params())], scheduled={"a": 32}))
    side.step(Output(preempted={"a"}))
    assert progress(side.step(Output(cached={"a": (0, [11])}, resumed={"a"}, scheduled={"a": 8}))) == {
        "a": (8, (11,))
    }
    plan = side.step(Output(cached={"a": (8, [12, 13])}, scheduled={"a": 32}))
    assert plan.closed == {}
    assert progress(plan) == {"a": (40, (11, 12, 13))}


def test_preempted_after_its_last_chunk_is_told_its_new_blocks(side: HandoffScheduler) -> None:
    """The worker may still wait for staging memory when the blocks are taken away."""
    side.step(Output(new=[new("a", 16, [1], kv=params())], scheduled={"a": 16}))
    side.step(Output(preempted={"a"}))
    plan = side.step(Output(cached={"a": (0, [5, 6])}, resumed={"a"}, scheduled={"a": 17}))
    assert progress(plan) == {"a": (16, (5, 6))}


def test_tokens_computed_again_without_preemption_close_the_handoff(side: HandoffScheduler) -> None:
    """Another connector's load failed: what was taken for final was not."""
    side.step(Output(new=[new("a", 40, [1, 2], computed=16, kv=params())], scheduled={"a": 16}))
    plan = side.step(Output(cached={"a": (0, None)}, scheduled={"a": 16}))
    assert plan.closed == {"a": "recomputed"}
    assert plan.progress == ()
    assert side.step(Output(cached={"a": (16, None)}, scheduled={"a": 24})).progress == ()
    assert side.finished("a", aborted=False)[1]["tilert_handoff"]["error"] == "recomputed"  # type: ignore[index]


def test_abort_in_the_middle_closes_and_keeps_blocks_until_the_worker_is_done(side: HandoffScheduler) -> None:
    side.step(Output(new=[new("a", 40, [1], kv=params())], scheduled={"a": 16}))
    kept, _ = side.finished("a", aborted=True)
    plan = side.step(Output())
    assert kept
    assert plan.closed == {"a": "cancelled"}
    assert plan.ended == {"a"}


def test_abort_while_preempted(side: HandoffScheduler) -> None:
    side.step(Output(new=[new("a", 40, [1], kv=params())], scheduled={"a": 16}))
    side.step(Output(preempted={"a"}))
    side.finished("a", aborted=True)
    assert side.step(Output()).closed == {"a": "cancelled"}


def test_abort_before_it_was_ever_scheduled_is_nothing(side: HandoffScheduler) -> None:
    assert side.finished("a", aborted=True) == (False, None)
    assert side.step(Output()) == StepPlan()


@pytest.mark.parametrize("kv", [None, {}, {"do_remote_decode": True}, "tilert_host", {"tilert_host": ""}])
def test_requests_of_others_are_left_alone(side: HandoffScheduler, kv: Any) -> None:
    assert side.step(Output(new=[new("a", 8, [1], kv=kv)], scheduled={"a": 8})) == StepPlan()
    assert side.finished("a", aborted=False) == (False, None)


@pytest.mark.parametrize("host", ["10.0.0.2", "DECODE-1.example", "fd00:0::0007"])
def test_other_spellings_of_an_allowed_host_are_allowed(side: HandoffScheduler, host: str) -> None:
    plan = side.step(Output(new=[new("a", 8, [1], kv=params(tilert_host=host))], scheduled={"a": 8}))
    assert plan.opened[0].host in CONFIG.allowed_hosts.hosts


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"tilert_host": "10.0.0.3"}, "host_not_allowed"),
        ({"tilert_host": "decode-1.example.evil"}, "host_not_allowed"),
        ({"tilert_host": "169.254.169.254"}, "host_not_allowed"),
        ({"tilert_host": "[fd00::7]"}, "bad_request"),
        ({"tilert_host": "10.0.0.2:80"}, "bad_request"),
        ({"tilert_host": ["10.0.0.2"]}, "bad_request"),
        ({"tilert_host": 167772162}, "bad_request"),
        ({"tilert_ctrl_port": 0}, "bad_request"),
        ({"tilert_ctrl_port": 65536}, "bad_request"),
        ({"tilert_ctrl_port": "5556"}, "bad_request"),
        ({"tilert_ctrl_port": True}, "bad_request"),
        ({"tilert_rid": "job-42"}, "bad_request"),
        ({"tilert_rid": "A" * 32}, "bad_request"),
        ({"tilert_rid": "0" * 32 + "\n"}, "bad_request"),
        ({"tilert_rid": None}, "bad_request"),
        ({"tilert_generation": "3"}, "bad_request"),
        ({"tilert_generation": 1.5}, "bad_request"),
    ],
)
def test_a_claim_that_cannot_be_honoured_is_refused_and_counted(
    side: HandoffScheduler, changes: dict[str, Any], code: str
) -> None:
    plan = side.step(Output(new=[new("a", 8, [1], kv=params(**changes))], scheduled={"a": 8}))
    assert plan == StepPlan(refused=(code,))
    assert side.step(Output(cached={"a": (8, None)}, scheduled={"a": 1})) == StepPlan()
    kept, about = side.finished("a", aborted=False)
    assert not kept, "nothing reads the blocks"
    assert about is not None
    assert about["tilert_handoff"]["error"] == code


def test_a_prompt_beyond_the_limit_is_refused(side: HandoffScheduler) -> None:
    plan = side.step(Output(new=[new("a", 1001, [1], kv=params())], scheduled={"a": 8}))
    assert plan.refused == ("seq_len_exceeded",)


def test_what_a_node_cannot_continue_is_refused(side: HandoffScheduler) -> None:
    lora, image, embeds = (new(r, 8, [1], kv=params()) for r in "abc")
    lora.lora_request, image.mm_features, embeds.prompt_token_ids = object(), [object()], None
    plan = side.step(Output(new=[lora, image, embeds], scheduled=dict.fromkeys("abc", 8)))
    assert plan.refused == ("bad_request",) * 3


def test_one_rid_is_handed_off_once(side: HandoffScheduler) -> None:
    kv = params()
    plan = side.step(
        Output(new=[new("a", 8, [1], kv=kv), new("b", 9, [2], kv=kv)], scheduled={"a": 8, "b": 9})
    )
    assert [order.req_id for order in plan.opened] == ["a"]
    assert plan.refused == ("rid_reused",)
    assert progress(plan) == {"a": (8, (1,))}


def test_a_refused_request_is_refused_once_even_when_preempted(side: HandoffScheduler) -> None:
    request = new("a", 8, [1], kv=params(tilert_rid="x"))
    assert side.step(Output(new=[request], scheduled={"a": 4})).refused == ("bad_request",)
    side.step(Output(preempted={"a"}))
    assert side.step(Output(new=[request], scheduled={"a": 8})) == StepPlan()


def test_a_vllm_that_does_not_report_preemptions_is_followed_too(side: HandoffScheduler) -> None:
    side.step(Output(new=[new("a", 40, [1], kv=params())], scheduled={"a": 16}, preempted=None))
    plan = side.step(Output(cached={"a": (0, [9, 8, 7])}, resumed={"a"}, scheduled={"a": 40}))
    assert progress(plan) == {"a": (40, (9, 8, 7))}

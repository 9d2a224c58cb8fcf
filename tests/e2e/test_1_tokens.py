"""The answer is vLLM's own: every token that leaves nginx was decoded from handed-over state, and is right."""

from __future__ import annotations

import httpx
import pytest
from cluster import Cluster
from openai import OpenAI

pytestmark = pytest.mark.timeout(3600)

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 200, 511, 900, 1500)


def lengths(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values))


def all_identical(comparisons: list[dict]) -> None:
    wrong = [
        (c["prompt_tokens"], c["diverged_at"], c["answer"]["token_ids"][:8], c["expected"][:8])
        for c in comparisons
        if c["diverged_at"] is not None
    ]
    assert not wrong, f"prompts whose tokens are not vLLM's own: {wrong}"


def test_every_prompt_length_decodes_to_vllms_own_tokens(cluster: Cluster) -> None:
    result = cluster.verify("--prompts", lengths(LENGTHS), "--max-tokens", "64", "--seed", "11")
    assert len(result) == len(LENGTHS)
    assert [len(c["expected"]) for c in result] == [64] * len(LENGTHS)
    all_identical(result)
    # A model that repeats itself would make equality cheap.
    assert min(len(set(c["expected"])) for c in result) >= 20
    # They came from the decode nodes, not from a detour.
    assert all(c["handoff"].get("outcome") == "done" and c["handoff"]["bytes"] > 0 for c in result)


def test_eight_at_once_over_two_nodes_are_each_their_own(cluster: Cluster) -> None:
    result = cluster.verify(
        "--prompts", lengths((40, 300, 7, 800, 90, 33, 1200, 150)), "--concurrency", "8", "--seed", "12"
    )
    assert len({tuple(c["expected"]) for c in result}) == 8, "prompts too alike to tell a mix-up"
    all_identical(result)
    rids = {c["answer"]["rid"] for c in result}
    assert len(rids) == 8
    served = {host: 0 for host in cluster.hosts("decode")}
    for host in served:
        served[host] = sum(_knows(cluster, host, rid) for rid in rids)
    assert all(served.values()), f"one node did all the work: {served}"


def _knows(cluster: Cluster, host: str, rid: str) -> bool:
    return cluster.node(host, f"/pd/history/{rid}").get("rid") == rid


def test_the_official_client_streams_and_does_not(cluster: Cluster) -> None:
    client = OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "The quick brown fox"}]
    whole = client.chat.completions.create(
        model=cluster.model, messages=messages, temperature=0, max_completion_tokens=24
    )
    chunks = list(
        client.chat.completions.create(
            model=cluster.model,
            messages=messages,
            temperature=0,
            max_completion_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text
    assert text == whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert cluster.model in [m.id for m in client.models.list()]


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"kv_transfer_params": {"tilert_host": "203.0.113.9", "tilert_ctrl_port": 5556}}, (200, 400)),
        ({"n": 2}, (400,)),
        ({"model": "nobody"}, (404,)),
        ({"messages": "not a list"}, (400, 422)),
        ({"max_tokens": 0}, (400, 422)),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    cluster: Cluster, change: dict, status: tuple[int, ...]
) -> None:
    body = cluster.chat("hello", 4, stream=False) | change
    answer = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code in status, answer.text
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
        assert not any(n["address"] in answer.text for n in cluster.nodes.values()), (
            "an internal address leaks"
        )


def test_the_whole_cluster_fits_in_twelve_gib(cluster: Cluster) -> None:
    # Proportional set size: memory shared between processes counts once.
    script = "cat /proc/[0-9]*/smaps_rollup 2>/dev/null | awk '/^Pss:/ {kib += $2} END {print kib / 1048576}'"
    gib = {host: float(cluster.run(host, script)) for host in cluster.nodes}
    print(f"memory in GiB: {gib}, {sum(gib.values()):.1f} together")
    assert all(gib.values())
    assert sum(gib.values()) < 12

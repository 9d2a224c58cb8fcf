"""Token rates, expected waits and Retry-After come from what was measured, not from constants."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from tilert_router.config import ConfigError, load, parse, reference_markdown
from tilert_router.decode import Reservation
from tilert_router.errors import ApiError
from tilert_router.keys import Key, Keys
from tilert_router.leases import Bounds, Lease, Pool
from tilert_router.queue import FairQueue, Ticket
from vllm_tilert.wire.api import ASK_AGAIN_S
from vllm_tilert.wire.notify import sd_notify

ROOT = Path(__file__).parents[3]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_token_rate_holds_over_time_and_says_when_to_come_back(tmp_path: Path) -> None:
    hashed = hashlib.sha256(b"k").hexdigest()
    (tmp_path / "keys").write_text(f"- {{name: a, sha256: {hashed}, tokens_per_minute: 600}}")
    clock = Clock()
    keys = Keys(tmp_path / "keys", clock)
    key = keys.check("Bearer k")
    used = 0
    for second in range(600):  # somebody who always asks as soon as it is allowed
        clock.now = 1000.0 + second
        try:
            keys.enter(key)
        except ApiError as error:
            wait_s = int(error.headers["Retry-After"])
            clock.now += wait_s
            keys.enter(key)  # after that time it is
            clock.now -= wait_s
            keys.leave(key)
            continue
        keys.leave(key)
        keys.charge(key, 200)
        used += 200
    assert 600 * 10 <= used <= 600 * 10 + 600 + 200
    clock.now += 3600
    assert keys._debt(key) == 0


class Node:
    """Grants everything."""

    def __init__(self) -> None:
        self.others: list[dict[str, Any]] = []
        """Slots that another router's requests have."""
        self.cancelled: list[str] = []
        self.wanted = False

    async def reserve(self, rid: str, *, ahead: bool, ttl_s: float, timeout_s: float) -> Reservation:
        return Reservation(rid, 0, 1, ahead, self.wanted)

    async def cancel(self, rid: str, timeout_s: float) -> bool:
        self.cancelled.append(rid)
        return True

    async def status(self, timeout_s: float) -> dict[str, Any]:
        free = [{"state": "free", "rid": None}] * (2 - len(self.others))
        return {"status": "busy" if self.others else "idle", "slots": self.others + free}


async def test_the_expected_wait_is_the_observed_pace_times_those_ahead() -> None:
    loop = asyncio.get_running_loop()
    pool = Pool(FairQueue(100), Bounds())
    assert pool.expected_wait_s(0) is None  # no node yet
    for name in "ab":
        pool.add(name, "127.0.0.1", 5556, Node())
    await asyncio.sleep(0.05)
    assert pool.expected_wait_s(0) == 0.0
    assert pool.expected_wait_s(3) is None

    def ticket() -> Ticket:
        return Ticket("k", 0, 1, loop.time() + 10, loop.create_future())

    took = []
    for _ in range(3):
        began = loop.time()
        leases = [await pool.acquire(ticket()) for _ in range(2)]
        for lease in leases:
            lease.open(1)
        await asyncio.sleep(0.1)
        for lease in leases:
            lease.finish()
        took.append(loop.time() - began)
    assert pool.service_s
    assert 0.09 <= pool.service_s <= max(took)
    assert pool.expected_wait_s(9) == pytest.approx(10 * pool.service_s / 2)
    await pool.close()


class Two:
    """A pool of two nodes, and who waits for them."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.pool = Pool(FairQueue(100), Bounds())
        self.nodes = {name: Node() for name in "ab"}
        for name, node in self.nodes.items():
            self.pool.add(name, "127.0.0.1", 5556, node)

    def ask(self, tokens: int) -> asyncio.Task[Lease]:
        ticket = Ticket("k", 0, tokens, self.loop.time() + 10, self.loop.create_future())
        return self.loop.create_task(self.pool.acquire(ticket))

    async def open(self, lease: Lease, remaining: int) -> None:
        lease.open(remaining)
        await asyncio.sleep(0.01)

    async def long_and_short(self) -> tuple[Lease, Lease]:
        """Both nodes decode, one of them for long."""
        await asyncio.sleep(0.05)
        long, short = await self.ask(1900), await self.ask(24)
        assert long.node is not short.node
        await self.open(long, 1900)
        await self.open(short, 24)
        return long, short


async def test_nobody_lines_up_behind_a_long_answer_while_a_short_one_ends() -> None:
    two = Two()
    long, short = await two.long_and_short()
    second = await two.ask(24)
    assert second.node is short.node
    # Both slots there are taken, and still that node is free sooner.
    third = two.ask(24)
    await asyncio.sleep(0.05)
    assert not third.done()
    short.finish()
    await asyncio.sleep(0.05)
    assert not third.done(), "its prefill runs; then the node takes another one"
    await two.open(second, 24)
    assert (await third).node is short.node
    # The long answer nears its end: now that node is the better one.
    long.remaining = 20
    assert (await two.ask(24)).node is long.node
    await two.pool.close()


async def test_a_node_that_is_being_asked_is_not_forgotten() -> None:
    two = Two()
    _, short = await two.long_and_short()
    short.finish()
    both = two.ask(24), two.ask(24)  # the second while the first asks for the free node
    first = await both[0]
    assert first.node is short.node
    await asyncio.sleep(0.05)
    assert not both[1].done()
    await two.open(first, 24)
    assert (await both[1]).node is short.node
    await two.pool.close()


@pytest.mark.parametrize(("busy", "waits"), [(400, False), (100, True)])
async def test_only_a_much_shorter_wait_is_worth_waiting_for(busy: int, waits: bool) -> None:
    two = Two()
    await asyncio.sleep(0.05)
    full, other = await two.ask(busy), await two.ask(700)
    await two.open(full, busy)
    behind = await two.ask(20)
    assert behind.node is full.node
    await two.open(other, 700)
    last = two.ask(20)
    await asyncio.sleep(0.05)
    assert last.done() is not waits
    if not waits:
        assert (await last).node is other.node
    last.cancel()
    await two.pool.close()


async def test_limits_that_are_never_reached_do_not_count() -> None:
    two = Two()
    await asyncio.sleep(0.05)
    full, other = await two.ask(4000), await two.ask(100_000)
    await two.open(full, 4000)
    assert (await two.ask(20)).node is full.node
    await two.open(other, 100_000)
    assert (await two.ask(20)).node is other.node
    await two.pool.close()


def decoding(remaining: int | None) -> dict[str, Any]:
    """A slot that another router's request has."""
    return {"state": "decoding", "rid": "another router's", "remaining": remaining}


@pytest.mark.parametrize("known", [24, None])
async def test_another_routers_request_counts_with_what_the_node_says_of_it(known: int | None) -> None:
    two = Two()
    two.nodes["b"].others = [decoding(known)]  # None: as an ordinary answer
    await asyncio.sleep(0.05)
    long = await two.ask(1900)
    assert long.node.name == "a"
    await two.open(long, 1900)
    assert (await two.ask(24)).node.name == "b"
    await two.pool.close()


async def test_nobody_lines_up_behind_another_routers_long_answer() -> None:
    two = Two()
    two.nodes["b"].others = [decoding(24)]
    await asyncio.sleep(0.05)
    two.nodes["b"].others = [decoding(1900)]  # since this router looked
    own = await two.ask(600)
    await two.open(own, 600)
    assert (await two.ask(24)).node.name == "a"
    assert len(two.nodes["b"].cancelled) == 1, "what b had granted is given back"
    await two.pool.close()


@pytest.mark.parametrize("room", ["behind it", "after it"])
async def test_a_router_gives_way_to_one_that_was_refused(room: str) -> None:
    two = Two()
    two.pool.retire("b")
    two.nodes["a"].wanted = True
    await asyncio.sleep(0.05)
    lease = await two.ask(24)
    two.nodes["a"].wanted = False
    following = two.ask(24)
    began = two.loop.time()
    if room == "behind it":
        lease.open(24)
    else:
        lease.finish()
    second = await following
    assert two.loop.time() - began >= 0.9 * 2 * ASK_AGAIN_S
    # Nobody was refused before that one: nothing to give way to.
    if room == "behind it":
        lease.finish()
    second.finish()
    assert two.pool.nodes["a"].retry_at == 0.0
    await two.pool.close()


async def test_a_router_gives_way_once_for_each_reservation() -> None:
    two = Two()
    two.nodes["a"].wanted = two.nodes["b"].wanted = True
    await asyncio.sleep(0.05)
    lease = await two.ask(24)
    lease.open(24)
    assert lease.node.retry_at > two.loop.time()
    lease.finish()
    assert lease.node.retry_at == 0.0
    await two.pool.close()


def test_who_would_be_overtaken_does_not_count() -> None:
    queue = FairQueue(100)
    loop = asyncio.new_event_loop()
    for priority in (0, 0, 5, -1):
        queue.push(Ticket("k", priority, 1, 0.0, loop.create_future()))
    loop.close()
    assert [queue.ahead(priority) for priority in (-2, -1, 0, 5)] == [0, 1, 3, 4]


@pytest.mark.parametrize("host", ["[::1]", "http://x", "10.0.0", "a b", "-x", ""])
def test_hosts_are_checked_as_everywhere_else(host: str) -> None:
    text = f"""
model: {{name: m, tokenizer: /t, max_model_len: 2048}}
prefill: [{{name: p, url: "http://127.0.0.1:8000"}}]
decode: [{{name: d, url: "http://127.0.0.1:5557", host: "{host}"}}]
"""
    with pytest.raises(ConfigError, match=r"decode\[0\].host"):
        parse(text)


def test_a_name_and_an_ipv6_address_are_hosts() -> None:
    text = """
model: {name: m, tokenizer: /t, max_model_len: 2048}
prefill: [{name: p, url: "http://[fd00::1]:8000"}]
decode: [{name: d, url: "http://decode-1.rack:5557", host: "fd00:0::2"}, {name: e, url: "http://e:1", host: E.rack}]
"""
    config = parse(text)
    assert [node.host for node in config.decode] == ["fd00::2", "e.rack"]
    with pytest.raises(ConfigError, match="cannot be read"):
        load(Path("/nowhere/router.yaml"))


def test_the_docs_show_every_key_with_its_meaning() -> None:
    table = reference_markdown()
    assert (ROOT / "docs/router.md").read_text().count(table) == 1
    for line in table.splitlines()[2:]:
        assert line.split("|")[3].strip(), f"no meaning: {line}"


def test_systemd_is_told_where_it_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    sd_notify("READY=1")
    for name in (str(tmp_path / "notify"), f"@tilert-test-{os.getpid()}"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.bind("\0" + name[1:] if name.startswith("@") else name)
            systemd.settimeout(2)
            monkeypatch.setenv("NOTIFY_SOCKET", name)
            sd_notify("READY=1")
            assert systemd.recv(100) == b"READY=1"


def test_the_role_takes_exactly_the_limits_that_a_key_has() -> None:
    specs = yaml.safe_load((ROOT / "roles/pd_router/meta/argument_specs.yml").read_text())
    said = specs["argument_specs"]["main"]["options"]["pd_router_keys"]["options"]
    assert set(said) == {field.alias or name for name, field in Key.model_fields.items()}
    required = {name for name, option in said.items() if option.get("required")}
    assert required == {name for name, field in Key.model_fields.items() if field.is_required()}

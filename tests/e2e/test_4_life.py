"""Upgrades, rollbacks and drains while people are served: nobody is refused, nobody gets a wrong token."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from cluster import ROOT, Cluster, recap, shell, until

pytestmark = pytest.mark.timeout(1800)

WHEELHOUSE = ROOT / ".local/wheelhouse"
TOKENS = 24
# A client's pause between two requests. Without one the load takes both cores of a small machine, and what
# is tested, playbooks that work beside it, takes an hour.
PAUSE_S = 0.5
LONG = 1900  # tokens, nearly the window
PROMPTS = ("continue this", "a second one", "and then a third that is a little longer than the others")
# The comparison of an upgrade, short enough for a few minutes on two cores.
SHORT = '{"check_prompts": [17, 200], "check_max_tokens": 32}'


@dataclass
class Load:
    """Clients that ask again and again, and what became of every request."""

    cluster: Cluster
    expected: dict[str, list[int]]
    served: int = 0
    faults: list[str] = field(default_factory=list)
    slowest: float = 0.0
    _stop: threading.Event = field(default_factory=threading.Event)

    def _ask(self, number: int) -> None:
        with httpx.Client(timeout=120) as client:
            turn = number
            while not self._stop.is_set():
                prompt = PROMPTS[turn % len(PROMPTS)]
                turn += 1
                start = time.monotonic()
                try:
                    got = self._one(client, prompt, stream=turn % 2 == 0)
                except (httpx.HTTPError, AssertionError, ValueError, KeyError) as error:
                    self.faults.append(f"{prompt!r} failed: {error!r}")
                    time.sleep(0.2)
                    continue
                self.slowest = max(self.slowest, time.monotonic() - start)
                if got != self.expected[prompt]:
                    self.faults.append(
                        f"{prompt!r}: wrong tokens {got[:6]}, expected {self.expected[prompt][:6]}"
                    )
                self.served += 1
                time.sleep(PAUSE_S)

    def _one(self, client: httpx.Client, prompt: str, stream: bool) -> list[int]:
        body = self.cluster.chat(prompt, TOKENS, stream)
        url = f"{self.cluster.url}/v1/chat/completions"
        if not stream:
            answer = client.post(url, json=body)
            assert answer.status_code == 200, f"{answer.status_code} {answer.text[:300]}"
            return list(answer.json()["choices"][0]["token_ids"])
        tokens: list[int] = []
        with client.stream("POST", url, json=body) as answer:
            assert answer.status_code == 200, f"{answer.status_code} {answer.read()[:300]!r}"
            last = ""
            for line in answer.iter_lines():
                if not line.startswith("data:"):
                    continue
                last = line[5:].strip()
                if last == "[DONE]":
                    break
                event = json.loads(last)
                assert "error" not in event, event
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or []
            assert last == "[DONE]", "the stream was cut"
        return tokens


@contextmanager
def load(cluster: Cluster, clients: int = 2) -> Iterator[Load]:
    """Keep asking while the block runs; afterwards not one request may have failed."""
    running = Load(cluster, {prompt: cluster.own(prompt, TOKENS) for prompt in PROMPTS})
    threads = [threading.Thread(target=running._ask, args=(n,), daemon=True) for n in range(clients)]
    for thread in threads:
        thread.start()
    try:
        until("the load runs", lambda: running.served >= 2 or running.faults, 60)
        yield running
    finally:
        running._stop.set()
        for thread in threads:
            thread.join(150)
    print(f"load: {running.served} served, {len(running.faults)} faults, slowest {running.slowest:.1f} s")
    assert running.faults == []
    assert running.served > 10


class Releases:
    """The wheel of this product in the cluster's wheelhouse, which a release replaces."""

    def __init__(self, keep: Path) -> None:
        (wheel,) = WHEELHOUSE.glob("vllm_tilert-*.whl")
        self.original = keep / wheel.name
        shutil.copy2(wheel, self.original)
        self.there = self.original
        """The wheel that was put last."""
        self.version = wheel.name.split("-")[1]
        self.folder = keep

    def put(self, wheel: Path) -> None:
        """This wheel and no other is what hosts install from now on."""
        self.there = wheel
        new = WHEELHOUSE / f".{wheel.name}"
        shutil.copy2(wheel, new)
        for old in WHEELHOUSE.glob("vllm_tilert-*.whl"):
            old.unlink()
        new.rename(WHEELHOUSE / wheel.name)

    def post(self, number: int) -> str:
        """The version of the nth release after the one that was there."""
        return f"{self.version}.post{number}"

    def make(self, number: int, change: tuple[str, str, str] | None = None) -> str:
        """Build and put the nth release: this source with its version and, if given, (file, old, new)."""
        version = self.post(number)
        source = self.folder / f"source-{version}"
        source.mkdir()
        for name in ("plugin", "router", "pyproject.toml", "README.md", "LICENSE"):
            path = ROOT / name
            if path.is_dir():
                shutil.copytree(
                    path, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
                )
            else:
                shutil.copy2(path, source / name)
        edits = [("plugin/vllm_tilert/__init__.py", '__version__ = "', f'__version__ = "{version}"  # ')]
        for file, old, new in [*edits, *([change] if change else [])]:
            text = (source / file).read_text()
            assert old in text, f"{file} has changed; this test's release must change with it"
            (source / file).write_text(text.replace(old, new, 1))
        shell(
            '"$OPS/bin/pip" wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation '
            f'-w "{source}/out" "{source}"'
        )
        (wheel,) = (source / "out").glob("*.whl")
        self.put(wheel)
        return version


def play(name: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a playbook on the local cluster."""
    return shell(f"playbook {name} " + " ".join(f"'{a}'" for a in arguments), timeout=1200, check=check)


def version(cluster: Cluster, host: str, kind: str = "decode") -> str:
    """What the node's environment (decode, prefill) has installed."""
    return cluster.run(host, f"/opt/tilert/{kind}/bin/tilertctl --version").split()[-1]


def started(cluster: Cluster, host: str) -> str:
    """When the decode node's process was started, as systemd has it."""
    return cluster.run(
        host, "systemctl show -p ExecMainStartTimestampMonotonic --value tilert-decode.service"
    ).strip()


def states(cluster: Cluster) -> dict[str, str]:
    """Decode node -> state, as the router shows it."""
    out = cluster.run(cluster.hosts("router")[0], "curl -sS -m 5 http://127.0.0.1:8081/nodes")
    return {node["name"]: node["state"] for node in json.loads(out)["nodes"]}


def all_serve(cluster: Cluster) -> None:
    """Both nodes are known to the router and in service, and no check is left running."""
    assert set(states(cluster)) == set(cluster.hosts("decode"))
    assert not {"DOWN", "DRAINING", "UNKNOWN"} & set(states(cluster).values())
    assert not any(cluster.status(host)["draining"] for host in cluster.hosts("decode"))
    router = cluster.hosts("router")[0]
    assert (
        cluster.run(router, "systemctl is-active tilert-router-check.service", check=False).strip()
        == "inactive"
    )
    assert cluster.run(router, "ls /etc/tilert/router-check.yaml", check=False) == ""


@pytest.fixture(scope="module")
def releases(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Releases]:
    """The wheelhouse, whose wheel and whose cluster are put back as they were."""
    made = Releases(tmp_path_factory.mktemp("releases"))
    yield made
    made.put(made.original)
    play("upgrade.yml", "-e", SHORT)


def test_an_upgrade_under_load_loses_no_request_and_no_token(cluster: Cluster, releases: Releases) -> None:
    before = {host: version(cluster, host) for host in cluster.hosts("decode")}
    starts = {host: started(cluster, host) for host in before}
    router = started_router(cluster)
    better = releases.make(1)
    with load(cluster):
        play("upgrade.yml", "-e", SHORT)
    assert {version(cluster, host) for host in before} == {better} != set(before.values())
    assert all(started(cluster, host) != starts[host] for host in before)
    # The router took nodes out and in without a restart.
    assert started_router(cluster) == router
    all_serve(cluster)


def started_router(cluster: Cluster) -> str:
    command = "systemctl show -p ExecMainStartTimestampMonotonic --value tilert-router.service"
    return cluster.run(cluster.hosts("router")[0], command).strip()


def test_a_rollback_is_a_switch_and_a_second_one_goes_forward(cluster: Cluster, releases: Releases) -> None:
    first, second = cluster.hosts("decode")
    start = time.monotonic()
    with load(cluster):
        play("rollback.yml", "-l", first, "-e", SHORT)
    print(f"rollback of one node: {time.monotonic() - start:.0f} s")
    assert version(cluster, first) == releases.version
    assert version(cluster, second) == releases.post(1)
    all_serve(cluster)
    play("rollback.yml", "-l", first, "-e", SHORT)
    assert version(cluster, first) == releases.post(1)
    all_serve(cluster)


def test_a_release_that_decodes_wrongly_meets_no_client_and_is_put_back(
    cluster: Cluster, releases: Releases
) -> None:
    first, second = cluster.hosts("decode")
    untouched = started(cluster, second)
    # It starts, is healthy, and answers: only the tokens are wrong.
    wrong, before = ".transpose(1, 2).reshape(state.seq_len, -1)", releases.there
    releases.make(
        2,
        ("plugin/vllm_tilert/decode/engines/reference.py", wrong, ".reshape(state.seq_len, -1)"),
    )
    try:
        with load(cluster):
            done = play("upgrade.yml", "-e", SHORT, check=False)
    finally:
        releases.put(before)
    assert done.returncode != 0
    said = " ".join(done.stdout.split())
    assert "DIFFERENT at token" in said
    assert "Its former version is back in service" in said
    counts = recap(done.stdout)
    assert counts[first]["rescued"] == 1
    assert second not in counts or counts[second]["ok"] <= 2  # validate.yml's look at it
    assert (version(cluster, first), version(cluster, second)) == (releases.post(1), releases.post(1))
    assert started(cluster, second) == untouched
    all_serve(cluster)


def test_a_release_that_does_not_start_is_put_back(cluster: Cluster, releases: Releases) -> None:
    first = cluster.hosts("decode")[0]
    with load(cluster):
        done = play(
            "upgrade.yml",
            "-l",
            first,
            "-e",
            SHORT,
            "-e",
            '{"tilert_decode_extra_args": ["--no-such"]}',
            check=False,
        )
    assert done.returncode != 0
    assert "Its former version is back in service" in " ".join(done.stdout.split())
    assert "--no-such" not in cluster.run(first, "cat /etc/systemd/system/tilert-decode.service")
    assert version(cluster, first) == releases.post(1)
    all_serve(cluster)


def test_a_drain_lets_the_running_stream_end_and_takes_nothing_new(cluster: Cluster) -> None:
    expected = cluster.own("for the other node", TOKENS)
    with cluster.streaming("a long one", LONG) as a:
        until("the stream runs", lambda: len(a.token_ids) > 3, 60)
        busy = cluster.holder(a.rid)
        assert busy
        try:
            with cluster.slowed(busy):
                # It gives up in time, says why, and goes on draining.
                short = play("drain.yml", "-l", busy, "-e", "drain_timeout_s=2", check=False)
                assert short.returncode != 0
                assert "still holds a request after 2 s" in " ".join(short.stdout.split())
                assert cluster.status(busy)["draining"]
                for _ in range(2):
                    with cluster.streaming("for the other node", TOKENS) as b:
                        until("served elsewhere", lambda: b.ended, 60)
                    assert b.token_ids == expected
                assert not a.ended, "the stream must still be running here"
            play("drain.yml", "-l", busy)
            until("the stream ends", lambda: a.ended, 5)
            assert (a.error, a.done, len(a.token_ids)) == (None, True, LONG)
            assert cluster.status(busy)["status"] == "idle"
            assert states(cluster)[busy] == "DRAINING"
        finally:
            play("undrain.yml", "-l", f"{busy},router")
    all_serve(cluster)


def test_draining_every_node_has_to_be_meant(cluster: Cluster) -> None:
    done = play("drain.yml", check=False)
    assert done.returncode != 0
    assert "nothing would be served" in " ".join(done.stdout.split())
    all_serve(cluster)


def test_a_teardown_has_to_name_the_pool(cluster: Cluster) -> None:
    done = play("teardown.yml", check=False)
    assert done.returncode != 0
    assert "-e teardown=local to mean it" in " ".join(done.stdout.split())
    all_serve(cluster)


@pytest.fixture
def two_prefills(cluster: Cluster, releases: Releases) -> Iterator[Cluster]:
    """The cluster with a second prefill host; a release made meanwhile is gone afterwards."""
    before = releases.there
    shell("export TF_VAR_prefill_count=2; cluster_apply; cluster_deploy", timeout=1200)
    yield Cluster()
    releases.put(before)
    shell("cluster_apply; cluster_deploy", timeout=1200)


def test_prefill_hosts_are_upgraded_and_rolled_back_under_load(
    two_prefills: Cluster, releases: Releases
) -> None:
    first, second = two_prefills.hosts("prefill")

    def versions() -> list[str]:
        return [version(two_prefills, host, "prefill") for host in (first, second)]

    before = versions()
    better = releases.make(3)
    with load(two_prefills):
        play("upgrade_prefill.yml", "-e", SHORT)
    assert versions() == [better, better] != before
    with load(two_prefills):
        play("rollback_prefill.yml", "-l", first, "-e", SHORT)
    assert versions() == [before[0], better]
    all_serve(two_prefills)


@pytest.fixture
def two_routers(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with a second router host."""
    shell("export TF_VAR_router_count=2; cluster_apply; cluster_deploy", timeout=1200)
    yield Cluster()
    shell("cluster_apply; cluster_deploy", timeout=1200)


def test_routers_restart_one_after_the_other_under_load(two_routers: Cluster) -> None:
    processes = [(host, "tilert-router") for host in two_routers.hosts("router")]
    assert len(processes) == 2
    _restart_under_load(two_routers, processes)


TWO = '{"pd_router_processes": 2}'


@pytest.fixture
def two_processes(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with a second router process on its router host."""
    play("site.yml", "-e", TWO)
    yield cluster
    play("site.yml")
    (host,) = cluster.hosts("router")
    assert cluster.run(host, "systemctl is-active tilert-router-2", check=False).strip() == "inactive"


def test_router_processes_of_a_host_restart_one_after_the_other_under_load(two_processes: Cluster) -> None:
    (host,) = two_processes.hosts("router")
    processes = [(host, "tilert-router"), (host, "tilert-router-2")]
    _restart_under_load(two_processes, processes, "-e", TWO)


def _restart_under_load(cluster: Cluster, processes: list[tuple[str, str]], *arguments: str) -> None:
    """Restart all router processes while clients ask and one stream outlasts it: nobody notices."""

    def starts() -> list[str]:
        command = "systemctl show -p ExecMainStartTimestampMonotonic --value"
        return [cluster.run(host, f"{command} {unit}").strip() for host, unit in processes]

    before = starts()
    with load(cluster), cluster.streaming("across the restarts", LONG) as a:
        until("the stream runs", lambda: len(a.token_ids) > 3, 60)
        holder = cluster.holder(a.rid)
        assert holder
        with cluster.slowed(holder):
            play("restart_routers.yml", *arguments)
        until("the stream ends", lambda: a.ended, 60)
    assert (a.error, a.done, len(a.token_ids)) == (None, True, LONG)
    assert all(now not in ("", "0", then) for now, then in zip(starts(), before, strict=True))
    for host in cluster.hosts("router"):
        assert " down;" not in cluster.run(host, "cat /etc/nginx/nginx.conf")


def test_a_pool_that_was_torn_down_leaves_nothing_and_is_deployed_again(cluster: Cluster) -> None:
    look = (
        "ls -d /opt/tilert /etc/tilert /usr/local/lib/tilert /var/lib/tilert/* /var/cache/tilert/* 2>/dev/null; "
        "grep -ls tilert /etc/nginx/nginx.conf; "
        "systemctl list-units --all --plain --no-legend 'tilert*' 'vllm*' | grep ' loaded '; "
        "nft list tables | grep tilert; ps -eo args | grep -E '^(/opt/tilert|nginx)'"
    )

    def left() -> dict[str, str]:
        return {host: cluster.run(host, look, check=False) for host in cluster.nodes}

    for there in left().values():  # this look sees what a pool that serves has
        assert all(word in there for word in ("/etc/tilert", "loaded", "table inet tilert", "/opt/tilert/"))
    play("teardown.yml", "-e", "teardown=local")
    assert left() == dict.fromkeys(cluster.nodes, "")
    with pytest.raises(httpx.TransportError):
        httpx.get(cluster.url, timeout=5)
    # What it needs no more does not keep it from coming back.
    cluster.deploy()
    all_serve(cluster)
    with load(cluster):
        time.sleep(20)

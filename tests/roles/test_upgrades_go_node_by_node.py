"""The order of an upgrade and of a rollback, and what a failure leaves, with systemd, HTTP and the comparison played.

The same playbook runs against real nodes under load in tests/e2e; here it takes no container.
"""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from roles.playbook import ROOT, needs_ansible, run_playbook, write_inventory

pytestmark = [needs_ansible, pytest.mark.timeout(600)]

SECRET = "s" * 40
SYSTEMCTL = """#!/bin/sh
case "$*" in
  *is-active*) echo active; exit ;;
  *show*) printf 'Id=x.service\\nActiveState=active\\nLoadState=loaded\\nUnitFileState=enabled\\n'; exit ;;
esac
echo "systemctl $*" >>"{calls}"
"""
# What a role does to a host: a new environment, the former one beside it, a new unit.
ROLE = """
- name: A new version
  ansible.builtin.shell:
    cmd: |
      set -eu
      cd "{{ tilert_prefix }}"
      echo "install $(cat KIND/.stamp)" >>"{{ calls }}"
      rm -rf KIND.old; mv KIND KIND.old; mkdir KIND
      echo new >KIND/.stamp; echo "unit new" >"{{ tilert_unit_dir }}/UNIT"
      exit {{ role_status | default(0) }}
"""
UNITS = {"decode": "tilert-decode.service", "prefill": "vllm-prefill.service"}


class Pool:
    """Two decode hosts, two prefill hosts and a router on this machine; what they are asked is written to `calls`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls_file = folder, folder / "calls"
        self.calls_file.touch()
        for name in ("bin", "host_vars", "etc", "roles/rdma/tasks"):
            (folder / name).mkdir(parents=True)
        self.program("bin/systemctl", SYSTEMCTL.replace("{calls}", str(self.calls_file)))
        self.program("bin/systemd-run", f'#!/bin/sh\necho "check" >>"{self.calls_file}"\n')
        (folder / "roles/rdma/tasks/main.yml").write_text("[]\n")
        for role, kind in (("tilert_decode", "decode"), ("vllm_prefill", "prefill")):
            (folder / f"roles/{role}/tasks").mkdir(parents=True)
            text = ROLE.replace("KIND", kind).replace("UNIT", UNITS[kind])
            (folder / f"roles/{role}/tasks/main.yml").write_text(text)
        self.router = folder / "etc/router.yaml"
        self.ports: dict[str, int] = {}
        self.playbook, self.kind = "upgrade.yml", "decode"
        self.running: list[int] = []
        """Requests that a prefill host computes, look by look; none after the last."""
        self.dead: set[str] = set()
        """Prefill hosts that do not answer."""

    def program(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def serve(self) -> Iterator[None]:
        """A decode node's, a router's and two prefill hosts' HTTP on free ports."""
        pool = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None: ...

            def answer(self, value: Any) -> None:
                body = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                if self.server.server_address[0] in pool.dead:
                    self.send_error(503)
                elif self.path == "/metrics":
                    self.metrics()
                else:
                    nodes = {"nodes": [{"name": name, "state": "FREE"} for name in pool.known]}
                    self.answer(nodes if self.path == "/nodes" else {"status": "idle", "slots": []})

            def metrics(self) -> None:
                count = pool.running.pop(0) if pool.running else 0
                with pool.calls_file.open("a") as calls:
                    calls.write(f"{count} run, routers know {' '.join(pool.knows('prefill'))}\n")
                text = (
                    "# TYPE vllm:num_requests_running gauge\n"
                    f'vllm:num_requests_running{{engine="0"}} {float(count)}\n'
                    'vllm:num_requests_waiting{engine="0"} 0.0\n'
                )
                self.send_response(200)
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def do_POST(self) -> None:
                if self.path.startswith("/pd/") and self.headers["authorization"] != f"Bearer {SECRET}":
                    self.send_error(401)
                    return
                with pool.calls_file.open("a") as calls:
                    calls.write(f"{self.path}\n")
                self.answer({})

        servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(2)]
        self.ports = {"node": servers[0].server_port, "admin": servers[1].server_port}
        servers.append(http.server.ThreadingHTTPServer(("127.0.0.7", 0), Handler))
        self.ports["prefill"] = servers[-1].server_port
        servers.append(http.server.ThreadingHTTPServer(("127.0.0.8", self.ports["prefill"]), Handler))
        for server in servers:
            threading.Thread(target=server.serve_forever, daemon=True).start()
        yield
        for server in servers:
            server.shutdown()

    def upgrade(
        self, *arguments: str, compare: str = "exit 0", prefill: int = 2
    ) -> subprocess.CompletedProcess[str]:
        """Run the playbook; `compare` is the shell that answers for the comparison."""
        decode = [
            {"name": f"d{n}", "url": f"http://127.0.0.{n}:5557", "host": f"127.0.0.{n}", "ctrl_port": 5556}
            for n in (1, 2)
        ]
        model = {"name": "small", "tokenizer": "/srv", "max_model_len": 2048}
        first = [{"name": f"p{n}", "url": f"http://127.0.0.{6 + n}:8000"} for n in range(1, 1 + prefill)]
        self.router.write_text(yaml.safe_dump({"model": model, "prefill": first, "decode": decode}))
        for host in (f"{self.kind[0]}{n}" for n in (1, 2)):
            prefix = self.folder / host
            (prefix / self.kind).mkdir(parents=True)
            (prefix / "units").mkdir()
            (prefix / self.kind / ".stamp").write_text("old\n")
            (prefix / "units" / UNITS[self.kind]).write_text("unit old\n")
            (self.folder / f"host_vars/{host}.yml").write_text(
                json.dumps({"tilert_prefix": str(prefix), "tilert_unit_dir": str(prefix / "units")})
            )
            self.program(f"{host}/router/bin/tilert-router", "#!/bin/sh\n")
            self.program(
                f"{host}/router/bin/tilertctl",
                f'#!/bin/sh\necho "compare $(cat {prefix}/{self.kind}/.stamp)" >>"{self.calls_file}"\n'
                f"version=$(cat {prefix}/{self.kind}/.stamp)\n{compare}\n",
            )
        given = yaml.safe_load((ROOT / "inventory/local/group_vars/tilert.yml").read_text()) | {
            "ansible_connection": "local",
            "ansible_become": False,
            "ansible_python_interpreter": sys.executable,
            "tilert_config_dir": str(self.folder / "etc"),
            "tilert_user": str(os.getgid()),
            "tilert_secret": SECRET,
            "tilert_wheelhouse": "",
            "tilert_controller_addresses": [],
            "tilert_decode_http_port": self.ports["node"],
            "tilert_decode_host": "127.0.0.1",
            "tilert_router_admin_port": self.ports["admin"],
            "tilert_prefill_port": self.ports["prefill"],
            "calls": str(self.calls_file),
        }
        groups: dict[str, Any] = {
            "prefill": {f"p{n}": {"address": f"127.0.0.{6 + n}"} for n in range(1, 1 + prefill)},
            "decode": {f"d{n}": {"address": f"127.0.0.{n}"} for n in (1, 2)},
            "router": {"g1": {"address": "127.0.0.9"}},
            "ingress": {},
            "native": {},
            "observability": {},
        }
        write_inventory(self.folder, groups, given)
        return self.run(self.playbook, *arguments)

    def run(self, playbook: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a playbook on the hosts that an upgrade has made; `calls` are those of this run."""
        self.calls_file.write_text("")
        path, inventory = ROOT / "ansible" / playbook, self.folder / "hosts.yml"
        played = {
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            "ANSIBLE_ROLES_PATH": str(self.folder / "roles"),
        }
        return run_playbook(path, inventory, *arguments, environment=played, timeout=580)

    @property
    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines()

    def runs(self, host: str) -> tuple[str, str]:
        prefix = self.folder / host
        unit = (prefix / "units" / UNITS[self.kind]).read_text().strip()
        return (prefix / self.kind / ".stamp").read_text().strip(), unit

    def knows(self, section: str) -> list[str]:
        return [node["name"] for node in yaml.safe_load(self.router.read_text())[section]]

    @property
    def known(self) -> list[str]:
        return self.knows("decode")


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    made = Pool(tmp_path)
    serving = made.serve()
    next(serving)
    yield made
    next(serving, None)


ONE_NODE = [
    "/pd/drain",
    "/nodes/{0}/drain",
    "systemctl reload tilert-router.service",
    "install old",
    "check",
    "compare new",
]
BACK = ["/pd/undrain", "/nodes/{0}/undrain", "systemctl reload tilert-router.service"]
CHECK_ENDS = "systemctl stop tilert-router-check.service"


def test_each_node_is_drained_replaced_compared_and_put_back_before_the_next(pool: Pool) -> None:
    done = pool.upgrade()
    assert done.returncode == 0, done.stdout + done.stderr
    expected = [call.format(host) for host in ("d1", "d2") for call in [*ONE_NODE, CHECK_ENDS, *BACK]]
    assert pool.calls == expected
    assert {pool.runs(host) for host in ("d1", "d2")} == {("new", "unit new")}
    assert pool.known == ["d1", "d2"]
    # The way back is kept.
    assert (pool.folder / "d1/decode.version/tilert-decode.service").read_text() == "unit old\n"


def test_a_node_that_decodes_wrongly_gets_its_version_back_and_the_next_is_not_touched(pool: Pool) -> None:
    done = pool.upgrade(compare='[ "$version" = old ] || { echo "DIFFERENT at token 3"; exit 1; }')
    assert done.returncode != 0
    said = " ".join(done.stdout.split())
    assert "d1: the upgrade failed (The tokens are vLLM's own: DIFFERENT at token 3)" in said
    undone = [
        "systemctl daemon-reload",
        "systemctl restart tilert-decode.service",
        "check",
        "compare old",
        CHECK_ENDS,
    ]
    assert pool.calls == [call.format("d1") for call in [*ONE_NODE, CHECK_ENDS, *undone, *BACK]]
    assert pool.runs("d1") == pool.runs("d2") == ("old", "unit old")
    assert pool.known == ["d1", "d2"]


def test_a_node_whose_former_version_is_wrong_too_stays_out_of_service(pool: Pool) -> None:
    done = pool.upgrade(compare="echo DIFFERENT; exit 1")
    assert done.returncode != 0
    assert "The node is out of service, the others serve" in " ".join(done.stdout.split())
    assert "/pd/undrain" not in pool.calls
    assert pool.known == ["d2"]
    assert pool.runs("d2") == ("old", "unit old")


SWITCH = "systemctl daemon-reload", "systemctl restart {0}", "check", "compare old", CHECK_ENDS


def test_a_rollback_of_a_node_is_a_switch_that_is_compared(pool: Pool) -> None:
    assert pool.upgrade().returncode == 0
    done = pool.run("rollback.yml", "-l", "d1")
    assert done.returncode == 0, done.stdout + done.stderr
    switch = [call.format(UNITS["decode"]) for call in SWITCH]
    assert pool.calls == [call.format("d1") for call in [*ONE_NODE[:3], *switch, *BACK]]
    assert (pool.runs("d1"), pool.runs("d2")) == (("old", "unit old"), ("new", "unit new"))
    assert pool.known == ["d1", "d2"]


@pytest.fixture
def prefill(pool: Pool) -> Pool:
    pool.playbook, pool.kind = "upgrade_prefill.yml", "prefill"
    return pool


RELOAD = "systemctl reload tilert-router.service"


def one_host(other: str, *before: str) -> list[str]:
    """Every call of one prefill host's upgrade, up to its comparison."""
    idle = [f"0 run, routers know {other}"] * 3
    return [RELOAD, *before, *idle, "install old", "check", "compare new", CHECK_ENDS]


def test_each_prefill_host_is_left_out_and_idle_before_it_is_replaced(prefill: Pool) -> None:
    prefill.running = [2, 0, 1]
    done = prefill.upgrade()
    assert done.returncode == 0, done.stdout + done.stderr
    busy = [f"{count} run, routers know p2" for count in (2, 0, 1)]
    assert prefill.calls == [*one_host("p2", *busy), RELOAD, *one_host("p1"), RELOAD]
    assert {prefill.runs(host) for host in ("p1", "p2")} == {("new", "unit new")}
    assert prefill.knows("prefill") == ["p1", "p2"]


def test_a_prefill_host_that_fails_gets_its_version_back_and_the_next_is_not_touched(prefill: Pool) -> None:
    done = prefill.upgrade(compare='[ "$version" = old ] || { echo "DIFFERENT at token 3"; exit 1; }')
    assert done.returncode != 0
    said = " ".join(done.stdout.split())
    assert "p1: the upgrade failed (The tokens are vLLM's own: DIFFERENT at token 3)" in said
    undone = ["systemctl daemon-reload", "systemctl restart vllm-prefill.service", "check", "compare old"]
    assert prefill.calls == [*one_host("p2"), *undone, CHECK_ENDS, RELOAD]
    assert prefill.runs("p1") == prefill.runs("p2") == ("old", "unit old")
    assert prefill.knows("prefill") == ["p1", "p2"]


def test_a_prefill_host_that_does_not_become_idle_is_put_back_untouched(prefill: Pool) -> None:
    prefill.running = [3] * 99
    done = prefill.upgrade("-e", "drain_timeout_s=4")
    assert done.returncode != 0
    assert "p1 still computes requests after 4 s (3 requests" in " ".join(done.stdout.split())
    assert "install old" not in prefill.calls
    assert prefill.knows("prefill") == ["p1", "p2"]


def test_no_prefill_host_is_taken_out_that_has_no_other(prefill: Pool) -> None:
    done = prefill.upgrade(prefill=1)
    assert done.returncode != 0
    assert "p1 is the only prefill host" in " ".join(done.stdout.split())
    assert prefill.calls == []


def test_a_prefill_host_that_is_down_does_not_count_as_the_other(prefill: Pool) -> None:
    prefill.dead = {"127.0.0.8"}
    done = prefill.upgrade()
    assert done.returncode != 0
    assert "p1 is the only prefill host that answers" in " ".join(done.stdout.split())
    assert prefill.calls == []


def test_a_rollback_of_a_prefill_host_waits_until_it_is_idle(prefill: Pool) -> None:
    assert prefill.upgrade().returncode == 0
    prefill.running = [1]
    done = prefill.run("rollback_prefill.yml", "-l", "p1")
    assert done.returncode == 0, done.stdout + done.stderr
    idle = ["1 run, routers know p2", *["0 run, routers know p2"] * 3]
    assert prefill.calls == [RELOAD, *idle, *[call.format(UNITS["prefill"]) for call in SWITCH], RELOAD]
    assert (prefill.runs("p1"), prefill.runs("p2")) == (("old", "unit old"), ("new", "unit new"))
    assert prefill.knows("prefill") == ["p1", "p2"]


def test_a_prefill_host_that_stays_busy_is_not_rolled_back(prefill: Pool) -> None:
    assert prefill.upgrade().returncode == 0
    prefill.running = [3] * 99
    done = prefill.run("rollback_prefill.yml", "-l", "p1", "-e", "drain_timeout_s=4")
    assert done.returncode != 0
    said = " ".join(done.stdout.split())
    assert "p1 is in service as before. p1 still computes requests after 4 s (3 requests" in said
    assert prefill.runs("p1") == ("new", "unit new")
    assert prefill.knows("prefill") == ["p1", "p2"]


def test_a_rollback_that_decodes_wrongly_leaves_the_host_out(prefill: Pool) -> None:
    assert prefill.upgrade(compare='[ "$version" = new ] || { echo DIFFERENT; exit 1; }').returncode == 0
    done = prefill.run("rollback_prefill.yml", "-l", "p1")
    assert done.returncode != 0
    said = " ".join(done.stdout.split())
    assert (
        "The node is out of service, the others serve. rollback_prefill.yml -l p1 again goes forward" in said
    )
    assert prefill.knows("prefill") == ["p2"]
    assert prefill.runs("p2") == ("new", "unit new")


def test_without_a_former_version_nothing_is_taken_out(prefill: Pool) -> None:
    assert prefill.upgrade(compare="echo DIFFERENT; exit 1").returncode != 0
    done = prefill.run("rollback_prefill.yml", "-l", "p2")
    assert done.returncode != 0
    assert "p2: no upgrade has left a former version" in " ".join(done.stdout.split())
    assert prefill.calls == []


def test_a_lone_prefill_host_that_cannot_be_put_right_is_said_to_be_asked_still(prefill: Pool) -> None:
    done = prefill.upgrade("-e", "upgrade_interrupts=true", compare="echo DIFFERENT; exit 1", prefill=1)
    assert done.returncode != 0
    assert "It was not left out, and routers still ask it" in " ".join(done.stdout.split())
    assert prefill.knows("prefill") == ["p1"]

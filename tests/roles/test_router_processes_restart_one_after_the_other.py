"""Several router processes on a host: each known to everyone by its ports, and restarted without the others.

systemd and nginx are played; the playbooks and tasks are the real ones. What streams see of it is shown in tests/e2e.
"""

from __future__ import annotations

import http.server
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from roles.playbook import ROOT, needs_ansible, run_playbook, write_inventory
from roles.test_units_say_what_was_meant import GPU, HOSTS, argv, render, rendering
from tilert_router.config import parse

pytestmark = [needs_ansible, pytest.mark.timeout(600)]

SYSTEMCTL = """#!/bin/sh
case "$*" in
  *is-enabled*) exit ;;
  *show*) printf 'Id=x.service\\nActiveState=active\\nLoadState=loaded\\nUnitFileState=enabled\\n'; exit ;;
  "reload nginx.service")
    out=$(sed -n 's/^ *server \\([^ ]*\\) .* down;/ \\1/p' "{nginx}" | tr -d '\\n')
    echo "nginx leaves out:$out" >>"{calls}"; exit ;;
  daemon-reload) exit ;;
esac
echo "$*" >>"{calls}"
{more}
"""


class Host:
    """This machine as the one router host of a pool; what systemd and the routers are asked is written to `calls`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls_file = folder, folder / "calls"
        for name in ("bin", "etc/credentials", "units"):
            (folder / name).mkdir(parents=True)
        self.nginx = folder / "nginx.conf"
        self.program("bin/nginx", "#!/bin/sh\n")
        self.program("venv/bin/tilert-router", '#!/bin/sh\ntest -s "$2"\n')
        self.systemctl()
        self.ports: list[int] = []
        self.unready: set[int] = set()
        self.playbook = ROOT / "ansible/restart_routers.yml"

    def program(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def systemctl(self, more: str = "") -> None:
        text = SYSTEMCTL.replace("{calls}", str(self.calls_file)).replace("{nginx}", str(self.nginx))
        self.program("bin/systemctl", text.replace("{more}", more))

    def serve(self) -> Iterator[None]:
        """The routers' HTTP on two free ports, the lower one the first's: a pool's port step is never negative."""
        host = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None: ...

            def do_GET(self) -> None:
                number = host.ports.index(self.server.server_port) + 1  # type: ignore[attr-defined]
                restarted = f"restart tilert-router{'-2' if number == 2 else ''}.service" in host.calls
                status = 503 if self.path == "/ready" and restarted and number in host.unready else 200
                if self.path == "/ready" and restarted and status == 200:
                    with host.calls_file.open("a") as calls:
                        calls.write(f"{number} is ready\n")
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

        servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(2)]
        servers.sort(key=lambda server: server.server_port)
        self.ports = [server.server_port for server in servers]
        for server in servers:
            threading.Thread(target=server.serve_forever, daemon=True).start()
        yield
        for server in servers:
            server.shutdown()

    def run(self, *, processes: int = 2, decode: int = 2, **variables: Any) -> str:
        """Run the playbook with so many processes; what it said, with white space folded."""
        self.calls_file.write_text("")
        lines = [
            f"    server 127.0.0.1:{port} max_fails=1 fail_timeout=1s;" for port in self.ports[:processes]
        ]
        self.nginx.write_text("\n".join(lines) + "\n")
        given = {
            "ansible_connection": "local",
            "ansible_become": False,
            "ansible_python_interpreter": sys.executable,
            "tilert_config_dir": str(self.folder / "etc"),
            "tilert_credentials_dir": str(self.folder / "etc/credentials"),
            "tilert_user": str(os.getgid()),
            "tilert_secret": "s" * 40,
            "tilert_prefill_key": "",
            "tilert_router_port": self.ports[0],
            "tilert_router_port_step": self.ports[1] - self.ports[0],
            "tilert_router_admin_port": 8081,
            "pd_router_processes": processes,
        }
        groups: dict[str, Any] = {
            "prefill": {"p1": {"address": "127.0.0.8"}},
            "decode": {f"d{n}": {"address": f"127.0.0.{n + 1}"} for n in range(decode)},
            "router": {"g1": {"address": "127.0.0.1"}},
            "ingress": {"g1": {}},
            "native": {},
            "observability": {},
        }
        inventory = write_inventory(self.folder, groups, given | variables, defaults=True)
        own = {
            "pd_router_venv": str(self.folder / "venv"),
            "pd_router_unit_dir": str(self.folder / "units"),
            "pd_router_nginx_config": str(self.nginx),
            "pd_router_nginx": str(self.folder / "bin/nginx"),
        }
        path = {"PATH": f"{self.folder}/bin:{os.environ['PATH']}"}
        extra = ["-e", json.dumps(own)]
        done = run_playbook(self.playbook, inventory, *extra, environment=path, timeout=300)
        self.rc = done.returncode
        return " ".join((done.stdout + done.stderr).split())

    @property
    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    serving = made.serve()
    next(serving)
    yield made
    next(serving, None)


def rolling(host: Host) -> list[str]:
    """Every call of a restart of both: nginx without it, restarted, ready, nginx with it; then the next."""
    first, second = (f"127.0.0.1:{port}" for port in host.ports)
    return [
        f"nginx leaves out: {first}",
        "restart tilert-router.service",
        "1 is ready",
        "nginx leaves out:",
        f"nginx leaves out: {second}",
        "restart tilert-router-2.service",
        "2 is ready",
        "nginx leaves out:",
    ]


def test_each_process_waits_until_the_one_before_serves_again(host: Host) -> None:
    said = host.run()
    assert host.rc == 0, said
    assert host.calls == rolling(host)


def test_a_process_that_does_not_come_back_stops_it_before_the_next(host: Host) -> None:
    host.systemctl('[ "$*" != "restart tilert-router.service" ] || { echo "start failed" >&2; exit 1; }')
    said = host.run()
    assert host.rc != 0
    assert "g1 does not serve after its restart" in said
    assert "journalctl -u tilert-router.service" in said
    assert host.calls.count("restart tilert-router-2.service") == 0
    assert " down;" not in host.nginx.read_text()


def test_the_only_process_of_a_pool_is_restarted_only_when_told(host: Host) -> None:
    said = host.run(processes=1)
    assert host.rc != 0
    assert "Set pd_router_processes: 2" in said
    assert host.calls == []


def test_only_processes_that_have_changed_restart(host: Host) -> None:
    tasks = [
        {"ansible.builtin.include_role": {"name": "pd_router", "tasks_from": f"{part}.yml"}}
        for part in ("configure", "service")
    ]
    host.playbook = host.folder / "play.yml"
    host.playbook.write_text(json.dumps([{"hosts": "router", "gather_facts": False, "tasks": tasks}]))

    def run(**given: Any) -> list[str]:
        said = host.run(**given)
        assert host.rc == 0, said
        host.said = said  # type: ignore[attr-defined]
        return [call for call in host.calls if not call.startswith(("start ", "1 is", "2 is", "nginx"))]

    assert run(processes=1) == ["restart tilert-router.service"]
    assert run(processes=1) == []
    assert "changed=0" in host.said  # type: ignore[attr-defined]
    # More processes: the one that serves goes on.
    assert run() == ["restart tilert-router-2.service"]
    first, second = (parse((host.folder / f"etc/router{suffix}.yaml").read_text()) for suffix in ("", "-2"))
    assert [first.listen.port, second.listen.port] == host.ports
    assert first.admin
    assert second.admin
    assert second.admin.port - first.admin.port == host.ports[1] - host.ports[0]
    # The ports apart, they are one router twice over.
    ports = {"listen": first.listen, "admin": first.admin}
    assert second.model_copy(update=ports) == first
    unit = host.folder / "units/tilert-router-2.service"
    assert argv(unit)[1:] == ["serve", str(host.folder / "etc/router-2.yaml")]
    # Another node: all of them read it, none restarts.
    assert run(decode=3) == ["reload tilert-router.service", "reload tilert-router-2.service"]
    # What is read at start: one after the other, as restart_routers.yml does it.
    assert run(decode=3, tilert_max_seq_len=4096) == [
        "restart tilert-router.service",
        "restart tilert-router-2.service",
    ]
    assert host.calls[:8] == rolling(host)
    # Fewer: the one too many ends, and nothing of it is left.
    assert run(processes=1, decode=3, tilert_max_seq_len=4096) == [
        "disable tilert-router-2.service",
        "stop tilert-router-2.service",
    ]
    assert sorted(path.name for path in (host.folder / "units").iterdir()) == ["tilert-router.service"]
    assert not (host.folder / "etc/router-2.yaml").exists()


def test_everyone_who_must_know_the_processes_does(tmp_path: Path) -> None:
    hosts = {
        **HOSTS,
        "router": {"g1": {"address": "10.0.0.4", "pd_router_processes": 3}, "g2": {"address": "2001:db8::9"}},
        "observability": {"o1": {"address": "10.0.0.99"}},
    }
    play = [
        rendering("nginx_ingress", "ingress", ["nginx.conf"]),
        rendering("observability", "observability", ["prometheus.yml"]),
        rendering("base_host", "router", ["firewall.nft"]),
    ]
    out = render(tmp_path, GPU, hosts, play)
    nginx = (out / "g1-nginx.conf").read_text()
    servers = [
        line.split()[1] for line in nginx.splitlines() if line.strip().startswith("server ") and "=" in line
    ]
    assert servers == ["10.0.0.4:8080", "10.0.0.4:8082", "10.0.0.4:8084", "[2001:db8::9]:8080"]
    # All processes of a host that is gone, and still one of another.
    assert "proxy_next_upstream_tries 5;" in nginx
    (job,) = (
        job
        for job in yaml.safe_load((out / "o1-prometheus.yml").read_text())["scrape_configs"]
        if job["job_name"] == "router"
    )
    targets = {config["labels"]["host"]: config["targets"] for config in job["static_configs"]}
    assert targets["g1"] == ["10.0.0.4:8081", "10.0.0.4:8083", "10.0.0.4:8085"]
    assert targets["g2"] == ["[2001:db8::9]:8081"]
    firewall = (out / "g1-firewall.nft").read_text()
    assert 'tcp dport { 8080, 8082, 8084 } accept comment "router: ingress"' in firewall
    assert 'tcp dport { 8081, 8083, 8085 } accept comment "router admin: metrics"' in firewall
    assert "8082" not in (out / "g2-firewall.nft").read_text()

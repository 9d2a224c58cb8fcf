"""The local cluster as tests see it: deploy it, reach into its hosts, talk to its ingress."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]


def shell(script: str, timeout: float = 1800, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run bash with bin/lib.sh's functions at hand; a failure shows the end of the output."""
    done = subprocess.run(
        ["bash", "-c", f'. "{ROOT}/bin/lib.sh"; {script}'],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
    )
    if check and done.returncode:
        raise AssertionError(
            f"{script}: exit {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
        )
    return done


def podman(*arguments: str, check: bool = True, timeout: float = 120) -> str:
    """Run podman with the settings this machine needs."""
    return shell(f'. "$STACK/scripts/podman-env.sh"; podman {shlex.join(arguments)}', timeout, check).stdout


def recap(output: str) -> dict[str, dict[str, int]]:
    """The play recap of an ansible-playbook run: counts by host."""
    found = re.findall(r"^(\S+)\s+: (ok=.*)$", output, re.M)
    return {host: {k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", line)} for host, line in found}


def until(what: str, condition: Callable[[], Any], timeout: float, pause: float = 0.1) -> Any:
    """The first true result of `condition`; fails naming `what` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        got = condition()
        if got:
            return got
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} s: {what}")
        time.sleep(pause)


@dataclass
class Stream:
    """One streamed chat completion, read by a thread so that tests can act on it midway."""

    max_tokens: int
    rid: str = ""
    status: int = 0
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: Any = None
    done: bool = False
    times: list[float] = field(default_factory=list)
    ended: float = 0.0
    body: str = ""


class Cluster:
    """A deployed local cluster."""

    def __init__(self) -> None:
        self.nodes: dict[str, dict[str, Any]] = json.loads(shell("tf output -json nodes").stdout)
        self.url: str = json.loads(shell("tf output -json ingress_url").stdout)
        self.model = "small"

    def hosts(self, role: str) -> list[str]:
        """Names of the hosts of a role."""
        return sorted(name for name, node in self.nodes.items() if node["role"] == role)

    def run(self, host: str, command: str, check: bool = True, timeout: float = 120) -> str:
        """Run a shell command inside a host."""
        return podman("exec", host, "sh", "-c", command, check=check, timeout=timeout)

    def deploy(self, *arguments: str) -> str:
        """Run site.yml; its output."""
        return shell("cluster_deploy " + " ".join(f"'{a}'" for a in arguments)).stdout

    # ---- decode nodes, asked from the router host, whose address they let in

    def node(self, host: str, path: str) -> Any:
        """GET a path of a decode node's HTTP interface with the shared secret; parsed JSON."""
        return self._nodes([host], path)[0]

    def _nodes(self, hosts: list[str], path: str) -> list[Any]:
        """The same of several nodes, by one command: reaching into a host takes longer than asking."""
        urls = " ".join(f"http://{self.nodes[host]['address']}:5557{path}" for host in hosts)
        script = (
            f"for url in {urls}; do curl -sS -m 5 "
            '-H "Authorization: Bearer $(cat /etc/tilert/credentials/decode)" $url; echo; done'
        )
        out = self.run(self.hosts("router")[0], script)
        return [json.loads(line) for line in out.splitlines() if line]

    def status(self, host: str) -> dict[str, Any]:
        """A decode node's /decode_status."""
        return dict(self.node(host, "/decode_status"))

    def holders(self, *rids: str) -> list[str | None]:
        """For each rid the decode host that has a slot for it, if any."""
        hosts = self.hosts("decode")
        held = {
            slot["rid"]: host
            for host, status in zip(hosts, self._nodes(hosts, "/decode_status"), strict=True)
            for slot in status["slots"]
        }
        return [held.get(rid) for rid in rids]

    def holder(self, rid: str) -> str | None:
        """The decode host that has a slot for `rid`, if any."""
        return self.holders(rid)[0]

    @contextmanager
    def slowed(self, *hosts: str) -> Iterator[None]:
        """Let decode nodes run a sixth of the time: their streams then last as long as a playbook takes."""
        pid = "$(systemctl show -p MainPID --value tilert-decode.service)"
        beat = f"pid={pid}; while kill -STOP $pid; do sleep 0.15; kill -CONT $pid; sleep 0.03; done"
        for host in hosts:
            self.run(host, f"systemd-run --quiet --collect --unit=slowed sh -c {shlex.quote(beat)}")
        try:
            yield
        finally:
            for host in hosts:
                self.run(host, f"systemctl stop slowed.service; kill -CONT {pid}", check=False)

    def wait_idle(self, host: str, timeout: float = 60) -> None:
        """Wait until a decode node says that it holds nothing."""
        until(f"{host} is idle", lambda: self.status(host)["status"] == "idle", timeout, pause=0.3)

    def verify(self, *arguments: str) -> list[dict[str, Any]]:
        """Comparisons with vLLM's own continuation, as `compared` gives them."""
        return list(self.compared(*arguments)["comparisons"])

    def compared(self, *arguments: str) -> dict[str, Any]:
        """`tilertctl verify --json` on the router host: its near-tie margin and its comparisons."""
        prefill = self.nodes[self.hosts("prefill")[0]]["address"]
        decode = " ".join(f"--decode http://{self.nodes[h]['address']}:5557" for h in self.hosts("decode"))
        command = (
            "/opt/tilert/router/bin/tilertctl verify --json "
            f"--ingress http://127.0.0.1 --prefill http://{prefill}:8000 "
            f"{decode} --secret-file /etc/tilert/credentials/decode "
            f"--model {self.model} " + " ".join(arguments)
        )
        out = self.run(self.hosts("router")[0], command + " || [ $? = 1 ]", timeout=600)
        return dict(json.loads(out))

    # ---- clients

    def chat(self, prompt: str, max_tokens: int, stream: bool = True) -> dict[str, Any]:
        """The body of a greedy chat request."""
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": max_tokens,
            "stream": stream,
            "return_token_ids": True,
        }

    @contextmanager
    def streaming(self, prompt: str, max_tokens: int = 64) -> Iterator[Stream]:
        """Start a stream in the background; leaving the block closes the connection if it still runs."""
        stream = Stream(max_tokens)
        client = httpx.Client(timeout=300)
        response: list[httpx.Response] = []

        def read() -> None:
            try:
                with client.stream(
                    "POST", f"{self.url}/v1/chat/completions", json=self.chat(prompt, max_tokens)
                ) as r:
                    response.append(r)
                    stream.status, stream.rid = r.status_code, r.headers.get("x-tilert-rid", "")
                    if r.status_code != 200:
                        stream.body = r.read().decode()
                        return
                    for line in r.iter_lines():
                        if line.startswith("data:"):
                            self._event(stream, line[5:].strip())
            except (httpx.HTTPError, httpx.StreamError, OSError) as error:
                stream.error = stream.error or repr(error)
            finally:
                stream.ended = time.monotonic()

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        try:
            yield stream
        finally:
            if thread.is_alive() and response:
                # Close the socket under the reader: that is what a client that goes away looks like.
                response[0].extensions["network_stream"].get_extra_info("socket").shutdown(2)
            thread.join(30)
            client.close()

    @staticmethod
    def _event(stream: Stream, data: str) -> None:
        if data == "[DONE]":
            stream.done = True
            return
        event = json.loads(data)
        if "error" in event:
            stream.error = event["error"]
            return
        for choice in event["choices"]:
            stream.token_ids += choice.get("token_ids") or []
            stream.finish_reason = choice.get("finish_reason") or stream.finish_reason
            stream.times.append(time.monotonic())

    def own(self, prompt: str, max_tokens: int) -> list[int]:
        """vLLM's own greedy continuation of the same chat, asked of the prefill node itself."""
        prefill = self.nodes[self.hosts("prefill")[0]]["address"]
        body = json.dumps(self.chat(prompt, max_tokens, stream=False))
        out = self.run(
            self.hosts("router")[0],
            f"curl -sS -m 120 -H 'content-type: application/json' "
            f"-d {shlex.quote(body)} http://{prefill}:8000/v1/chat/completions",
        )
        return list(json.loads(out)["choices"][0]["token_ids"])

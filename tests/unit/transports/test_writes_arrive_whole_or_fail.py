"""Real loopback writes over both transports, and what happens when they cannot be."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vllm_tilert.transports import (
    Transport,
    TransportError,
    TransportUnavailable,
    WriteOutstanding,
    base,
    make_transport,
    mooncake,
)

BOTH = pytest.mark.parametrize(("name", "protocol"), [("mooncake", "tcp"), ("nixl", "UCX")])


def pair(name: str, protocol: str, size: int) -> tuple[Transport, torch.Tensor, Transport, torch.Tensor]:
    """A writer with random bytes and a target with zeros."""
    source = torch.randint(0, 256, (size,), dtype=torch.uint8)
    target = torch.zeros(size, dtype=torch.uint8)
    ends = []
    for memory in (source, target):
        transport = make_transport(name, protocol)
        transport.init("127.0.0.1")
        transport.register(memory.data_ptr(), size, "cpu")
        ends.append(transport)
    return ends[0], source, ends[1], target


@BOTH
def test_parts_land_where_they_should(name: str, protocol: str) -> None:
    writer, source, node, target = pair(name, protocol, 1 << 20)
    meta = node.local_meta()
    writer.prepare(meta)
    lens = [1, 4096, 100_000, 7]
    offsets = [0, 10, 50_000, 900_000]
    writer.write(
        meta,
        [source.data_ptr() + at for at in offsets],
        [target.data_ptr() + at for at in offsets],
        lens,
        timeout_s=10,
    )
    expected = torch.zeros_like(target)
    for at, length in zip(offsets, lens, strict=True):
        expected[at : at + length] = source[at : at + length]
    assert torch.equal(target, expected)
    writer.close()
    node.close()


@BOTH
def test_bytes_are_read_only_once_they_are_said_to_be_there(name: str, protocol: str) -> None:
    writer, source, node, target = pair(name, protocol, 4096)
    sent = source.clone()
    source.zero_()

    def ready() -> float:
        source.copy_(sent)
        return 10.0

    def never() -> float:
        raise KeyError("given up")

    parts = ([source.data_ptr()], [target.data_ptr()], [4096])
    with pytest.raises(KeyError, match="given up"):
        writer.write(node.local_meta(), *parts, 0.0, never)
    assert not target.any()
    writer.write(node.local_meta(), *parts, 0.0, ready)  # the time is what `ready` says, not none
    assert torch.equal(target, sent)
    writer.close()
    node.close()


@BOTH
def test_many_parts_at_once_as_a_stock_node_needs(name: str, protocol: str) -> None:
    writer, source, node, target = pair(name, protocol, 237 * 4096)
    at = [i * 4096 for i in range(237)]
    writer.write(
        node.local_meta(),
        [source.data_ptr() + x for x in at],
        [target.data_ptr() + x for x in reversed(at)],
        [4096] * 237,
        timeout_s=10,
    )
    assert torch.equal(target.view(237, 4096), source.view(237, 4096).flip(0))
    writer.close()
    node.close()


@BOTH
def test_threads_write_side_by_side(name: str, protocol: str) -> None:
    size = 4 << 20
    writer, source, node, target = pair(name, protocol, size)
    meta, faults, share = node.local_meta(), [], size // 8

    def work(index: int) -> None:
        at = index * share
        try:
            writer.write(meta, [source.data_ptr() + at], [target.data_ptr() + at], [share], timeout_s=10)
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert torch.equal(source, target)
    writer.close()
    node.close()


@BOTH
def test_memory_that_was_never_registered_is_not_written(name: str, protocol: str) -> None:
    writer, source, node, target = pair(name, protocol, 4096)
    foreign = torch.zeros(4096, dtype=torch.uint8)
    with pytest.raises(TransportError):
        writer.write(node.local_meta(), [source.data_ptr()], [foreign.data_ptr()], [4096], timeout_s=10)
    assert not foreign.any()
    writer.write(node.local_meta(), [source.data_ptr()], [target.data_ptr()], [4096], timeout_s=10)
    assert torch.equal(source, target), "a failed write does not spoil the next"
    writer.close()
    node.close()


@BOTH
@pytest.mark.parametrize(
    "meta", [{}, {"session_id": 7, "nixl_meta": 7}, {"session_id": "", "nixl_meta": "%"}]
)
def test_broken_metadata_is_an_error_with_its_field(
    name: str, protocol: str, meta: dict[str, object]
) -> None:
    writer, source, node, _ = pair(name, protocol, 64)
    field = "session_id" if name == "mooncake" else "nixl_meta"
    with pytest.raises(TransportError, match=field):
        writer.prepare(meta)
    with pytest.raises(TransportError, match=field):
        writer.write(meta, [source.data_ptr()], [source.data_ptr()], [1], timeout_s=1)
    writer.close()
    node.close()


NODE = """
import sys, json, torch
from vllm_tilert.transports import make_transport
transport = make_transport(sys.argv[1], sys.argv[2])
transport.init("127.0.0.1")
memory = torch.zeros(65536, dtype=torch.uint8)
transport.register(memory.data_ptr(), 65536, "cpu")
print(json.dumps({"address": memory.data_ptr(), **transport.local_meta()}), flush=True)
sys.stdin.readline()
print(int(memory.sum()), flush=True)
sys.stdin.readline()
"""


class Node:
    """A decode node's memory in a process of its own."""

    def __init__(self, name: str, protocol: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", NODE, name, protocol],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PYTHONPATH": str(Path(__file__).resolve().parents[3] / "plugin"), "PATH": "/usr/bin:/bin"},
            text=True,
        )
        import json

        self.meta = json.loads(self._line("{"))

    def _line(self, start: str) -> str:
        assert self.process.stdout is not None
        while not (line := self.process.stdout.readline()).startswith(start):
            assert line, "the node ended"
        return line

    def sum(self) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        while not (line := self.process.stdout.readline()).strip().isdigit():
            assert line, "the node ended"
        return int(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    started: list[Node] = []
    yield started
    for node in started:
        node.kill()


@BOTH
def test_a_restarted_node_is_reached_without_restarting_the_writer(
    name: str, protocol: str, nodes: list[Node]
) -> None:
    writer, source, other, _ = pair(name, protocol, 65536)
    total = int(source.sum())

    def write(node: Node) -> None:
        writer.prepare(node.meta)
        writer.write(node.meta, [source.data_ptr()], [node.meta["address"]], [65536], timeout_s=10)

    nodes.append(Node(name, protocol))
    write(nodes[0])
    assert nodes[0].sum() == total
    nodes[0].kill()
    began = time.monotonic()
    with pytest.raises(TransportError):
        writer.write(nodes[0].meta, [source.data_ptr()], [nodes[0].meta["address"]], [65536], timeout_s=10)
    assert time.monotonic() - began < 11
    nodes.append(Node(name, protocol))
    write(nodes[1])
    assert nodes[1].sum() == total
    writer.close()
    other.close()


def test_ipv6_works_in_a_process_of_its_own() -> None:
    """Mooncake is set to IPv6 for a whole process, so this one must not be."""
    code = """
import torch
from vllm_tilert.transports import make_transport
a, b = make_transport("mooncake", "tcp"), make_transport("mooncake", "tcp")
x, y = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
for t, m in ((a, x), (b, y)):
    t.init("::1")
    t.register(m.data_ptr(), 100, "cpu")
assert b.local_meta()["session_id"].startswith("[::1]:")
a.write(b.local_meta(), [x.data_ptr()], [y.data_ptr()], [100], 10)
assert torch.equal(x, y)
"""
    plugin = Path(__file__).resolve().parents[3] / "plugin"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(plugin)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("name", "protocol", "says"),
    [
        ("infiniband", "rdma", "choose one of mooncake, nixl"),
        ("mooncake", "UCX", "choose one of rdma, tcp, efa"),
        ("nixl", "tcp", "choose one of UCX, LIBFABRIC"),
    ],
)
def test_an_unknown_transport_names_the_choices(name: str, protocol: str, says: str) -> None:
    with pytest.raises(TransportUnavailable, match=says):
        make_transport(name, protocol)


@pytest.mark.parametrize("protocol", ["rdma", "efa"])
def test_rdma_without_a_device_is_refused_and_not_replaced_by_tcp(
    protocol: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(base, "INFINIBAND", tmp_path / "none")
    with pytest.raises(TransportUnavailable, match=r"needs an RDMA device .* use tcp"):
        make_transport("mooncake", protocol).init("127.0.0.1")


def test_a_device_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(base, "INFINIBAND", tmp_path)
    with pytest.raises(TransportUnavailable, match="mlx5_7 do not exist here: present are mlx5_0"):
        make_transport("mooncake", "rdma", ["mlx5_0", "mlx5_7"]).init("127.0.0.1")


def test_efa_needs_its_own_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "rdmap0s6").mkdir()
    monkeypatch.setattr(base, "INFINIBAND", tmp_path)
    with pytest.raises(TransportUnavailable, match="needs the wheel mooncake-transfer-engine-efa"):
        make_transport("mooncake", "efa").init("127.0.0.1")


def test_a_missing_library_names_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)  # what an import of it does when it cannot load
    with pytest.raises(TransportUnavailable, match=r"install .*mooncake-transfer-engine"):
        make_transport("mooncake", "tcp").init("127.0.0.1")


def test_a_missing_nixl_names_the_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("nixl._api", "nixl_cu12._api", "nixl_cu13._api"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(TransportUnavailable, match="nixl-cu12 or nixl-cu13"):
        make_transport("nixl", "UCX").init("127.0.0.1")


def test_a_backend_that_does_not_start_names_the_remedy() -> None:
    with pytest.raises(TransportUnavailable, match=r"LIBFABRIC .*EFA"):
        make_transport("nixl", "LIBFABRIC").init("127.0.0.1")


def test_gpu_memory_needs_the_cuda_wheel() -> None:
    transport = make_transport("mooncake", "tcp")
    transport.init("127.0.0.1")
    assert mooncake.installed_wheel().endswith("-non-cuda")
    with pytest.raises(TransportUnavailable, match="install the CUDA wheel"):
        transport.register(4096, 4096, "cuda:0")
    with pytest.raises(TransportUnavailable, match="must be cpu or cuda:N"):
        transport.register(4096, 4096, "xpu")
    transport.close()


def test_an_outstanding_write_can_be_waited_for() -> None:
    polls = iter([False, False, True])
    assert WriteOutstanding("late", lambda: next(polls)).settle(5)
    assert not WriteOutstanding("late", lambda: False).settle(0.01)

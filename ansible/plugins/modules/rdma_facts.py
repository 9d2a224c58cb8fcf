#!/usr/bin/python
"""Ansible module: what the kernel shows of RDMA NICs, and which of them each GPU sits next to."""

from __future__ import annotations

import itertools
import os
import re
import resource
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

DOCUMENTATION = r"""
module: rdma_facts
short_description: RDMA NICs of a host, and the NICs nearest to each GPU
description:
  - Reads sysfs alone, so it needs no tool on the host and runs on a tree made by a test.
  - Chooses the NICs of the fabric, names every NIC that it leaves out with the reason, and lists what is missing for
    GPU memory to move over them.
options:
  sysfs_root:
    description: Where sysfs is.
    type: path
    default: /sys
  proc_root:
    description: Where procfs is.
    type: path
    default: /proc
  dev_root:
    description: Where device nodes are.
    type: path
    default: /dev
  devices:
    description: RDMA devices to use. Empty chooses the fastest connected ones.
    type: list
    elements: str
    default: []
author: The vLLM-TileRT authors
"""

EXAMPLES = r"""
- name: Find the NICs
  rdma_facts:
  register: found
"""

RETURN = r"""
rdma:
  description: C(devices) has every NIC, C(fabric) the chosen ones in order of their names,
    C(gpus) each GPU's NICs, nearest first, C(problems) what is missing, each with C(code), C(message) and C(remedy).
  returned: always
  type: dict
"""

NVIDIA, AMAZON = "0x10de", "0x1d0f"
MTUS = (4096, 2048, 1024, 512, 256)
ROCE_HEADERS = 96
"""Bytes of an Ethernet frame's payload that the kernel sets aside for RoCE headers."""


@dataclass(frozen=True)
class Gid:
    """One entry of a port's GID table."""

    index: int
    gid: str
    type: str
    netdev: str


@dataclass(frozen=True)
class Nic:
    """An RDMA device and its first port. `rate_gbps` is 0 when the kernel does not say."""

    name: str
    kind: str  # infiniband, roce or efa
    driver: str
    pci: str
    numa: int
    netdev: str
    port: int
    state: str
    rate_gbps: float
    mtu: int  # of the netdev; 0 without one
    gids: tuple[Gid, ...] = ()
    uverbs: str = ""
    pci_path: tuple[str, ...] = field(default=(), repr=False)

    @property
    def active(self) -> bool:
        """Whether the port is up."""
        return self.state == "ACTIVE"

    def roce_v2(self) -> list[int]:
        """Indexes of RoCE v2 addresses that are routable, IPv4 before IPv6."""
        v2 = [g for g in self.gids if g.type == "RoCE v2"]
        v4 = [g.index for g in v2 if g.gid.startswith("0000:0000:0000:0000:0000:ffff:")]
        v6 = [g.index for g in v2 if g.index not in v4 and not g.gid.startswith("fe80:")]
        return v4 + v6


def read(path: Path) -> str:
    """The file's text, or "" when it is not there or the driver refuses (an unused GID entry does)."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def entries(path: Path) -> list[str]:
    """Names in a folder in natural order (mlx5_10 after mlx5_9); [] when there is none."""
    try:
        names = os.listdir(path)
    except OSError:
        return []
    return sorted(names, key=natural)


def natural(name: str) -> tuple[Any, ...]:
    """Sort key that compares the numbers in a name as numbers."""
    return tuple(
        (1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.split(r"(\d+)", name) if part
    )


def integer(text: str, default: int) -> int:
    """The whole number in the text, or the default."""
    try:
        return int(text)
    except ValueError:
        return default


def pci_path(device: Path) -> tuple[str, ...]:
    """The bridges above a device and the device itself, from the root complex down; () without a PCI device."""
    parts = Path(os.path.realpath(device)).parts
    starts = [i for i, part in enumerate(parts) if part.startswith("pci") and ":" in part]
    return parts[starts[-1] :] if starts and device.exists() else ()


def default_route_netdevs(proc: Path) -> set[str]:
    """Network interfaces that carry a default route."""
    found = set()
    for line in read(proc / "net/route").splitlines()[1:]:
        columns = line.split()
        if len(columns) > 7 and columns[1] == "00000000" and columns[7] == "00000000":
            found.add(columns[0])
    for line in read(proc / "net/ipv6_route").splitlines():
        columns = line.split()
        if len(columns) > 9 and columns[0] == "0" * 32 and columns[1] == "00" and columns[9] != "lo":
            found.add(columns[9])
    return found


def gid_table(port: Path) -> tuple[Gid, ...]:
    """Used entries of the port's GID table."""
    table = []
    for index in entries(port / "gids"):
        gid = read(port / "gids" / index)
        if gid and gid.replace(":", "").strip("0"):
            attributes = port / "gid_attrs"
            table.append(
                Gid(int(index), gid, read(attributes / "types" / index), read(attributes / "ndevs" / index))
            )
    return tuple(table)


def nics(sysfs: Path) -> list[Nic]:
    """Every RDMA device the kernel shows."""
    verbs = {
        read(sysfs / "class/infiniband_verbs" / name / "ibdev"): name
        for name in entries(sysfs / "class/infiniband_verbs")
    }
    found = []
    for name in entries(sysfs / "class/infiniband"):
        base = sysfs / "class/infiniband" / name
        device = base / "device"
        port = next(iter(entries(base / "ports")), "")
        at = base / "ports" / port if port else base / "ports" / "none"
        driver = Path(os.path.realpath(device / "driver")).name if (device / "driver").exists() else ""
        link = read(at / "link_layer")
        efa = driver == "efa" or read(device / "vendor") == AMAZON
        netdev = next(iter(entries(device / "net")), "")
        gids = gid_table(at)
        # A bond's RDMA device has the bond's address, not that of the member under its PCI device.
        netdev = next((g.netdev for g in gids if g.netdev), netdev)
        path = pci_path(device)
        found.append(
            Nic(
                name=name,
                kind="efa" if efa else "infiniband" if link == "InfiniBand" else "roce",
                driver=driver,
                pci=path[-1] if path else "",
                numa=integer(read(device / "numa_node"), -1),
                netdev="" if efa else netdev,
                port=integer(port, 0),
                state=read(at / "state").partition(":")[2].strip(),
                rate_gbps=float((re.match(r"[\d.]+", read(at / "rate")) or ["0"])[0]),
                mtu=integer(read(sysfs / "class/net" / netdev / "mtu"), 0) if netdev and not efa else 0,
                gids=gids,
                uverbs=verbs.get(name, ""),
                pci_path=path,
            )
        )
    return found


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU, numbered as CUDA_DEVICE_ORDER=PCI_BUS_ID does."""

    index: int
    pci: str
    numa: int
    pci_path: tuple[str, ...] = field(default=(), repr=False)


def gpus(sysfs: Path) -> list[Gpu]:
    """NVIDIA display and 3D controllers (PCI class 03), in bus order."""
    found = []
    for address in sorted(entries(sysfs / "bus/pci/devices")):
        device = sysfs / "bus/pci/devices" / address
        if read(device / "vendor") == NVIDIA and read(device / "class").startswith("0x03"):
            found.append(Gpu(len(found), address, integer(read(device / "numa_node"), -1), pci_path(device)))
    return found


def shared_bridges(gpu: Gpu, nic: Nic) -> int:
    """How many steps from the root complex down the two have in common."""
    pairs = zip(gpu.pci_path, nic.pci_path, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def distance(gpu: Gpu, nic: Nic) -> tuple[int, str]:
    """(rank, name) of the way between the two, nearest first: PIX one switch, PXB several, PHB a root complex, NODE a
    NUMA node, SYS the link between sockets."""
    shared = shared_bridges(gpu, nic)
    if shared > 1:
        hops = len(gpu.pci_path) + len(nic.pci_path) - 2 * shared
        return (0, "PIX") if hops <= 4 else (1, "PXB")
    if shared == 1:
        return 2, "PHB"
    if gpu.numa >= 0 and gpu.numa == nic.numa:
        return 3, "NODE"
    return 4, "SYS"


def nearest(cards: list[Gpu], fabric: list[Nic]) -> list[dict[str, Any]]:
    """Each GPU with its NICs, nearest first. Among equally near ones the least used comes first, so that where a
    hypervisor hides the topology, GPUs still get a NIC each."""
    used = dict.fromkeys((nic.name for nic in fabric), 0)
    found = []
    for card in cards:
        order = sorted(
            fabric,
            key=lambda nic: (
                distance(card, nic)[0],
                -shared_bridges(card, nic),
                used[nic.name],
                natural(nic.name),
            ),
        )
        if order:
            used[order[0].name] += 1
        found.append(
            {
                "index": card.index,
                "pci": card.pci,
                "numa": card.numa,
                "nics": [nic.name for nic in order],
                "distance": distance(card, order[0])[1] if order else "",
            }
        )
    return found


def choose(found: list[Nic], wanted: list[str], routed: set[str]) -> tuple[list[Nic], dict[str, str]]:
    """(the fabric's NICs, name -> why it was left out).

    Named ones are taken as they are. Else: connected, not the way to the default route where there are others, the
    fastest, and of one kind (InfiniBand before EFA before RoCE).
    """
    if wanted:
        return [nic for nic in found if nic.name in wanted], {
            nic.name: "not in the list of devices" for nic in found if nic.name not in wanted
        }
    out = {nic.name: f"port is {nic.state or 'in an unknown state'}" for nic in found if not nic.active}
    left = [nic for nic in found if nic.active]
    other = [nic for nic in left if not (nic.netdev and nic.netdev in routed)]
    if other:
        out |= {nic.name: f"{nic.netdev} carries the default route" for nic in left if nic not in other}
        left = other
    top = max((nic.rate_gbps for nic in left), default=0.0)
    out |= {
        n.name: f"slower ({n.rate_gbps:g} Gb/s) than the fabric's {top:g} Gb/s"
        for n in left
        if n.rate_gbps < top
    }
    left = [nic for nic in left if nic.rate_gbps == top]
    kinds = {nic.kind for nic in left}
    if len(kinds) > 1:
        kind = next(k for k in ("infiniband", "efa", "roce") if k in kinds)
        out |= {nic.name: f"{nic.kind}, and the fabric is {kind}" for nic in left if nic.kind != kind}
        left = [nic for nic in left if nic.kind == kind]
    return left, out


def gpu_direct(sysfs: Path, proc: Path) -> str:
    """How a NIC reaches GPU memory: `peermem` (module loaded), `dmabuf` (open modules, Linux >= 5.12) or ""."""
    if (sysfs / "module/nvidia_peermem").exists() or (sysfs / "module/nv_peer_mem").exists():
        return "peermem"
    release = re.match(r"(\d+)\.(\d+)", read(proc / "sys/kernel/osrelease"))
    new_enough = release is not None and (int(release[1]), int(release[2])) >= (5, 12)
    if new_enough and "Open Kernel Module" in read(proc / "driver/nvidia/version"):
        return "dmabuf"
    return ""


def mtu_of(nic: Nic) -> int:
    """The largest RDMA MTU that the NIC's Ethernet MTU carries; 0 when there is no netdev or it is too small."""
    return next((mtu for mtu in MTUS if mtu <= nic.mtu - ROCE_HEADERS), 0)


def problem(code: str, message: str, remedy: str) -> dict[str, str]:
    """One missing thing."""
    return {"code": code, "message": message, "remedy": remedy}


def gather(sysfs: Path, proc: Path, dev: Path, wanted: list[str]) -> dict[str, Any]:
    """All facts as plain data."""
    found, cards = nics(sysfs), gpus(sysfs)
    fabric, left_out = choose(found, wanted, default_route_netdevs(proc))
    problems = []

    missing = [name for name in wanted if name not in {nic.name for nic in found}]
    if missing:
        problems.append(
            problem(
                "device_missing",
                f"rdma_devices: {', '.join(missing)} not found, "
                f"there is {', '.join(n.name for n in found) or 'none'}",
                "Correct rdma_devices in the inventory, or leave it out to have the NICs found.",
            )
        )
    if not found:
        problems.append(
            problem(
                "no_device",
                f"{sysfs}/class/infiniband shows no RDMA device",
                "Load the NIC's driver (mlx5_ib, or efa), pass the devices into the virtual machine, or set "
                "tilert_transport/tilert_protocol to mooncake/tcp.",
            )
        )
    elif not fabric and not missing:
        reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items())
        problems.append(
            problem(
                "no_active_port",
                f"no RDMA port is connected ({reasons})",
                "Check cables, switch ports and `rdma link`.",
            )
        )
    for nic in fabric:
        if not nic.active:
            problems.append(
                problem(
                    "port_down",
                    f"{nic.name}: its port is {nic.state or 'in an unknown state'}",
                    "Check cable and switch port.",
                )
            )
        if nic.uverbs and not (dev / "infiniband" / nic.uverbs).exists():
            problems.append(
                problem(
                    "no_device_node",
                    f"{nic.name}: {dev}/infiniband/{nic.uverbs} is not there",
                    "Load ib_uverbs, or pass /dev/infiniband into the container.",
                )
            )
        elif not nic.uverbs:
            problems.append(
                problem(
                    "no_uverbs",
                    f"{nic.name}: the kernel offers no verbs device for it",
                    "Load the module ib_uverbs.",
                )
            )
    if fabric and any(n.kind != "efa" for n in fabric) and not (dev / "infiniband/rdma_cm").exists():
        problems.append(
            problem(
                "no_rdma_cm",
                f"{dev}/infiniband/rdma_cm is not there",
                "Load rdma_ucm, or pass /dev/infiniband into the container.",
            )
        )

    kinds = sorted({nic.kind for nic in fabric})
    gid_index = None
    roce = [nic for nic in fabric if nic.kind == "roce"]
    for nic in roce:
        if not nic.roce_v2():
            problems.append(
                problem(
                    "no_gid",
                    f"{nic.name}: its GID table has no routable RoCE v2 address",
                    f"Give {nic.netdev or 'its network interface'} an IP address; the kernel then adds the entry.",
                )
            )
        if nic.mtu and not mtu_of(nic):
            problems.append(
                problem(
                    "mtu",
                    f"{nic.netdev}: MTU {nic.mtu} is too small for RoCE",
                    "Set at least 1500, better 4200 or 9000.",
                )
            )
    if roce and all(nic.roce_v2() for nic in roce):
        # One number for all NICs is what the transports take.
        common = [i for i in roce[0].roce_v2() if all(i in nic.roce_v2() for nic in roce)]
        if common:
            gid_index = common[0]
        else:
            differ = ", ".join(f"{nic.name}: {nic.roce_v2()}" for nic in roce)
            problems.append(
                problem(
                    "gid_differs",
                    f"no GID index is RoCE v2 on every NIC ({differ})",
                    "Give every NIC of the fabric the same number of addresses, or name fewer in rdma_devices.",
                )
            )
    direct = gpu_direct(sysfs, proc)
    if cards and fabric and not direct:
        problems.append(
            problem(
                "no_gpu_direct",
                "neither nvidia_peermem is loaded nor are the open kernel modules there for dma-buf",
                "Load nvidia-peermem, or install the driver's open kernel modules on Linux 5.12 or newer.",
            )
        )
    mtus = [mtu_of(nic) for nic in roce if nic.mtu]
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "devices": [_shown(nic) for nic in found],
        "fabric": [nic.name for nic in fabric],
        "ports": {nic.name: nic.port for nic in fabric},
        "netdevs": {nic.name: nic.netdev for nic in fabric if nic.netdev},
        "left_out": left_out,
        "kind": kinds[0] if len(kinds) == 1 else "mixed" if kinds else "none",
        "rate_gbps": sum(nic.rate_gbps for nic in fabric),
        "gid_index": gid_index,
        "mtu": min(mtus) if mtus else 0,
        "gpus": nearest(cards, fabric),
        "gpu_direct": direct,
        "memlock_bytes": -1 if hard == resource.RLIM_INFINITY else hard,
        "oracle_cloud": read(sysfs / "class/dmi/id/chassis_asset_tag") == "OracleCloud.com",
        "problems": problems,
    }


def _shown(nic: Nic) -> dict[str, Any]:
    shown = asdict(replace(nic, pci_path=()))
    del shown["pci_path"]
    return shown | {"active": nic.active, "roce_v2": nic.roce_v2()}


def main() -> None:
    """Run as an Ansible module."""
    from ansible.module_utils.basic import AnsibleModule

    module = AnsibleModule(
        argument_spec={
            "sysfs_root": {"type": "path", "default": "/sys"},
            "proc_root": {"type": "path", "default": "/proc"},
            "dev_root": {"type": "path", "default": "/dev"},
            "devices": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    roots = [Path(module.params[name]) for name in ("sysfs_root", "proc_root", "dev_root")]
    module.exit_json(changed=False, rdma=gather(*roots, module.params["devices"]))


if __name__ == "__main__":
    main()

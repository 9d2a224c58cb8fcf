"""Trees with the files of sysfs, procfs and /dev that rdma_facts reads."""

from __future__ import annotations

from pathlib import Path


class Host:
    """A machine under construction. PCI paths are given from the root complex down."""

    def __init__(self, root: Path) -> None:
        self.sys, self.proc, self.dev = root / "sys", root / "proc", root / "dev"
        for folder in (self.sys, self.proc, self.dev):
            folder.mkdir()
        self.write(self.proc / "sys/kernel/osrelease", "6.8.0-45-generic")
        self.write(self.dev / "infiniband/rdma_cm", "")
        self.uverbs = 0

    @staticmethod
    def write(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    def link(self, path: Path, target: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)

    def _pci(self, path: str, vendor: str, kind: str, numa: int) -> Path:
        device = self.sys / "devices" / path
        self.write(device / "vendor", vendor)
        self.write(device / "class", kind)
        self.write(device / "numa_node", str(numa))
        self.link(self.sys / "bus/pci/devices" / device.name, device)
        return device

    def gpu(self, path: str, numa: int = 0) -> None:
        self._pci(path, "0x10de", "0x030200", numa)

    def open_driver(self) -> None:
        text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.45.04"
        self.write(self.proc / "driver/nvidia/version", text)

    def default_route(self, netdev: str) -> None:
        lines = ["Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT"]
        lines.append(f"{netdev} 00000000 0100000A 0003 0 0 0 00000000 0 0 0")
        self.write(self.proc / "net/route", "\n".join(lines))

    def nic(
        self,
        name: str,
        path: str,
        *,
        link: str = "Ethernet",
        rate: str = "400 Gb/sec (4X NDR)",
        state: str = "4: ACTIVE",
        netdev: str = "",
        mtu: int = 9000,
        gids: tuple[tuple[str, str], ...] = (),
        driver: str = "mlx5_core",
        numa: int = 0,
        node: bool = True,
    ) -> None:
        vendor = "0x1d0f" if driver == "efa" else "0x15b3"
        device = self._pci(path, vendor, "0x020000", numa)
        (self.sys / "bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
        self.link(device / "driver", self.sys / "bus/pci/drivers" / driver)
        base = self.sys / "class/infiniband" / name
        self.link(base / "device", device)
        port = base / "ports/1"
        self.write(port / "state", state)
        self.write(port / "link_layer", link)
        self.write(port / "rate", rate)
        for index, (gid, kind) in enumerate(gids):
            self.write(port / "gids" / str(index), gid)
            self.write(port / "gid_attrs/types" / str(index), kind)
            self.write(port / "gid_attrs/ndevs" / str(index), netdev)
        if netdev:
            (device / "net" / netdev).mkdir(parents=True)
            self.write(self.sys / "class/net" / netdev / "mtu", str(mtu))
        self.write(self.sys / f"class/infiniband_verbs/uverbs{self.uverbs}/ibdev", name)
        if node:
            self.write(self.dev / f"infiniband/uverbs{self.uverbs}", "")
        self.uverbs += 1


V1, V2 = "IB/RoCE v1", "RoCE v2"


def roce_gids(last: int, *, v4: bool = True) -> tuple[tuple[str, str], ...]:
    """The table as the kernel fills it: link-local v1 and v2, then IPv4 v1 and v2."""
    local = f"fe80:0000:0000:0000:0000:0000:0000:{last:04x}"
    mapped = f"0000:0000:0000:0000:0000:ffff:0a00:{last:04x}"
    return ((local, V1), (local, V2)) + (((mapped, V1), (mapped, V2)) if v4 else ())


def b200_roce(root: Path) -> Host:
    """8 x B200, each under one switch with a ConnectX-7; the two Ethernet NICs are RDMA devices too. NICs are
    numbered against the GPUs' order, so that a name's number is not the answer."""
    host = Host(root)
    host.open_driver()
    for i in range(8):
        switch = f"pci0000:{i}0/0000:{i}0:01.0/0000:{i}1:00.0"
        host.gpu(f"{switch}/0000:{i}1:00.1/0000:{i}2:00.0", i // 4)
        host.nic(
            f"mlx5_{11 - i}",
            f"{switch}/0000:{i}1:01.0/0000:{i}3:00.0",
            netdev=f"rdma{i}",
            gids=roce_gids(i + 1),
            numa=i // 4,
        )
    slow = "100 Gb/sec (4X EDR)"
    host.nic("mlx5_0", "pci0000:a0/0000:a0:01.0/0000:a1:00.0", netdev="eth0", rate=slow, gids=roce_gids(99))
    host.nic("mlx5_1", "pci0000:a0/0000:a0:01.0/0000:a1:00.1", netdev="eth1", rate=slow, gids=roce_gids(98))
    host.default_route("eth0")
    return host

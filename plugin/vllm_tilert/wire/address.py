"""Hosts and ports as people write them: IPv4, bare IPv6 or a name; and the list of hosts one may dial."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*\.?")


def check_host(value: object) -> str:
    """`value` as a host: an IPv4 or bare IPv6 address (zone allowed) or a DNS name, in canonical form.

    Raises ValueError that says what is wrong and what to write instead.
    """
    if not isinstance(value, str) or not value:
        raise ValueError(f"host {value!r} is not a host: write an IPv4 or IPv6 address or a name")
    if value.startswith("[") or value.endswith("]"):
        raise ValueError(f"host {value!r} is in brackets: write {value.strip('[]')!r}")
    try:
        return str(ipaddress.ip_address(value))
    except ValueError:
        pass
    # Digits and dots alone are an address gone wrong, never a name.
    if len(value) > 253 or not _NAME.fullmatch(value) or re.fullmatch(r"[0-9.]+", value):
        raise ValueError(f"host {value!r} is neither an address nor a name: leave scheme, port and path out")
    return value.rstrip(".").lower()


def check_port(value: object) -> int:
    """`value` as a TCP port. Raises ValueError unless it is an integer from 1 to 65535."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65535:
        raise ValueError(f"port {value!r} is not a number from 1 to 65535")
    return value


def authority(host: str, port: int) -> str:
    """`host:port` as URLs and session names write it: IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True)
class AllowList:
    """Hosts a request may name. A host is allowed only in a form that was listed: names are not resolved."""

    hosts: frozenset[str]

    @classmethod
    def of(cls, hosts: Iterable[object]) -> AllowList:
        """From hosts as configured. Raises ValueError for one that is no host, or when none is given."""
        checked = frozenset(check_host(host) for host in hosts)
        if not checked:
            raise ValueError("the list of allowed hosts is empty: name every decode host")
        return cls(checked)

    def allows(self, host: object) -> bool:
        """Whether `host`, in any spelling of the same address or name, was listed."""
        try:
            return check_host(host) in self.hosts
        except ValueError:
            return False

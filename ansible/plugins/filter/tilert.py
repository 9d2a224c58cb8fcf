"""Filters of the playbooks and roles: addresses, and quoting for systemd."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError


def _is_ip(value: str) -> bool:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return False
    return True


def url_host(address: str) -> str:
    """The address as it stands in a URL: an IPv6 address gets its brackets."""
    return f"[{address}]" if ":" in str(address) else str(address)


def ip_addresses(values: Iterable[str], version: int) -> list[str]:
    """The distinct IP addresses or networks of one version (4 or 6), sorted; names are left out."""
    found = set()
    for value in values:
        try:
            network = ipaddress.ip_network(str(value), strict=False)
        except ValueError:
            continue
        if network.version == version:
            single = network.num_addresses == 1
            found.add(str(network.network_address) if single else str(network))
    return sorted(found)


def not_ip_addresses(values: Iterable[str]) -> list[str]:
    """The values that are names rather than IP addresses."""
    return sorted({str(value) for value in values if not _is_ip(str(value))})


def duplicates(values: Iterable[Any]) -> list[Any]:
    """The values that are there more than once."""
    return sorted(value for value, count in Counter(values).items() if count > 1)


def systemd_command(argv: Iterable[Any]) -> str:
    """One ExecStart= line for this argv: quoted so that systemd passes every argument unchanged.

    Raises AnsibleFilterError for an argument with a line break, which a unit file cannot carry.
    """
    words = []
    for value in argv:
        word = str(value)
        if "\n" in word or "\r" in word:
            raise AnsibleFilterError(f"argument {word!r} has a line break; a unit file cannot carry it")
        escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
        plain = word and all(c.isalnum() or c in "-_./:=,@+" for c in word)
        words.append(escaped if plain else f'"{escaped}"')
    return " ".join(words)


def systemd_environment(values: Mapping[str, Any]) -> str:
    """Lines of an EnvironmentFile=, sorted by name; each value stands in double quotes."""
    lines = []
    for name in sorted(values):
        value = str(values[name])
        if "\n" in value or "\r" in value:
            raise AnsibleFilterError(f"environment variable {name} has a line break; give one line")
        for special in '\\"$`':
            value = value.replace(special, f"\\{special}")
        lines.append(f'{name}="{value}"')
    return "\n".join(lines)


STATE_BYTES = {
    ("glm5", "fp8_ds_mla"): 62_252,
    ("glm5", "bf16"): 101_436,
    ("dsv32", "fp8_ds_mla"): 48_856,
    ("dsv32", "bf16"): 79_608,
}


def state_bytes_per_token(profile: str, dtype: str) -> int:
    """Bytes of handed-over state a prompt token has; 0 for profile mla, whose layers the model decides."""
    return STATE_BYTES.get((str(profile), str(dtype)), 0)


def mib(value: Any) -> str:
    """Bytes as MiB for a message, with thousands separated."""
    return f"{int(float(value)) / 2**20:,.0f} MiB"


class FilterModule:
    """What Ansible loads."""

    def filters(self) -> dict[str, Any]:
        """Filter names and functions."""
        return {
            "duplicates": duplicates,
            "ip_addresses": ip_addresses,
            "mib": mib,
            "not_ip_addresses": not_ip_addresses,
            "state_bytes_per_token": state_bytes_per_token,
            "systemd_command": systemd_command,
            "systemd_environment": systemd_environment,
            "url_host": url_host,
        }

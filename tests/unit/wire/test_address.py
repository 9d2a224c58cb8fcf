"""A host is what it says, or is refused with what to write instead."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tilert.wire.address import AllowList, authority, check_host, check_port


@pytest.mark.parametrize(
    ("given_host", "canonical"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("FD00::0001", "fd00::1"),
        ("fe80::1%eth0", "fe80::1%eth0"),
        ("Decode-1.example", "decode-1.example"),
        ("node.", "node"),
    ],
)
def test_hosts_in_every_form(given_host: str, canonical: str) -> None:
    assert check_host(given_host) == canonical


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "[fd00::1]",
        "10.0.0",
        "10.0.0.256",
        "a b",
        "http://x",
        "x:5556",
        "-x",
        "x/..",
        None,
        7,
        "a" * 64,
        "é",
    ],
)
def test_what_is_no_host_is_refused_with_its_value(bad: object) -> None:
    with pytest.raises(ValueError, match=r"host .* is"):
        check_host(bad)


def test_brackets_are_named_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"brackets: write 'fd00::1'"):
        check_host("[fd00::1]")


@pytest.mark.parametrize("bad", [0, 65536, "80", True, 1.5, None])
def test_ports_are_integers_in_range(bad: object) -> None:
    with pytest.raises(ValueError, match="port"):
        check_port(bad)


def test_allow_list_knows_other_spellings_and_nothing_else() -> None:
    allowed = AllowList.of(["FD00::1", "decode-1", "10.0.0.2"])
    assert allowed.allows("fd00:0:0::1")
    assert allowed.allows("DECODE-1")
    assert not allowed.allows("10.0.0.3")
    assert not allowed.allows("decode-1.evil.example")
    assert not allowed.allows("[fd00::1]")
    assert not allowed.allows({"host": "decode-1"})
    with pytest.raises(ValueError, match="empty"):
        AllowList.of([])


@given(st.ip_addresses(v=6))
def test_authority_brackets_ipv6_only(address: object) -> None:
    assert authority(str(address), 1) == f"[{address}]:1"
    assert authority("10.0.0.1", 1) == "10.0.0.1:1"

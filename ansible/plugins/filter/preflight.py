"""Filters of preflight.yml: facts and expectations into numbered results, and results into text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Facts = Mapping[str, Any]
Shape = Mapping[str, Any]
Limits = Mapping[str, float]
Verdict = tuple[str, str]
"""(status, what was found): pass, fail or skip."""


def _verdict(good: bool, found: str) -> Verdict:
    return ("pass" if good else "fail"), found


def _shape(facts: Facts, shape: Shape, _: Limits) -> Verdict:
    return _verdict(bool(shape), f"shape = {facts.get('shape') or '(not set)'}")


def _vcpus(facts: Facts, shape: Shape, _: Limits) -> Verdict:
    return _verdict(facts["vcpus"] >= shape["vcpus"], f"{facts['vcpus']}, expected {shape['vcpus']}")


def _memory(facts: Facts, shape: Shape, limits: Limits) -> Verdict:
    have, want = facts["memory_mb"] / 1000, shape["memory_gb"] * limits["memory_share"]
    return _verdict(have >= want, f"{have:,.0f} GB, expected {want:,.0f} or more")


def _system(facts: Facts, _shape: Shape, _: Limits) -> Verdict:
    name, release = facts["system"]
    least = {"Debian": (12,), "Ubuntu": (24, 4)}.get(name)
    numbers = tuple(int(part) for part in str(release).split(".") if part.isdigit())
    return _verdict(least is not None and numbers >= least, f"{name} {release}")


def _clock(facts: Facts, _shape: Shape, _: Limits) -> Verdict:
    if not facts["clock"]:
        return "skip", "no timedatectl"
    return _verdict(facts["clock"] == "yes", f"NTPSynchronized={facts['clock']}")


def _held(facts: Facts, _shape: Shape, _: Limits) -> Verdict:
    if not facts["unattended_upgrades"]:
        return "skip", "no unattended upgrades here"
    loose = facts["not_held"]
    return _verdict(not loose, f"not held: {', '.join(loose)}" if loose else "all held")


def _gpu(check: Callable[[list[dict[str, Any]], Shape, Limits], Verdict]) -> Callable[..., Verdict]:
    """A check that a shape without GPUs skips, and that fails where nvidia-smi did not answer."""

    def rule(facts: Facts, shape: Shape, limits: Limits) -> Verdict:
        if not shape["gpus"]:
            return "skip", "a shape without GPUs"
        if facts["gpu"]["fault"]:
            return "fail", str(facts["gpu"]["fault"])
        return check(facts["gpu"]["gpus"], shape, limits)

    return rule


def _distinct(gpus: list[dict[str, Any]], field: str) -> str:
    return ", ".join(sorted({str(gpu[field]) for gpu in gpus}))


@_gpu
def _gpu_model(gpus: list[dict[str, Any]], shape: Shape, _: Limits) -> Verdict:
    good = all(shape["gpu"] in gpu["name"] for gpu in gpus)
    return _verdict(good, f"{_distinct(gpus, 'name')}, expected {shape['gpu']}")


@_gpu
def _gpu_count(gpus: list[dict[str, Any]], shape: Shape, _: Limits) -> Verdict:
    return _verdict(len(gpus) == shape["gpus"], f"{len(gpus)}, expected {shape['gpus']}")


@_gpu
def _gpu_memory(gpus: list[dict[str, Any]], shape: Shape, limits: Limits) -> Verdict:
    want = shape["gpu_memory_gb"] * limits["gpu_memory_share"]
    short = [
        f"GPU {g['index']}: {g['memory_bytes'] / 1e9:.0f} GB" for g in gpus if g["memory_bytes"] < want * 1e9
    ]
    return _verdict(not short, f"{', '.join(short) or 'all'}, expected {want:.0f} GB or more")


@_gpu
def _compute_capability(gpus: list[dict[str, Any]], shape: Shape, _: Limits) -> Verdict:
    good = all(gpu["compute_capability"] == shape["compute_capability"] for gpu in gpus)
    return _verdict(good, f"{_distinct(gpus, 'compute_capability')}, expected {shape['compute_capability']}")


def _reboot(facts: Facts, shape: Shape, _: Limits) -> Verdict:
    if not shape["gpus"]:
        return "skip", "a shape without GPUs"
    due = facts["driver"].get("reboot", [])
    return _verdict(not due, "; ".join(due) or "none")


def _rdma(check: Callable[[dict[str, Any], Shape], Verdict]) -> Callable[..., Verdict]:
    """A check that a host whose handoffs do not use RDMA skips."""

    def rule(facts: Facts, shape: Shape, _: Limits) -> Verdict:
        if not facts["rdma_enabled"]:
            return "skip", "handoffs do not use RDMA here"
        return check(facts["rdma"], shape)

    return rule


@_rdma
def _nic_count(rdma: dict[str, Any], shape: Shape) -> Verdict:
    have = len(rdma["fabric"])
    return _verdict(have >= shape["rdma_nics"], f"{have}, expected {shape['rdma_nics']}")


@_rdma
def _nic_rate(rdma: dict[str, Any], shape: Shape) -> Verdict:
    have, want = rdma["rate_gbps"], shape["fabric_gbps"]
    if not have and rdma["kind"] == "efa":
        return "skip", "the EFA driver does not say"
    return _verdict(have >= 0.99 * want, f"{have:g} Gb/s, expected {want:g}")


@_rdma
def _nic_kind(rdma: dict[str, Any], shape: Shape) -> Verdict:
    return _verdict(rdma["kind"] == shape["fabric"], f"{rdma['kind']}, expected {shape['fabric']}")


@_rdma
def _nic_near(rdma: dict[str, Any], _: Shape) -> Verdict:
    far = [
        f"GPU {g['index']}: {g['distance'] or 'none'}"
        for g in rdma["gpus"]
        if g["distance"] not in ("PIX", "PXB")
    ]
    return _verdict(not far, ", ".join(far) or "PIX or PXB for all")


def _weights_room(facts: Facts, shape: Shape, limits: Limits) -> Verdict:
    if not shape["gpus"] or facts["weights_there"]:
        return "skip", "weights are there" if facts["weights_there"] else "a shape without GPUs"
    have = facts["weights_free_bytes"] / 1e9
    return _verdict(
        have >= limits["weights_free_gb"], f"{have:,.0f} GB free, expected {limits['weights_free_gb']}"
    )


def _measured(name: str, floor: Callable[[Shape, Limits], float], unit: str) -> Callable[..., Verdict]:
    """A check of measurements {what: value} against a floor; skipped where nothing was measured."""

    def rule(facts: Facts, shape: Shape, limits: Limits) -> Verdict:
        values = facts.get("measured", {}).get(name) or {}
        if not values:
            return "skip", "not measured here"
        want = floor(shape, limits)
        low = {what: value for what, value in values.items() if value < want}
        shown = ", ".join(f"{what} {value:.2f}" for what, value in sorted((low or values).items()))
        return _verdict(not low, f"{shown} {unit}, expected {want:.2f} or more")

    return rule


def _dcgm(facts: Facts, _shape: Shape, _: Limits) -> Verdict:
    done = facts.get("measured", {}).get("dcgm") or {}
    if not done:
        return "skip", "not run here"
    return _verdict(done["rc"] == 0, str(done["summary"]))


RULES: dict[str, Callable[[Facts, Shape, Limits], Verdict]] = {
    "shape": _shape,
    "vcpus": _vcpus,
    "memory": _memory,
    "system": _system,
    "clock": _clock,
    "held": _held,
    "gpu_model": _gpu_model,
    "gpu_count": _gpu_count,
    "gpu_memory": _gpu_memory,
    "compute_capability": _compute_capability,
    "reboot": _reboot,
    "nic_count": _nic_count,
    "nic_rate": _nic_rate,
    "nic_kind": _nic_kind,
    "nic_near": _nic_near,
    "weights_room": _weights_room,
    "tcp": _measured("tcp", lambda _, limits: limits["tcp_gbps"], "Gb/s"),
    "rdma_bandwidth": _measured(
        "rdma",
        lambda shape, limits: shape["fabric_gbps"] / max(1, shape["rdma_nics"]) * limits["rdma_share"],
        "Gb/s",
    ),
    "dcgm": _dcgm,
    "disk_read": _measured("disk", lambda _, limits: limits["disk_read_gbyte_s"], "GB/s"),
}


def _coded(check: Facts, facts: Facts) -> tuple[str, str, str]:
    """(status, found, remedy) of a check that is a module's problems of certain codes."""
    known = facts.get(check["from"])
    if not known:
        return "skip", "not asked here", ""
    hits = [p for p in known["problems"] if p["code"] in check["codes"]]
    found = "; ".join(p["message"] for p in hits)
    return ("fail" if hits else "pass"), found, " ".join(dict.fromkeys(p["remedy"] for p in hits))


def preflight_results(
    facts: Facts,
    checks: Iterable[Mapping[str, Any]],
    shapes: Mapping[str, Shape],
    limits: Limits,
    suite: str = "light",
) -> list[dict[str, Any]]:
    """Every check of the suite, in order: {number, name, severity, status, found, remedy}.

    `suite` light leaves the intensive checks out. A problem whose code no check names is result 999.
    """
    checks = sorted(checks, key=lambda check: check["number"])
    shape = shapes.get(facts.get("shape") or "", {})
    results = []
    for check in checks:
        if check["suite"] == "intensive" and suite != "intensive":
            continue
        remedy = check.get("remedy", "")
        if "codes" in check:
            status, found, remedy = _coded(check, facts)
        elif not shape and check["rule"] not in ("shape", "system", "clock", "held"):
            status, found = "skip", "the shape is not known"
        else:
            status, found = RULES[check["rule"]](facts, shape, limits)
        results.append(
            {
                "number": check["number"],
                "name": check["name"],
                "severity": check["severity"],
                "status": status,
                "found": found,
                "remedy": remedy if status == "fail" else "",
            }
        )
    named = {code for check in checks for code in check.get("codes", ())}
    for source in ("driver", "rdma"):
        for problem in (facts.get(source) or {}).get("problems", ()):
            if problem["code"] not in named:
                results.append(
                    {
                        "number": 999,
                        "name": problem["code"],
                        "severity": "major",
                        "status": "fail",
                        "found": problem["message"],
                        "remedy": problem["remedy"],
                    }
                )
    return results


def preflight_lines(
    results: Iterable[Mapping[str, Any]], actions: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """What a person reads: failures with their remedy, what to do by severity, and counts."""
    results = list(results)
    failed = [r for r in results if r["status"] == "fail"]
    lines = []
    for r in failed:
        lines.append(f"{r['number']} {r['severity'].upper()} {r['name']}: {r['found']}")
        if r["remedy"]:
            lines.append(f"    {r['remedy']}")
    for severity, row in actions.items():
        if any(r["severity"] == severity for r in failed):
            lines.append(f"{severity}: {row['action']}")
    counts = {status: sum(r["status"] == status for r in results) for status in ("pass", "fail", "skip")}
    lines.append(f"{counts['pass']} passed, {counts['fail']} failed, {counts['skip']} skipped")
    return lines


class FilterModule:
    """What Ansible loads."""

    def filters(self) -> dict[str, Any]:
        """Filter names and functions."""
        return {"preflight_results": preflight_results, "preflight_lines": preflight_lines}

"""A wrong plan of a stack fails with a message that names the variable, the value and what to do.

The module tests say that each rule refuses; here the words a person reads in the stack are checked, one mistake
at a time, and mistakes in the configuration itself are rejected by core or by the provider's double.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .conftest import CLOUDS, Workspace

# stack, what is replaced in terraform.tfvars.example, by what, what the refusal must say
MISTAKES = [
    (
        "aws",
        'protocol = "efa"',
        'protocol = "rdma"',
        ["transport", '"rdma"', "does not work on the fabric", "mooncake:efa or nixl:LIBFABRIC"],
    ),
    ("aws", "2099-01-31", "2024-01-31", ["b200.ends_at", "2024-01-31", "has passed", "extend it"]),
    (
        "aws",
        'zone = "us-west-2b", shape = "p5en',
        'zone = "us-west-2a", shape = "p5en',
        ["h200.zone", "us-west-2a", "own zone"],
    ),
    (
        "aws",
        'role = "decode", shape = "p6-b200.48xlarge"',
        'role = "decode", shape = "p5en.48xlarge"',
        ["decode.shape", "cannot decode", "use p6-b200.48xlarge"],
    ),
    (
        "aws",
        "192.168.0.0/16",
        "10.80.4.0/24",
        ["network.host_cidr = 10.80.0.0/20", "network.peers.office = 10.80.4.0/24", "own range"],
    ),
    (
        "gcp",
        "a4-highgpu-8g",
        "a4-highgpu-4g",
        ["decode.shape", "a4-highgpu-4g", "unknown shape", "a4-highgpu-8g"],
    ),
    (
        "gcp",
        'protocol = "rdma"',
        'protocol = "efa"',
        ["transport", '"efa"', "roce", "mooncake:rdma or nixl:UCX"],
    ),
    ("gcp", "192.168.0.0/16", "10.96.32.0/24", ["network.fabric_cidr", "network.peers.office", "own range"]),
    ("oci", 'also = ["ingress"]', "also = []", ["no host carries the ingress", "also"]),
    ("oci", "203.0.113.7/32", "0.0.0.0/0", ["admin_clients", "opens SSH to everyone"]),
    (
        "onprem",
        "hgx-h200-infiniband",
        "hgx-h200-roce",
        ["different fabrics", '"hgx-h200-roce" on roce', "choose shapes"],
    ),
    ("onprem", "10.0.0.12", "10.0.0.11", ["10.0.0.11 (decode-1, decode-2)", "own address"]),
    ("onprem", '"10.0.0.21"', '"[fd00::1]"', ["prefill-1", "[fd00::1]", "Remove the brackets"]),
]


@pytest.mark.parametrize(
    ("cloud", "old", "new", "words"), MISTAKES, ids=[f"{m[0]}-{m[2][:30]}" for m in MISTAKES]
)
def test_the_refusal_says_what_to_do(
    workspace: Workspace, tmp_path: Path, cloud: str, old: str, new: str, words: list[str]
) -> None:
    where = f"stacks/{cloud}"
    workspace.init(where)
    good = (workspace.root / where / "terraform.tfvars.example").read_text()
    assert old in good
    bad = tmp_path / "bad.tfvars"
    bad.write_text(good.replace(old, new))
    result = workspace.terraform(where, "plan", "-input=false", f"-var-file={bad}")
    assert result.code == 1
    for word in words:
        assert word in result.said, result.said


@pytest.mark.parametrize("cloud", [*CLOUDS, "onprem"])
def test_the_example_can_be_planned(workspace: Workspace, cloud: str) -> None:
    workspace.init(f"stacks/{cloud}")
    result = workspace.terraform(
        f"stacks/{cloud}", "plan", "-input=false", "-var-file=terraform.tfvars.example"
    )
    assert result.code == 0, result.said


# module, what is replaced in main.tf, by what, what the rejection must say
MUTATIONS = [
    (
        "aws",
        "map_public_ip_on_launch = false",
        "map_public_ip_at_launch = false",
        'argument named "map_public_ip_at_launch" is not expected',
    ),
    ("aws", 'strategy = "cluster"', 'strategy = "clustered"', "expected one of"),
    ("aws", 'type = "efa-only"', 'type = "efa_only"', "network_interfaces.interface_type: expected one of"),
    (
        "aws",
        "  vpc_id = aws_vpc.cluster.id\n  tags   = merge(local.tags, { Name = var.name })",
        '  vpc_id = aws_vpc.cluster.id\n  owner_id = "me"',
        "only the provider sets this attribute",
    ),
    ("aws", "to_port           = 443", 'to_port           = "https"', "a number is required"),
    ("gcp", 'nic_type   = "MRDMA"', 'nic_type   = "RDMA"', "network_interface.nic_type: expected one of"),
    ("gcp", "mtu                     = 8896", "mtu                     = 9000", "expected 1300 to 8896"),
    ("gcp", "  boot_disk {", "  lifecycle {}\n  boot_disks {", "boot_disk"),
    (
        "oci",
        "name          = plugins_config.value",
        'name          = "RDMA"',
        "plugins_config.name: expected one of",
    ),
    ("oci", "  availability_domain = var.zone\n", "", 'argument "availability_domain" is required'),
    (
        "oci",
        "  placement_configuration {\n    availability_domain = var.zone\n"
        "    primary_subnet_id   = oci_core_subnet.hosts.id\n  }\n",
        "",
        'At least 1 "placement_configuration" blocks are required',
    ),
    (
        "oci",
        'direction                 = "INGRESS"',
        'direction                 = "IN"',
        "direction: expected one of",
    ),
]


@pytest.mark.parametrize(
    ("cloud", "old", "new", "words"),
    MUTATIONS,
    ids=[f"{m[0]}-{re.sub('[^a-z]+', '-', m[3].lower())[:40]}-{i}" for i, m in enumerate(MUTATIONS)],
)
def test_a_mutated_module_is_rejected(
    workspace: Workspace, tmp_path: Path, cloud: str, old: str, new: str, words: str
) -> None:
    folder = workspace.copy(f"modules/{cloud}", tmp_path / "terraform")
    source = (folder / "main.tf").read_text()
    assert old in source
    (folder / "main.tf").write_text(source.replace(old, new, 1))
    assert workspace.terraform(folder, "init", "-input=false").code == 0
    # What hangs on a variable inside a dynamic block is seen by `test`, not by `validate`.
    for command in ("validate", "test"):
        result = workspace.terraform(folder, command)
        said = result.said.replace('\\"', '"')
        if result.code != 0 and words in said:
            return
    pytest.fail(f"not refused with {words!r}: {said}")

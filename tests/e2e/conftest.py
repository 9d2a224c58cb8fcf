"""One deployed local cluster for all end-to-end tests; TILERT_KEEP_CLUSTER=1 leaves it running."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cluster import ROOT, Cluster, shell


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The default cluster (float32), booted and deployed by the product's own command."""
    shell(f'"{ROOT}/bin/demo" --up', timeout=3000)
    yield Cluster()
    if os.environ.get("TILERT_KEEP_CLUSTER") != "1":
        shell("cluster_destroy")


@pytest.fixture(autouse=True)
def settled(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test starts from decode nodes that hold nothing, and leaves them so."""
    yield
    if "cluster" in request.fixturenames:
        found: Cluster = request.getfixturevalue("cluster")
        for host in found.hosts("decode"):
            found.wait_idle(host)

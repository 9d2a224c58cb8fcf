"""Whatever stock senders come, go and vanish in whatever order: never two of them may write at once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from unit.profiles.caches import nsa_caches
from vllm_tilert.decode.landing import NOWHERE, LandingZone, Lease
from vllm_tilert.profiles import stock
from vllm_tilert.profiles.base import ProfileError, get_profile
from vllm_tilert.profiles.layout import Layout
from vllm_tilert.small_model import CONFIG

GLM5: Layout = get_profile("glm5").layout_from_caches(nsa_caches(79, 1, "fp8_ds_mla"))
QUARANTINE_S = 90.0


class Zone(RuleBasedStateMachine):
    """`writers`: connections that may be writing, with the time at which they surely are not any more."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.zone = LandingZone(get_profile("glm5"), GLM5, 64, "cpu", QUARANTINE_S, lambda: self.now)
        self.lease: Lease | None = None
        self.writing_until = 0.0

    @rule()
    def connect(self) -> None:
        lease = self.zone.lend()
        if self.lease is not None or self.now < self.writing_until:
            assert lease is None, "two may write at once"
        else:
            assert lease is not None, "the zone is nobody's, and yet not lent"
            self.lease = lease

    @rule()
    def end_quiet(self) -> None:
        if self.lease is not None:
            self.lease.quiet = True
            self.lease.end()
            self.lease = None

    @rule()
    def vanish(self) -> None:
        if self.lease is not None:
            self.lease.end()
            self.lease = None
            self.writing_until = self.now + QUARANTINE_S

    @rule(seconds=st.sampled_from([0.1, 1.0, 45.0, 89.9, 90.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def the_hello_of_a_lease_alone_names_addresses(self) -> None:
        low, high = self.zone.memory.data_ptr(), self.zone.memory.data_ptr() + self.zone.memory.numel()
        hello = self.zone.hello()
        assert all(low <= hello[base] < high for base in ("kv_base", "pe_base", "ki_base"))
        assert hello["layout_version"] == GLM5.version != NOWHERE["layout_version"]


Zone.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestZone = Zone.TestCase


def test_it_holds_a_whole_prompt_at_stocks_strides_and_gives_it_as_ours() -> None:
    caches = nsa_caches(79, 2, "fp8_ds_mla", generator=torch.Generator().manual_seed(3))
    profile = get_profile("glm5")
    zone = LandingZone(profile, GLM5, 128, "cpu", QUARANTINE_S, lambda: 0.0)
    segment = torch.empty(GLM5.segment_bytes(100), dtype=torch.uint8)
    profile.gatherer(caches, GLM5).gather([1, 0], 0, 100, segment)
    base = zone.memory.data_ptr()
    for part in stock.parts(GLM5, {"max_seq_len": 128, **zone.hello()}, 0, 100):
        at = part.target - base
        zone.memory[at : at + part.length] = segment[part.source : part.source + part.length]
    state, want = zone.convert(100), profile.convert(segment, GLM5, [100])
    assert all(torch.equal(state.planes[name], want.planes[name]) for name in want.order)
    kept = {name: plane.clone() for name, plane in state.planes.items()}
    zone.memory.fill_(0xEE)  # the next sender writes
    assert all(torch.equal(state.planes[name], kept[name]) for name in kept)


@pytest.mark.parametrize("layers", [3, 62])
def test_a_layout_that_is_none_of_stocks_has_no_zone(layers: int) -> None:
    mla = get_profile("mla").layout_from_config(CONFIG | {"num_hidden_layers": layers}, "float32")
    with pytest.raises(ProfileError, match="stock TileRT takes glm5 and dsv32 only"):
        LandingZone(get_profile("mla"), mla, 64, "cpu", QUARANTINE_S, lambda: 0.0)

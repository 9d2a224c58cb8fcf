"""Where senders of TileRT's own write: a region beside the slots, lent to one connection at a time.

Such a sender writes to the addresses in Hello without waiting for leave. So Hello is the leave: it names
the region to one connection, and no other gets it until that one can write no more. What has arrived is
converted out of the region; no slot's memory is ever named to a stock sender.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from vllm_tilert.profiles import stock
from vllm_tilert.profiles.base import ConvertedState, Profile
from vllm_tilert.profiles.layout import Layout
from vllm_tilert.profiles.mla_nsa import MlaNsaProfile

NOWHERE: Final[dict[str, Any]] = {"layout_version": 0, "kv_base": 0, "pe_base": 0, "ki_base": 0}
"""Fields of a Hello that lends nothing. A stock sender gives up at a layout version that is not its own,
before it has written anything; our senders compare `layout`."""


class LandingZone:
    """The region, its conversion and its lease. `quarantine_s` closes it after a sender that vanished.

    Raises ProfileError where the layout is none of TileRT's.
    """

    def __init__(
        self,
        profile: Profile,
        layout: Layout,
        max_seq_len: int,
        device: str,
        quarantine_s: float,
        clock: Callable[[], float],
    ) -> None:
        stock.check_layout(layout)
        assert isinstance(profile, MlaNsaProfile)
        self._profile, self._layout, self._max_seq_len = profile, layout, max_seq_len
        self._quarantine_s = quarantine_s
        self._clock = clock
        self._lease: Lease | None = None
        self._closed_until = 0.0
        self.memory = torch.zeros(stock.slot_bytes(layout, max_seq_len), dtype=torch.uint8, device=device)

    def lend(self) -> Lease | None:
        """The only lease, or None while it is out or the last sender may still be writing."""
        if self._lease is not None or self._clock() < self._closed_until:
            return None
        self._lease = Lease(self)
        return self._lease

    def hello(self) -> dict[str, Any]:
        """The fields of a Hello that lends the region."""
        bases = stock.hello_bases(self._layout, self._max_seq_len, self.memory.data_ptr())
        return {"layout_version": self._layout.version, **bases}

    def convert(self, seq_len: int) -> ConvertedState:
        """What lies in the region as engine tensors of their own. Raises ValueError on a wrong length."""
        state = self._profile.convert_strided(self.memory, self._layout, self._max_seq_len, seq_len)
        if self.memory.is_cuda:
            torch.cuda.current_stream().synchronize()  # the region may be lent again when this returns
        return state

    def _end(self, lease: Lease) -> None:
        assert self._lease is lease
        self._lease = None
        if not lease.quiet:
            self._closed_until = self._clock() + self._quarantine_s


@dataclass(eq=False)
class Lease:
    """The right of one connection to write. `quiet`: it is known that nothing of it is written any more."""

    zone: LandingZone
    quiet: bool = False

    def end(self) -> None:
        """The connection is over."""
        self.zone._end(self)

"""The staging pool: pieces never overlap, nothing is lost, and what cannot be is refused at start."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from vllm_tilert.staging import ALIGNMENT, Piece, StagingError, StagingPool, free_bytes

CPU = torch.device("cpu")


class PoolMachine(RuleBasedStateMachine):
    """Takes and gives back pieces, each filled with a byte of its own that must survive the others."""

    pieces = Bundle("pieces")

    @initialize(capacity=st.integers(1, 40 * ALIGNMENT))
    def start(self, capacity: int) -> None:
        self.pool = StagingPool(capacity, CPU)
        self.live: dict[Piece, int] = {}
        self.stamp = 0

    @rule(target=pieces, nbytes=st.integers(1, 12 * ALIGNMENT))
    def take(self, nbytes: int) -> Piece | None:
        if nbytes > self.pool.capacity:
            with pytest.raises(StagingError):
                self.pool.try_take(nbytes)
            return None
        piece = self.pool.try_take(nbytes)
        if piece is None:
            assert self.live, "an empty pool refuses nothing that fits"
            return None
        assert piece.nbytes == nbytes == piece.tensor.numel()
        assert piece.address % 16 == self.pool.buffer.data_ptr() % 16
        self.stamp = self.stamp % 255 + 1
        piece.tensor.fill_(self.stamp)
        self.live[piece] = self.stamp
        return piece

    @rule(piece=consumes(pieces))
    def give_back(self, piece: Piece | None) -> None:
        if piece is not None:
            del self.live[piece]
            piece.release()
            with pytest.raises(RuntimeError, match="released twice"):
                piece.release()

    @invariant()
    def every_piece_keeps_its_bytes(self) -> None:
        for piece, stamp in getattr(self, "live", {}).items():
            assert bool((piece.tensor == stamp).all())

    @invariant()
    def what_is_in_use_is_what_was_taken(self) -> None:
        if hasattr(self, "pool"):
            taken = sum(piece.nbytes for piece in self.live)
            assert taken <= self.pool.in_use <= min(taken + ALIGNMENT * len(self.live), self.pool.capacity)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for piece in self.live:
                piece.release()
            assert self.pool.in_use == 0
            assert self.pool.try_take(self.pool.capacity) is not None, "holes grow together again"


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40)


def test_a_pool_larger_than_free_memory_is_refused_with_both_sizes() -> None:
    with pytest.raises(StagingError, match=r"tilert_staging_bytes is 1001, but only 1000 bytes are free"):
        StagingPool(1001, CPU, available=lambda _: 1000)


def test_free_memory_is_what_the_system_says() -> None:
    assert 1 << 20 < free_bytes(CPU) < 1 << 44


def test_a_full_pool_answers_at_once() -> None:
    pool = StagingPool(4096, CPU)
    piece = pool.try_take(4096)
    assert piece is not None
    assert pool.try_take(1) is None
    piece.release()
    assert pool.try_take(1) is not None


def test_threads_share_it() -> None:
    pool, faults = StagingPool(64 * ALIGNMENT, CPU), []

    def work(stamp: int) -> None:
        for i in range(200):
            piece = pool.try_take(ALIGNMENT * (1 + i % 5))
            if piece is not None:
                piece.tensor.fill_(stamp)
                if not bool((piece.tensor == stamp).all()):
                    faults.append(stamp)
                piece.release()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert pool.in_use == 0

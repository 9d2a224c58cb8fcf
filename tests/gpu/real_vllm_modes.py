"""Real vLLM in the modes in which a handoff could go wrong; each state that arrives is compared with vLLM's own cache.

usage: PYTHONPATH=plugin:tests:SITE python3 tests/gpu/real_vllm_modes.py MODELS FOLDER MODE [MODEL]

MODE
  ranks     tensor parallel 2, on two GPUs: the cache is the same on both ranks, one of them sends, and both let
            go of the blocks
  graphs    torch.compile and CUDA graphs; claimed prompts are prefilled beside requests that decode
  bf16      a bfloat16 cache instead of fp8_ds_mla
  pressure  a claimed prompt is preempted, more than once, and resumed; another is aborted half way
MODELS is what `make_models` writes; MODEL is dsv32 (default) or glm5.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

from gpu.nodes import LAYERS, Peer
from gpu.real_vllm import Claims, ask, engine, ours, prompt_of, result


class Run:
    """One vLLM, one decode node of ours, and what both hold of a prompt."""

    def __init__(self, models: Path, folder: Path, mode: str, model: str, **settings: Any) -> None:
        self.mode, self.model, self.ranks = mode, model, settings.get("tensor_parallel_size", 1)
        self.dumps, self.snapshots = folder / "dumps", folder / "snapshots"
        for made in (self.dumps, self.snapshots):
            made.mkdir(parents=True, exist_ok=True)
        os.environ["SNAPSHOTS"] = str(self.snapshots)
        self.peer = Peer("ours", model, "nixl", 16384, "--dumps", str(self.dumps))
        began = time.monotonic()
        self.llm = engine(models / model, ours(self.peer, model), **settings)
        print(f"engine up after {time.monotonic() - began:.0f} s", flush=True)
        self.claims = Claims(self.peer)
        self.rng = random.Random(mode)
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.pool = self.core.scheduler.kv_cache_manager.block_pool

    def compare(self, rid: str, tokens: int, **about: Any) -> None:
        """Every segment that arrived is what the cache held after some step, on every rank."""
        told = self.peer.ready(rid)
        if told["error"]:
            result(mode=self.mode, tokens=tokens, failed=told["error"], **about)
            return
        got = landed_state(self.dumps / f"{rid}.bin", LAYERS[self.model], told["segments"])
        equal, steps = True, 0
        for rank in range(self.ranks):
            kept = sorted(self.snapshots.glob(f"{rid}-{rank}-*.pt"))
            steps = max(steps, len(kept))
            held = [torch.load(path, weights_only=True) for path in kept]
            at = 0
            for length in told["segments"]:
                part = slice(at, at + length)
                equal &= any(
                    own["rows"].shape[1] >= part.stop
                    and all(torch.equal(own[name][:, part], got[name][:, part]) for name in own)
                    for own in held
                )
                at += length
            equal &= at == tokens
        for path in (*self.snapshots.glob(f"{rid}-*.pt"), self.dumps / f"{rid}.bin"):
            path.unlink()
        said = {
            "segments": told["segments"],
            "landed_ahead": told["ahead"],
            "connections": told["connections"],
        }
        result(
            mode=self.mode, model=self.model, tokens=tokens, byte_equal=equal, steps=steps, **said, **about
        )

    def hand_off(self, *lengths: int, beside: int = 0) -> None:
        """Claimed prompts posted together, with `beside` requests that decode 24 tokens."""
        claimed = [self.claims.next() for _ in lengths]
        prompts = [prompt_of(self.rng, length) for length in lengths]
        others = [prompt_of(self.rng, 40) for _ in range(beside)]
        if others:
            self.ask_some(others, 24)
            for (_, params), prompt in zip(claimed, prompts, strict=True):
                for _ in range(3):
                    self.llm.llm_engine.step()
                self.add(prompt, params, 1)
            self.finish()
        else:
            ask(self.llm, prompts, [params for _, params in claimed], 1)
        for (rid, _), length in zip(claimed, lengths, strict=True):
            self.compare(rid, length, beside=beside)

    def add(self, prompt: list[int], params: dict[str, Any] | None, tokens: int) -> str:
        from vllm import SamplingParams

        req = f"q{time.monotonic_ns()}"
        extra = {"kv_transfer_params": params} if params else None
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0, extra_args=extra)
        self.llm.llm_engine.add_request(req, {"prompt_token_ids": prompt}, sampling)
        return req

    def ask_some(self, prompts: list[list[int]], tokens: int) -> None:
        for prompt in prompts:
            self.add(prompt, None, tokens)

    def finish(self) -> None:
        while self.llm.llm_engine.has_unfinished_requests():
            self.llm.llm_engine.step()

    def blocks_return(self, free: int) -> bool:
        """Whether all blocks are free again once a few more steps have polled for it."""
        for _ in range(50):
            if self.pool.get_num_free_blocks() >= free:
                return True
            ask(self.llm, [prompt_of(self.rng, 3)], [None], 1)
        return False


def landed_state(path: Path, layers: int, segments: list[int]) -> dict[str, torch.Tensor]:
    from gpu import connectors

    state = connectors.landed_state(path, layers, segments)
    del state["pages"]
    return state


def ranks(run: Run) -> None:
    free = run.pool.get_num_free_blocks()
    run.hand_off(100)
    run.hand_off(5, 64)
    run.hand_off(1000, 1000)
    run.hand_off(4097, 65)
    run.hand_off(9000)
    result(mode=run.mode, blocks_free_again=run.blocks_return(free))


def lengths(run: Run) -> None:
    run.hand_off(100)
    run.hand_off(1000, 64)
    run.hand_off(4097, 65)


def graphs(run: Run) -> None:
    config = run.llm.llm_engine.vllm_config.compilation_config
    result(mode=run.mode, cudagraph_mode=str(config.cudagraph_mode), compile_mode=str(config.mode))
    free = run.pool.get_num_free_blocks()
    run.hand_off(100)
    for lengths in ((5,), (8, 16), (300, 64), (2000, 1000), (5000,)):
        run.hand_off(*lengths, beside=3)
    result(mode=run.mode, blocks_free_again=run.blocks_return(free))


def pressure(run: Run) -> None:
    scheduler, free = run.core.scheduler, run.pool.get_num_free_blocks()
    preempted = 0
    preempt = scheduler._preempt_request

    def counted(*arguments: Any, **more: Any) -> Any:
        nonlocal preempted
        preempted += 1
        return preempt(*arguments, **more)

    scheduler._preempt_request = counted
    run.hand_off(100)
    for _ in range(2):
        assert run.blocks_return(free)
        # The other one's blocks leave room for three of the claimed prompt's four chunks.
        run.add(prompt_of(run.rng, 600), None, 40)
        run.llm.llm_engine.step()
        rid, params = run.claims.next()
        before = preempted
        run.add(prompt_of(run.rng, 1900), params, 1)
        run.finish()
        run.compare(rid, 1900, preempted=preempted - before)
    for chunks in (1, 2):
        assert run.blocks_return(free)
        rid, params = run.claims.next()
        req = run.add(prompt_of(run.rng, 1900), params, 1)
        for _ in range(chunks):
            run.llm.llm_engine.step()
        run.llm.llm_engine.abort_request([req])
        ask(run.llm, [prompt_of(run.rng, 3)], [None], 1)
        told = run.peer.ready(rid)
        result(mode=run.mode, aborted_after_steps=chunks, node_says=told["error"], landed_ahead=told["ahead"])
        run.hand_off(700)
    result(mode=run.mode, blocks_free_again=run.blocks_return(free))


MODES: dict[str, tuple[Any, dict[str, Any]]] = {
    "ranks": (ranks, {"tensor_parallel_size": 2, "disable_custom_all_reduce": True}),
    "bf16": (lengths, {"kv_cache_dtype": "bfloat16"}),
    "graphs": (graphs, {"enforce_eager": False, "max_cudagraph_capture_size": 16}),
    "pressure": (
        pressure,
        {
            "num_gpu_blocks_override": 38,
            "max_model_len": 2304,
            "max_num_batched_tokens": 512,
            "scheduler_reserve_full_isl": False,
        },
    ),
}


def main() -> None:
    models, folder, mode = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    work, settings = MODES[mode]
    if mode == "bf16":
        os.environ["CACHE_DTYPE"] = "bfloat16"
    run = Run(models, folder / mode, mode, sys.argv[4] if len(sys.argv) > 4 else "dsv32", **settings)
    try:
        work(run)
    finally:
        run.peer.close()
    result(mode=mode, over=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

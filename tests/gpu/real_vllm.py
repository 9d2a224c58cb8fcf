"""Real vLLM with small models of the real cache geometry, handing off to decode nodes, on one GPU.

usage: PYTHONPATH=plugin:tests:SITE python3 tests/gpu/real_vllm.py MODELS FOLDER [ROLE ...]

MODELS is what `make_models` writes: `dsv32` (61 layers and a draft layer) and `glm5` (78 and one). A role is
`prefill:MODEL:KIND:TRANSPORT` with KIND none, ours or stock, or `oracle:MODEL`. Every role is a process with an
engine of its own; they start together and take turns, so that nothing runs beside what is measured.

For `ours` with transport nixl: two claimed prompts at once, page-crossing lengths, chunked prompts and
prefix-cache hits: every state that arrives is compared with vLLM's own cache, byte for byte. The states of
prompts of up to 2,048 tokens then go into the oracle's cache, a second vLLM, which continues from the first
token; its tokens are compared with the first engine's own.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
ROLES = (
    "prefill:dsv32:ours:nixl",
    "prefill:dsv32:stock:nixl",
    "prefill:dsv32:ours:mooncake",
    "prefill:dsv32:stock:mooncake",
    "prefill:glm5:ours:nixl",
    "oracle:dsv32",
    "oracle:glm5",
)
PAIRS = ((1000, 1000), (5, 64), (65, 2000), (63, 128), (1500, 700), (4097, 9000))
CONTINUED = tuple(int(n) for n in os.environ.get("CONTINUED", "5 64 65 300 1000 2000").split())
TIMED = tuple(int(n) for n in os.environ.get("TIMED", "1000 4000 8000").split())
REPEAT = int(os.environ.get("REPEAT", "8"))
LIMIT_S = float(os.environ.get("LIMIT_S", "270"))
STEPS = 33


def waited_for() -> list[str]:
    """Models that an oracle is asked about."""
    return [role.split(":")[1] for role in os.environ.get("ROLES", "").split() if role[:6] == "oracle"]


def result(**what: Any) -> None:
    print("RESULT", json.dumps(what), flush=True)


@contextlib.contextmanager
def turn(folder: Path):
    with (folder / "turn").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def engine(model: Path, transfer: dict[str, Any] | None, **more: Any) -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM
    from vllm.config import KVTransferConfig

    settings: dict[str, Any] = {
        "kv_cache_dtype": "fp8_ds_mla",
        "enforce_eager": True,
        "kv_cache_memory_bytes": 4 << 30,
        "gpu_memory_utilization": 0.3,
        "max_model_len": 16384,
        "max_num_batched_tokens": 4096,
        "max_num_seqs": 16,
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
        "kv_transfer_config": KVTransferConfig(**transfer) if transfer else None,
    }
    return LLM(model=str(model), **(settings | more))


def ours(peer: Any, model: str) -> dict[str, Any]:
    """The transfer settings of our connector, watched, towards a node of ours."""
    extra = {
        "tilert_profile": model,
        "tilert_transport": peer.transport,
        "tilert_protocol": peer.protocol,
        "tilert_local_host": HOST,
        "tilert_allowed_hosts": [HOST],
        "tilert_staging_bytes": 2 << 30,
        "tilert_checksum": False,
    }
    return {
        "kv_connector": "Watched",
        "kv_connector_extra_config": extra,
        "kv_connector_module_path": "gpu.connectors",
        "kv_role": "kv_producer",
    }


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, 250) for _ in range(length)]


def ask(
    llm: Any, prompts: list[list[int]], params: list[dict[str, Any] | None], tokens: int
) -> list[list[int]]:
    from vllm import SamplingParams

    sampling = [
        SamplingParams(
            max_tokens=tokens,
            ignore_eos=True,
            temperature=0.0,
            extra_args={"kv_transfer_params": p} if p else None,
        )
        for p in params
    ]
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    answers = llm.generate(given, sampling, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]


def prefill(models: Path, folder: Path, model: str, kind: str, transport: str) -> None:
    from gpu.nodes import Peer

    dumps = folder / model
    dumps.mkdir(exist_ok=True)
    peer = None
    transfer: dict[str, Any] | None = None
    if kind == "ours":
        flags = ["--dumps", str(dumps)] if transport == "nixl" else []
        peer = Peer("ours", model, transport, 16384, *flags)
        transfer = ours(peer, model)
    elif kind == "stock":
        peer = Peer("stock", model, transport, 16384)
        extra = {
            "tilert_host": HOST,
            "tilert_model": model,
            "tilert_transport": transport,
            "tilert_max_seq_len": 16384,
        }
        transfer = {"kv_connector": "WatchedStock", "kv_connector_extra_config": extra}
        transfer |= {"kv_connector_module_path": "gpu.connectors", "kv_role": "kv_producer"}
    began = time.time()
    llm = engine(models / model, transfer)
    print(f"engine up after {time.time() - began:.0f} s", flush=True)
    rng = random.Random(f"{model} {kind} {transport}")
    claims = Claims(peer)
    with turn(folder):
        if kind == "ours" and transport == "nixl" and model in (*waited_for(), "glm5"):
            try:
                compare(llm, claims, rng, model, dumps)
            finally:
                (dumps / "all.json").touch()
    # What is compared comes first: it is the point, and time may run out.
    limit = time.monotonic() + 150
    while not all((folder / m / "over").exists() for m in waited_for()) and time.monotonic() < limit:
        time.sleep(0.5)
    if model == "dsv32":
        if kind == "ours":
            peer.no_dumps()
        with turn(folder):
            measure(llm, claims, rng, f"{kind}:{transport}", kind)
    if peer is not None:
        peer.close()
    os._exit(0)


class Claims:
    """Claimed requests towards one node of ours."""

    def __init__(self, peer: Any) -> None:
        self.peer = peer
        self._number = 0

    def next(self) -> tuple[str, dict[str, Any]]:
        self._number += 1
        rid = f"{os.getpid():08x}{self._number:024x}"
        generation = self.peer.reserve(rid)
        return rid, {
            "tilert_host": HOST,
            "tilert_ctrl_port": self.peer.port,
            "tilert_rid": rid,
            "tilert_generation": generation,
        }


def compare(llm: Any, claims: Claims, rng: random.Random, model: str, dumps: Path) -> None:
    import torch

    from gpu import connectors
    from gpu.nodes import LAYERS

    layers, peer = LAYERS[model], claims.peer
    connectors.KEEP = True
    states = equal = 0

    def hand_off(prompts: list[list[int]]) -> list[tuple[str, int]]:
        """Prompts posted together; (rid, first token) of each, compared."""
        nonlocal states, equal
        claimed = [claims.next() for _ in prompts]
        firsts = ask(llm, prompts, [params for _, params in claimed], 1)
        found = []
        for (rid, _), prompt, first in zip(claimed, prompts, firsts, strict=True):
            told = peer.ready(rid)
            states += 1
            if told["error"]:
                result(model=model, rid=rid, tokens=len(prompt), failed=told["error"])
                continue
            got = connectors.landed_state(dumps / f"{rid}.bin", layers, told["segments"])
            own = connectors.OWN.pop(rid)
            differ = {name: int((own[name].cpu() != got[name]).sum()) for name in own}
            equal += not any(differ.values())
            if any(differ.values()):
                result(model=model, rid=rid, tokens=len(prompt), segments=told["segments"], differ=differ)
            (dumps / f"{rid}.json").write_text(json.dumps({"segments": told["segments"]}))
            found.append((rid, first[0]))
        torch.cuda.synchronize()
        return found

    hand_off([prompt_of(rng, 100)])  # the first one connects
    connectors.TOGETHER.clear()
    for lengths in PAIRS if "CONTINUED" not in os.environ else ():
        before = (states, equal)
        for rid, _ in hand_off([prompt_of(rng, length) for length in lengths]):
            (dumps / f"{rid}.bin").unlink()
        print(f"pair {lengths}: {equal - before[1]} of {states - before[0]} equal", flush=True)
    together = list(connectors.TOGETHER)
    shared = prompt_of(rng, 640)
    for tail in (0, 1, 70) if "CONTINUED" not in os.environ else ():
        for rid, _ in hand_off([shared + prompt_of(rng, tail)]):  # hits of 10 blocks, from the second on
            (dumps / f"{rid}.bin").unlink()
    told = []
    for length in CONTINUED:
        prompt = prompt_of(rng, length)
        (own,) = ask(llm, [prompt], [None], STEPS)
        llm.reset_prefix_cache()
        for rid, first in hand_off([prompt]):
            told.append({"rid": rid, "prompt": prompt, "own": own, "first": first})
    (dumps / "all.part").write_text(json.dumps(told))
    (dumps / "all.part").rename(dumps / "told.json")
    connectors.KEEP = False
    result(model=model, layers=layers, states=states, byte_equal=equal, opened_in_one_step=together)


def measure(llm: Any, claims: Claims, rng: random.Random, name: str, kind: str) -> None:
    """Alternately an ordinary prefill, a claimed one whose hooks are timed, and a claimed one whose end is
    watched: the thread that waits for it is in the way of the hooks."""
    from gpu import connectors

    peer = claims.peer
    for length in TIMED:
        plain: list[float] = []
        claimed: list[float] = []
        timing: dict[str, list[float]] = {}
        connectors.TIMES.clear()
        for repeat in range(REPEAT):
            began = time.perf_counter()
            ask(llm, [prompt_of(rng, length)], [None], 1)
            plain.append(1e3 * (time.perf_counter() - began))
            for watched in (False, True) if peer is not None else ():
                prompt = prompt_of(rng, length)
                rid, params = None, {"tilert_host": HOST, "tilert_ctrl_port": peer.port}
                if kind == "ours":
                    rid, params = claims.next()
                connectors.WATCH = watched
                connectors.ENDED.clear()
                began = time.perf_counter()
                ask(llm, [prompt], [params], 1)
                took = 1e3 * (time.perf_counter() - began)
                told = peer.ready(rid)
                if repeat < 2:
                    connectors.TIMES.clear()
                elif watched:
                    (ended,) = connectors.ENDED
                    ended.thread.join()
                    timing.setdefault("ready after end", []).append(1e3 * (told["ready"] - ended.at))
                    for key, value in told["timing"].items():
                        timing.setdefault(key, []).append(value)
                    if kind == "ours":
                        timing.setdefault("done after end", []).append(1e3 * (told["done"] - ended.at))
                else:
                    claimed.append(took)
        plain = plain[2:]
        mid = lambda values: round(statistics.median(values), 3)  # noqa: E731
        said: dict[str, Any] = {"run": name, "tokens": length, "prefill_ms": mid(plain)}
        if claimed:
            said["claimed_ms"] = mid(claimed)
            said["added_ms"] = mid([b - a for a, b in zip(plain, claimed, strict=True)])
            # median, worst, number of steps
            said["forward_thread_ms"] = {
                hook: [mid(v), round(max(v), 3), len(v)] for hook, v in sorted(connectors.TIMES.items())
            }
            said["timing_ms"] = {key: mid(value) for key, value in timing.items()}
        result(**said)


def oracle(models: Path, folder: Path, model: str) -> None:
    dumps = folder / model
    dumps.mkdir(exist_ok=True)
    transfer = {
        "kv_connector": "Oracle",
        "kv_connector_module_path": "gpu.connectors",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"folder": str(dumps)},
    }
    llm = engine(models / model, transfer, enable_prefix_caching=False)
    print("engine up", flush=True)
    while not (dumps / "all.json").exists():
        time.sleep(0.5)
    if not (dumps / "told.json").exists():
        result(oracle=model, failed="there is nothing to continue from")
        (dumps / "over").touch()
        os._exit(1)
    with turn(folder):
        for item in json.loads((dumps / "told.json").read_text()):
            own, first = item["own"], item["first"]
            (got,) = ask(llm, [[*item["prompt"], first]], [{"oracle": item["rid"]}], STEPS - 1)
            same = next((i for i, (a, b) in enumerate(zip([first, *got], own, strict=True)) if a != b), STEPS)
            result(
                oracle=model,
                tokens=len(item["prompt"]),
                same_tokens=f"{same} of {STEPS}",
                different_ids=len(set(own)),
            )
    (dumps / "over").touch()
    os._exit(0)


def main() -> int:
    models, folder = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(exist_ok=True, parents=True)
    if sys.argv[3:4] == ["role"]:
        what, model, *rest = sys.argv[4].split(":")
        if what == "oracle":
            oracle(models, folder, model)
        else:
            prefill(models, folder, model, *rest)
        return 0
    roles = sys.argv[3:] or list(ROLES)
    running = {}
    os.environ["ROLES"] = " ".join(roles)
    limit = time.monotonic() + LIMIT_S
    for role in roles:
        log = folder / (role.replace(":", "-") + ".log")
        command = [sys.executable, __file__, str(models), str(folder), "role", role]
        running[role] = (subprocess.Popen(command, stdout=log.open("w"), stderr=subprocess.STDOUT), log)
        time.sleep(0.5)
    failed = 0
    for role, (process, log) in running.items():
        try:
            rc = process.wait(max(0.1, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            rc = process.wait()
        failed += rc != 0
        print(f"== {role}: exit {rc}", flush=True)
        for line in log.read_text(errors="replace").splitlines():
            if line.startswith(("RESULT", "pair", "engine up")):
                print("  ", line)
        if rc:
            print("   ...", log.read_text(errors="replace")[-1500:])
    return failed


if __name__ == "__main__":
    sys.exit(main())

"""How near does the engine come to a real vLLM on this machine? A sweep, then a fresh trace, twice on the real one.

vLLM's CPU build runs in an environment of its own, in one process that is stepped by hand (engine_side.py). The model
is a small Llama with random weights, of which only a config.json is needed. What the simulated engine is given comes
from the sweep and from vLLM's arguments; the trace has another seed and other lengths than any case of the sweep.
"""

import json
import os
import random
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from errors import Compared, Served, between, compare
from replay import Arrival, replay
from sweep import BUDGET, MAX_SEQS, alike, cases, fit, write_profile

from penstock_lab.config.timing_files import load_timing
from penstock_lab.engine.settings import SimSettings, TimingSettings

HERE = Path(__file__).resolve().parent
VOCABULARY, LAYERS, MAX_LEN = 4096, 4, 2048
BLOCK, BLOCKS = 32, 512
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": MAX_LEN,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "max_model_len": MAX_LEN,
    "max_num_seqs": MAX_SEQS,
    "max_num_batched_tokens": BUDGET,
    "block_size": BLOCK,
    "num_gpu_blocks_override": BLOCKS,
    "enforce_eager": True,
    "disable_log_stats": True,
}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's core in the process that steps it
}
RATE, REQUESTS = 4.0, 160
SWEEP_SEEDS, WARM_UP_SEED, TRACE_SEED = (11, 12, 13), 2, 3
TIMEOUT = 540.0
"""Seconds for the start, the sweep and both runs; an idle machine needs less than half of it."""


class Failed(Exception):
    """The real engine did not do what it was asked; the message has the end of its log."""


@dataclass(frozen=True, slots=True)
class Live:
    """``ours`` is beside the mean of the two real runs, ``again`` the second of them beside the first.

    Shares: ``missed`` is how far the fitted cost is off the sweep's own passes, in the median; ``waited`` how much of
    the passes' time vLLM had no core for, in each run.
    """

    ours: list[Compared]
    again: list[Compared]
    passes: int
    sweep_seconds: float
    missed: float
    waited: list[float]


def arrivals(seed: int, count: int) -> list[Arrival]:
    """Return a trace: Poisson arrivals, lognormal lengths."""
    rng = random.Random(seed)
    found, now = [], 0.0
    for _ in range(count):
        now += rng.expovariate(RATE)
        isl, osl = round(rng.lognormvariate(5.2, 0.8)), round(rng.lognormvariate(3.8, 0.6))
        found.append(Arrival(now, min(max(isl, 20), 880), min(max(osl, 2), 200)))
    return found


def live(venv: Path, folder: Path, say: Callable[[str], None]) -> Live:
    """Sweep a real engine, run the trace on it twice, and once on ours.

    Args:
        venv: the environment with vLLM in it.
        folder: where plan, result, log and profile go.
        say: told what goes on.
    Raises:
        Failed: vLLM did not start or did not end in time.
    """
    trace = arrivals(TRACE_SEED, REQUESTS)
    say("vLLM starts, is swept, and serves the trace twice: about four minutes")
    found = real(venv, folder, plan(folder, trace))
    swept = alike(found["passes"])
    cost = fit(swept)
    write_profile(folder / "profile", cost, LAYERS, MAX_LEN)
    timing = TimingSettings(kind="operators", model=str(folder / "model"), profile=str(folder / "profile"))
    settings = SimSettings(
        block_size=BLOCK,
        kv_blocks=BLOCKS - 1,  # vLLM keeps one for itself
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=BUDGET,
        max_model_len=MAX_LEN,
        timing=timing,
    )
    first, second = ([Served(r["at"], r["first"], r["last"], r["tokens"]) for r in run] for run in found["runs"])
    ours = replay(trace, settings, load_timing(timing))
    return Live(
        between(compare(first, ours), compare(second, ours)),
        compare(first, second),
        len(found["passes"]),
        found["sweep_seconds"],
        median(abs(cost.of(one) / one.seconds - 1.0) for one in swept),
        found["waited"],
    )


def plan(folder: Path, trace: Sequence[Arrival]) -> dict[str, Any]:
    """Write the model; return what the engine's side is to do."""
    (folder / "model").mkdir(parents=True, exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    rows = [(row.at, row.isl, row.osl) for row in trace]
    return {
        "engine": {**ENGINE, "model": str(folder / "model")},
        "vocabulary": VOCABULARY,
        "warm_up": [(row.at, row.isl, row.osl) for row in arrivals(WARM_UP_SEED, 15)],
        "sweep": [cases(seed) for seed in SWEEP_SEEDS],
        "runs": [rows, rows],
    }


def real(venv: Path, folder: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Return what the engine's side saw."""
    paths = [folder / name for name in ("plan.json", "result.json")]
    paths[0].write_text(json.dumps(asked))
    path = f"{venv / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    with (folder / "vllm.log").open("wb") as log:
        process = subprocess.Popen(
            [venv / "bin" / "python", HERE / "engine_side.py", *paths],
            env={**os.environ, **ENVIRONMENT, "PATH": path},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            code: int | None = process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            process.kill()
            process.wait()
    if code != 0:
        how = f"did not end within {TIMEOUT:g} s" if code is None else f"ended with {code}"
        tail = "\n".join((folder / "vllm.log").read_text(errors="replace").splitlines()[-15:])
        raise Failed(f"vLLM {how}:\n{tail}")
    found: dict[str, Any] = json.loads(paths[1].read_text())
    return found

"""Self-benchmark of an engine: single requests and even batches through the real machine, on virtual time."""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from penstock.kernel.machine import SECOND, Nanos, Wake, Woken
from penstock.kernel.values import Prompt, RequestId, StepStats
from penstock_lab.engine.engine import Engine
from penstock_lab.engine.events import EngineFirstToken, SubmitRequest
from penstock_lab.engine.kv_capacity import with_blocks
from penstock_lab.engine.settings import SimSettings

STEPS = 8
"""Decode steps that one point is averaged over."""


def perf_metrics(settings: SimSettings, table: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Measure prefill and decode.

    Returns: ``prefill``: points (tokens, seconds) of a lone prompt; ``decode``: points (kv_tokens, batch, seconds) of
        one step; ``fit``: least-squares lines through both, seconds = prefill_intercept + prefill_slope * tokens and
        seconds = decode_base + decode_slope * KV blocks read.
    Cost: some 40 short simulations, about 20 ms.
    """
    settings = with_blocks(settings, table)
    quiet = msgspec.structs.replace(
        settings, enable_prefix_caching=False, num_speculative_tokens=0, emit_decode_blocks=False
    )
    quiet = msgspec.structs.replace(quiet, watermark=0.0)
    longest = min(quiet.max_model_len, quiet.capacity) - STEPS
    prefill = []
    for tokens in _spread_counts(max(1, longest // 512), max(1, min(longest, 4 * quiet.max_num_batched_tokens)), 16):
        first, _ = _run_prompts(quiet, table, [tokens], 1)
        prefill.append({"tokens": tokens, "seconds": first / SECOND})
    decode = []
    for batch in sorted({1, max(1, quiet.max_num_seqs // 8), max(1, quiet.max_num_seqs // 2)}):
        # Room for the tokens that the first ones make while the last ones are prefilled.
        room = min(longest - batch, quiet.capacity * 9 // 10 // batch - quiet.block_size) - STEPS
        room -= (
            -(-room * batch // (quiet.max_num_batched_tokens - batch)) if quiet.max_num_batched_tokens > batch else room
        )
        for context in _spread_counts(max(1, room // 64), room, 8) if room > 0 else ():
            _, window = _run_prompts(quiet, table, [context] * batch, STEPS)
            assert window is not None and window.decode_kv is not None and window.wall is not None
            per_pass = {"kv_tokens": window.decode_kv / window.passes, "seconds": window.wall / window.passes}
            decode.append({"batch": batch, **per_pass})
    intercept, slope = _line([p["tokens"] for p in prefill], [p["seconds"] for p in prefill])
    blocks = [point["kv_tokens"] / quiet.block_size for point in decode]
    base, per_block = _line(blocks, [point["seconds"] for point in decode])
    return {
        "unit": "seconds",
        "block_size": quiet.block_size,
        "prefill": prefill,
        "decode": decode,
        "fit": {
            "prefill_intercept": intercept,
            "prefill_slope": slope,
            "decode_base": base,
            "decode_slope": per_block,
        },
    }


def _run_prompts(
    settings: SimSettings, table: Mapping[str, Any] | None, prompts: list[int], out: int
) -> tuple[Nanos, StepStats | None]:
    """Run prompts that arrive together; return when the last has its first token, and what the steps after it did.

    The window is None where the last request ends with its first token. At least ``out`` steps follow otherwise.
    """
    passes = sum(prompts) // max(1, settings.max_num_batched_tokens - len(prompts)) + len(prompts) + out
    engine = Engine(settings, table=table)
    wake: Nanos | None = None
    for place, prompt in enumerate(prompts):
        submit = SubmitRequest(id=RequestId(str(place)), prompt=Prompt(prompt), max_tokens=1 if out == 1 else passes)
        for effect in engine.handle(0, submit):
            wake = effect.at if isinstance(effect, Wake) else wake
    waiting, last = len(prompts), 0
    while wake is not None:
        now, wake = wake, None
        effects = engine.handle(now, Woken())
        for effect in effects:
            if isinstance(effect, Wake):
                wake = effect.at
            elif isinstance(effect, EngineFirstToken):
                waiting -= 1
                last = effect.at
        if waiting == 0 and now > last:
            return last, engine.take_stats(now)
        if waiting == 0:
            engine.take_stats(now)  # the window of interest begins here
    return last, None


def _spread_counts(low: int, high: int, count: int) -> list[int]:
    return sorted({int(value) for value in np.geomspace(low, max(low, high), count)})


def _line(x: list[float], y: list[float]) -> tuple[float, float]:
    """Fit a line, relative errors counted alike; neither number below 0."""
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if len(xs) < 2 or np.ptp(xs) == 0.0:
        return (float(ys.mean()) if len(ys) else 0.0), 0.0
    weights = 1.0 / np.maximum(ys, 1e-9)
    slope, intercept = np.polyfit(xs, ys, 1, w=weights)
    return max(0.0, float(intercept)), max(0.0, float(slope))

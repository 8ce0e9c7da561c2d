"""Engine throughput within a service level: requests per second, from trying every batch size on the pass times.

Of the sizes that keep the service level the one with the highest rate counts; where none does, the one with the
highest rate at all: the pool has to serve anyway. This is the sizing of Dynamo's throughput loop over forward passes.
"""

import math
from collections.abc import Iterator

from penstock.kernel.values import EngineLimits
from penstock.planner.performance.performance_model import PerformanceModel
from penstock.planner.performance.regressions import LEAST, EngineRate, fresh

CANDIDATES = 128
"""Most batch sizes that are tried, evenly spaced."""


def effective_isl(isl: float, hit_rate: float | None) -> int:
    """Return the prompt tokens that must be computed; the last one always is."""
    return max(1, math.ceil(fresh(isl, hit_rate) - 1e-9))


def decode_context(isl: float, osl: float) -> int:
    """Return the tokens that a sequence has half way through its output."""
    return int(isl) + int(osl) // 2


def batches(most: float) -> Iterator[int]:
    """Yield the batch sizes that are tried, from 1 to ``most``."""
    top = max(1, int(most))
    if top <= CANDIDATES:
        yield from range(1, top + 1)
        return
    yield from sorted({1 + round(i * (top - 1) / (CANDIDATES - 1)) for i in range(CANDIDATES)})


def chunked_seconds(model: PerformanceModel, tokens: float, chunk: int, seqs: float = 0.0, kv: float = 0.0) -> float:
    """Return seconds of ``tokens`` prompt tokens in passes of ``chunk``, with decodes beside them in every pass."""
    whole, rest = divmod(tokens, chunk)
    total = whole * float(model.mixed(chunk, seqs, kv)) if whole else 0.0
    return max(LEAST, total + (float(model.mixed(rest, seqs, kv)) if rest > 0.0 else 0.0))


def prefill_capacity(
    model: PerformanceModel, limits: EngineLimits[int], *, isl: float, ttft: float, hit_rate: float | None = None
) -> EngineRate | None:
    """Return the rate of one prefill engine: prompts in even batches; None where its limits are no limits."""
    if limits.none:
        return None
    tokens = effective_isl(isl, hit_rate)
    most = (
        1
        if tokens > limits.max_num_batched_tokens
        else min(limits.max_num_seqs, limits.max_num_batched_tokens // tokens)
    )
    rates: list[EngineRate] = []
    for batch in batches(most):
        seconds = chunked_seconds(model, tokens * batch, limits.max_num_batched_tokens)
        rates.append(EngineRate(batch / seconds, seconds, batch, seconds <= ttft))
    return _fastest_rate(rates)


def decode_capacity(
    model: PerformanceModel,
    limits: EngineLimits[int],
    *,
    isl: float,
    osl: float,
    itl: float,
    accept: float = 1.0,
) -> EngineRate | None:
    """Return the rate of one decode engine. ``accept``: tokens of a pass per sequence, 1 without speculation."""
    context = decode_context(isl, osl)
    if limits.none or osl <= 0.0 or context <= 0 or accept <= 0.0:
        return None
    rates: list[EngineRate] = []
    for batch in batches(min(limits.max_num_seqs, limits.kv_tokens // context)):
        gap = max(LEAST, float(model.decode(batch, batch * context))) / accept
        rates.append(EngineRate(batch / (osl * gap), gap, batch, gap <= itl))
    return _fastest_rate(rates)


def aggregated_capacity(
    model: PerformanceModel,
    limits: EngineLimits[int],
    *,
    isl: float,
    osl: float,
    ttft: float,
    itl: float,
    hit_rate: float | None = None,
    accept: float = 1.0,
) -> EngineRate | None:
    """Return the rate of one aggregated engine in steady state: as many prompts arrive as sequences end.

    In every pass a batch of sequences decodes, and the prompt tokens that replace those that end fit beside it.
    ``seconds`` of the result is the ITL.
    """
    context, tokens = decode_context(isl, osl), effective_isl(isl, hit_rate)
    if limits.none or osl <= 0.0 or context <= 0 or accept <= 0.0:
        return None
    rates: list[EngineRate] = []
    for batch in batches(min(limits.max_num_seqs, limits.kv_tokens // context)):
        beside = math.ceil(batch * accept * tokens / osl)
        chunk = limits.max_num_batched_tokens - batch
        if chunk <= 0 or (beside > chunk and rates):
            break
        gap = max(LEAST, float(model.mixed(min(beside, chunk), batch, batch * context))) / accept
        first = chunked_seconds(model, beside + tokens, chunk, batch, batch * context)
        rate = batch / (osl * gap)
        if beside > chunk:  # not even one sequence's replacement fits into a pass: prefill alone limits the rate
            rate = min(rate, chunk / (tokens * gap))
        rates.append(EngineRate(rate, gap, batch, gap <= itl and first <= ttft))
    return _fastest_rate(rates)


def _fastest_rate(rates: list[EngineRate]) -> EngineRate | None:
    met = [each for each in rates if each.met]
    return max(met or rates, key=lambda each: each.rate, default=None)

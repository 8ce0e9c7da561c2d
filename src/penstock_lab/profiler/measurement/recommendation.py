"""Recommendation: the tensor-parallel size of each phase that meets the SLA with the best throughput per GPU.

Where none meets it the nearest is taken and marked. The bounds for the planner, and the lines that are printed, are
those of Dynamo's first profiler (`profile_sla`).
"""

import math
from collections.abc import Mapping, Sequence

import msgspec

from penstock.config.files.profile_manifest import PickedSize, ProfilePoint
from penstock.kernel.values import EngineLimits, RequestShape
from penstock.planner.performance.interpolators import DecodeInterpolator
from penstock_dynamo.policies.load_classic import suggested_thresholds

NEAR = 0.25
"""Relative distance from the target within which a point's context counts as the target's."""


def pick_prefill(points: Sequence[ProfilePoint], isl: int, ttft: float | None) -> PickedSize | None:
    """Return the prefill size; None where the target prompt was measured at no size. ``ttft`` None takes any."""
    mine = [point for point in points if point.kind == "prefill" and point.tokens == isl]
    if not mine:
        return None
    limit = math.inf if ttft is None else ttft
    met = [point for point in mine if point.mean <= limit]
    best = max(met, key=lambda p: isl / p.mean / p.tp) if met else min(mine, key=lambda p: p.mean)
    upper, lower = queue_bounds(best.mean, best.mean if ttft is None else ttft)
    needs = ""
    if not met:
        fits = [p.tokens for p in points if p.kind == "prefill" and p.mean <= limit]
        shorter = f"prompts of at most {max(fits):,} tokens (TTFT within the SLA), or " if fits else ""
        needs = f"a TTFT SLA of {1e3 * best.mean:.2f} ms, or {shorter}an engine {best.mean / limit:.2f} times as fast"
    per_gpu = isl / best.mean / best.tp
    return PickedSize(
        tp=best.tp,
        seconds=best.mean,
        per_gpu=per_gpu,
        seqs=1,
        met=bool(met),
        upper=upper,
        lower=lower,
        needs=needs,
    )


def pick_decode(
    points: Sequence[ProfilePoint],
    shape: RequestShape[float],
    itl: float | None,
    limits: Mapping[int, EngineLimits[int | None]],
) -> PickedSize | None:
    """Return the decode size and the sequences in flight; None where the target context was measured at no size."""
    context = shape.isl + shape.osl / 2
    mine = [p for p in points if p.kind == "decode" and abs(p.context - context) <= NEAR * context]
    if not mine:
        return None
    limit = math.inf if itl is None else itl
    met = [
        within
        for tp in sorted({point.tp for point in mine})
        if (within := _most_within([point for point in mine if point.tp == tp], context, limit)) is not None
    ]
    best = max(met, key=lambda p: p.seqs / p.mean / p.tp) if met else min(mine, key=lambda p: p.mean)
    kv = limits[best.tp].kv_tokens if best.tp in limits else None
    upper, lower = kv_bounds(best.seqs, shape, kv)
    needs = "" if met else f"an ITL SLA of {1e3 * best.mean:.2f} ms, or an engine {best.mean / limit:.2f} times as fast"
    return PickedSize(
        tp=best.tp,
        seconds=best.mean,
        per_gpu=best.seqs / best.mean / best.tp,
        seqs=best.seqs,
        met=bool(met),
        upper=upper,
        lower=lower,
        needs=needs,
    )


def _most_within(points: Sequence[ProfilePoint], context: float, limit: float) -> ProfilePoint | None:
    """Return the most sequences in flight whose ITL is within the limit, on the line between measured points.

    Args:
        points: of one size, near the target context.
    """
    room = max(point.seqs * point.context for point in points)
    rows = [(p.seqs * p.context / room, p.context, p.mean, p.seqs / p.mean) for p in points]
    usage, contexts, seconds, rates = (list(column) for column in zip(*rows, strict=True))
    curves = DecodeInterpolator(usage, contexts, seconds, rates, room)
    best = curves.find_best_throughput_per_gpu(limit, context)
    if not best.met:
        return None
    most = max(point.seqs for point in points)
    seqs = max(1, min(most, math.floor(best.usage * room / context + 1e-6)))
    itl = min(limit, curves.itl_at(seqs, context))
    return msgspec.structs.replace(points[0], seqs=seqs, context=context, mean=itl)


def queue_bounds(ttft: float, sla: float) -> tuple[float, float]:
    """Return the upper and lower bound of requests that wait per prefill engine."""
    found = suggested_thresholds(ttft=ttft, ttft_sla=sla, sequences=0, isl=0, osl=0, kv_tokens=1)
    return found[0], found[1]


def kv_bounds(seqs: int, shape: RequestShape[float], kv_tokens: int | None) -> tuple[float, float]:
    """Return the upper and lower bound of KV use; of an engine that does not say its room, as of an empty one."""
    sequences = seqs if kv_tokens else 0
    found = suggested_thresholds(
        ttft=1, ttft_sla=1, sequences=sequences, isl=shape.isl, osl=shape.osl, kv_tokens=kv_tokens or 1
    )
    return found[2], found[3]


def recommendation_lines(prefill: PickedSize | None, decode: PickedSize | None) -> list[str]:
    """Return the lines of Dynamo's profiler, and what a missed SLA would need."""
    lines = []
    for phase, latency, bounds, size in (
        ("prefill", "TTFT", "prefill queue size", prefill),
        ("decode", "ITL", "decode kv cache utilization", decode),
    ):
        if size is None:
            lines.append(f"No suggestion for {phase}: the target was not measured")
            continue
        miss = "" if size.met else ", misses the SLA"
        lines.append(
            f"Suggested {phase} TP:{size.tp} ({latency} {1e3 * size.seconds:.2f} ms, "
            f"throughput {size.per_gpu:.2f} tokens/s/GPU{miss})"
        )
        lines.append(f"Suggested planner upper/lower bound for {bounds}: {size.upper:.2f}/{size.lower:.2f}")
        if size.needs:
            lines.append(f"No {phase} size meets the SLA: it needs {size.needs}")
    return lines

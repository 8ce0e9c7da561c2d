"""Floors of an SLO: what no number of replicas improves, which one a request hits, and what would change it."""

import math

import msgspec

from penstock_lab.engine.timing.gpus import GPUS
from penstock_lab.profiler.deployment_plan.deployment_search import DeploymentSearch
from penstock_lab.profiler.deployment_plan.engine_candidates import EngineCatalog, IdleEngine
from penstock_lab.profiler.deployment_plan.plan_request import PlanRequest
from penstock_lab.profiler.deployment_plan.planned_traffic import PlannedTraffic

RELAXED = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
"""Multiples of a target that are tried, to name one that some deployment keeps."""
NO_LIMIT = 1e9
"""GPUs of a deployment without a limit."""
FACTOR_LEAST, FACTOR_MOST = 0.01, 1e4
"""Multiples of a rate between which the largest one is looked for."""


class SloFloor(msgspec.Struct, frozen=True, kw_only=True):
    """Why no deployment meets the SLO: the floor, in words with numbers, and what would change it."""

    floor: str
    reason: str
    changes: tuple[str, ...]


def context_floor(request: PlanRequest, traffic: PlannedTraffic) -> SloFloor | None:
    """Return why a model can't serve requests that it is too short for; None where enough of them fit it."""
    context = request.shape().context
    longer = 0 if context is None else traffic.longer_than(context)
    if longer <= (1.0 - request.attainment) * len(traffic.requests):
        return None
    return SloFloor(
        floor="context",
        reason=(
            f"{request.name} is made for {context:,} tokens of prompt and answer together, which {longer:,} of "
            f"{len(traffic.requests):,} requests exceed; the longest has {traffic.longest:,}"
        ),
        changes=(f"requests of {context:,} tokens at most", "a model with a longer context"),
    )


def floor_of(request: PlanRequest, traffic: PlannedTraffic, catalog: EngineCatalog) -> SloFloor:
    """Return the floor that a request without a deployment hits."""
    if not catalog.idle:
        return _memory_floor(request, traffic, catalog)
    idle = _idle_floor(request, traffic, catalog)
    if idle is not None:
        return idle
    wide = DeploymentSearch(request, traffic, catalog).deployments(NO_LIMIT)
    if wide:
        best = min(wide, key=lambda each: each.gpus)
        factor = largest_factor(request, traffic, catalog)
        changes = [f"--max-gpus {best.gpus}: {best.label}"]
        if factor is not None:
            changes.append(f"at most {factor * traffic.rate:,.2f} requests/s with {request.max_gpus} GPUs")
        return SloFloor(
            floor="compute",
            reason=f"the fewest GPUs that meet it are {best.gpus}, and --max-gpus is {request.max_gpus}",
            changes=tuple(changes),
        )
    ttft, itl = request.slo.planned
    return SloFloor(
        floor="prefill time" if _keeps_without(request, traffic, catalog, "ttft") else "weights/bandwidth",
        reason=(
            f"TTFT {_in_ms(ttft)} and ITL {_in_ms(itl)} are each in reach of an idle engine, but not "
            f"for {request.attainment:.0%} of these requests: long prompts, or steps beside prompts, miss them"
        ),
        changes=_relaxed_targets(request, traffic, catalog),
    )


def _idle_floor(request: PlanRequest, traffic: PlannedTraffic, catalog: EngineCatalog) -> SloFloor | None:
    """Return the targets that even an idle engine misses; None where there are none."""
    ttft, itl = request.slo.planned[0], request.slo.itl or math.inf
    floors, reasons, changes = [], [], []
    fastest = min(catalog.idle, key=lambda each: each.step)
    if fastest.step > itl:
        floors.append("weights/bandwidth" if fastest.weights > 0.5 * fastest.step else "launches and collectives")
        reasons.append(
            f"ITL {_in_ms(itl)}: one decode step of one sequence takes {_in_ms(fastest.step)} on {fastest.label}, the "
            "fastest layout of the GPUs named; reading the weights at full bandwidth is "
            f"{_in_ms(fastest.weights)} of it"
        )
        changes.append(f"--itl above {_in_ms(fastest.step)}")
    quickest = min(catalog.idle, key=lambda each: each.prompt)
    if quickest.prompt > ttft:
        floors.append("prefill time")
        reasons.append(
            f"TTFT {_in_ms(ttft)}: the mean prompt of {traffic.prompt:,.0f} tokens takes {_in_ms(quickest.prompt)} of "
            f"computing alone on {quickest.label}, the fastest layout of the GPUs named"
        )
        changes.append(f"--ttft above {_in_ms(quickest.prompt)}")
    if not floors:
        return None
    enough = [each for each in _other_engines(request, traffic) if each.step <= itl and each.prompt <= ttft]
    others = [
        f"--gpu {each.gpu}: {each.label} takes {_in_ms(each.step)} for a step and {_in_ms(each.prompt)} for a prompt"
        for each in sorted(enough, key=lambda each: each.gpus)[:3]
    ]
    narrower = "weights in a narrower data type, as of a model's name that ends in -FP8"
    return SloFloor(floor=" and ".join(floors), reason="; ".join(reasons), changes=(*changes, *others, narrower))


def _memory_floor(request: PlanRequest, traffic: PlannedTraffic, catalog: EngineCatalog) -> SloFloor:
    others = sorted(_other_engines(request, traffic), key=lambda each: each.stages)
    changes = [f"{each.label} holds it" for each in others[:2]]
    reasons = [reasons[-1] for reasons in catalog.refused.values()]
    limit = "" if request.max_gpus is None else f"more than --max-gpus {request.max_gpus}, "
    return SloFloor(
        floor="memory",
        reason="; ".join(reasons) or f"no layout of {', '.join(request.gpus)} can be made of {request.max_gpus} GPUs",
        changes=(*changes, f"{limit}weights in a narrower data type, or a GPU with more memory"),
    )


def _other_engines(request: PlanRequest, traffic: PlannedTraffic) -> list[IdleEngine]:
    """Return the layouts of all GPUs of the table, without a limit."""
    wide = msgspec.structs.replace(request, gpus=tuple(GPUS), max_gpus=None)
    return EngineCatalog(wide, traffic).idle


def _relaxed_targets(request: PlanRequest, traffic: PlannedTraffic, catalog: EngineCatalog) -> tuple[str, ...]:
    """Return for each target the tightest of some multiples that a deployment keeps."""
    changes = []
    for name, target in zip(("ttft", "itl"), request.slo.planned, strict=True):
        for factor in RELAXED:
            slo = msgspec.structs.replace(request.slo, **{name: target * factor})
            wider = msgspec.structs.replace(request, slo=slo)
            if DeploymentSearch(wider, traffic, catalog).deployments():
                changes.append(f"--{name} {_in_ms(target * factor).replace(' ', '')}")
                break
    return (*changes, "a lower --attainment")


def _keeps_without(request: PlanRequest, traffic: PlannedTraffic, catalog: EngineCatalog, name: str) -> bool:
    """Return whether it is this target that is missed: without it there is a deployment."""
    slo = msgspec.structs.replace(request.slo, **{name: RELAXED[-1] * (getattr(request.slo, name) or 1.0)})
    return bool(DeploymentSearch(msgspec.structs.replace(request, slo=slo), traffic, catalog).deployments())


def largest_factor(request: PlanRequest, traffic: PlannedTraffic, catalog: EngineCatalog) -> float | None:
    """Return the largest multiple of the traffic's rates that the GPUs allowed keep, to 2 %; None where it is none."""

    def feasible(factor: float) -> bool:
        return bool(DeploymentSearch(request, traffic.at(factor), catalog).deployments())

    low, high = 0.0, 1.0
    while high < FACTOR_MOST and feasible(high):
        low, high = high, 2.0 * high
    while high - low > 0.02 * high and high > FACTOR_LEAST:
        middle = (low + high) / 2.0
        low, high = (middle, high) if feasible(middle) else (low, middle)
    return low or None


def _in_ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < 1.0 else f"{seconds:,.2f} s"

"""Reasons of policy slo: why each pool gets its number, whatever bound that number."""

from collections.abc import Mapping
from typing import NamedTuple

from penstock.kernel.values import Role
from penstock.planner.plugins.proposals import CEILING, Reason
from penstock.planner.policies.slo_state import SloPool
from penstock.planner.sizing.fleet_sizing import FleetCandidate


class FloorReason(NamedTuple):
    """Least number of a pool at present, and why. ``code``: soon, returns, learning, waiting or asleep."""

    workers: int
    code: str
    text: str


class ExpectedLoad(NamedTuple):
    """Forecast for the second ``lead`` seconds from now; requests per second."""

    lead: float
    rate_q50: float
    rate_q90: float


def reason(
    sized: SloPool, now: int, wanted: int, order: FleetCandidate, floor: FloorReason, expected: ExpectedLoad
) -> Reason:
    """Return why a pool gets ``wanted`` workers.

    Args:
        now: its present workers.
        order: the cheapest fleet for the expected load; ``floor``: what may keep the pool above it.
    """
    ordered = order.workers[sized.pool.role]
    facts = {
        "pool": sized.name,
        "was": now,
        "wanted": wanted,
        "cheapest": ordered,
        **expected._asdict(),
    }
    later = (
        f"in {expected.lead:.0f} s, when new workers serve, {expected.rate_q50:.1f} requests/s are expected "
        f"({expected.rate_q90:.1f} at the 90th percentile)"
    )
    if wanted > now:
        text = f"{sized.name} {now} -> {wanted}: {later}, of which {fleet(order.workers)} keep {order.attainment:.1%}"
        return Reason(code="up", text=text, facts=facts, pools=(sized.name,))
    if wanted < now:
        text = (
            f"{sized.name} {now} -> {wanted}: nothing in the next {expected.lead:.0f} s needs more "
            f"({expected.rate_q90:.1f} requests/s at the 90th percentile)"
        )
        if wanted > ordered:
            text += f"; {ordered} would do, but {floor.text}"
        return Reason(code="down", text=text, facts=facts, pools=(sized.name,))
    if wanted > ordered:
        text = f"{sized.name} stays at {wanted}, though {ordered} would do: {floor.text}"
        return Reason(code=floor.code, text=text, facts=facts, pools=(sized.name,))
    text = f"{sized.name} stays at {wanted}: {later}, of which {fleet(order.workers)} keep {order.attainment:.1%}"
    return Reason(code="fits", text=text, facts=facts, pools=(sized.name,))


def ceiling(model: str, gpus_most: float, order: FleetCandidate, free: FleetCandidate) -> Reason:
    """Return the attainment that a model would have if no limit held its fleet back.

    Args:
        gpus_most: GPUs that its pools may have together.
        order: the best fleet within the limits; ``free``: the best one without them.
    """
    more = free.gpus - order.gpus
    text = (
        f"the ceiling binds: {more} more {'GPU' if more == 1 else 'GPUs'} would keep {free.attainment:.1%} "
        f"of {model}'s requests in SLO instead of {order.attainment:.1%}"
    )
    if order.answered < 0.999:
        text += f"; {order.answered:.0%} of the load can be served at all, so the queue grows"
    facts = {
        "model": model,
        "more_gpus": more,
        "gpus": order.gpus,
        "ceiling": None if gpus_most == float("inf") else gpus_most,
        "attainment": order.attainment,
        "would_keep": free.attainment,
        "answered": order.answered,
    }
    return Reason(code=CEILING, text=text, facts=facts)


def fleet(workers: Mapping[Role, int]) -> str:
    """Return a fleet in words."""
    total = sum(workers.values())
    return " and ".join(f"{count} {role}" for role, count in workers.items()) + (
        " worker" if total == 1 else " workers"
    )

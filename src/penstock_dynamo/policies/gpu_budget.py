"""GPU budget in the terms of Dynamo's planners: one pool, a pair of pools, one step of the load loop.

The classic policies and their golden cases are written in these functions: plain numbers, no pools and no models. The
limits of every policy, over any number of pools, are in `penstock.planner.limits.limits`, and `load_guard` applies them
to a pair. A bound of -1 is none.
"""

import math
from typing import Literal, NamedTuple

from penstock.kernel.values import Pool, Role
from penstock.planner.limits.capacity_limits import PoolDemand
from penstock.planner.limits.limits import within
from penstock.planner.settings import BudgetSettings

GuardReason = Literal["", "gpu_budget_guard_hold", "gpu_budget_reconcile", "gpu_budget_fit"]


class PoolPair(NamedTuple):
    """Replicas of the prefill and of the decode pool."""

    prefill: int
    decode: int


class Widths(NamedTuple):
    """GPUs of one prefill replica and of one decode replica."""

    prefill: int = 1
    decode: int = 1

    def total(self, pair: PoolPair) -> int:
        """Return the GPUs that a pair takes."""
        return pair.prefill * self.prefill + pair.decode * self.decode


class GuardedTargets(NamedTuple):
    """The load loop's proposal after the guard; ``reason`` is empty where it is unchanged."""

    pair: PoolPair
    reason: GuardReason = ""


def clamp_pair(
    wanted: PoolPair, widths: Widths, min_gpus: int = -1, max_gpus: int = -1, minima: PoolPair = PoolPair(1, 1)
) -> PoolPair:
    """Fit a pair of pools into a budget, in proportion: prefill is rounded down first and decode takes the rest.

    Below the floor both grow in proportion, prefill rounded up first; from zero each gets half. The floor may be
    missed by up to one replica where there is a ceiling too, so that there is room for a fleet between the two.

    Returns: (0, 0) where the minima do not fit under the ceiling. The ceiling is never broken, also not by the floor.
    """
    if max_gpus >= 0 and widths.total(minima) > max_gpus:
        return PoolPair(0, 0)
    fitted = wanted
    floor = lowest(widths, min_gpus, max_gpus)
    if floor >= 0 and widths.total(fitted) < floor:
        fitted = _raise_to_minimum(fitted, widths, min_gpus)
    fitted = PoolPair(max(fitted.prefill, minima.prefill), max(fitted.decode, minima.decode))
    if 0 <= max_gpus < widths.total(fitted):
        fitted = _lowered(fitted, widths, max_gpus, minima)
    return fitted


def lowest(widths: Widths, min_gpus: int, max_gpus: int) -> int:
    """Return the fewest GPUs that count as within the budget; -1 is no floor.

    Where both bounds are set, one replica of the wider pool less than the floor is tolerated: else a width that does
    not divide the bounds could never be at rest.
    """
    if min_gpus < 0:
        return -1
    return min_gpus if max_gpus < 0 else min_gpus - max(widths)


def in_band(pair: PoolPair, widths: Widths, min_gpus: int = -1, max_gpus: int = -1) -> bool:
    """Return whether a pair is within both bounds."""
    total = widths.total(pair)
    return (max_gpus < 0 or total <= max_gpus) and total >= lowest(widths, min_gpus, max_gpus)


def load_guard(
    current: PoolPair,
    wanted: PoolPair,
    widths: Widths,
    min_gpus: int = -1,
    max_gpus: int = -1,
    minima: PoolPair = PoolPair(1, 1),
) -> GuardedTargets:
    """Fit a step of a pair into the budget and return the reason for any change.

    A state that is out of the budget already is brought back from the *present* replicas, whatever was proposed; a step
    that does not fit goes as far as it can, and one that can't go anywhere is held. Where one role gives and the other
    lacks, it gives only as much as the other one takes: the rest would serve no request.
    """
    names: tuple[Role, Role] = ("prefill", "decode")
    budget = BudgetSettings(max_gpus=None if max_gpus < 0 else max_gpus, min_gpus=None if min_gpus < 0 else min_gpus)

    def within_budget(state: PoolPair) -> PoolPair:
        slots = [_pool_demand(name, *each) for name, *each in zip(names, widths, minima, current, strict=True)]
        targets = within(slots, state._asdict(), budget, staged=False).targets
        return PoolPair(*(targets[name] for name in names))

    if not in_band(current, widths, min_gpus, max_gpus):
        return GuardedTargets(within_budget(current), "gpu_budget_reconcile")
    if in_band(wanted, widths, min_gpus, max_gpus):
        return GuardedTargets(wanted)
    fitted = within_budget(wanted)
    for giver, taker in (names, names[::-1]):
        lacks = getattr(fitted, taker) < getattr(wanted, taker) > getattr(current, taker)
        given = getattr(current, giver) - getattr(fitted, giver)
        if lacks and given > 0 and max_gpus >= 0:
            back = min(given, (max_gpus - widths.total(fitted)) // getattr(widths, giver))
            fitted = fitted._replace(**{giver: getattr(fitted, giver) + back})
    return GuardedTargets(fitted, "gpu_budget_guard_hold" if fitted == current else "gpu_budget_fit")


def _pool_demand(name: Role, gpus: int, minimum: int, current: int) -> PoolDemand:
    return PoolDemand(
        name=name,
        pool=Pool(model="", role=name, gpus=gpus, desired=current),
        watts=None,
        priority=0,
        minimum=minimum,
        maximum=None,
        committed=current,
        draining=0,
    )


def cap_change(current: int, wanted: int, cap: int, minimum: int = 0) -> int:
    """Return ``wanted``, at most ``cap`` replicas away from ``current``; a return to a minimum may take more."""
    return max(min(max(wanted, current - cap), current + cap), minimum)


def _raise_to_minimum(wanted: PoolPair, widths: Widths, min_gpus: int) -> PoolPair:
    total = widths.total(wanted)
    if total == 0:
        half = min_gpus // 2
        prefill = half // widths.prefill
    else:
        prefill = math.ceil(wanted.prefill * min_gpus / total - 1e-9)
    rest = max(0, min_gpus - prefill * widths.prefill)
    return PoolPair(prefill, max(wanted.decode, -(-rest // widths.decode)))


def _lowered(wanted: PoolPair, widths: Widths, max_gpus: int, minima: PoolPair) -> PoolPair:
    total = widths.total(wanted)
    room = (max_gpus - minima.decode * widths.decode) // widths.prefill
    prefill = max(minima.prefill, min(room, wanted.prefill * max_gpus // total))
    return PoolPair(prefill, max(minima.decode, (max_gpus - prefill * widths.prefill) // widths.decode))

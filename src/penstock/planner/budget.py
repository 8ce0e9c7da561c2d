"""What fits into a GPU budget? The field's classic rules for one pool, a pair of pools, and a move between two states.

These are the functions that the classic policies and their golden cases are written in: plain numbers, no pools and no
models. What holds for every policy, over any number of pools, is `penstock.planner.limits`. A bound of -1 is none.
"""

import math
from typing import Literal, NamedTuple

GuardReason = Literal["", "gpu_budget_guard_hold", "gpu_budget_reconcile", "gpu_budget_fit"]


class Pair(NamedTuple):
    """Replicas of the prefill and of the decode pool."""

    prefill: int
    decode: int


class Widths(NamedTuple):
    """GPUs of one replica of each."""

    prefill: int = 1
    decode: int = 1

    def total(self, pair: Pair) -> int:
        """Return the GPUs that a pair takes."""
        return pair.prefill * self.prefill + pair.decode * self.decode


class Guarded(NamedTuple):
    """What becomes of a proposal of the load loop; ``reason`` is empty where it is left as it was."""

    pair: Pair
    reason: GuardReason = ""


def clamp_pair(wanted: Pair, widths: Widths, min_gpus: int = -1, max_gpus: int = -1, minima: Pair = Pair(1, 1)) -> Pair:
    """Fit a pair of pools into a budget, in proportion: prefill is rounded down first and decode takes the rest.

    Below the floor both grow in proportion, prefill rounded up first; from nothing each gets half. The floor may be
    missed by up to one replica where there is a ceiling too, so that the two leave room for something to stand between.

    Returns: (0, 0) where the minima do not fit under the ceiling. The ceiling is never broken, also not by the floor.
    """
    if max_gpus >= 0 and widths.total(minima) > max_gpus:
        return Pair(0, 0)
    found = wanted
    floor = lowest(widths, min_gpus, max_gpus)
    if floor >= 0 and widths.total(found) < floor:
        found = _raised(found, widths, min_gpus)
    found = Pair(max(found.prefill, minima.prefill), max(found.decode, minima.decode))
    if 0 <= max_gpus < widths.total(found):
        found = _lowered(found, widths, max_gpus, minima)
    return found


def clamp_single(wanted: int, gpus: int, min_gpus: int = -1, max_gpus: int = -1, minimum: int = 1) -> int:
    """Fit one pool into a budget; 0 where its minimum does not fit. The ceiling wins over the floor."""
    most = max_gpus // gpus if max_gpus >= 0 else None
    if most is not None and minimum > most:
        return 0
    found = wanted
    floor = lowest(Widths(gpus, gpus), min_gpus, max_gpus)
    if floor >= 0 and found * gpus < floor:
        found = -(-min_gpus // gpus)
    found = max(found, minimum)
    return found if most is None else min(found, most)


def lowest(widths: Widths, min_gpus: int, max_gpus: int) -> int:
    """Return the fewest GPUs that count as within the budget; -1 is no floor.

    Where both bounds are set, one replica of the wider pool less than the floor is tolerated: else a width that does
    not divide the bounds could never be at rest.
    """
    if min_gpus < 0:
        return -1
    return min_gpus if max_gpus < 0 else min_gpus - max(widths)


def in_band(pair: Pair, widths: Widths, min_gpus: int = -1, max_gpus: int = -1) -> bool:
    """Say whether a pair is within both bounds."""
    total = widths.total(pair)
    return (max_gpus < 0 or total <= max_gpus) and total >= lowest(widths, min_gpus, max_gpus)


def fit_transition(current: Pair, wanted: Pair, widths: Widths, min_gpus: int = -1, max_gpus: int = -1) -> Pair:
    """Go from ``current`` towards ``wanted`` as far as the budget allows, each role only in its own direction.

    The nearest to ``wanted`` in replicas counts; then the one that brings both roles equally far; then the one that
    brings them further; then fewer prefill and fewer decode replicas. A role that should grow never makes the other
    one shrink: whoever wants a donor has to name it. Where nothing on the way fits, all stays as it is.

    Cost: O(replicas between the two states of the narrower role).
    """
    best: tuple[float, ...] | None = None
    found = current
    for prefill in _between(current.prefill, wanted.prefill):
        for decode in _fitting(prefill, current, wanted, widths, min_gpus, max_gpus):
            pair = Pair(prefill, decode)
            done = _progress(current, wanted, pair)
            missing = abs(wanted.prefill - prefill) + abs(wanted.decode - decode)
            rank = (missing, abs(done[0] - done[1]), -(done[0] + done[1]), prefill, decode)
            if best is None or rank < best:
                best, found = rank, pair
    return found


def load_guard(
    current: Pair,
    wanted: Pair,
    widths: Widths,
    min_gpus: int = -1,
    max_gpus: int = -1,
    minima: Pair = Pair(1, 1),
) -> Guarded:
    """Fit a step of the load loop into the budget and say what was done to it.

    A state that is out of the budget already is brought back from what there *is*, whatever was proposed; a step that
    does not fit goes as far as it can, and one that can't go anywhere is held.
    """
    if not in_band(current, widths, min_gpus, max_gpus):
        return Guarded(clamp_pair(current, widths, min_gpus, max_gpus, minima), "gpu_budget_reconcile")
    if in_band(wanted, widths, min_gpus, max_gpus):
        return Guarded(wanted)
    fitted = fit_transition(current, wanted, widths, min_gpus, max_gpus)
    if fitted == current:
        return Guarded(current, "gpu_budget_guard_hold")
    return Guarded(fitted, "gpu_budget_fit")


def cap_change(current: int, wanted: int, cap: int, minimum: int = 0) -> int:
    """Return ``wanted``, at most ``cap`` replicas away from ``current``; getting back to a minimum may take more."""
    return max(min(max(wanted, current - cap), current + cap), minimum)


def _raised(wanted: Pair, widths: Widths, min_gpus: int) -> Pair:
    total = widths.total(wanted)
    if total == 0:
        half = min_gpus // 2
        prefill = half // widths.prefill
    else:
        prefill = math.ceil(wanted.prefill * min_gpus / total - 1e-9)
    rest = max(0, min_gpus - prefill * widths.prefill)
    return Pair(prefill, max(wanted.decode, -(-rest // widths.decode)))


def _lowered(wanted: Pair, widths: Widths, max_gpus: int, minima: Pair) -> Pair:
    total = widths.total(wanted)
    room = (max_gpus - minima.decode * widths.decode) // widths.prefill
    prefill = max(minima.prefill, min(room, wanted.prefill * max_gpus // total))
    return Pair(prefill, max(minima.decode, (max_gpus - prefill * widths.prefill) // widths.decode))


def _between(a: int, b: int) -> range:
    return range(min(a, b), max(a, b) + 1)


def _fitting(
    prefill: int, current: Pair, wanted: Pair, widths: Widths, min_gpus: int, max_gpus: int
) -> tuple[int, ...]:
    """Return the decode counts worth looking at: of those on the way that fit, the nearest to what is wanted."""
    low, high = min(current.decode, wanted.decode), max(current.decode, wanted.decode)
    if max_gpus >= 0:
        high = min(high, (max_gpus - prefill * widths.prefill) // widths.decode)
    floor = lowest(widths, min_gpus, max_gpus)
    low = max(low, -(-(floor - prefill * widths.prefill) // widths.decode)) if floor >= 0 else low
    return (min(max(wanted.decode, low), high),) if low <= high else ()


def _progress(current: Pair, wanted: Pair, pair: Pair) -> tuple[float, float]:
    """Return how far each role has come, 0..1; one that need not move counts as far as the other."""
    steps = [
        None if target == start else (now - start) / (target - start)
        for start, target, now in zip(current, wanted, pair, strict=True)
    ]
    known = [step for step in steps if step is not None] or [1.0]
    prefill, decode = (known[0] if step is None else step for step in steps)
    return prefill, decode

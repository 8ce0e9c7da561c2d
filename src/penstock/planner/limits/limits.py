"""Limits that hold after every stage, whatever plugin proposed: bounds, ceilings, floor; the ceiling always wins.

In this order: bounds of single pools; the ceilings of GPUs and of power; the GPU floor, as far as the ceilings let it.
Scarce resources are shared out four times, in each round to pools of a higher priority first: for the minima, for
what runs or starts already, for what is ordered, and for additions. So a shortage takes increases away before it
takes running replicas, and a pool that wants more never makes another one give something up. Within one priority a
share is proportional, prefill rounded down first and decode last.

Where the present fleet keeps the limits, every pool ends between its present and its proposed number: a pool without
a proposed change does not move, none moves the other way, and none moves less than the limits allow. So a floor that
forbids a decrease gives up as much of the decrease as it must, and makes no other pool grow. Only a fleet that is out
of the limits already (a ceiling lowered, a floor raised) is brought back by moving more.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penstock.planner.limits.capacity_limits import (
    SLACK,
    UNBOUND,
    Ceiling,
    Headroom,
    PoolDemand,
    ceilings_of,
    fits,
    fitting_replicas,
    gpus_of,
    ordered,
    subtract,
)
from penstock.planner.observation import Observation, PoolState
from penstock.planner.plugins.proposals import Reason
from penstock.planner.settings import BudgetSettings, PoolLimits

STATES_MAX = 4096
"""Sums that are followed where pools share a floor: only many pools of odd widths and powers give more."""


class Projected(NamedTuple):
    """Replicas of every pool, within all limits; ``bound``: the limits that changed something."""

    targets: dict[str, int]
    bound: tuple[Reason, ...] = ()


def project(
    wanted: Mapping[str, int], observation: Observation, budget: BudgetSettings, *, committed: Mapping[str, int]
) -> Projected:
    """Bring the proposed replicas within the limits.

    Args:
        wanted: pool -> replicas; observed pools that are not named keep the connector's desired number.
        committed: pool -> replicas that exist already and are paid, ready and starting.
    Returns: targets whose GPUs and watts are within the ceilings, even against minima or the floor. Projecting
        them again changes nothing.
    Cost: O(pools log pools), and O(replicas to add) for the floor.
    """
    slots = [_pool_demand(name, state, budget, committed) for _, name, state in observation.pools()]
    current = {slot.name: slot.pool.desired for slot in slots}
    projected = within(slots, {name: wanted.get(name, desired) for name, desired in current.items()}, budget)
    strangers = sorted(set(wanted) - set(current))
    if not strangers:
        return projected
    text = f"{', '.join(strangers)}: there is no such pool, so nothing is done about it"
    stranger = Reason(code="unknown_pool", text=text, facts={"pools": strangers})
    return Projected(projected.targets, (stranger, *projected.bound))


def within(
    slots: Sequence[PoolDemand], wanted: Mapping[str, int], budget: BudgetSettings, *, staged: bool = True
) -> Projected:
    """Bring the proposed replicas of some pools within the limits: the one place where this is decided.

    Args:
        wanted: replicas of every one of the pools.
        budget: only its parts that all pools share: bounds of single pools are in the slots.
        staged: in an exchange without a floor the pool that grows waits until the other one's replicas have left.
    """
    bound: list[Reason] = []
    goal = {slot.name: _within_pool_bounds(slot, wanted[slot.name], bound) for slot in slots}
    now = {slot.name: _within_pool_bounds(slot, slot.pool.desired, []) for slot in slots}
    targets, stuck = goal, set[str]()
    ceilings = ceilings_of(budget)
    if ceilings:
        targets, stuck = _under_ceilings(slots, goal, now, ceilings, staged and budget.min_gpus is None, bound)
    if budget.min_gpus is not None:
        targets = _above(slots, targets, goal, now, budget.min_gpus, ceilings, stuck, bound)
    return Projected(targets, tuple(bound))


def _pool_demand(name: str, state: PoolState, budget: BudgetSettings, committed: Mapping[str, int]) -> PoolDemand:
    limits = budget.pools.get(name, PoolLimits())
    most = [bound for bound in (limits.max_replicas, state.pool.limit) if bound is not None]
    return PoolDemand(
        name=name,
        pool=state.pool,
        watts=state.watts if limits.watts is None else limits.watts,
        priority=limits.priority,
        minimum=budget.min_replicas if limits.min_replicas is None else limits.min_replicas,
        maximum=min(most) if most else None,
        committed=max(0, committed.get(name, state.ready + len(state.starting))),
        draining=max(0, state.draining),
    )


def _within_pool_bounds(slot: PoolDemand, wanted: int, bound: list[Reason]) -> int:
    """Keep one pool's own bounds; the most that the machine can have wins over its minimum."""
    count = max(0, wanted, slot.minimum)
    if count != wanted:
        text = f"{slot.name} gets {count} instead of {wanted}: its minimum is {slot.minimum}"
        bound.append(Reason(code="pool_minimum", text=text, facts=_pool_facts(slot, wanted, count), pools=(slot.name,)))
    if slot.maximum is not None and count > slot.maximum:
        text = f"{slot.name} gets {slot.maximum} instead of {count}: it can have no more"
        bound.append(
            Reason(code="pool_maximum", text=text, facts=_pool_facts(slot, count, slot.maximum), pools=(slot.name,))
        )
        return slot.maximum
    return count


# --- under the ceilings -----------------------------------------------------------------------------------------------


def _under_ceilings(
    slots: Sequence[PoolDemand],
    wanted: dict[str, int],
    now: Mapping[str, int],
    ceilings: Sequence[Ceiling],
    staged: bool,
    bound: list[Reason],
) -> tuple[dict[str, int], set[str]]:
    """Share out what is scarce; return it, and the pools that can't have even their minima and so get no more.

    Args:
        staged: count leaving replicas until they have left, so that an exchange never exceeds the ceiling. With a
            floor they do not count, since the sum must not dip either.
    """
    minima = {slot.name: min(slot.minimum, wanted[slot.name]) for slot in slots}
    granted, room, stuck = _minima(slots, minima, ceilings)
    free = [slot for slot in slots if slot.name not in stuck]
    for there in ({slot.name: slot.committed for slot in free}, now):
        running = {slot.name: max(granted[slot.name], min(wanted[slot.name], there[slot.name])) for slot in free}
        room = _share_out_room(free, granted, running, ceilings, room)
    going = {s.name: s.draining + (max(0, s.committed - granted[s.name]) if staged else 0) for s in slots}
    later = dict(granted)
    _share_out_room(free, later, wanted, ceilings, room)
    left_now = [max(0.0, left - ceiling.of(slots, going)) for left, ceiling in zip(room, ceilings, strict=True)]
    _share_out_room(free, granted, wanted, ceilings, left_now)
    _explain(slots, wanted, later, minima, ceilings, bound)
    late = {name: [granted[name], later[name]] for name in granted if later[name] > granted[name]}
    if late:
        words = ", ".join(f"{name} {count} now and {then} then" for name, (count, then) in late.items())
        text = f"{words}: replicas that leave still hold what it takes, and {' and '.join(c.named for c in ceilings)}"
        bound.append(Reason(code="ceiling_staged", text=text, facts={"pools": late}, pools=tuple(late)))
    return granted, stuck


def _minima(
    slots: Sequence[PoolDemand], minima: Mapping[str, int], ceilings: Sequence[Ceiling]
) -> tuple[dict[str, int], Headroom, set[str]]:
    """Give minima, higher priorities first; return the grants, the room left, and the pools without their minimum.

    Where a model's prefill and decode minima do not fit together, one replica of each role is tried; else it gets none,
    since one role without the other serves no request.
    """
    granted = {slot.name: 0 for slot in slots}
    room: Headroom = [ceiling.most for ceiling in ceilings]
    stuck = set[str]()
    units: dict[tuple[str, str], list[PoolDemand]] = {}
    for slot in ordered(slots):
        units.setdefault(slot.unit, []).append(slot)
    for unit in sorted(units.values(), key=lambda each: -max(slot.priority for slot in each)):
        least = {slot.name: minima[slot.name] for slot in unit}
        if not fits(unit, least, ceilings, room):
            stuck |= {slot.name for slot in unit}
            least = _smallest_useful_part(unit, minima, ceilings, room)
        granted |= least
        room = [left - ceiling.of(unit, least) for left, ceiling in zip(room, ceilings, strict=True)]
    return granted, room, stuck


def _smallest_useful_part(
    unit: Sequence[PoolDemand], minima: Mapping[str, int], ceilings: Sequence[Ceiling], room: Headroom
) -> dict[str, int]:
    """Return the smallest useful part of a unit whose minima do not fit."""
    none = {slot.name: 0 for slot in unit}
    if unit[0].pool.role == "aggregated":
        return {unit[0].name: fitting_replicas(unit[0], ceilings, room)}
    least = dict(none)
    for role in dict.fromkeys(slot.pool.role for slot in unit):
        able = [slot for slot in unit if slot.pool.role == role and minima[slot.name] > 0]
        if able:
            least[min(able, key=lambda slot: (slot.pool.gpus, -slot.committed, slot.name)).name] = 1
    return least if fits(unit, least, ceilings, room) else none


def _share_out_room(
    slots: Sequence[PoolDemand],
    granted: dict[str, int],
    upto: Mapping[str, int],
    ceilings: Sequence[Ceiling],
    room: Headroom,
) -> Headroom:
    """Raise ``granted`` towards ``upto`` in place, higher priorities first; return the room that is left.

    Replicas left over by rounding go to the pool that lacks most, one at a time.
    """
    queue = ordered(slots)
    for priority in dict.fromkeys(slot.priority for slot in queue):
        group = [slot for slot in queue if slot.priority == priority and upto[slot.name] > granted[slot.name]]
        budget: Headroom = [left + ceiling.of(group, granted) for left, ceiling in zip(room, ceilings, strict=True)]
        scarce = not fits(group, upto, ceilings, budget)
        for place, slot in enumerate(group):
            high = upto[slot.name]
            if scarce:
                most = _fair(group[place:], granted, upto, ceilings, budget)
                high = max(granted[slot.name], min(high, most))
            granted[slot.name] = high
            budget = subtract(budget, slot, high, ceilings)
        while lacking := [s for s in group if granted[s.name] < upto[s.name] and fitting_replicas(s, ceilings, budget)]:
            slot = min(lacking, key=lambda slot: granted[slot.name] / upto[slot.name])
            granted[slot.name] += 1
            budget = subtract(budget, slot, 1, ceilings)
        room = budget
    return room


def _fair(
    group: Sequence[PoolDemand],
    granted: Mapping[str, int],
    upto: Mapping[str, int],
    ceilings: Sequence[Ceiling],
    budget: Headroom,
) -> int:
    """Return the first pool's share of a budget, rounded down; the last one's is all that is left."""
    slot, rest = group[0], group[1:]
    most = float(upto[slot.name])
    for ceiling, left in zip(ceilings, budget, strict=True):
        price = ceiling.cost(slot)
        if price > 0.0:
            share = upto[slot.name] * left / ceiling.of(group, upto) if rest else most
            most = min(most, share, (left - ceiling.of(rest, granted)) / price)
    return int(most + SLACK)


def _explain(
    slots: Sequence[PoolDemand],
    wanted: Mapping[str, int],
    granted: Mapping[str, int],
    minima: Mapping[str, int],
    ceilings: Sequence[Ceiling],
    bound: list[Reason],
) -> None:
    cut = [slot for slot in slots if granted[slot.name] < wanted[slot.name]]
    if not cut:
        return
    # A pool that merely keeps its replicas was not cut: its increase was held. The classic loops have a word for it.
    holds = all(granted[slot.name] >= min(slot.committed, wanted[slot.name]) for slot in cut)
    words = ", ".join(f"{slot.name} {granted[slot.name]} instead of {wanted[slot.name]}" for slot in cut)
    facts = {"wanted": {s.name: wanted[s.name] for s in cut}, "got": {s.name: granted[s.name] for s in cut}}
    for ceiling in ceilings:
        total, unit = ceiling.of(slots, wanted), "GPUs" if ceiling.kind == "gpu" else "W"
        if total > ceiling.most + SLACK:
            text = f"{words}: {total:g} {unit} were wanted, {ceiling.named}"
            code = f"{ceiling.kind}_ceiling_hold" if holds else f"{ceiling.kind}_ceiling"
            bound.append(
                Reason(
                    code=code,
                    text=text,
                    facts={**facts, "asked": total, "ceiling": ceiling.most},
                    pools=tuple(s.name for s in cut),
                )
            )
    under = [slot for slot in slots if granted[slot.name] < minima[slot.name]]
    if under:
        words = ", ".join(f"{slot.name} {granted[slot.name]} of {minima[slot.name]}" for slot in under)
        reasons = " and ".join(ceiling.named for ceiling in ceilings)
        text = f"not even the minima fit: {words}; {reasons}: raise that, or lower the minima"
        facts = {"got": {s.name: granted[s.name] for s in under}, "minima": {s.name: minima[s.name] for s in under}}
        bound.append(Reason(code="ceiling_over_minimum", text=text, facts=facts, pools=tuple(s.name for s in under)))


# --- above the floor --------------------------------------------------------------------------------------------------


def _above(
    slots: Sequence[PoolDemand],
    wanted: dict[str, int],
    goal: Mapping[str, int],
    now: Mapping[str, int],
    floor: int,
    ceilings: Sequence[Ceiling],
    stuck: set[str],
    bound: list[Reason],
) -> dict[str, int]:
    """Raise the sum of GPUs to the floor; the ceilings stay where they are.

    First changes are given up, as few as are enough (`_nearest_to_floor`). Only where the present fleet is under the
    floor, more is started: of pools that should grow, else of those that should stay, last of those that should shrink.

    Args:
        wanted: what the ceilings left of ``goal``.
    """
    taken = Ceiling("gpu", float(floor), gpus_of)
    total = taken.of(slots, wanted)
    if total >= floor:
        return wanted
    able = [slot for slot in ordered(slots) if slot.name not in stuck and slot.pool.gpus > 0]
    going = {slot.name: slot.draining for slot in slots}
    raised = _nearest_to_floor(able, slots, wanted, goal, now, floor, ceilings, going)
    shrinking = [slot for slot in able if goal[slot.name] < now[slot.name]]
    growing = [slot for slot in able if goal[slot.name] > now[slot.name]]
    idle = [slot for slot in able if goal[slot.name] == now[slot.name]]
    most = {slot.name: UNBOUND if slot.maximum is None else slot.maximum for slot in slots}
    for group in (growing, idle, shrinking):
        there = {slot.name: raised[slot.name] or int(not taken.of(slots, raised)) for slot in slots}
        raised = _raised_to_floor(group, slots, raised, most, there, floor, ceilings, going)
    reached = taken.of(slots, raised)
    changed = {slot.name: raised[slot.name] for slot in slots if raised[slot.name] != wanted[slot.name]}
    if changed:
        words = ", ".join(f"{name} {count} instead of {wanted[name]}" for name, count in changed.items())
        text = f"{words}: {total:g} GPUs were left, planner.budget.min_gpus is {floor}"
        bound.append(Reason(code="gpu_floor", text=text, facts={"got": changed, "floor": floor}, pools=tuple(changed)))
    if reached < floor:
        text = f"planner.budget.min_gpus {floor} is not reached, only {reached:g}: ceilings and pool bounds win over it"
        pools = tuple(slot.name for slot in slots)
        bound.append(Reason(code="gpu_floor_missed", text=text, facts={"floor": floor, "gpus": reached}, pools=pools))
    return raised


def _nearest_to_floor(
    able: Sequence[PoolDemand],
    slots: Sequence[PoolDemand],
    wanted: Mapping[str, int],
    goal: Mapping[str, int],
    now: Mapping[str, int],
    floor: int,
    ceilings: Sequence[Ceiling],
    going: Mapping[str, int],
) -> dict[str, int]:
    """Return the state between the goal and the present that takes at least the floor, or comes nearest to it.

    The fewest GPUs' worth of change is given up; then no pool gets more than the ceilings left of the goal, as far as
    replicas come out even; then each pool gives up an equal share of its change. Running replicas can simply stay, but
    where replicas start, those that leave still count against the ceilings.

    Cost: O(replicas to move x distinct sums of GPUs and watts), of which `STATES_MAX` are followed.
    """
    counted = [Ceiling("gpu", float(floor), gpus_of), *ceilings]
    growing = [slot for slot in able if goal[slot.name] > now[slot.name]]
    span = {slot.name: sorted((wanted[slot.name], goal[slot.name], now[slot.name])) for slot in able}
    moving = [slot for slot in able if span[slot.name][0] < span[slot.name][-1]]
    fixed = [slot for slot in slots if slot not in moving]
    used = tuple(each.of(fixed, wanted) for each in counted)
    # By what is used and whether any replica starts: the least that is given up, the excess over its share, how uneven
    # that is, and the counts that do it.
    Way = tuple[float, float, float, tuple[int, ...]]
    ways: dict[tuple[tuple[float, ...], bool], Way] = {
        (used, any(wanted[slot.name] > slot.committed for slot in fixed)): (0.0, 0.0, 0.0, ())
    }
    for slot in moving:
        low, _, high = span[slot.name]
        more: dict[tuple[tuple[float, ...], bool], Way] = {}
        for (used, starts), (lost, above, uneven, counts) in sorted(ways.items(), key=lambda each: each[1])[
            :STATES_MAX
        ]:
            for count in range(low, high + 1):
                key = (
                    tuple(part + count * each.cost(slot) for part, each in zip(used, counted, strict=True)),
                    starts or count > slot.committed,
                )
                away, more_than = abs(goal[slot.name] - count) * slot.pool.gpus, max(0, count - wanted[slot.name])
                way = (
                    lost + away,
                    above + (more_than * slot.pool.gpus if slot in growing else 0),
                    uneven + away * away / (high - low) / slot.pool.gpus,
                    (*counts, count),
                )
                more[key] = min(way, more.get(key, way))
        ways = more
    left = [each.most - each.of(slots, going) for each in ceilings]
    fitting = [
        (max(0.0, floor - used[0]), way)
        for (used, starts), way in ways.items()
        if all(
            part <= (room if starts else each.most) + SLACK
            for part, room, each in zip(used[1:], left, ceilings, strict=True)
        )
    ]
    counts = min(fitting)[1][3] if fitting else tuple(wanted[slot.name] for slot in moving)
    return {**wanted, **dict(zip((slot.name for slot in moving), counts, strict=True))}


def _raised_to_floor(
    group: Sequence[PoolDemand],
    slots: Sequence[PoolDemand],
    start: Mapping[str, int],
    upto: Mapping[str, int],
    weights: Mapping[str, int],
    floor: int,
    ceilings: Sequence[Ceiling],
    going: Mapping[str, int],
) -> dict[str, int]:
    """Return ``start`` with the pools of a group raised until all pools take the floor, and no further than that.

    The lack is shared in proportion to ``weights``, rounded up for the first of the group as long as that is
    not too much, and the rest goes to the last one first.

    Args:
        upto: how far each may be raised.
        going: replicas that leave and still count against the ceilings.
    """
    taken = Ceiling("gpu", float(floor), gpus_of)
    filled = dict(start)

    def missing() -> float:
        return floor - taken.of(slots, filled)

    def add(slot: PoolDemand, count: int) -> None:
        left = [ceiling.most - ceiling.of(slots, filled) - ceiling.of(slots, going) for ceiling in ceilings]
        filled[slot.name] += max(
            0, min(count, fitting_replicas(slot, ceilings, left), upto[slot.name] - filled[slot.name])
        )

    for place, slot in enumerate(group):
        share = taken.of(group[place:], weights)
        if missing() > 0 and share > 0:
            part = math.ceil(weights[slot.name] * missing() / share - SLACK)
            add(slot, min(part, int(missing() // slot.pool.gpus)))
    for slot in reversed(group):  # left over by rounding and by bounds of single pools
        add(slot, math.ceil(missing() / slot.pool.gpus))
    for slot in group:  # a wide replica may have made a narrow one needless
        filled[slot.name] -= min(filled[slot.name] - start[slot.name], max(0, int(-missing() // slot.pool.gpus)))
    return filled


def _pool_facts(slot: PoolDemand, wanted: int, got: int) -> dict[str, object]:
    return {"pool": slot.name, "wanted": wanted, "got": got}

"""What may be of what is wanted? The limits that hold after every stage, whoever proposed it; the ceiling always wins.

In this order: bounds of single pools; the ceilings of GPUs and of power; the GPU floor, as far as the ceilings let it.
What is scarce goes round three times, in each round to pools of a higher priority first: for the minima, for
what runs or starts already, and for what is to come on top. So a shortage takes increases away before it takes what
runs, and a pool that wants more never makes another one give something up. Within one priority a share is
proportional, prefill rounded down first and decode last (`penstock.planner.budget` has the classic rule for a pair).
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penstock.planner.proposals import Because
from penstock.planner.scarce import (
    SLACK,
    Ceiling,
    Room,
    Slot,
    ceilings_of,
    fits,
    gpus_of,
    less,
    ordered,
    whole,
)
from penstock.planner.seen import Observation, PoolSeen
from penstock.planner.settings import BudgetSettings, PoolLimits


class Projected(NamedTuple):
    """Replicas of every pool that was seen, within all limits; ``bound``: the limits that changed something."""

    targets: dict[str, int]
    bound: tuple[Because, ...] = ()


def project(
    wanted: Mapping[str, int], observation: Observation, budget: BudgetSettings, *, committed: Mapping[str, int]
) -> Projected:
    """Bring what is wanted within the limits.

    Args:
        wanted: pool -> replicas; pools that are seen and not named are wanted as the connector has them.
        committed: pool -> replicas that exist already and are paid, ready and starting.
    Returns: targets whose GPUs and watts are within the ceilings, also where minima or the floor say otherwise. Putting
        them in again changes nothing.
    Cost: O(pools log pools), and O(replicas to add) for the floor.
    """
    said: list[Because] = []
    seen = {name: pool for _, name, pool in observation.pools()}
    strangers = sorted(set(wanted) - set(seen))
    if strangers:
        text = f"{', '.join(strangers)}: there is no such pool, so nothing is done about it"
        said.append(Because(code="unknown_pool", text=text, facts={"pools": strangers}))
    slots = [_slot(model, name, pool, budget, committed) for model, name, pool in observation.pools()]
    found = {slot.name: _bounded(slot, wanted.get(slot.name, seen[slot.name].desired), said) for slot in slots}
    stuck: set[str] = set()
    ceilings = ceilings_of(budget)
    if ceilings:
        found, stuck = _under(slots, found, ceilings, budget.min_gpus is None, said)
    if budget.min_gpus is not None:
        found = _above(slots, found, budget.min_gpus, ceilings, stuck, said)
    return Projected(found, tuple(said))


def _slot(model: str, name: str, pool: PoolSeen, budget: BudgetSettings, committed: Mapping[str, int]) -> Slot:
    limits = budget.pools.get(name, PoolLimits())
    most = [bound for bound in (limits.max_replicas, pool.limit) if bound is not None]
    return Slot(
        name=name,
        model=model,
        role=pool.role,
        gpus=max(0, pool.gpus),
        watts=pool.watts if limits.watts is None else limits.watts,
        priority=limits.priority,
        minimum=budget.min_replicas if limits.min_replicas is None else limits.min_replicas,
        maximum=min(most) if most else None,
        committed=max(0, committed.get(name, pool.ready + len(pool.starting))),
        draining=max(0, pool.draining),
    )


def _bounded(slot: Slot, wanted: int, said: list[Because]) -> int:
    """Keep one pool's own bounds; what the machine can have wins over its minimum."""
    found = max(0, wanted, slot.minimum)
    if found != wanted:
        text = f"{slot.name} gets {found} instead of {wanted}: its minimum is {slot.minimum}"
        said.append(Because(code="pool_minimum", text=text, facts=_facts(slot, wanted, found)))
    if slot.maximum is not None and found > slot.maximum:
        text = f"{slot.name} gets {slot.maximum} instead of {found}: it can have no more"
        said.append(Because(code="pool_maximum", text=text, facts=_facts(slot, found, slot.maximum)))
        return slot.maximum
    return found


# --- under the ceilings -----------------------------------------------------------------------------------------------


def _under(
    slots: Sequence[Slot],
    wanted: dict[str, int],
    ceilings: Sequence[Ceiling],
    staged: bool,
    said: list[Because],
) -> tuple[dict[str, int], set[str]]:
    """Share out what is scarce; return it, and the pools that can't have even their minima and so get no more.

    Args:
        staged: let what leaves count until it has left, so that an exchange never takes more than the ceiling. With a
            floor it does not, since the sum must not dip either.
    """
    minima = {slot.name: min(slot.minimum, wanted[slot.name]) for slot in slots}
    found, room, stuck = _minima(slots, minima, ceilings)
    free = [slot for slot in slots if slot.name not in stuck]
    kept = {slot.name: max(found[slot.name], min(wanted[slot.name], slot.committed)) for slot in free}
    room = _share(free, found, kept, ceilings, room)
    going = {s.name: s.draining + (max(0, s.committed - found[s.name]) if staged else 0) for s in slots}
    later = dict(found)
    _share(free, later, wanted, ceilings, room)
    now = [max(0.0, left - ceiling.of(slots, going)) for left, ceiling in zip(room, ceilings, strict=True)]
    _share(free, found, wanted, ceilings, now)
    _explain(slots, wanted, later, minima, ceilings, said)
    late = {name: [found[name], later[name]] for name in found if later[name] > found[name]}
    if late:
        words = ", ".join(f"{name} {count} now and {then} then" for name, (count, then) in late.items())
        text = f"{words}: replicas that leave still hold what it takes, and {' and '.join(c.named for c in ceilings)}"
        said.append(Because(code="ceiling_staged", text=text, facts={"pools": late}))
    return found, stuck


def _minima(
    slots: Sequence[Slot], minima: Mapping[str, int], ceilings: Sequence[Ceiling]
) -> tuple[dict[str, int], Room, set[str]]:
    """Give minima, higher priorities first; return what was given, what is left, and who did not get all of it.

    Where a model's prefill and decode minima do not fit together, one replica of each role is tried; else it gets none,
    since one role without the other serves nobody.
    """
    found = {slot.name: 0 for slot in slots}
    room: Room = [ceiling.most for ceiling in ceilings]
    stuck = set[str]()
    units: dict[tuple[str, str], list[Slot]] = {}
    for slot in ordered(slots):
        units.setdefault(slot.unit, []).append(slot)
    for unit in sorted(units.values(), key=lambda each: -max(slot.priority for slot in each)):
        least = {slot.name: minima[slot.name] for slot in unit}
        if not fits(unit, least, ceilings, room):
            stuck |= {slot.name for slot in unit}
            least = _least(unit, minima, ceilings, room)
        found |= least
        room = [left - ceiling.of(unit, least) for left, ceiling in zip(room, ceilings, strict=True)]
    return found, room, stuck


def _least(unit: Sequence[Slot], minima: Mapping[str, int], ceilings: Sequence[Ceiling], room: Room) -> dict[str, int]:
    """Return what still makes sense of a unit whose minima do not fit."""
    none = {slot.name: 0 for slot in unit}
    if unit[0].role == "aggregated":
        return {unit[0].name: whole(unit[0], ceilings, room)}
    least = dict(none)
    for role in dict.fromkeys(slot.role for slot in unit):
        able = [slot for slot in unit if slot.role == role and minima[slot.name] > 0]
        if able:
            least[min(able, key=lambda slot: (slot.gpus, -slot.committed, slot.name)).name] = 1
    return least if fits(unit, least, ceilings, room) else none


def _share(
    slots: Sequence[Slot], found: dict[str, int], upto: Mapping[str, int], ceilings: Sequence[Ceiling], room: Room
) -> Room:
    """Raise ``found`` towards ``upto`` in place, higher priorities first; return the room that is left.

    What rounding leaves over goes to whoever lacks most, one replica at a time.
    """
    queue = ordered(slots)
    for priority in dict.fromkeys(slot.priority for slot in queue):
        group = [slot for slot in queue if slot.priority == priority and upto[slot.name] > found[slot.name]]
        budget: Room = [left + ceiling.of(group, found) for left, ceiling in zip(room, ceilings, strict=True)]
        scarce = not fits(group, upto, ceilings, budget)
        for place, slot in enumerate(group):
            high = upto[slot.name]
            if scarce:
                most = _fair(group[place:], found, upto, ceilings, budget)
                high = max(found[slot.name], min(high, most))
            found[slot.name] = high
            budget = less(budget, slot, high, ceilings)
        while lacking := [s for s in group if found[s.name] < upto[s.name] and whole(s, ceilings, budget)]:
            slot = min(lacking, key=lambda slot: found[slot.name] / upto[slot.name])
            found[slot.name] += 1
            budget = less(budget, slot, 1, ceilings)
        room = budget
    return room


def _fair(
    group: Sequence[Slot],
    found: Mapping[str, int],
    upto: Mapping[str, int],
    ceilings: Sequence[Ceiling],
    budget: Room,
) -> int:
    """Return the first one's share of a budget, rounded down; the last one's is all that is left."""
    slot, rest = group[0], group[1:]
    most = float(upto[slot.name])
    for ceiling, left in zip(ceilings, budget, strict=True):
        price = ceiling.cost(slot)
        if price > 0.0:
            share = upto[slot.name] * left / ceiling.of(group, upto) if rest else most
            most = min(most, share, (left - ceiling.of(rest, found)) / price)
    return int(most + SLACK)


def _explain(
    slots: Sequence[Slot],
    wanted: Mapping[str, int],
    found: Mapping[str, int],
    minima: Mapping[str, int],
    ceilings: Sequence[Ceiling],
    said: list[Because],
) -> None:
    cut = [slot for slot in slots if found[slot.name] < wanted[slot.name]]
    if not cut:
        return
    # A pool that merely keeps what it has was not cut: its increase was held. The classic loops have a word for it.
    held = all(found[slot.name] >= min(slot.committed, wanted[slot.name]) for slot in cut)
    words = ", ".join(f"{slot.name} {found[slot.name]} instead of {wanted[slot.name]}" for slot in cut)
    facts = {"wanted": {s.name: wanted[s.name] for s in cut}, "got": {s.name: found[s.name] for s in cut}}
    for ceiling in ceilings:
        asked, unit = ceiling.of(slots, wanted), "GPUs" if ceiling.kind == "gpu" else "W"
        if asked > ceiling.most + SLACK:
            text = f"{words}: {asked:g} {unit} were wanted, {ceiling.named}"
            code = f"{ceiling.kind}_ceiling_hold" if held else f"{ceiling.kind}_ceiling"
            said.append(Because(code=code, text=text, facts={**facts, "asked": asked, "ceiling": ceiling.most}))
    under = [slot for slot in slots if found[slot.name] < minima[slot.name]]
    if under:
        words = ", ".join(f"{slot.name} {found[slot.name]} of {minima[slot.name]}" for slot in under)
        reasons = " and ".join(ceiling.named for ceiling in ceilings)
        text = f"not even the minima fit: {words}; {reasons}: raise that, or lower the minima"
        facts = {"got": {s.name: found[s.name] for s in under}, "minima": {s.name: minima[s.name] for s in under}}
        said.append(Because(code="ceiling_over_minimum", text=text, facts=facts))


# --- above the floor --------------------------------------------------------------------------------------------------


def _above(
    slots: Sequence[Slot],
    wanted: dict[str, int],
    floor: int,
    ceilings: Sequence[Ceiling],
    stuck: set[str],
    said: list[Because],
) -> dict[str, int]:
    """Raise the sum of GPUs to the floor: in proportion to what is there, prefill rounded up first, and from nothing
    in equal shares of replicas. The ceilings stay where they are, and what is leaving counts until it has left."""
    taken = Ceiling("gpu", float(floor), gpus_of)
    total = taken.of(slots, wanted)
    if total >= floor:
        return wanted
    found = dict(wanted)
    able = [slot for slot in ordered(slots) if slot.name not in stuck and slot.gpus > 0]
    going = {slot.name: slot.draining for slot in slots}

    def room(slot: Slot) -> int:
        """Return how many more of it fit."""
        left = [ceiling.most - ceiling.of(slots, found) - ceiling.of(slots, going) for ceiling in ceilings]
        most = whole(slot, ceilings, left)
        return most if slot.maximum is None else max(0, min(most, slot.maximum - found[slot.name]))

    there = {slot.name: found[slot.name] or int(not total) for slot in able}
    for place, slot in enumerate(able):
        rest = able[place:]
        missing, share = floor - taken.of(slots, found), taken.of(rest, there)
        if missing > 0 and share > 0:
            upto = there[slot.name] * (missing + taken.of(rest, found)) / share
            found[slot.name] += min(max(0, math.ceil(upto - SLACK) - found[slot.name]), room(slot))
    for slot in reversed(able):  # what bounds of single pools left over
        missing = floor - taken.of(slots, found)
        found[slot.name] += max(0, min(room(slot), math.ceil(missing / slot.gpus)))
    reached = taken.of(slots, found)
    changed = {slot.name: found[slot.name] for slot in slots if found[slot.name] != wanted[slot.name]}
    if changed:
        words = ", ".join(f"{name} {count} instead of {wanted[name]}" for name, count in changed.items())
        text = f"{words}: {total:g} GPUs were left, planner.budget.min_gpus is {floor}"
        said.append(Because(code="gpu_floor", text=text, facts={"got": changed, "floor": floor}))
    if reached < floor:
        text = f"planner.budget.min_gpus {floor} is not reached, only {reached:g}: ceilings and pool bounds win over it"
        said.append(Because(code="gpu_floor_missed", text=text, facts={"floor": floor, "gpus": reached}))
    return found


def _facts(slot: Slot, wanted: int, got: int) -> dict[str, object]:
    return {"pool": slot.name, "wanted": wanted, "got": got}

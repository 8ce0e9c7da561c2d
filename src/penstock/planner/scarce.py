"""What is scarce, and what does a replica take of it? Pools as their limits see them, ceilings, and room under them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from penstock.kernel.values import Role
from penstock.planner.settings import BudgetSettings

ORDER: dict[Role, int] = {"prefill": 0, "encode": 1, "aggregated": 2, "decode": 3}
"""Who is rounded down first where a budget is shared."""
SLACK = 1e-6
"""Watts are floats: so much over a ceiling is none."""
UNBOUND = 1 << 30
"""Replicas of a pool that takes nothing scarce: its own bounds hold."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One pool, as its limits see it. ``watts``: None where nobody says, and then they are not counted."""

    name: str
    model: str
    role: Role
    gpus: int
    watts: float | None
    priority: int
    minimum: int
    maximum: int | None
    committed: int
    draining: int

    @property
    def unit(self) -> tuple[str, str]:
        """Whose minima are worth something only together: prefill without decode serves nobody."""
        return (self.model, self.name if self.role == "aggregated" else "")


class Ceiling(NamedTuple):
    """One thing that is scarce. ``cost``: what one replica takes of it."""

    kind: Literal["gpu", "power"]
    most: float
    cost: Callable[[Slot], float]

    def of(self, slots: Iterable[Slot], replicas: Mapping[str, int]) -> float:
        """Return what so many replicas take."""
        return sum(replicas[slot.name] * self.cost(slot) for slot in slots)

    @property
    def named(self) -> str:
        return f"planner.budget.max_gpus is {self.most:g}" if self.kind == "gpu" else f"the ceiling is {self.most:g} W"


Room = Sequence[float]
"""What is left under each ceiling."""


def gpus_of(slot: Slot) -> float:
    """Return the GPUs of one replica."""
    return float(slot.gpus)


def watts_of(slot: Slot) -> float:
    """Return the power of one replica; 0 where nobody says, which is not counted."""
    return slot.watts or 0.0


def ceilings_of(budget: BudgetSettings) -> list[Ceiling]:
    """Return the ceilings that a budget has."""
    found = [] if budget.max_gpus is None else [Ceiling("gpu", float(budget.max_gpus), gpus_of)]
    return found if budget.watts is None else [*found, Ceiling("power", budget.watts, watts_of)]


def fits(slots: Sequence[Slot], replicas: Mapping[str, int], ceilings: Sequence[Ceiling], room: Room) -> bool:
    """Say whether so many replicas of some pools fit into the room."""
    return all(c.of(slots, replicas) <= left + SLACK for c, left in zip(ceilings, room, strict=True))


def whole(slot: Slot, ceilings: Sequence[Ceiling], room: Room) -> int:
    """Return how many replicas of a pool fit."""
    prices = ((left, ceiling.cost(slot)) for left, ceiling in zip(room, ceilings, strict=True))
    return min((int(max(0.0, left + SLACK) // price) for left, price in prices if price > 0.0), default=UNBOUND)


def less(room: Room, slot: Slot, replicas: int, ceilings: Sequence[Ceiling]) -> Room:
    """Return the room that is left when a pool has so many more replicas."""
    return [left - replicas * ceiling.cost(slot) for left, ceiling in zip(room, ceilings, strict=True)]


def ordered(slots: Sequence[Slot]) -> list[Slot]:
    """Return the pools as they are served: higher priorities first, decode last."""
    return sorted(slots, key=lambda slot: (-slot.priority, ORDER[slot.role], slot.name))

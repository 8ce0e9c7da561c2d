"""Capacity limits: pools as their limits see them, the ceilings of GPUs and power, and the room under them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from penstock.kernel.values import Pool, Role
from penstock.planner.settings import BudgetSettings

ORDER: dict[Role, int] = {"prefill": 0, "encode": 1, "aggregated": 2, "decode": 3}
"""Order of rounding down where a budget is shared; the lowest is first."""
SLACK = 1e-6
"""Watts are floats: so much over a ceiling is no excess."""
UNBOUND = 1 << 30
"""Replicas of a pool that needs no scarce resource: its own bounds hold."""


@dataclass(frozen=True, slots=True)
class PoolDemand:
    """One pool, as its limits see it.

    Args:
        watts: of one replica; None where no setting gives them, and then they are not counted.
        committed: those of the pool's desired replicas that run or start.
    """

    name: str
    pool: Pool
    watts: float | None
    priority: int
    minimum: int
    maximum: int | None
    committed: int
    draining: int

    @property
    def unit(self) -> tuple[str, str]:
        """Pools whose minima are useful only together: prefill without decode serves no request."""
        return (self.pool.model, self.name if self.pool.role == "aggregated" else "")


class Ceiling(NamedTuple):
    """One scarce resource. ``cost``: one replica's share of it."""

    kind: Literal["gpu", "power"]
    most: float
    cost: Callable[[PoolDemand], float]

    def of(self, slots: Iterable[PoolDemand], replicas: Mapping[str, int]) -> float:
        """Return how much of it so many replicas take."""
        return sum(replicas[slot.name] * self.cost(slot) for slot in slots)

    @property
    def named(self) -> str:
        return f"planner.budget.max_gpus is {self.most:g}" if self.kind == "gpu" else f"the ceiling is {self.most:g} W"


Headroom = Sequence[float]
"""What is left under each ceiling."""


def gpus_of(slot: PoolDemand) -> float:
    """Return the GPUs of one replica."""
    return float(slot.pool.gpus)


def watts_of(slot: PoolDemand) -> float:
    """Return the power of one replica; 0 where no setting gives it, which is not counted."""
    return slot.watts or 0.0


def ceilings_of(budget: BudgetSettings) -> list[Ceiling]:
    """Return the ceilings that a budget has."""
    ceilings = [] if budget.max_gpus is None else [Ceiling("gpu", float(budget.max_gpus), gpus_of)]
    return ceilings if budget.watts is None else [*ceilings, Ceiling("power", budget.watts, watts_of)]


def fits(slots: Sequence[PoolDemand], replicas: Mapping[str, int], ceilings: Sequence[Ceiling], room: Headroom) -> bool:
    """Return whether so many replicas of some pools fit into the room."""
    return all(c.of(slots, replicas) <= left + SLACK for c, left in zip(ceilings, room, strict=True))


def fitting_replicas(slot: PoolDemand, ceilings: Sequence[Ceiling], room: Headroom) -> int:
    """Return how many replicas of a pool fit."""
    prices = ((left, ceiling.cost(slot)) for left, ceiling in zip(room, ceilings, strict=True))
    return min((int(max(0.0, left + SLACK) // price) for left, price in prices if price > 0.0), default=UNBOUND)


def subtract(room: Headroom, slot: PoolDemand, replicas: int, ceilings: Sequence[Ceiling]) -> Headroom:
    """Return the room that is left when a pool has so many more replicas."""
    return [left - replicas * ceiling.cost(slot) for left, ceiling in zip(room, ceilings, strict=True)]


def ordered(slots: Sequence[PoolDemand]) -> list[PoolDemand]:
    """Return the pools in the order of service: higher priorities first, decode last."""
    return sorted(slots, key=lambda slot: (-slot.priority, ORDER[slot.pool.role], slot.name))

"""Victim rule: which replicas go first where a pool shrinks, and which change their role.

One that does not serve goes first, then one that frontends do not know or are to give nothing (it was on its way out
before), then one that is outdated, then the youngest, whose cache is the emptiest.
"""

from collections.abc import Iterable

from penstock.fleet.fleet_state import Life
from penstock.kernel.values import Pool, Role


def leaving_first(lives: Iterable[Life]) -> list[Life]:
    """Sort replicas: those that go first stand first."""

    def worth(life: Life) -> tuple[bool | int, ...]:
        return (
            life.state == "ready",
            life.role is not None and not life.aside,
            not life.outdated,
            -life.created,
            -life.number,
        )

    return sorted(lives, key=worth)


def to_flip(pools: Iterable[Pool], model: str, role: Role, count: int) -> list[str]:
    """Return the replicas of a role that are given another one.

    Pools do not show when a replica came: the highest number stands for the youngest.
    """
    serving = [
        replica.id
        for pool in pools
        if pool.model == model
        for replica in pool.replicas or ()
        if replica.state == "ready" and replica.role == role
    ]
    return sorted(serving, key=_number_and_base, reverse=True)[:count]


def _number_and_base(worker: str) -> tuple[int, str]:
    base, _, number = worker.rpartition("-")
    return (int(number) if number.isdigit() else 0, base)

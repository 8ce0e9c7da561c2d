"""Pool states in one call, from the fields of the pool and those that are observed of it."""

from typing import Any

from penstock.kernel.values import Pool
from penstock.planner.observation import PoolState


def pool_state(**told: Any) -> PoolState:
    """Return the state of a pool of model "m", aggregated if nothing else is told."""
    own = {name: told.pop(name) for name in Pool.__struct_fields__ if name in told}
    return PoolState(pool=Pool(**{"model": "m", **own}), **told)

"""How long does a replica take from the decision until it serves? What was measured, and who is on the way."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.kernel.stats import percentile
from penstock.planner.seen import PoolSeen

KEPT = 32
"""Start-ups that are remembered of each kind of replica."""


class Coming(NamedTuple):
    """Replicas of a pool that are starting: in how many seconds each is expected (0 is any moment), the soonest
    first; and how many have been given up because they take too long."""

    due: tuple[float, ...] = ()
    given_up: int = 0

    @property
    def number(self) -> int:
        return len(self.due)


class StartUps:
    """Measured start-up times by model, kind of GPU, and whether the machine had what it needs (warm).

    Args:
        assumed: seconds for those never measured.
    """

    def __init__(self, assumed: float = 60.0) -> None:
        self.assumed = assumed
        self._seen: dict[str, list[float]] = {}

    def note(self, model: str, pool: PoolSeen) -> None:
        """Take in what a look says of replicas that came to serve."""
        if pool.came:
            kept = self._seen.setdefault(_key(model, pool), [])
            kept += pool.came
            del kept[:-KEPT]

    def quantile(self, model: str, pool: PoolSeen, q: float) -> float:
        """Return the q-quantile (0..1) in seconds. Never measured here: of the other warmth, else what is assumed."""
        for warm in (pool.warm, not pool.warm):
            kept = self._seen.get(_key(model, pool, warm))
            if kept:
                return percentile(sorted(kept), q)
        return self.assumed

    def measured(self, model: str, pool: PoolSeen) -> int:
        """Return how many start-ups of this kind are known."""
        return len(self._seen.get(_key(model, pool), ()))

    def coming(self, model: str, pool: PoolSeen, deadline: float) -> Coming:
        """Say when the starting ones are expected; those older than ``deadline`` seconds count no more."""
        usual = self.quantile(model, pool, 0.9)
        alive = [max(0.0, usual - age) for age in pool.starting if age <= deadline]
        return Coming(tuple(sorted(alive)), len(pool.starting) - len(alive) + pool.failed)

    def snapshot(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return {"assumed": self.assumed, "seen": {key: list(kept) for key, kept in self._seen.items()}}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> "StartUps":
        """Return what `snapshot` wrote."""
        found = cls(state["assumed"])
        found._seen = {key: list(kept) for key, kept in state["seen"].items()}
        return found


def _key(model: str, pool: PoolSeen, warm: bool | None = None) -> str:
    return f"{model}|{pool.variant}|{pool.gpus}|{'warm' if (pool.warm if warm is None else warm) else 'cold'}"

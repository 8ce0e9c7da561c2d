"""How do autoscalers scale that know nothing of language models? Three kinds in wide use, as far as their rules go.

- HPA-like: replicas x (metric / target), tolerance 10 %; down to the highest recommendation of the last 300 s only.
- KEDA-like: a replica per so many waiting requests, or by KV use; the same 300 s.
- Ray-Serve-like: a replica per so many ongoing requests, averaged over 30 s; up after 30 s, down after 600 s.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from penstock.planner.seen import EngineSeen, ModelSeen, Observation, PoolSeen

STABLE = 300.0
"""Seconds over which the highest recommendation counts before a pool shrinks."""
TOLERANCE = 0.1
KV_TARGET = 0.7

Wanted = Callable[[ModelSeen, PoolSeen], float]
"""How many replicas a pool should have, not rounded."""


class Stabilised:
    """A rule with a window before it goes down.

    Args:
        wanted: the rule.
        most: of each pool.
        growth: most replicas that a pool grows to at once, times what it has, but for four more at any time.
    """

    def __init__(self, wanted: Wanted, most: int, *, stable: float = STABLE, growth: float = 2.0) -> None:
        self._wanted = wanted
        self._most = most
        self._stable = stable
        self._growth = growth
        self._said: dict[str, list[tuple[float, int]]] = {}

    def decide(self, seen: Observation) -> Mapping[str, int]:
        """Return every pool's replicas."""
        found = {}
        (model,) = seen.models.values()
        for name, pool in model.pools.items():
            ratio = self._wanted(model, pool) / max(1, pool.ready)
            wanted = pool.ready if abs(ratio - 1.0) <= TOLERANCE else math.ceil(self._wanted(model, pool) - 1e-9)
            said = self._said.setdefault(name, [])
            said.append((seen.at, wanted))
            said[:] = [(at, count) for at, count in said if at > seen.at - self._stable]
            limit = max(pool.desired + 4, round(pool.desired * self._growth))
            wanted = max(count for _, count in said) if wanted < pool.desired else min(wanted, limit)
            found[name] = max(1, min(self._most, wanted))
        return found


def hpa(kv_target: float, most: int) -> Stabilised:
    """Return the HPA-like rule on KV use; prefill pools, which hold little KV, on running requests, four each."""

    def wanted(model: ModelSeen, pool: PoolSeen) -> float:
        if pool.role == "prefill":
            return _sum(pool.engines, "running") / 4.0 * (KV_TARGET / kv_target)
        return pool.ready * _kv(pool.engines) / kv_target

    return Stabilised(wanted, most)


def keda(waiting: float, most: int) -> Stabilised:
    """Return the KEDA-like rule: so many waiting requests per replica, or KV use over 0.7."""

    def wanted(model: ModelSeen, pool: PoolSeen) -> float:
        line = _sum(pool.engines, "waiting") + (model.queued or 0)
        return max(line / waiting, pool.ready * _kv(pool.engines) / KV_TARGET)

    return Stabilised(wanted, most)


class RayServe:
    """The Ray-Serve-like rule.

    Args:
        ongoing: requests per replica that are aimed at.
    """

    def __init__(self, ongoing: float, most: int, *, up: float = 30.0, down: float = 600.0, back: float = 30.0) -> None:
        self._ongoing, self._most = ongoing, most
        self._up, self._down, self._back = up, down, back
        self._seen: dict[str, list[tuple[float, float]]] = {}
        self._since: dict[str, tuple[int, float]] = {}

    def decide(self, seen: Observation) -> Mapping[str, int]:
        """Return the replicas of pools that want the same direction for long enough."""
        found = {}
        (model,) = seen.models.values()
        for name, pool in model.pools.items():
            past = self._seen.setdefault(name, [])
            past.append((seen.at, _sum(pool.engines, "running") + _sum(pool.engines, "waiting")))
            past[:] = [(at, count) for at, count in past if at > seen.at - self._back]
            mean = sum(count for _, count in past) / len(past) + (model.queued or 0)
            wanted = max(1, min(self._most, math.ceil(mean / self._ongoing)))
            direction = (wanted > pool.desired) - (wanted < pool.desired)
            before, since = self._since.get(name, (0, seen.at))
            if direction != before:
                since = seen.at
            self._since[name] = (direction, since)
            if direction and seen.at - since >= (self._up if direction > 0 else self._down):
                found[name] = wanted
                self._since[name] = (0, seen.at)
        return found


def _sum(engines: Sequence[EngineSeen], name: str) -> float:
    return float(sum(getattr(engine, name) or 0 for engine in engines))


def _kv(engines: Sequence[EngineSeen]) -> float:
    usage = [engine.kv_usage for engine in engines if engine.kv_usage is not None]
    return sum(usage) / len(usage) if usage else 0.0

"""Autoscaler baselines without knowledge of language models: rules like HPA, KEDA and Ray Serve.

- HPA-like: replicas x (metric / target), tolerance 10 %; down to the highest recommendation of the last 300 s only.
- KEDA-like: a replica per so many waiting requests, or by KV use; the same 300 s.
- Ray-Serve-like: a replica per so many ongoing requests, averaged over 30 s; up after 30 s, down after 600 s.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from penstock.planner.observation import EngineState, ModelState, Observation, PoolState

STABLE = 300.0
"""Seconds over which the highest recommendation counts before a pool shrinks."""
GROWTH = 2.0
"""A pool grows at most to so many times its replicas at once, but always by up to four."""
TOLERANCE = 0.1
KV_TARGET = 0.7

Wanted = Callable[[ModelState, PoolState], float]
"""Desired replicas of a pool, not rounded."""


class Stabilised:
    """A rule with a stabilisation window before it scales down.

    Args:
        wanted: the rule.
        most: upper bound of each pool.
    """

    def __init__(self, wanted: Wanted, most: int) -> None:
        self._wanted = wanted
        self._most = most
        self._proposals: dict[str, list[tuple[float, int]]] = {}

    def decide(self, observation: Observation) -> Mapping[str, int]:
        """Return the desired replicas of every pool."""
        targets = {}
        (model,) = observation.models.values()
        for name, state in model.pools.items():
            desired, ratio = state.pool.desired, self._wanted(model, state) / max(1, state.ready)
            wanted = state.ready if abs(ratio - 1.0) <= TOLERANCE else math.ceil(self._wanted(model, state) - 1e-9)
            proposals = self._proposals.setdefault(name, [])
            proposals.append((observation.at, wanted))
            proposals[:] = [(at, count) for at, count in proposals if at > observation.at - STABLE]
            limit = max(desired + 4, round(desired * GROWTH))
            wanted = max(count for _, count in proposals) if wanted < desired else min(wanted, limit)
            targets[name] = max(1, min(self._most, wanted))
        return targets


def hpa(kv_target: float, most: int) -> Stabilised:
    """Return the HPA-like rule on KV use; prefill pools, which hold little KV, on running requests, four each."""

    def wanted(model: ModelState, state: PoolState) -> float:
        if state.pool.role == "prefill":
            return _sum(state.engines, "running") / 4.0 * (KV_TARGET / kv_target)
        return state.ready * _kv(state.engines) / kv_target

    return Stabilised(wanted, most)


def keda(waiting: float, most: int) -> Stabilised:
    """Return the KEDA-like rule: so many waiting requests per replica, or KV use over 0.7."""

    def wanted(model: ModelState, state: PoolState) -> float:
        line = _sum(state.engines, "waiting") + (model.queued or 0)
        return max(line / waiting, state.ready * _kv(state.engines) / KV_TARGET)

    return Stabilised(wanted, most)


class RayServe:
    """The Ray-Serve-like rule.

    Args:
        ongoing: target of ongoing requests per replica.
    """

    def __init__(self, ongoing: float, most: int, *, up: float = 30.0, down: float = 600.0, back: float = 30.0) -> None:
        self._ongoing, self._most = ongoing, most
        self._up, self._down, self._back = up, down, back
        self._loads: dict[str, list[tuple[float, float]]] = {}
        self._since: dict[str, tuple[int, float]] = {}

    def decide(self, observation: Observation) -> Mapping[str, int]:
        """Return the replicas of pools whose desired direction has lasted long enough."""
        targets = {}
        (model,) = observation.models.values()
        for name, state in model.pools.items():
            past = self._loads.setdefault(name, [])
            past.append((observation.at, _sum(state.engines, "running") + _sum(state.engines, "waiting")))
            past[:] = [(at, count) for at, count in past if at > observation.at - self._back]
            mean = sum(count for _, count in past) / len(past) + (model.queued or 0)
            wanted = max(1, min(self._most, math.ceil(mean / self._ongoing)))
            direction = (wanted > state.pool.desired) - (wanted < state.pool.desired)
            before, since = self._since.get(name, (0, observation.at))
            if direction != before:
                since = observation.at
            self._since[name] = (direction, since)
            if direction and observation.at - since >= (self._up if direction > 0 else self._down):
                targets[name] = wanted
                self._since[name] = (0, observation.at)
        return targets


def _sum(engines: Sequence[EngineState], name: str) -> float:
    return float(sum(getattr(engine, name) or 0 for engine in engines))


def _kv(engines: Sequence[EngineState]) -> float:
    usage = [engine.kv_usage for engine in engines if engine.kv_usage is not None]
    return sum(usage) / len(usage) if usage else 0.0

"""Faults of metrics for the study: one at a time, between the cluster and the policy.

Counts of replicas stay true: the policy has ordered them, and gets them from the connector.
"""

import math
from collections.abc import Callable, Iterable

import msgspec

from penstock.planner.observation import EngineState, ModelState, Observation, PoolState

Distort = Callable[[Observation], Observation]
SECONDS = 180.0
"""How long a source is gone, or repeats itself; the fault begins after a third of the run."""


def gap(seconds: float) -> Distort:
    """Lose all traffic and engine metrics for three minutes."""

    def change(model: ModelState) -> ModelState:
        pools = {name: _engines(pool, map(_silent, pool.engines)) for name, pool in model.pools.items()}
        return msgspec.structs.replace(model, traffic=None, why="connection refused", queued=None, pools=pools)

    def distort(seen: Observation) -> Observation:
        return _models(seen, change) if _during(seen, seconds) else seen

    return distort


def nan(seconds: float) -> Distort:
    """Report latencies that are not numbers, now and then, like a source that divides by zero."""

    def distort(seen: Observation) -> Observation:
        if int(seen.at / 30.0) % 3:
            return seen

        def change(model: ModelState) -> ModelState:
            traffic = model.traffic
            if traffic is None:
                return model
            broken = msgspec.structs.replace(traffic, ttft_sum=math.nan, itl_sum=math.nan, duration_sum=math.nan)
            return msgspec.structs.replace(model, traffic=broken)

        return _models(seen, change)

    return distort


def stale(seconds: float) -> Distort:
    """Repeat every source's last report for three minutes."""
    kept: list[Observation] = []

    def distort(seen: Observation) -> Observation:
        if not _during(seen, seconds):
            kept[:] = [seen]
            return seen
        models = {name: _as_before(model, kept[0].models[name]) for name, model in seen.models.items()}
        return msgspec.structs.replace(seen, models=models)

    return distort


def silent_engine(seconds: float) -> Distort:
    """Silence the first engine of every pool from a third of the run on."""

    def change(model: ModelState) -> ModelState:
        pools = {
            name: _engines(pool, (*map(_silent, pool.engines[:1]), *pool.engines[1:]))
            for name, pool in model.pools.items()
        }
        return msgspec.structs.replace(model, pools=pools)

    def distort(seen: Observation) -> Observation:
        return seen if seen.at < seconds / 3.0 else _models(seen, change)

    return distort


FAULTS: dict[str, Callable[[float], Distort]] = {
    "gap": gap,
    "NaN": nan,
    "stale": stale,
    "silent engine": silent_engine,
}


def _during(seen: Observation, seconds: float) -> bool:
    return seconds / 3.0 <= seen.at < seconds / 3.0 + SECONDS


def _models(seen: Observation, change: Callable[[ModelState], ModelState]) -> Observation:
    return msgspec.structs.replace(seen, models={name: change(model) for name, model in seen.models.items()})


def _as_before(model: ModelState, old: ModelState) -> ModelState:
    pools = {name: _engines(pool, old.pools[name].engines) for name, pool in model.pools.items()}
    return msgspec.structs.replace(model, traffic=old.traffic, queued=old.queued, health="stale", pools=pools)


def _engines(pool: PoolState, engines: Iterable[EngineState]) -> PoolState:
    return msgspec.structs.replace(pool, engines=tuple(engines))


def _silent(engine: EngineState) -> EngineState:
    told = ("steps", "running", "waiting", "queued_prefill_tokens", "queued_decode_kv", "decode_kv")
    return msgspec.structs.replace(engine, **dict.fromkeys(told))

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

    def distort(observation: Observation) -> Observation:
        return _models(observation, change) if _during(observation, seconds) else observation

    return distort


def nan(seconds: float) -> Distort:
    """Report latencies that are not numbers, now and then, like a source that divides by zero."""

    def distort(observation: Observation) -> Observation:
        if int(observation.at / 30.0) % 3:
            return observation

        def change(model: ModelState) -> ModelState:
            traffic = model.traffic
            if traffic is None:
                return model
            broken = msgspec.structs.replace(traffic, ttft_sum=math.nan, itl_sum=math.nan, duration_sum=math.nan)
            return msgspec.structs.replace(model, traffic=broken)

        return _models(observation, change)

    return distort


def stale(seconds: float) -> Distort:
    """Repeat every source's last report for three minutes."""
    repeated: list[Observation] = []

    def distort(observation: Observation) -> Observation:
        if not _during(observation, seconds):
            repeated[:] = [observation]
            return observation
        models = {name: _as_before(model, repeated[0].models[name]) for name, model in observation.models.items()}
        return msgspec.structs.replace(observation, models=models)

    return distort


def silent_engine(seconds: float) -> Distort:
    """Silence the first engine of every pool from a third of the run on."""

    def change(model: ModelState) -> ModelState:
        pools = {
            name: _engines(pool, (*map(_silent, pool.engines[:1]), *pool.engines[1:]))
            for name, pool in model.pools.items()
        }
        return msgspec.structs.replace(model, pools=pools)

    def distort(observation: Observation) -> Observation:
        return observation if observation.at < seconds / 3.0 else _models(observation, change)

    return distort


FAULTS: dict[str, Callable[[float], Distort]] = {
    "gap": gap,
    "NaN": nan,
    "stale": stale,
    "silent engine": silent_engine,
}


def _during(observation: Observation, seconds: float) -> bool:
    return seconds / 3.0 <= observation.at < seconds / 3.0 + SECONDS


def _models(look: Observation, change: Callable[[ModelState], ModelState]) -> Observation:
    return msgspec.structs.replace(look, models={name: change(model) for name, model in look.models.items()})


def _as_before(model: ModelState, old: ModelState) -> ModelState:
    pools = {name: _engines(pool, old.pools[name].engines) for name, pool in model.pools.items()}
    return msgspec.structs.replace(model, traffic=old.traffic, queued=old.queued, health="stale", pools=pools)


def _engines(pool: PoolState, engines: Iterable[EngineState]) -> PoolState:
    return msgspec.structs.replace(pool, engines=tuple(engines))


def _silent(engine: EngineState) -> EngineState:
    fields = ("steps", "running", "waiting", "queued_prefill_tokens", "queued_decode_kv", "decode_kv")
    return msgspec.structs.replace(engine, **dict.fromkeys(fields))

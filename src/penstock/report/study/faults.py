"""What goes wrong with metrics? One fault at a time, on the way from the cluster to who scales."""

import math
from collections.abc import Callable

import msgspec

from penstock.planner.seen import ModelSeen, Observation

Distort = Callable[[Observation], Observation]


def _models(seen: Observation, change: Callable[[ModelSeen], ModelSeen]) -> Observation:
    return msgspec.structs.replace(seen, models={name: change(model) for name, model in seen.models.items()})


def gap(seconds: float) -> Distort:
    """The source can't be read for three minutes, around a third of the run."""
    begin = seconds / 3.0

    def distort(seen: Observation) -> Observation:
        if not begin <= seen.at < begin + 180.0:
            return seen
        return _models(seen, lambda model: msgspec.structs.replace(model, traffic=None, why="connection refused"))

    return distort


def nan(seconds: float) -> Distort:
    """Latencies are not numbers, now and then: a source that divides by nothing."""

    def distort(seen: Observation) -> Observation:
        if int(seen.at / 30.0) % 3:
            return seen

        def change(model: ModelSeen) -> ModelSeen:
            traffic = model.traffic
            if traffic is None:
                return model
            broken = msgspec.structs.replace(traffic, ttft_sum=math.nan, itl_sum=math.nan, duration_sum=math.nan)
            return msgspec.structs.replace(model, traffic=broken)

        return _models(seen, change)

    return distort


def stale(seconds: float) -> Distort:
    """For three minutes the source repeats what it said before."""
    begin = seconds / 3.0
    kept: list[Observation] = []

    def distort(seen: Observation) -> Observation:
        if not begin <= seen.at < begin + 180.0:
            kept[:] = [seen]
            return seen
        old = kept[0]

        def change(name: str, model: ModelSeen) -> ModelSeen:
            return msgspec.structs.replace(model, traffic=old.models[name].traffic, health="stale")

        return msgspec.structs.replace(seen, models={name: change(name, model) for name, model in seen.models.items()})

    return distort


def silent_engine(seconds: float) -> Distort:
    """The first engine of every pool tells nothing from a third of the run on."""
    begin = seconds / 3.0

    def distort(seen: Observation) -> Observation:
        if seen.at < begin:
            return seen

        def change(model: ModelSeen) -> ModelSeen:
            pools = {
                name: msgspec.structs.replace(
                    pool,
                    engines=tuple(
                        msgspec.structs.replace(
                            engine,
                            steps=None,
                            running=None,
                            waiting=None,
                            queued_prefill_tokens=None,
                            decode_kv=None,
                        )
                        if place == 0
                        else engine
                        for place, engine in enumerate(pool.engines)
                    ),
                )
                for name, pool in model.pools.items()
            }
            return msgspec.structs.replace(model, pools=pools)

        return _models(seen, change)

    return distort


FAULTS: dict[str, Callable[[float], Distort]] = {
    "gap": gap,
    "NaN": nan,
    "stale": stale,
    "silent engine": silent_engine,
}

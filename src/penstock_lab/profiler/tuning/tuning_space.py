"""Tuning space: the settings that a search varies, each as an axis of a few choices."""

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from penstock.config.derived.knobs import dotted
from penstock.config.settings.cluster_settings import ClusterSettings, PoolSettings
from penstock.kernel.errors import ConfigError

AS_IT_IS = 0
"""The choice of every axis that changes nothing."""
CHUNKS = (512, 1024, 2048, 4096, 8192, 16384)
REPLICA_FACTORS = (0.5, 0.75, 1.25, 1.5, 2.0)

Overrides = tuple[str, ...]
"""``name=value`` texts, as ``--set`` takes them."""
Candidate = tuple[int, ...]
"""The number of its choice on each axis."""

ROUTER = {
    "router.mode": ("kv", "round_robin", "least_loaded", "power_of_two"),
    "router.cost.kind": ("blocks", "latency"),
    "router.cost.overlap_credit": ("0.5", "1", "1.5", "2"),
    "router.cost.decode_scale": ("0.5", "1", "2"),
    "router.cost.temperature": ("0", "0.2", "0.5"),
    "router.queue.threshold": ("null", "0.5", "1", "2", "4"),
    "router.queue.policy": ("fcfs", "wspt", "edf"),
}
POLICY_SLO = {
    "planner.slo.miss_cost": ("5", "10", "20", "40", "80", "160"),
    "planner.slo.hold": ("0", "30", "60", "180", "600"),
}
"""How aggressive policy ``slo`` is."""


class TuningAxis(NamedTuple):
    """What is varied together. ``choices``: settings; the first, empty one is what is configured."""

    name: str
    choices: tuple[Overrides, ...]


class TuningSpace:
    """All axes of a search.

    Args:
        axes: at least one.
    """

    def __init__(self, axes: Sequence[TuningAxis]) -> None:
        self.axes = list(axes)

    @property
    def configured(self) -> Candidate:
        """What the config says."""
        return (AS_IT_IS,) * len(self.axes)

    def overrides(self, candidate: Candidate) -> Overrides:
        """Return a candidate as settings."""
        return tuple(text for axis, choice in zip(self.axes, candidate) for text in axis.choices[choice])

    def samples(self, rng: random.Random) -> Iterator[Candidate]:
        """Return candidates without end: some axes as configured, the others anywhere."""
        while True:
            share = rng.random()
            yield tuple(rng.randrange(len(axis.choices)) if rng.random() < share else AS_IT_IS for axis in self.axes)

    def every(self) -> Iterator[Candidate]:
        """Return all candidates, each once."""
        return product(*(range(len(axis.choices)) for axis in self.axes))

    def neighbours(self, candidates: Sequence[Candidate], rng: random.Random) -> Iterator[Candidate]:
        """Return candidates without end that differ from one of these on one axis or two."""
        while True:
            near = list(rng.choice(candidates))
            for place in rng.sample(range(len(near)), min(len(near), rng.choice((1, 1, 2)))):
                near[place] = rng.randrange(len(self.axes[place].choices))
            yield tuple(near)


def space_of(settings: ClusterSettings, model: str, chosen: Sequence[str] = ()) -> TuningSpace:
    """Return the axes for a config.

    Args:
        chosen: ``name=value,value`` texts, as ``--compare`` of simulate takes them: only these are varied. Without any:
            router mode, cost and queue; the chunk of each pool; the planner's eagerness where it plans by policy
            ``slo``; and without a planner the replicas, of disaggregated pools also how their GPUs are split.
    Raises:
        ConfigError: a text names nothing to vary.
    """
    if chosen:
        return TuningSpace([_axis_of(text) for text in chosen])
    axes = [_axis_of_values(name, values) for name, values in ROUTER.items()]
    pools = settings.models[model].pools
    for name, pool in pools.items():
        knob = dotted(("models", model, "pools", name, "sim", "max_num_batched_tokens"))
        if pool.role != "decode":
            axes.append(_axis_of_values(knob, (str(size) for size in CHUNKS if size >= pool.sim.max_num_seqs)))
    if not settings.planner.enabled:
        axes += _replica_axes(model, pools)
    elif settings.planner.policy == "slo" and settings.planner.optimization_target == "sla":
        axes += [_axis_of_values(name, values) for name, values in POLICY_SLO.items()]
    return TuningSpace(axes)


def _axis_of_values(name: str, values: Iterable[str]) -> TuningAxis:
    return TuningAxis(name, ((), *((f"{name}={value}",) for value in values)))


def _axis_of(text: str) -> TuningAxis:
    name, equals, values = text.partition("=")
    choices = [value for value in values.split(",") if value]
    if not equals or not name or not choices:
        raise ConfigError(f"--vary {text!r} names nothing to vary", hint="such as router.mode=kv,round_robin")
    return _axis_of_values(name, choices)


def _replica_axes(model: str, pools: dict[str, PoolSettings]) -> Iterator[TuningAxis]:
    """Yield the axes of how many replicas each pool has: alone, and of two pools against each other."""

    def put(pool: str, count: int) -> str:
        return f"{dotted(('models', model, 'pools', pool, 'replicas'))}={count}"

    roles = {pool.role: name for name, pool in pools.items()}
    if len(pools) == 2 and roles.keys() == {"prefill", "decode"}:
        prefill, decode = (pools[roles[role]] for role in ("prefill", "decode"))
        sizes = [pool.gpus or max(1, pool.sim.timing.tensor_parallel_size) for pool in (prefill, decode)]
        total = prefill.replicas * sizes[0] + decode.replicas * sizes[1]
        splits = [
            (put(roles["prefill"], count), put(roles["decode"], (total - count * sizes[0]) // sizes[1]))
            for count in range(1, total // sizes[0] + 1)
            if total - count * sizes[0] >= sizes[1] and count != prefill.replicas
        ]
        yield TuningAxis("split of the GPUs", ((), *splits))
        return
    for name, pool in pools.items():
        if not pool.urls:
            counts = dict.fromkeys(max(1, round(pool.replicas * factor)) for factor in REPLICA_FACTORS)
            yield TuningAxis(f"replicas of {name}", ((), *((put(name, n),) for n in counts if n != pool.replicas)))

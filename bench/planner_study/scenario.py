"""Scenario of the study: one engine, two layouts, a service level, and the result of one run."""

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import islice, pairwise
from typing import Any

import msgspec
import numpy as np

from bench.planner_study.traffic import LENGTHS
from penstock.kernel.latency_bins import Bins
from penstock.kernel.machine import Effect, Event, Machine, Nanos, Snapshot
from penstock.kernel.request_record import RequestRecord
from penstock.kernel.values import EngineLimits, Role, Slo
from penstock.planner.observation import Observation
from penstock.planner.performance.benchmark_table import BenchmarkTable
from penstock.planner.performance.speed_sources import KnownSpeeds
from penstock.planner.sizing.attainment import AttainmentModel
from penstock.planner.sizing.fleet_sizing import Bounds, ShareTable, Sizing, UncertainDemand
from penstock.planner.sizing.workload_mix import WorkloadMix, count_into, shape_bin
from penstock.planner.tick_record import TickRecord
from penstock.router.settings import RouterSettings
from penstock_lab.engine.self_benchmark import perf_metrics
from penstock_lab.engine.settings import SimSettings, TimingSettings
from penstock_lab.simulate.scale_policy import ScalePolicy
from penstock_lab.simulate.simulated_cluster import SimulatedCluster
from penstock_lab.simulate.simulation_plan import PoolPlan, SimulationPlan, StartUp
from penstock_lab.traffic.traffic_request import TrafficRequest
from penstock_lab.traffic.workloads import plain

MODEL = "llama-3.1-8b"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""The model's config.json, as far as time depends on it."""
ENGINE = SimSettings(
    block_size=64,
    kv_blocks=6000,
    max_model_len=32_768,
    emit_decode_blocks=False,
    timing=TimingSettings(kind="roofline", gpu="a100", model="config.json"),
)
TABLE = {"model": CONFIG}
TTFT, ITL = 3.0, 0.04
"""Service level: TTFT and ITL in seconds."""
SLO = Slo(ttft=TTFT, itl=ITL)
GPUS_MAX = 20
"""Ceiling of every policy."""
LAYOUTS: dict[str, tuple[Role, ...]] = {"aggregated": ("aggregated",), "disaggregated": ("prefill", "decode")}
PRICE = 40.0
"""Price of a miss, in GPU time of a request, for the choice of a run's first workers."""
POOLS: dict[Role, str] = {"aggregated": "main", "prefill": "prefill", "decode": "decode"}


class StudyResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one run.

    Args:
        attainment: share of all submitted requests that were answered in full within the service level.
        gpu_hours: of all workers from their start to their end, starting and draining included.
        misses: requests that were not.
        harmed: requests that ended badly or had to restart because a worker was removed.
        worst: share of misses in the worst five minutes.
        direction_changes: per hour, summed over pools; ``changes``: of the desired numbers, per hour.
        tick_ms: mean time of one tick of the planner.
    """

    attainment: float
    gpu_hours: float
    requests: int
    misses: int
    harmed: int = 0
    worst: float = 0.0
    ttft_p99: float | None = None
    itl_p99: float | None = None
    direction_changes: float = 0.0
    changes: float = 0.0
    tick_ms: float = 0.0
    wall: float = 0.0
    alarms: dict[str, int] = {}


def sizing_of(layout: str, requests: Iterable[TrafficRequest]) -> Sizing:
    """Return the closed forms' sizing for this engine and these requests' lengths, whatever their rate."""
    mix: Bins = {}
    for request in requests:
        count_into(mix, shape_bin(request.isl, request.osl, 0.0))
    model = BenchmarkTable.of_metrics(known_speeds().metrics["self-benchmark"])
    limits = EngineLimits(
        max_num_seqs=ENGINE.max_num_seqs,
        max_num_batched_tokens=ENGINE.max_num_batched_tokens,
        kv_tokens=ENGINE.blocks * ENGINE.block_size,
    )
    serving = AttainmentModel(model, limits, WorkloadMix.of_bins(mix), SLO.of(None))
    roles = LAYOUTS[layout]
    work = sum(serving.least(role) for role in roles)
    return Sizing({role: ShareTable(serving, role) for role in roles}, PRICE * work, work)


@cache
def tables(layout: str) -> Sizing:
    """Return the closed forms' sizing for our own mix of requests."""
    return sizing_of(layout, islice(plain(1.0, random.Random(0), shape=LENGTHS, kind="mix"), 4000))


def priced(sizing: Sizing, price: float) -> Sizing:
    """Return the sizing with another price of a miss, in GPU time of a request."""
    return Sizing(sizing.tables, price * sizing.work, sizing.work)


def fleet(layout: str, rate: float, sizing: Sizing | None = None) -> dict[Role, int]:
    """Return the cheapest workers for a rate (requests/s) that is known and constant."""
    bounds = {role: Bounds(1, GPUS_MAX, 1) for role in LAYOUTS[layout]}
    sure = UncertainDemand(np.array([max(rate, 1e-3)]), np.ones(1))
    return dict((sizing or tables(layout)).best(sure, bounds, GPUS_MAX).workers)


@cache
def known_speeds() -> KnownSpeeds:
    """Return a worker's measurement of itself before it serves: every policy with a model gets it."""
    return KnownSpeeds(metrics={"self-benchmark": perf_metrics(ENGINE, TABLE)})


def plan_of(workers: dict[Role, int], start_up: float, seconds: float, **more: Any) -> SimulationPlan:
    """Return the cluster of a run."""
    pools = {POOLS[role]: PoolPlan(sim=ENGINE, replicas=n, role=role, table=TABLE) for role, n in workers.items()}
    return SimulationPlan(
        model=MODEL,
        pools=pools,
        router=RouterSettings(),
        until=seconds,
        start_up=StartUp(median=start_up),
        slo=SLO,
        drain_timeout=600.0,
        **more,
    )


class TimedPolicy:
    """A planner whose handling is timed."""

    def __init__(self, planner: Machine) -> None:
        self.planner = planner
        self.seconds = 0.0

    def handle(self, now: Nanos, event: Event) -> Sequence[Effect]:
        started = time.perf_counter()
        effects = self.planner.handle(now, event)
        self.seconds += time.perf_counter() - started
        return effects

    def snapshot(self) -> Snapshot:
        return self.planner.snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        self.planner.restore(snapshot)

    def check(self) -> None:
        self.planner.check()


class RecordedPolicy:
    """A policy whose orders are kept: ``wanted`` has every pool's, window by window."""

    def __init__(self, policy: ScalePolicy) -> None:
        self.policy = policy
        self.targets: dict[str, list[int]] = {}

    def decide(self, observation: Observation) -> Mapping[str, int] | None:
        targets = self.policy.decide(observation)
        for model in observation.models.values():
            for name, state in model.pools.items():
                self.targets.setdefault(name, []).append((targets or {}).get(name, state.pool.desired))
        return targets


def run(
    requests: Sequence[TrafficRequest],
    workers: dict[Role, int],
    start_up: float,
    seconds: float,
    *,
    policy: ScalePolicy | None = None,
    planner: Machine | None = None,
    distort: Callable[[Observation], Observation] | None = None,
    interval: float = 5.0,
) -> StudyResult:
    """Simulate one run.

    Args:
        policy, planner: which one scales; neither is a static fleet.
        distort: changes the observation on its way to the policy: a fault of the metrics.
    """
    records: list[RequestRecord] = []
    ticks: list[TickRecord] = []
    timed = None if planner is None else TimedPolicy(planner)
    noted = None if policy is None else RecordedPolicy(policy)
    plan = plan_of(workers, start_up, seconds, policy_interval=interval)
    cluster = SimulatedCluster(plan, requests, policy=noted, planner=timed, ticked=ticks.append, record=records.append)
    if distort is not None and cluster.observer is not None:
        cluster.observer.look = _distorted(cluster.observer.look, distort)  # type: ignore[method-assign]
    started = time.perf_counter()
    cluster.run()
    wall = time.perf_counter() - started
    good = [record.within(SLO) for record in records]
    bins: dict[int, list[bool]] = {}
    for record, in_slo in zip(records, good, strict=True):
        bins.setdefault(int(record.arrival // 300.0), []).append(in_slo)
    ttfts = [record.ttft for record in records if record.ttft is not None]
    itls = [record.itl.mean for record in records if record.itl is not None]
    turns, changes = _turns(_wanted(ticks) if noted is None else noted.targets)
    hours = seconds / 3600.0
    return StudyResult(
        attainment=sum(good) / len(good) if good else 1.0,
        gpu_hours=cluster.gpu_hours(),
        requests=len(good),
        misses=len(good) - sum(good),
        harmed=sum(record.outcome != "ok" or (record.attempts or 1) > 1 for record in records),
        worst=max((1.0 - sum(part) / len(part) for part in bins.values() if len(part) >= 50), default=0.0),
        ttft_p99=float(np.quantile(ttfts, 0.99)) if ttfts else None,
        itl_p99=float(np.quantile(itls, 0.99)) if itls else None,
        direction_changes=turns / hours,
        changes=changes / hours,
        tick_ms=0.0 if timed is None or not ticks else 1e3 * timed.seconds / len(ticks),
        wall=wall,
        alarms=dict(cluster.alarms),
    )


def _distorted(
    look: Callable[..., Observation], distort: Callable[[Observation], Observation]
) -> Callable[..., Observation]:
    return lambda *args: distort(look(*args))


def _wanted(ticks: Sequence[TickRecord]) -> dict[str, list[int]]:
    """Return a planner's desired replicas of each pool, tick by tick."""
    pools = ticks[-1].pools if ticks else ()
    return {pool: [tick.pools[pool].target for tick in ticks if pool in tick.pools] for pool in pools}


def _turns(wanted: Mapping[str, Sequence[int]]) -> tuple[int, int]:
    """Count changes of direction, and changes, of each pool's desired replicas."""
    turns = changes = 0
    for counts in wanted.values():
        steps = [after - before for before, after in pairwise(counts) if after != before]
        changes += len(steps)
        turns += sum((before > 0) != (after > 0) for before, after in pairwise(steps))
    return turns, changes

"""On what are policies judged? One engine, two layouts, a service level, and what one run comes to."""

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import islice, pairwise
from typing import Any

import msgspec
import numpy as np

from penstock.engine.benchmark import perf_metrics
from penstock.engine.settings import SimSettings, TimingSettings
from penstock.kernel.bins import Bins
from penstock.kernel.machine import Effect, Event, Machine, Nanos, Snapshot
from penstock.kernel.records import RequestRecord
from penstock.kernel.values import Role
from penstock.planner.counts import SloOf, SloPair
from penstock.planner.performance.sources import Known
from penstock.planner.performance.table import Table
from penstock.planner.record import TickRecord
from penstock.planner.seen import Observation
from penstock.planner.serving import Limits, Service, Serving
from penstock.planner.shapes import Shapes, count_into, shape_bin
from penstock.planner.sizing import Bounds, Demand, Sizing
from penstock.planner.sizing import Table as ShareTable
from penstock.report.study.traces import LENGTHS
from penstock.router.settings import RouterSettings
from penstock.simulate.cluster import Cluster
from penstock.simulate.plan import Plan, PoolPlan, StartUp
from penstock.simulate.scaling import ScalePolicy
from penstock.traffic.request import TrafficRequest
from penstock.traffic.workloads import plain

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
"""What the model's config.json says, as far as time depends on it."""
ENGINE = SimSettings(
    block_size=64,
    kv_blocks=6000,
    max_len=32_768,
    emit_decode_blocks=False,
    timing=TimingSettings(kind="roofline", gpu="a100", model="config.json"),
)
TABLE = {"model": CONFIG}
TTFT, ITL = 3.0, 0.04
"""Seconds that are promised."""
GPUS_MAX = 20
"""Ceiling of every policy."""
LAYOUTS: dict[str, tuple[Role, ...]] = {"aggregated": ("aggregated",), "disaggregated": ("prefill", "decode")}
PRICE = 40.0
"""Of a miss, in GPU time of a request, by which runs are given their first workers."""
POOLS: dict[Role, str] = {"aggregated": "main", "prefill": "prefill", "decode": "decode"}


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What one run came to.

    Args:
        attainment: share of all submitted requests that were answered in full within the service level.
        gpu_hours: of all workers from their start to their end, starting and draining included.
        misses: requests that were not.
        harmed: requests that ended badly or had to begin anew because a worker went.
        worst: share of misses in the worst five minutes.
        turns: changes of direction per hour, summed over pools; ``changes``: of the wanted numbers, per hour.
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
    turns: float = 0.0
    changes: float = 0.0
    tick_ms: float = 0.0
    wall: float = 0.0
    alarms: dict[str, int] = {}


def sizing_of(layout: str, requests: Iterable[TrafficRequest]) -> Sizing:
    """Return what the closed forms say of this engine and these requests' lengths, whatever their rate."""
    mix: Bins = {}
    for request in requests:
        count_into(mix, shape_bin(request.isl, request.osl, 0.0))
    model = Table.of_metrics(known().metrics["self-benchmark"])
    limits = Limits(ENGINE.max_seqs, ENGINE.max_batched_tokens, ENGINE.kv_blocks * ENGINE.block_size)
    serving = Serving(model, limits, Shapes.of_bins(mix), Service(TTFT, ITL))
    roles = LAYOUTS[layout]
    return Sizing(
        {role: ShareTable(serving, role) for role in roles},
        PRICE * sum(serving.least(role) for role in roles),
    )


@cache
def tables(layout: str) -> Sizing:
    """Return what the closed forms say of our own mix of requests: what no one beats."""
    return sizing_of(layout, islice(plain(1.0, random.Random(0), shape=LENGTHS, kind="mix"), 4000))


def priced(sizing: Sizing, price: float) -> Sizing:
    """Return it with another price of a miss, in GPU time of a request."""
    return Sizing(sizing.tables, sizing.price / PRICE * price)


def fleet(layout: str, rate: float, sizing: Sizing | None = None) -> dict[Role, int]:
    """Return the workers that are cheapest at a rate (requests/s) that is known and stays."""
    bounds = {role: Bounds(1, GPUS_MAX, 1) for role in LAYOUTS[layout]}
    sure = Demand(np.array([max(rate, 1e-3)]), np.ones(1))
    return dict((sizing or tables(layout)).best(sure, bounds, GPUS_MAX).workers)


@cache
def known() -> Known:
    """Return what a worker measures of itself before it serves: what every policy that has a model is given."""
    return Known(metrics={"self-benchmark": perf_metrics(ENGINE, TABLE)})


def plan_of(workers: dict[Role, int], start_up: float, seconds: float, **more: Any) -> Plan:
    """Return the cluster of a run."""
    pools = {POOLS[role]: PoolPlan(sim=ENGINE, replicas=n, role=role, table=TABLE) for role, n in workers.items()}
    return Plan(
        model=MODEL,
        pools=pools,
        router=RouterSettings(),
        until=seconds,
        start_up=StartUp(median=start_up),
        slo=SloOf(SloPair(TTFT, ITL)),
        drain_timeout=600.0,
        **more,
    )


class Timed:
    """A planner whose handling is timed."""

    def __init__(self, planner: Machine) -> None:
        self.planner = planner
        self.seconds = 0.0

    def handle(self, now: Nanos, event: Event) -> Sequence[Effect]:
        started = time.perf_counter()
        found = self.planner.handle(now, event)
        self.seconds += time.perf_counter() - started
        return found

    def snapshot(self) -> Snapshot:
        return self.planner.snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        self.planner.restore(snapshot)

    def check(self) -> None:
        self.planner.check()


class Noted:
    """A policy whose wishes are kept: ``wanted`` has every pool's, window by window."""

    def __init__(self, policy: ScalePolicy) -> None:
        self.policy = policy
        self.wanted: dict[str, list[int]] = {}

    def decide(self, seen: Observation) -> Mapping[str, int] | None:
        found = self.policy.decide(seen)
        for model in seen.models.values():
            for name, pool in model.pools.items():
                self.wanted.setdefault(name, []).append((found or {}).get(name, pool.desired))
        return found


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
) -> Result:
    """Simulate one run.

    Args:
        policy, planner: who scales; neither is a static fleet.
        distort: changes what is seen on its way to who scales: a fault of the metrics.
    """
    records: list[RequestRecord] = []
    ticks: list[TickRecord] = []
    timed = None if planner is None else Timed(planner)
    noted = None if policy is None else Noted(policy)
    plan = plan_of(workers, start_up, seconds, policy_interval=interval)
    cluster = Cluster(plan, requests, policy=noted, planner=timed, ticked=ticks.append, record=records.append)
    if distort is not None and cluster.seeing is not None:
        cluster.seeing.look = _distorted(cluster.seeing.look, distort)  # type: ignore[method-assign]
    started = time.perf_counter()
    cluster.run()
    wall = time.perf_counter() - started
    good = [record.within(TTFT, ITL) for record in records]
    bins: dict[int, list[bool]] = {}
    for record, kept in zip(records, good, strict=True):
        bins.setdefault(int(record.arrival // 300.0), []).append(kept)
    ttfts = [record.ttft for record in records if record.ttft is not None]
    itls = [record.itl.mean for record in records if record.itl is not None]
    turns, changes = _turns(_wanted(ticks) if noted is None else noted.wanted)
    hours = seconds / 3600.0
    return Result(
        attainment=sum(good) / len(good) if good else 1.0,
        gpu_hours=cluster.gpu_hours(),
        requests=len(good),
        misses=len(good) - sum(good),
        harmed=sum(record.outcome != "ok" or (record.attempts or 1) > 1 for record in records),
        worst=max((1.0 - sum(part) / len(part) for part in bins.values() if len(part) >= 50), default=0.0),
        ttft_p99=float(np.quantile(ttfts, 0.99)) if ttfts else None,
        itl_p99=float(np.quantile(itls, 0.99)) if itls else None,
        turns=turns / hours,
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
    """Return what a planner wanted of each pool, tick by tick."""
    pools = ticks[-1].pools if ticks else ()
    return {pool: [tick.pools[pool].target for tick in ticks if pool in tick.pools] for pool in pools}


def _turns(wanted: Mapping[str, Sequence[int]]) -> tuple[int, int]:
    """Count changes of direction, and changes, of what was wanted of each pool."""
    turns = changes = 0
    for counts in wanted.values():
        steps = [after - before for before, after in pairwise(counts) if after != before]
        changes += len(steps)
        turns += sum((before > 0) != (after > 0) for before, after in pairwise(steps))
    return turns, changes

"""Closed forms beside the simulated engine, and what must hold of them at any rate and number of workers."""

import random
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.planner_study.scenario import ENGINE, ITL, TABLE, TTFT, known_speeds
from bench.planner_study.traffic import LENGTHS
from penstock.kernel.latency_bins import Bins
from penstock.kernel.request_record import RequestRecord
from penstock.kernel.values import EngineLimits, Role, Slo
from penstock.planner.performance.benchmark_table import BenchmarkTable
from penstock.planner.sizing.attainment import AttainmentModel, LatencyTargets, coarse
from penstock.planner.sizing.fleet_sizing import ShareTable
from penstock.planner.sizing.workload_mix import WorkloadMix, count_into, shape_bin
from penstock.router.settings import RouterSettings
from penstock_lab.simulate.simulated_cluster import SimulatedCluster
from penstock_lab.simulate.simulation_plan import PoolPlan, SimulationPlan
from penstock_lab.traffic.traffic_request import TrafficRequest
from penstock_lab.traffic.workloads import plain
from tests.depth import deep

SERVICE = LatencyTargets(TTFT, ITL)
NAMES: dict[str, Role] = {"main": "aggregated", "prefill": "prefill", "decode": "decode"}


def requests(rate: float, count: int, seed: int) -> list[TrafficRequest]:
    made = islice(plain(rate, random.Random(seed), shape=LENGTHS, kind="mix"), count)
    return [TrafficRequest(at=one.at, isl=one.isl, osl=one.osl) for one in made]


def mix() -> WorkloadMix:
    bins: Bins = {}
    for one in requests(1.0, 4000, 0):
        count_into(bins, shape_bin(one.isl, one.osl, 0.0))
    return WorkloadMix.of_bins(bins)


def serving(service: LatencyTargets = SERVICE, **more) -> AttainmentModel:
    limits = EngineLimits(
        max_num_seqs=ENGINE.max_num_seqs,
        max_num_batched_tokens=ENGINE.max_num_batched_tokens,
        kv_tokens=ENGINE.blocks * ENGINE.block_size,
    )
    return AttainmentModel(
        BenchmarkTable.of_metrics(known_speeds().metrics["self-benchmark"]), limits, mix(), service, **more
    )


MODEL = serving()
TABLES = {role: ShareTable(MODEL, role) for role in NAMES.values()}


def simulated(workers: dict[str, int], rate: float, count: int = 1500) -> float:
    """Return the share of requests that the real engines keep, the first ones left out: they find nobody busy."""
    arrivals = requests(rate, count, 1)
    seconds = arrivals[-1].at + 1.0
    plan = SimulationPlan(
        model="m",
        router=RouterSettings(),
        pools={name: PoolPlan(sim=ENGINE, replicas=n, role=NAMES[name], table=TABLE) for name, n in workers.items()},
        until=seconds,
    )
    records: list[RequestRecord] = []
    SimulatedCluster(plan, arrivals, record=records.append).run()
    late = [one.within(Slo(ttft=SERVICE.ttft, itl=SERVICE.itl)) for one in records if one.arrival > 0.15 * seconds]
    return sum(late) / len(late)


def told(role: Role, workers: float, rate: float) -> float:
    return float(TABLES[role].attainment(np.array([workers]), np.array([rate]))[0])


@pytest.mark.parametrize("workers", [1, 4, 8])
@pytest.mark.parametrize("load", [0.4, 0.7, 0.85])
def test_up_to_what_workers_can_do_the_share_is_that_of_real_engines_within_a_few_points(workers, load):
    rate = load * TABLES["aggregated"].capacity(workers)
    assert told("aggregated", workers, rate) == pytest.approx(simulated({"main": workers}, rate), abs=0.05)


@pytest.mark.parametrize("workers", [1, 4, 8])
def test_where_it_says_that_all_is_lost_real_engines_lose_as_well(workers):
    rate = 1.5 * TABLES["aggregated"].capacity(workers)
    assert told("aggregated", workers, rate) < 0.2 and simulated({"main": workers}, rate, 800) < 0.6


@pytest.mark.parametrize("load", [0.4, 0.75])
def test_prefill_and_decode_apart_too(load):
    rate = load * min(TABLES["prefill"].capacity(2), TABLES["decode"].capacity(2))
    both = told("prefill", 2, rate) * told("decode", 2, rate)
    assert both == pytest.approx(simulated({"prefill": 2, "decode": 2}, rate), abs=0.05)


@pytest.mark.parametrize("role", list(TABLES))
def test_more_load_never_helps_and_more_workers_never_hurt(role):
    table = TABLES[role]
    top = 1.5 * table.capacity(1, share=0.1) + 1.0
    workers = np.arange(1.0, 70.0)
    found = table.attainment(workers[:, None], np.linspace(0.0, top * 20, 90)[None, :])
    assert (np.diff(found, axis=1) <= 1e-9).all(), "more load"
    assert (np.diff(found, axis=0) >= -0.02).all(), "more workers"
    assert (found >= 0.0).all() and (found <= 1.0).all() and not np.isnan(found).any()


@settings(max_examples=deep(30), deadline=None)
@given(st.floats(0.01, 100.0), st.integers(1, 64), st.sampled_from(list(TABLES)))
def test_a_share_is_a_share_at_any_rate(rate, workers, role):
    found = MODEL.attainment(role, np.array([rate]), np.array([float(workers)]))
    assert 0.0 <= float(found.both[0]) <= 1.0


def test_no_worker_keeps_nothing_and_nothing_to_do_is_kept():
    assert told("aggregated", 0, 1.0) == 0.0 and told("aggregated", 0, 0.0) == 1.0


def test_without_a_promise_everything_is_kept_as_long_as_there_is_room():
    free = serving(LatencyTargets(None, None))
    few = float(free.attainment("aggregated", np.array([0.1]), np.ones(1)).both[0])
    assert few == pytest.approx(1.0, abs=0.01)
    assert float(free.attainment("aggregated", np.array([500.0]), np.ones(1)).both[0]) == 0.0


@pytest.mark.parametrize("service", [LatencyTargets(1.0, ITL), LatencyTargets(TTFT, 0.025)])
def test_a_tighter_promise_is_kept_less_often(service):
    rates, ones = np.linspace(0.02, 0.8, 20), np.ones(20)
    tight = serving(service).attainment("aggregated", rates, ones).both
    loose = MODEL.attainment("aggregated", rates, ones).both
    assert (tight <= loose + 1e-9).all() and (tight < loose - 0.05).any()


def test_what_a_hand_off_takes_is_taken_from_the_ttft():
    rates, ones = np.array([0.5]), np.ones(1)
    assert serving(extra=0.5).attainment("prefill", rates, ones).ttft < MODEL.attainment("prefill", rates, ones).ttft
    assert float(serving(extra=TTFT + 1.0).attainment("prefill", rates, ones).ttft[0]) == 0.0


def test_capacity_grows_more_than_in_proportion_since_workers_help_each_other_out():
    table = TABLES["aggregated"]
    each = [table.capacity(workers, share=0.98) / workers for workers in (1, 2, 4, 8, 16)]
    assert each == sorted(each) and each[-1] > 1.1 * each[0]
    assert table.capacity(0) == 0.0


def test_a_mix_of_many_kinds_is_brought_down_to_few_with_the_same_means():
    whole = mix()
    few = coarse(whole)
    assert len(few.weight) < len(whole.weight) / 2
    for name in ("isl", "osl", "fresh"):
        assert few.mean(getattr(few, name)) == pytest.approx(whole.mean(getattr(whole, name)), rel=1e-6)

"""The cheapest fleet, against trying every one; and the expectation over an uncertain rate."""

import random
from itertools import pairwise, product

import numpy as np
import pytest

from penstock.kernel.values import EngineLimits
from penstock.planner.performance.benchmark_table import BenchmarkTable as Speed
from penstock.planner.sizing.attainment import AttainmentModel, LatencyTargets
from penstock.planner.sizing.fleet_sizing import Bounds, ShareTable, Sizing, UncertainDemand
from penstock.planner.sizing.workload_mix import WorkloadMix

METRICS = {
    "prefill": [{"tokens": n, "seconds": 0.01 + n * 1e-4} for n in (100, 1000, 4000, 16_000)],
    "decode": [
        {"batch": b, "kv_tokens": kv, "seconds": 0.01 + b * 1e-5 + kv * 4e-8}
        for b in (1, 16, 64, 256)
        for kv in (1000, 50_000, 400_000)
    ],
}
SERVING = AttainmentModel(
    Speed.of_metrics(METRICS),
    EngineLimits(max_num_seqs=256, max_num_batched_tokens=8192, kv_tokens=400_000),
    WorkloadMix.of_means(3000, 300),
    LatencyTargets(1.0, 0.03),
)
TABLES = {role: ShareTable(SERVING, role) for role in ("aggregated", "prefill", "decode")}


def sizing(*roles: str, price: float = 20.0) -> Sizing:
    return Sizing({role: TABLES[role] for role in roles}, price, sum(TABLES[role].least for role in roles))


def demand(dice: random.Random) -> UncertainDemand:
    ranks = (0.05, 0.2, 0.5, 0.8, 0.95)
    middle = dice.uniform(0.2, 12.0)
    return UncertainDemand.of_quantiles(ranks, np.sort([middle * dice.lognormvariate(0.0, 0.4) for _ in ranks]))


def every(one: Sizing, wanted: UncertainDemand, bounds: dict[str, Bounds], most: float) -> float:
    """Return the least cost of all fleets within bounds and GPUs, each asked by itself."""
    ranges = [range(bounds[role].least, bounds[role].most + 1) for role in one.tables]
    fleets = [dict(zip(one.tables, counts, strict=True)) for counts in product(*ranges)]
    able = [fleet for fleet in fleets if sum(bounds[role].gpus * n for role, n in fleet.items()) <= most]
    return min(one.candidate(fleet, wanted, bounds).cost for fleet in able)


@pytest.mark.parametrize("roles", [("aggregated",), ("prefill", "decode")])
def test_no_fleet_is_cheaper_than_the_one_that_is_chosen(roles):
    for seed in range(60):
        dice = random.Random(seed)
        one, wanted = sizing(*roles, price=dice.choice((2.0, 20.0, 100.0))), demand(dice)
        bounds = {role: Bounds(dice.randrange(2), dice.randrange(2, 14), dice.choice((1, 2, 4))) for role in roles}
        least = sum(bound.least * bound.gpus for bound in bounds.values())
        most = dice.choice((float("inf"), float(dice.randrange(least, least + 30))))
        best = one.best(wanted, bounds, most)
        assert best.gpus <= most, f"seed {seed}"
        assert all(bounds[role].least <= n <= bounds[role].most for role, n in best.workers.items()), f"seed {seed}"
        assert best.cost == pytest.approx(every(one, wanted, bounds, most), abs=1e-6), f"seed {seed}"


def test_three_roles_come_close_to_the_best_of_all_and_within_the_gpus():
    roles, worst = ("aggregated", "prefill", "decode"), 1.0
    for seed in range(12):
        dice = random.Random(seed)
        one, wanted = sizing(*roles), demand(dice)
        bounds = {role: Bounds(0, 7, 1) for role in roles}
        most = dice.choice((float("inf"), 6.0, 12.0))
        best = one.best(wanted, bounds, most)
        assert best.gpus <= most, f"seed {seed}"
        worst = max(worst, best.cost / every(one, wanted, bounds, most))
    assert worst < 1.1


def test_a_fleet_too_large_to_try_every_pair_is_sized_as_well_as_the_pairs_say():
    """Above `JOINT_MAX` each role is chosen in turns: the same demand, bounded below and above it."""
    one = sizing("prefill", "decode")
    wanted = UncertainDemand(np.array([30.0]), np.ones(1))
    small, large = ({role: Bounds(1, most, 1) for role in one.tables} for most in (60, 70))
    assert one.best(wanted, large).cost == pytest.approx(one.best(wanted, small).cost, rel=0.02)


def test_where_not_even_the_least_fits_the_least_is_returned():
    one = sizing("prefill", "decode")
    bounds = {role: Bounds(2, 8, 1) for role in one.tables}
    assert one.best(demand(random.Random(0)), bounds, 1.0).workers == {"prefill": 2, "decode": 2}


@pytest.mark.parametrize("price", [0.5, 4.0, 20.0])
@pytest.mark.parametrize("roles", [("aggregated",), ("prefill", "decode")])
def test_where_no_fleet_keeps_anything_what_can_be_answered_is(roles, price):
    """All miss alike there; the smallest fleet must not be the cheapest for that."""
    one = sizing(*roles, price=price)
    bounds = {role: Bounds(1, 6, 1) for role in roles}
    flood = UncertainDemand.of_quantiles((0.5,), np.array([50.0 / sum(TABLES[role].least for role in roles)]))
    best = one.best(flood, bounds, 6.0)
    assert best.attainment < 0.01 and best.gpus == 6
    # Of all fleets of so many GPUs, none takes up more.
    others = ({**dict.fromkeys(roles, n), roles[0]: 6 - n if len(roles) > 1 else 6} for n in range(1, 6))
    assert best.answered >= max(one.expected_answered(other, flood) for other in others) - 1e-9


def test_one_worker_more_answers_more_of_what_is_too_much():
    one = sizing("aggregated")
    rate = np.array([8.0 / TABLES["aggregated"].least])
    harm = [float(one.harm({"aggregated": float(n)}, rate)[0]) for n in range(1, 9)]
    assert all(before - after > 1.0 for before, after in pairwise(harm)), "each GPU spares more than it costs"


def test_nothing_to_do_takes_the_least_there_may_be():
    nothing = UncertainDemand(np.zeros(2), np.full(2, 0.5))
    assert sizing("aggregated").best(nothing, {"aggregated": Bounds(0, 9, 1)}).workers == {"aggregated": 0}


@pytest.mark.parametrize("roles", [("aggregated",), ("prefill", "decode")])
def test_more_demand_and_dearer_misses_take_no_fewer_gpus(roles):
    bounds = {role: Bounds(1, 40, 1) for role in roles}
    by_rate = [
        sizing(*roles).best(UncertainDemand(np.array([rate]), np.ones(1)), bounds).gpus
        for rate in np.linspace(0.1, 20, 40)
    ]
    assert by_rate == sorted(by_rate)
    wanted = demand(random.Random(3))
    by_price = [sizing(*roles, price=price).best(wanted, bounds).gpus for price in (1, 5, 20, 100, 1000)]
    assert by_price == sorted(by_price)


def test_an_uncertain_rate_takes_more_than_its_mean_where_misses_are_dear():
    bounds = {"aggregated": Bounds(1, 60, 1)}
    sure = UncertainDemand(np.array([6.0]), np.ones(1))
    unsure = UncertainDemand(np.array([3.0, 9.0]), np.full(2, 0.5))
    one = sizing("aggregated", price=200.0)
    assert one.best(unsure, bounds).gpus > one.best(sure, bounds).gpus


def test_quantiles_make_a_distribution_of_the_same_middle():
    found = UncertainDemand.of_quantiles((0.1, 0.5, 0.9), np.array([1.0, 2.0, 3.0]))
    assert found.weights.sum() == pytest.approx(1.0) and found.mean == pytest.approx(2.0)
    assert found.weights == pytest.approx([0.3, 0.4, 0.3])


def test_what_was_rejected_is_told_by_its_price():
    one, wanted = sizing("prefill", "decode"), demand(random.Random(1))
    bounds = {role: Bounds(1, 9, 1) for role in one.tables}
    best = one.best(wanted, bounds)
    beside = one.neighbours(best, wanted, bounds)
    assert beside and all(other.cost >= best.cost - 1e-9 for other in beside)
    assert [other.cost for other in beside] == sorted(other.cost for other in beside)
    assert set(best.as_data()) == {"workers", "gpus", "attainment", "answered", "cost"}

"""What is worth loading: the best of all depths by brute force, within a deadline, and as an engine reports it."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from penstock.kernel.tiers.load_worth import BlockRun, LoadCosts, Way, costs_in, metrics_of, worth_loading
from tests.depth import deep

SECONDS = st.floats(0.0, 1e-2, allow_subnormal=False)
WAYS = [Way(name, start, block) for name, start, block in (("", 1e-4, 1e-4), ("disk", 1e-3, 1e-3), ("p", 2e-3, 5e-5))]
RUNS = st.lists(
    st.tuples(st.integers(0, 40), st.lists(st.sampled_from(WAYS), unique=True, max_size=3).map(tuple)).map(
        lambda run: BlockRun(*run)
    ),
    max_size=4,
)
COSTS = st.builds(
    LoadCosts,
    compute=st.just(0.0) | SECONDS,
    host_start=SECONDS,
    host_token=SECONDS,
    disk_start=SECONDS,
    disk_token=SECONDS,
    own_host=st.booleans(),
)


def load_of(runs: Sequence[BlockRun], depth: int) -> float:
    """Return the seconds of a load, way by way."""
    ways = [run.ways for run in runs for _ in range(run.blocks)][:depth]
    return sum(
        way.start + way.block * sum(way in each for each in ways) for way in {way for each in ways for way in each}
    )


@hypothesis_settings(max_examples=deep(300), deadline=None)
@given(RUNS, SECONDS.filter(bool))
def test_no_other_depth_gains_more(runs: list[BlockRun], compute: float) -> None:
    total = sum(run.blocks for run in runs)
    gains = [depth * compute - load_of(runs, depth) for depth in range(total + 1)]
    blocks, short = worth_loading(runs, compute)
    assert gains[blocks] == pytest.approx(max(gains), abs=1e-12)
    assert blocks == total or short == "recompute is cheaper"


@given(RUNS, SECONDS, st.floats(1e-4, 0.1))
def test_a_load_ends_within_its_deadline(runs: list[BlockRun], compute: float, limit: float) -> None:
    blocks, short = worth_loading(runs, compute, limit)
    assert load_of(runs, blocks) <= limit + 1e-12
    assert short == "deadline" or compute or blocks == sum(run.blocks for run in runs)


def test_an_unknown_speed_loads_all() -> None:
    assert worth_loading([BlockRun(7, (WAYS[1],))], 0.0)[0] == 7
    assert LoadCosts(compute=0.0, host_start=9.0, host_token=9.0, disk_start=9.0, disk_token=9.0).worth(3, 4) == 7


def test_a_slow_disk_leaves_its_blocks_out_and_keeps_those_of_the_host() -> None:
    costs = LoadCosts(compute=1e-3, host_start=1e-4, host_token=1e-4, disk_start=1e-3, disk_token=2e-3)
    assert costs.worth(3, 27) == 3 and costs.worth(0, 27) == 0
    assert (
        LoadCosts(compute=1e-3, host_start=1e-4, host_token=1e-4, disk_start=0.02, disk_token=5e-4).worth(3, 60) == 63
    )
    assert LoadCosts(compute=1e-3, host_start=1e-4, host_token=1e-4, disk_start=0.02, disk_token=5e-4).worth(3, 40) == 3


def test_what_an_engine_loads_without_asking_counts_at_any_cost() -> None:
    costs = LoadCosts(compute=1e-3, host_start=1.0, host_token=1.0, disk_start=1.0, disk_token=1.0, own_host=True)
    assert costs.worth(3, 27) == 3


@given(COSTS)
def test_costs_are_read_as_they_were_reported_and_ranks_add_up(costs: LoadCosts) -> None:
    page = metrics_of(costs)
    assert costs_in(page) == costs
    twice = costs_in({name: 2 * value for name, value in page.items()})
    assert twice is not None
    assert all(twice.worth(host, disk) == costs.worth(host, disk) for host in (0, 1, 9) for disk in (0, 1, 9, 300))


def test_an_incomplete_report_is_none() -> None:
    page = metrics_of(LoadCosts(compute=1e-3, host_start=1e-4, host_token=1e-4))
    for name in page:
        assert costs_in({**page, name: float("nan")}) is None
        assert costs_in({key: value for key, value in page.items() if key != name}) is None

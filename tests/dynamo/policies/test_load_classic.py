"""The first load planner: samples each second, one step per 30 s, ways down first, and grace for newcomers."""

import pytest

from penstock.kernel.errors import ConfigError
from penstock.planner.policies import make
from penstock.planner.settings import BudgetSettings, PlannerSettings
from penstock_dynamo.policies.load_classic import GPUS_MAX, suggested_thresholds
from penstock_dynamo.settings_classic import ClassicSettings, LoadClassicSettings
from tests.planner.policies.looks import Ticks, look, pool


def ticks(budget: BudgetSettings | None = None) -> Ticks:
    settings = PlannerSettings(policy="load-classic")
    assert settings.base == 1.0
    return Ticks(make("load-classic", settings), budget)


def interval(run: Ticks, queue, kv, *, prefill: int = 2, decode: int = 2, start: int = 0, seconds: int = 31, **told):
    """Look each second; ``queue``: second -> requests that wait for prefill, ``kv``: use of decode workers."""
    said = []
    for second in range(seconds):
        waiting = queue(second) if callable(queue) else queue
        pools = {
            "p": pool("prefill", [{"waiting": waiting}] + [{}] * (prefill - 1)),
            "d": pool("decode", [{"decode_kv": round(100_000 * kv)}] * decode, **told),
        }
        said.append(run.tick(look(float(start + second), pools, window=1.0)))
    return said


@pytest.mark.parametrize(
    "reversed_",
    [
        {"decode_kv_scale_up_threshold": 0.4},
        {"prefill_queue_scale_down_threshold": 0.5, "prefill_queue_scale_up_threshold": 0.5},
    ],
)
def test_reversed_thresholds_are_refused(reversed_):
    """A load between them would be one to go down and one to go up, in one decision."""
    settings = PlannerSettings(policy="load-classic", classic=ClassicSettings(load=LoadClassicSettings(**reversed_)))
    with pytest.raises(ConfigError, match=r"planner\.classic\.load\..*_down_threshold is 0\.5, and"):
        make("load-classic", settings)


def test_samples_are_taken_as_often_as_set():
    load = LoadClassicSettings(metric_pulling_interval=2.0, adjustment_interval=6.0)
    settings = PlannerSettings(policy="load-classic", classic=ClassicSettings(load=load))
    assert make("load-classic", settings)[0].spec.interval == 2.0 and settings.base == 2.0


def test_a_queue_and_a_full_cache_each_bring_one_worker_at_the_end_of_the_interval():
    said = interval(ticks(), 2, 0.95)
    assert all(not each.named for each in said[:-1])
    assert said[-1].targets == {"p": 3, "d": 3}


def test_both_go_down_by_one_where_nothing_is_to_do_and_never_below_one():
    run = ticks()
    assert interval(run, 0, 0.1)[-1].targets == {"p": 1, "d": 1}
    low = interval(ticks(), 0, 0.1, prefill=1, decode=1)[-1]
    assert low.targets == {"p": 1, "d": 1} and low.codes == ["at_minimum", "at_minimum"]


def test_within_both_bands_nothing_happens():
    assert not interval(ticks(), 0, 0.7, prefill=1)[-1].named


def test_no_prefill_up_where_the_queue_falls_fast_enough():
    said = interval(ticks(), lambda second: max(0.0, 30 - second), 0.7)[-1]
    assert said.targets["p"] == 2 and "queue_falls" in said.codes


def test_a_decode_worker_that_came_has_three_decisions_of_grace():
    run = ticks()
    assert interval(run, 0.3, 0.95)[-1].targets["d"] == 3
    decisions = []
    for turn in range(4):
        decisions.append(interval(run, 0.3, 0.1, decode=3, start=31 + 30 * turn, seconds=30)[-1])
    assert [each.targets["d"] for each in decisions] == [3, 3, 3, 2]
    assert [each.codes for each in decisions[:3]] == [["workers_changed"], ["decode_grace"], ["decode_grace"]]


def test_while_workers_come_or_go_it_neither_samples_nor_decides():
    run = ticks()
    said = interval(run, 5, 0.95, starting=(1.0,), desired=3)
    assert said[-1].codes == ["scaling_in_progress"] and not said[-1].named
    later = interval(run, 5, 0.95, start=40, seconds=20)
    assert all(not each.named for each in later), "the interval begins anew when all are there"


def test_an_interval_in_which_workers_changed_decides_nothing():
    run = ticks()
    interval(run, 5, 0.95, seconds=15)
    said = interval(run, 5, 0.95, decode=3, start=15, seconds=16)
    assert said[-1].codes == ["workers_changed"] and not said[-1].named


def test_its_budget_holds_and_waiting_requests_may_count(monkeypatch):
    found = interval(ticks(BudgetSettings(max_gpus=4)), 2, 0.95)[-1]
    assert found.targets == {"p": 2, "d": 2} and found.codes.count("gpu_budget_guard_hold") == 2
    pools = {"d": pool("decode", [{"decode_kv": 85_000, "waiting": 5}])}
    for share, expected in ((0.02, 2), (0.0, 1)):
        monkeypatch.setattr("penstock_dynamo.policies.load_classic.WAITING_KV", share)
        run = ticks()
        for second in range(31):
            said = run.tick(look(float(second), pools, window=1.0))
        assert said.targets["d"] == expected


def test_without_a_budget_it_asks_for_no_more_than_dynamos_default():
    for prefill, decode, expected in ((3, 4, {"p": 4, "d": 4}), (4, 4, {"p": 4, "d": 4})):
        assert sum(expected.values()) == GPUS_MAX
        found = interval(ticks(), 2, 0.95, prefill=prefill, decode=decode)[-1]
        assert found.targets == expected and "gpu_budget_guard_hold" in found.codes


def test_a_restart_in_the_middle_of_an_interval_changes_nothing():
    one, two = ticks(), ticks()
    interval(one, 2, 0.95, seconds=15)
    two.plugins[0].restore(one.plugins[0].snapshot())
    assert interval(two, 2, 0.95, start=15, seconds=16)[-1].targets == {"p": 3, "d": 3}


def test_the_thresholds_that_a_profile_suggests():
    found = suggested_thresholds(ttft=0.04837, ttft_sla=0.050, sequences=1, isl=3000, osl=300, kv_tokens=10**6)
    assert found == pytest.approx((0.24, 0.10, 0.20, 0.10), abs=0.005)

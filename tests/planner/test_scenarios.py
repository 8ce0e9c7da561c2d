"""The default policy through what its users fear: each a small world on virtual time, with what must come of it."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import mean
from typing import NamedTuple

import msgspec
import pytest

from bench.planner_study.metric_faults import silent_engine
from bench.planner_study.scenario import ENGINE, LAYOUTS, SLO, known_speeds, plan_of, tables
from penstock.kernel.request_record import RequestRecord
from penstock.kernel.values import Role
from penstock.planner.observation import ModelState, Observation, PoolState
from penstock.planner.planner import Planner
from penstock.planner.policies import PolicyInputs, plugins_of
from penstock.planner.settings import BudgetSettings, PlannerSettings, StartSettings
from penstock.planner.tick_record import TickRecord
from penstock.router.settings import QueueSettings, RouterSettings
from penstock_lab.simulate.simulated_cluster import SimulatedCluster
from penstock_lab.traffic.traffic_request import TrafficRequest

ISL, OSL = 6000, 400
Rate = Callable[[float], float]
Distort = Callable[[Observation], Observation]


class Run(NamedTuple):
    """What became of requests, and of every tick."""

    requests: list[RequestRecord]
    ticks: list[TickRecord]
    alarms: Mapping[str, int]

    def wanted(self, pool: str, since: float = 0.0, until: float = math.inf) -> list[int]:
        """Return what was wanted of a pool in each tick of some seconds."""
        return [tick.pools[pool].target for tick in self.ticks if since <= tick.at < until]

    def kept(self, since: float = 0.0, until: float = math.inf) -> float:
        """Return the share in SLO of what arrived in some seconds."""
        found = [one.within(SLO) for one in self.requests if since <= one.arrival < until]
        return sum(found) / len(found)

    def unharmed(self) -> bool:
        """Say whether every request was answered, and none had to begin anew."""
        return all(one.outcome == "ok" and (one.attempts or 1) == 1 for one in self.requests)


def arrivals(
    rate: Rate, seconds: float, isl: Callable[[float], int] = lambda at: ISL, seed: int = 1
) -> list[TrafficRequest]:
    """Return requests that come by chance at a rate that changes, by thinning."""
    dice, at, found = random.Random(seed), 0.0, []
    most = max(rate(float(second)) for second in range(int(seconds)))
    while (at := at + dice.expovariate(most)) < seconds:
        length, answer = dice.lognormvariate(0.0, 0.3), dice.lognormvariate(0.0, 0.4)
        if dice.random() * most < rate(at):
            found.append(TrafficRequest(at=at, isl=round(isl(at) * length), osl=max(2, round(OSL * answer))))
    return found


class Stuck(SimulatedCluster):
    """A cluster in which no worker of ``stuck`` can be started: its connector says so."""

    stuck = ""

    def _start(self, pool, worker=None, *, at_once=False):
        if at_once or pool != self.stuck:
            super()._start(pool, worker, at_once=at_once)

    def _see(self, now):
        def told(state: PoolState) -> PoolState:
            pool = msgspec.structs.replace(state.pool, problem="no node has room")
            return msgspec.structs.replace(state, pool=pool, failed=max(0, pool.desired - state.ready))

        seen = super()._see(now)
        return of_models(seen, lambda model: of_pool(model, self.stuck, told))


def of_models(seen: Observation, change: Callable[[ModelState], ModelState]) -> Observation:
    return msgspec.structs.replace(seen, models={name: change(each) for name, each in seen.models.items()})


def of_pool(model: ModelState, name: str, change: Callable[[PoolState], PoolState]) -> ModelState:
    return msgspec.structs.replace(model, pools={**model.pools, name: change(model.pools[name])})


def run(
    requests: Sequence[TrafficRequest],
    workers: dict[Role, int],
    seconds: float,
    *,
    start_up: float = 60.0,
    distort: Distort = lambda seen: seen,
    stuck: str = "",
    budget: BudgetSettings | None = None,
    deadline: float = 600.0,
) -> Run:
    """Let policy slo scale a cluster."""
    layout = "aggregated" if "aggregated" in workers else "disaggregated"
    settings = PlannerSettings(
        budget=budget or BudgetSettings(max_gpus=20),
        start=StartSettings(assumed=max(1.0, start_up), deadline=deadline),
        mode=layout,
    )
    inputs = PolicyInputs(slo=SLO, speeds={"": {role: known_speeds() for role in LAYOUTS[layout]}})
    planner = Planner(settings, plugins_of(settings, inputs), strict=True)
    records: list[RequestRecord] = []
    ticks: list[TickRecord] = []

    class Made(Stuck if stuck else SimulatedCluster):
        def _see(self, now):
            return distort(super()._see(now))

    Made.stuck = stuck
    plan = plan_of(workers, start_up, seconds)
    if settings.budget.min_replicas == 0:  # as every cluster does whose planner may take the last worker
        plan = msgspec.structs.replace(plan, router=RouterSettings(queue=QueueSettings(start_wait=120.0)))
    cluster = Made(plan, requests, planner=planner, ticked=ticks.append, record=records.append)
    cluster.run()
    assert len(records) == len(requests), "requests were lost"
    # What is still to be answered at the end goes on after it; nobody comes any more then.
    return Run(records, [tick for tick in ticks if tick.at <= seconds], cluster.alarms)


def turns(wanted: Sequence[int]) -> int:
    """Count changes of direction."""
    steps = [after - before for before, after in pairwise(wanted) if after != before]
    return sum((before > 0) != (after > 0) for before, after in pairwise(steps))


def edge(workers: int) -> float:
    """Return about the highest rate that so many aggregated workers serve well: where one more is just not needed."""
    return tables("aggregated").tables["aggregated"].capacity(workers, share=0.97)


@pytest.mark.parametrize("near", [pytest.param(0.95, marks=pytest.mark.slow), 1.05])
def test_a_steady_load_near_a_threshold_does_not_flap(near):
    rate, seconds = near * edge(4), 1500.0
    found = run(arrivals(lambda at: rate, seconds), {"aggregated": 4}, seconds)
    hours = seconds / 3600.0
    assert turns(found.wanted("main")) <= 2.0 * hours + 1.0
    assert found.kept() > 0.9


def test_where_traffic_stops_and_latencies_become_nan_it_goes_down():
    def no_number(seen: Observation) -> Observation:
        def change(model: ModelState) -> ModelState:
            traffic = model.traffic
            if traffic is None or traffic.arrived or seen.at < 500.0:
                return model
            broken = msgspec.structs.replace(traffic, ttft_sum=math.nan, itl_sum=math.nan, duration_sum=math.nan)
            return msgspec.structs.replace(model, traffic=broken)

        return of_models(seen, change)

    rate = edge(4)
    # Somebody comes at the very end, or the run would be over when the last answer is.
    requests = [*arrivals(lambda at: rate, 500.0), TrafficRequest(at=1490.0, isl=ISL, osl=OSL)]
    found = run(requests, {"aggregated": 5}, 1500.0, distort=no_number)
    assert max(found.wanted("main", until=500.0)) >= 4
    assert found.wanted("main", 1400.0, 1490.0)[-1] == 1
    assert found.unharmed()


def test_where_nothing_can_be_read_it_holds():
    def blind(seen: Observation) -> Observation:
        if not 500.0 <= seen.at < 900.0:
            return seen
        return of_models(seen, lambda model: msgspec.structs.replace(model, traffic=None, why="connection refused"))

    high, low = edge(5), edge(1) * 0.6
    requests = arrivals(lambda at: high if at < 520.0 else low, 1500.0)
    found = run(requests, {"aggregated": 6}, 1500.0, distort=blind)
    before = found.wanted("main", until=500.0)[-1]
    assert min(found.wanted("main", 500.0, 900.0)) >= before, "unknown is not zero"
    assert found.wanted("main")[-1] < before, "and it goes down when it sees again"
    assert found.alarms["source_broken"] == 1
    health = {next(iter(tick.models.values())).health for tick in found.ticks}
    assert health == {"fresh", "stale", "broken"}


def test_where_one_pool_can_never_start_workers_the_other_one_is_still_planned_and_a_reason_is_shown():
    rate = edge(8)
    requests = arrivals(lambda at: rate * min(1.0, 0.2 + at / 300.0), 700.0)
    found = run(requests, {"prefill": 2, "decode": 1}, 700.0, stuck="prefill")
    assert max(found.wanted("decode")) > 1, "the other pool is planned"
    assert found.alarms["not_started"] >= 1
    last = [tick.pools["prefill"] for tick in found.ticks if tick.pools["prefill"].given_up][-1]
    assert last.given_up == last.desired - last.ready
    assert max(found.wanted("prefill")) <= 8, "what does not start is not ordered for ever"


def test_where_start_ups_never_end_they_are_given_up_and_the_reason_is_shown():
    rate = edge(3)
    requests = arrivals(lambda at: rate, 400.0)
    found = run(requests, {"aggregated": 2}, 400.0, start_up=1000.0, deadline=60.0)
    assert found.alarms["not_started"] >= 1
    assert found.ticks[-1].pools["main"].given_up > 0
    assert all(tick.outcome in ("apply", "keep", "hold") for tick in found.ticks), "ticks go on"


def test_one_engine_that_tells_nothing_changes_little():
    rate, seconds = edge(4), 600.0
    requests = arrivals(lambda at: rate, seconds)
    found = run(requests, {"aggregated": 4}, seconds, distort=silent_engine(seconds))
    plain = run(requests, {"aggregated": 4}, seconds)
    assert abs(found.wanted("main")[-1] - plain.wanted("main")[-1]) <= 1
    assert found.kept() > plain.kept() - 0.05 and found.unharmed()


@pytest.mark.slow
def test_a_six_fold_spike_shorter_than_a_start_up_is_survived_and_comes_back_down():
    low, after, recovered = edge(1), [], []
    for seed in range(1, 7):
        requests = arrivals(lambda at: 6 * low if 500.0 <= at < 560.0 else low, 1500.0, seed=seed)
        found = run(requests, {"aggregated": 2}, 1500.0, start_up=120.0)
        assert found.unharmed()
        assert max(found.wanted("main")) <= 20
        recovered.append(found.kept(since=1000.0))
        after.append(max(found.wanted("main", since=560.0 + 150.0)))
        stress = found.ticks[-1].evidence["slo_propose"]["stress"]
        assert stress < 1.15, "what waits after a burst is not the engines' fault"
    # One worker keeps 97 % of such a rate in the mean, with a seed or two below it.
    assert mean(recovered) > 0.97, f"it has recovered: {recovered}"
    # What was ordered for it goes before it ever serves. At so low a rate one spike in six may pass for no jump at all.
    assert sorted(after)[-2] <= 2 and max(after) <= 4, after


def ceilings(tick: TickRecord) -> list[int]:
    """Return how many GPUs more a tick would have liked, where the ceiling binds."""
    return [because.facts["more_gpus"] for because in tick.bound if because.code == "ceiling"]


@pytest.mark.slow
def test_above_the_ceiling_nobody_goes_and_after_it_service_is_back_at_once():
    rate = edge(8)
    requests = arrivals(lambda at: 2.0 * rate if 600.0 <= at < 840.0 else 0.7 * rate, 1800.0)
    found = run(requests, {"aggregated": 8}, 1800.0, budget=BudgetSettings(max_gpus=8))
    fixed = run(requests, {"aggregated": 8}, 1800.0, budget=BudgetSettings(max_gpus=8, min_replicas=8))
    assert set(found.wanted("main", since=620.0, until=900.0)) == {8}, "all of it while there is work"
    assert found.kept() > fixed.kept() - 0.02
    short = [tick for tick in found.ticks if 620.0 <= tick.at < 840.0]
    assert all(ceilings(tick) for tick in short) and found.alarms["ceiling"] == 1
    assert not any(ceilings(tick) for tick in found.ticks if not 600.0 <= tick.at < 1000.0)


def test_an_overload_that_never_ends_keeps_every_worker_and_says_how_many_gpus_are_missing():
    rate, seconds = 3.0 * edge(3), 900.0
    found = run(arrivals(lambda at: rate, seconds), {"aggregated": 3}, seconds, budget=BudgetSettings(max_gpus=3))
    assert set(found.wanted("main")) == {3}
    # About 9 workers carry three times what 3 do; a queue that only grows must not be taken for slow engines.
    late = [more for tick in found.ticks if tick.at > 300.0 for more in ceilings(tick)]
    assert len(late) >= 110 and all(4 <= more <= 16 for more in late)


def test_a_split_the_wrong_way_round_changes_roles_at_once_and_stays_so():
    rate, seconds = 0.9 * edge(8), 900.0
    workers: dict[Role, int] = {"prefill": 2, "decode": 6}
    found = run(arrivals(lambda at: rate, seconds), workers, seconds, start_up=120.0, budget=BudgetSettings(max_gpus=8))
    assert found.ticks[3].at < 20.0 and any(tick.flips for tick in found.ticks[:4])
    assert found.kept() > 0.99 and found.unharmed()
    for pool in ("prefill", "decode"):
        assert turns(found.wanted(pool)) <= 2, found.wanted(pool)


def test_prompts_four_times_as_long_at_the_same_rate_take_more_workers():
    rate = edge(3) * 0.8
    isl = {True: ISL // 4, False: ISL}
    requests = arrivals(lambda at: rate, 1200.0, lambda at: isl[at < 500.0])
    found = run(requests, {"aggregated": 3}, 1200.0)
    before, after = found.wanted("main", until=500.0)[-1], max(found.wanted("main", since=500.0))
    assert after >= before + 2
    assert found.kept(since=1000.0) > 0.9


def test_a_queue_that_grows_while_service_times_look_fine_takes_more_workers():
    """Tokens come as fast as ever to those who are served; what is too slow is the wait for the first one."""
    queued = {"count": 0}

    def growing(seen: Observation) -> Observation:
        if seen.at < 400.0:
            return seen
        queued["count"] += 5
        return of_models(seen, lambda model: msgspec.structs.replace(model, queued=queued["count"]))

    rate = edge(3) * 0.85
    requests = arrivals(lambda at: rate, 700.0)
    plain = run(requests, {"aggregated": 3}, 700.0)
    found = run(requests, {"aggregated": 3}, 700.0, distort=growing)
    assert max(found.wanted("main", since=400.0)) > max(plain.wanted("main", since=400.0))


@pytest.mark.parametrize("layout", ["aggregated", "disaggregated"])
def test_a_scale_down_never_harms_a_request(layout):
    workers: dict[Role, int] = {"aggregated": 8} if layout == "aggregated" else {"prefill": 5, "decode": 5}
    high, low = edge(6) * 0.8, edge(1)
    requests = arrivals(lambda at: high if at < 400.0 else low, 1200.0)
    found = run(requests, workers, 1200.0, start_up=20.0)
    for pool in found.ticks[-1].pools:
        wanted = found.wanted(pool)
        assert wanted[-1] < wanted[0], f"{pool} did not go down: this is not tested then"
    assert found.unharmed()


def test_what_comes_to_a_model_without_workers_waits_for_the_first_one():
    requests = [
        *arrivals(lambda at: 0.5, 200.0),
        *(TrafficRequest(at=900.0 + one.at, isl=one.isl, osl=one.osl) for one in arrivals(lambda at: 0.3, 200.0)),
    ]
    budget = BudgetSettings(max_gpus=8, min_replicas=0)
    found = run(requests, {"aggregated": 1}, 1200.0, start_up=20.0, budget=budget)
    assert found.wanted("main", 800.0, 900.0)[-1] == 0, "five minutes without anybody"
    assert found.wanted("main", 950.0)[-1] >= 1
    assert {one.outcome for one in found.requests} == {"ok"}


def test_an_engine_of_this_world_serves_about_what_the_scenarios_assume():
    assert ENGINE.timing.kind == "roofline" and 0.3 < edge(1) < edge(4) / 4 < 1.2

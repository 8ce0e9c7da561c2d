"""Does policy slo order in time, give back late, wake up, change roles, and weigh classes?"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from penstock.kernel.machine import Woken, nanos
from penstock.kernel.values import Role, Slo, SloClass, Traffic, WorkerId
from penstock.planner import events as planning
from penstock.planner.observation import EngineState, ModelState, Observation
from penstock.planner.performance.speed_sources import KnownSpeeds
from penstock.planner.planner import Planner
from penstock.planner.policies import PolicyInputs, plugins_of
from penstock.planner.settings import BudgetSettings, PlannerSettings, SloPolicySettings, StartSettings
from penstock.planner.sizing.workload_mix import shape_bin
from penstock.planner.tick_record import TickRecord
from tests.planner.pool_states import pool_state

ISL, OSL = 4000, 400
TICK = 5.0
METRICS = {
    "prefill": [{"tokens": n, "seconds": 0.01 + n * 1e-4} for n in (100, 1000, 4000, 16_000)],
    "decode": [
        {"batch": b, "kv_tokens": kv, "seconds": 0.01 + b * 1e-5 + kv * 4e-8}
        for b in (1, 16, 64, 256)
        for kv in (1000, 50_000, 400_000)
    ],
}
KNOWN = PolicyInputs(
    speeds={
        "": {role: KnownSpeeds(metrics={"self-benchmark": METRICS}) for role in ("aggregated", "prefill", "decode")}
    }
)


class Fleet:
    """A cluster that does at once what is wanted, but for starts, which take their time."""

    def __init__(self, workers: dict[Role, int], *, lead: float = 60.0, flips: bool = False, **slo: Any) -> None:
        budget, inputs = slo.pop("budget", BudgetSettings(max_gpus=24)), slo.pop("inputs", KNOWN)
        kept = Slo(ttft=2.0, itl=0.03, classes=slo.pop("classes", {}))
        settings = PlannerSettings(slo=SloPolicySettings(**slo), budget=budget, start=StartSettings(assumed=lead))
        self.planner = Planner(settings, plugins_of(settings, dataclasses.replace(inputs, slo=kept)), strict=True)
        self.lead, self.flips, self.at = lead, flips, 0.0
        self.workers = {role: {f"{role}-{n}": 0.0 for n in range(count)} for role, count in workers.items()}
        self.roles: dict[str, Role] = {}
        self.records: list[TickRecord] = []
        self.counts: dict[Role, int] = dict(workers)

    def run(self, seconds: float, rate: Callable[[float], float], **more: Any) -> list[TickRecord]:
        """Let some time go by; return the records of it."""
        first = len(self.records)
        for _ in range(round(seconds / TICK)):
            self._tick(rate(self.at), more)
        return self.records[first:]

    def _tick(self, rate: float, more: dict[str, Any]) -> None:
        self.at += TICK
        now = nanos(self.at)
        effects = list(self.planner.handle(now, Woken()))
        while effects:
            effect = effects.pop(0)
            if isinstance(effect, planning.Observe):
                effects += self.planner.handle(now, planning.Observed(id=effect.id, observation=self._seen(rate, more)))
            elif isinstance(effect, planning.Scale):
                self._scale(effect)
                effects += self.planner.handle(now, planning.Scaled(id=effect.id))
            elif isinstance(effect, planning.Ticked):
                self.records.append(effect.record)
        self.planner.check()

    def _scale(self, told: planning.Scale) -> None:
        for role, wanted in told.targets.items():
            own = self.workers[role]  # pools are called as their roles are
            for name in list(own)[wanted:]:
                del own[name]
            while len(own) < wanted:
                self.counts[role] += 1
                own[f"{role}-{self.counts[role]}"] = self.at + self.lead
        for flip in told.flips:
            able = [n for pool, own in self.workers.items() for n in own if self.roles.get(n, pool) == flip.frm]
            self.roles |= dict.fromkeys(able[: flip.count], flip.to)

    def _seen(self, rate: float, more: dict[str, Any]) -> Observation:
        arrived = round(rate * TICK)
        classes = more.get("classes", {})
        traffic = Traffic(
            seconds=TICK,
            arrived=arrived,
            prompt_tokens=arrived * ISL,
            answered=arrived,
            answered_prompt_tokens=arrived * ISL,
            output_tokens=arrived * OSL,
            shapes={shape_bin(ISL, OSL, 0.0): arrived} if arrived else {},
            classes={name: round(arrived * share) for name, share in classes.items()},
        )
        pools = {
            role: pool_state(
                role=role,
                desired=len(own),
                ready=sum(at <= self.at for at in own.values()),
                starting=tuple(
                    sorted((self.lead - (at - self.at) for at in own.values() if at > self.at), reverse=True)
                ),
                flips=self.flips,
                engines=tuple(
                    EngineState(worker=WorkerId(name), role=self.roles.get(name, role))
                    for name, at in own.items()
                    if at <= self.at
                ),
            )
            for role, own in self.workers.items()
        }
        model = ModelState(
            traffic=traffic, pools=pools, queued=more.get("queued", 0), without_worker=more.get("held", 0)
        )
        return Observation(at=self.at, window=TICK, models={"m": model})

    def wanted(self, role: Role = "aggregated") -> int:
        return len(self.workers[role])


def test_a_ramp_is_ordered_a_start_up_ahead_of_its_need() -> None:
    fleet = Fleet({"aggregated": 3}, lead=120.0)
    fleet.run(600.0, lambda at: 2.0)
    before = fleet.wanted()
    records = fleet.run(300.0, lambda at: 2.0 + (at - 600.0) / 60.0)
    # While the rate grows, more is ordered than what is needed at that moment.
    ahead = [r for r in records if r.pools["aggregated"].target > told(r)["needs"]["0"]["aggregated"]]
    assert fleet.wanted() > before and any(b.code == "up" for r in ahead for b in r.chosen)
    assert any(
        because.code == "up" and "requests/s are expected" in because.text for r in records for because in r.chosen
    )


def test_nothing_is_given_back_before_a_forecast_was_put_to_the_test() -> None:
    fleet = Fleet({"aggregated": 9}, lead=60.0)
    fleet.run(240.0, lambda at: 1.0)
    assert fleet.wanted() == 9
    fleet.run(600.0, lambda at: 1.0)
    assert fleet.wanted() < 5


def test_it_goes_down_only_after_the_hold_and_in_one_go() -> None:
    fleet = Fleet({"aggregated": 3}, lead=30.0, hold=120.0)
    fleet.run(900.0, lambda at: 6.0)
    high = fleet.wanted()
    fleet.run(60.0, lambda at: 1.0)
    assert fleet.wanted() == high
    fleet.run(600.0, lambda at: 1.0)
    assert fleet.wanted() <= high // 2
    downs = [r for r in fleet.records if r.outcome == "apply" and any(b.code == "down" for b in r.chosen)]
    assert 1 <= len(downs) <= 4


def test_a_dearer_miss_buys_more_workers() -> None:
    wanted = []
    for miss_cost in (3.0, 40.0, 400.0):
        fleet = Fleet({"aggregated": 4}, lead=60.0, miss_cost=miss_cost)
        fleet.run(900.0, lambda at: 4.0 + 1.5 * math.sin(at / 40.0))
        wanted.append(fleet.wanted())
    assert wanted == sorted(wanted) and wanted[0] < wanted[-1]


def test_the_last_worker_goes_after_a_silence_and_comes_back_for_whoever_waits() -> None:
    fleet = Fleet({"aggregated": 2}, lead=30.0, zero_after=120.0, budget=BudgetSettings(max_gpus=8, min_replicas=0))
    fleet.run(600.0, lambda at: 0.4)
    assert fleet.wanted() >= 1
    fleet.run(90.0, lambda at: 0.0)
    assert fleet.wanted() >= 1
    fleet.run(300.0, lambda at: 0.0)
    assert fleet.wanted() == 0
    fleet.run(TICK, lambda at: 0.2, queued=1, held=1)
    assert fleet.wanted() == 1


def test_who_sleeps_from_the_start_is_woken_by_the_first_request() -> None:
    fleet = Fleet({"aggregated": 0}, lead=30.0, budget=BudgetSettings(max_gpus=8, min_replicas=0))
    fleet.run(30.0, lambda at: 0.0)
    assert fleet.wanted() == 0
    fleet.run(20.0, lambda at: 0.2, queued=1, held=1)
    assert fleet.wanted() == 1


def test_roles_change_where_a_start_would_come_too_late() -> None:
    # One of six prefills, which is too little, while five have hardly anything to decode.
    fleet = Fleet({"prefill": 1, "decode": 5}, lead=120.0, flips=True, budget=BudgetSettings(max_gpus=6))
    records = fleet.run(200.0, lambda at: 3.0)
    flips = [flip for record in records for flip in record.flips]
    assert flips and all((flip.frm, flip.to) == ("decode", "prefill") for flip in flips)
    assert any(because.code == "flip" for record in records for because in record.chosen)
    doing = [fleet.roles.get(name, pool) for pool, own in fleet.workers.items() for name in own]
    assert doing.count("prefill") > 1 and len(doing) <= 6


def test_no_role_changes_where_nothing_is_gained() -> None:
    fleet = Fleet({"prefill": 3, "decode": 3}, lead=120.0, flips=True)
    assert not [flip for record in fleet.run(600.0, lambda at: 1.0) for flip in record.flips]


@pytest.mark.parametrize(("weight", "fewer"), [(0.01, True), (1.0, False)])
def test_misses_of_a_class_count_by_its_weight(weight: float, fewer: bool) -> None:
    def wanted(classes: dict[str, SloClass]) -> int:
        fleet = Fleet({"aggregated": 6}, lead=60.0, classes=classes, miss_cost=2.0)
        fleet.run(1200.0, lambda at: 5.0, classes={"batch": 0.95})
        return fleet.wanted()

    plain, weighed = wanted({}), wanted({"batch": SloClass(weight=weight)})
    assert weighed < plain if fewer else weighed == plain


def test_a_stricter_class_needs_more_workers() -> None:
    def wanted(classes: dict[str, SloClass]) -> int:
        fleet = Fleet({"aggregated": 6}, lead=60.0, classes=classes)
        fleet.run(1200.0, lambda at: 5.0, classes={"gold": 0.5})
        return fleet.wanted()

    assert wanted({"gold": SloClass(itl=0.014)}) > wanted({})


def test_three_roles_are_sized_together() -> None:
    fleet = Fleet({"aggregated": 2, "prefill": 2, "decode": 2}, lead=60.0)
    records = fleet.run(400.0, lambda at: 5.0)
    chosen = told(records[-1])["chosen"]
    assert set(chosen["workers"]) == {"aggregated", "prefill", "decode"} and chosen["attainment"] > 0.97


def test_every_tick_says_why_and_from_what_it_chose() -> None:
    fleet = Fleet({"aggregated": 3})
    records: Sequence[TickRecord] = fleet.run(600.0, lambda at: 4.0)
    assert all(record.chosen for record in records[5:])
    evidence = told(records[-1])
    assert {"lead", "demand", "chosen", "candidates", "price", "stress", "speed"} <= set(evidence)
    costs = [one["cost"] for one in evidence["candidates"]]
    assert len(costs) >= 2 and costs == sorted(costs)
    (tick,) = records[-1].models.values()
    weights = tick.predicted["weights"]
    assert len(weights) > 3 and sum(weights.values()) == pytest.approx(1.0, abs=0.01)


def told(record: TickRecord) -> dict[str, Any]:
    """Return what the policy chose from in a tick."""
    evidence = record.evidence["slo_propose"]
    found: dict[str, Any] = evidence.get("m", evidence)
    return found


def test_what_a_worker_measured_of_itself_comes_before_everything_else_and_survives_a_restart() -> None:
    fleet = Fleet({"aggregated": 3}, inputs=PolicyInputs())
    fleet.run(60.0, lambda at: 3.0)
    assert any(because.code == "no_speed" for because in fleet.records[-1].chosen)
    fleet.planner.handle(nanos(fleet.at), planning.Benchmarked(model="m", role="aggregated", metrics=METRICS))
    fleet.run(60.0, lambda at: 3.0)
    assert told(fleet.records[-1])["speed"]["aggregated"].startswith("self-benchmark")
    other = Fleet({"aggregated": 3}, inputs=PolicyInputs())
    other.planner.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(fleet.planner.snapshot()), strict=False))
    other.at, other.workers = fleet.at, fleet.workers
    assert told(other.run(TICK, lambda at: 3.0)[-1]) == told(fleet.run(TICK, lambda at: 3.0)[-1])


def test_a_benchmark_that_is_none_is_an_alarm_and_changes_nothing() -> None:
    fleet = Fleet({"aggregated": 3})
    nonsense = {"prefill": [{"tokens": 1}], "decode": []}
    fresh = Fleet({"aggregated": 3}, inputs=PolicyInputs())
    fresh.run(10.0, lambda at: 1.0)
    effects = fresh.planner.handle(nanos(10.0), planning.Benchmarked(model="m", role="aggregated", metrics=nonsense))
    assert [effect.reason.code for effect in effects if isinstance(effect, planning.Alarm)] == ["bad_benchmark"]
    fleet.run(10.0, lambda at: 1.0)
    assert not fleet.planner.handle(nanos(10.0), planning.Benchmarked(model="m", role="aggregated", metrics=nonsense))

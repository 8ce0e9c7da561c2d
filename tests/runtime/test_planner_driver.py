"""A planner driven live over a store: wishes and reports, a store that is away, a successor, and what people see."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.adapters.sources.traffic_source import ModelReading, Reading, WorkerReading
from penstock.adapters.stores.memory_store import MemorySpace, MemoryStore
from penstock.adapters.telemetry.planner_metrics import PlannerMetrics
from penstock.cli.explain_scale import decision_text, decisions_of, planner_text
from penstock.cli.shared.admin_client import AdminClient
from penstock.config.settings.planning_settings import PlanningSettings
from penstock.kernel.values import Pool, Replica, Slo, Traffic
from penstock.planner.observation import EngineState
from penstock.planner.planner import Planner
from penstock.planner.plugins.plugin_context import PluginContext
from penstock.planner.plugins.plugin_registry import PluginSpec, StatelessPlugin
from penstock.planner.plugins.proposals import Flip, Override, PoolTarget, Reason, Result
from penstock.planner.settings import BudgetSettings
from penstock.runtime.cluster_state.desired_state import (
    DESIRED,
    PLANNER,
    POOLS,
    ROLES,
    PoolSpec,
    PoolStatus,
    decode,
    put,
)
from penstock.runtime.planning.desired_state_connector import DesiredStateConnector
from penstock.runtime.planning.live_observer import LiveObserver
from penstock.runtime.planning.planner_driver import PlannerDriver
from penstock.runtime.planning.planner_report import (
    RECORDS,
    REPORT,
    STATE,
    PlannerReport,
    PlannerStatus,
    newest,
    reports,
)
from penstock.runtime.planning.tick_log import TickLog
from penstock.runtime.records.run_folder import LineWriter

PATIENCE = 20.0
SETTINGS = PlanningSettings(
    policy="static",
    load_interval=0.05,
    throughput_interval=0.1,
    manual_hold=600.0,
    budget=BudgetSettings(max_gpus=8),
)


class Wants(StatelessPlugin):
    """Proposes what a test says."""

    def __init__(self) -> None:
        self.spec = PluginSpec(id="wants", stage="propose")
        self.replicas = 1
        self.flips: tuple[Flip, ...] = ()
        self.bound: tuple[Reason, ...] = ()
        self.seen: list[PluginContext] = []

    def evaluate(self, context: PluginContext) -> Result:
        self.seen.append(context)
        because = (Reason(code="test", text=f"a test wants {self.replicas}"),)
        targets = (PoolTarget(pool="main", replicas=self.replicas),)
        return Override(
            targets=targets,
            flips=self.flips,
            reasons=because,
            bound=self.bound,
            evidence={"candidates": [{"n": 1, "attainment": 0.5}]},
        )


class Source:
    """Tells what a test says."""

    def __init__(self) -> None:
        self.traffic: Traffic | None = Traffic(seconds=1.0, arrived=5, prompt_tokens=500, answered=2, duration_sum=3.0)
        self.state = b'"nothing"'

    async def read(self, at: float) -> Reading:
        health = "fresh" if self.traffic is not None else "broken"
        engine = EngineState(worker="main-0", queued_prefill_tokens=700, decode_kv=90)  # type: ignore[arg-type]
        workers = {"main-0": WorkerReading(id="main-0", model="m", role="aggregated", ready=True, engines=(engine,))}
        return Reading(models={"m": ModelReading(traffic=self.traffic, health=health)}, workers=workers)  # type: ignore[arg-type]

    def snapshot(self) -> bytes:
        return self.state

    def restore(self, state: bytes) -> None:
        self.state = b'"restored"'

    def describe(self) -> str:
        return "a test"

    async def close(self) -> None:
        return None


class Scene:
    """A driver over a store in which a pool of one replica stands."""

    def __init__(self, folder: Path, settings: PlanningSettings) -> None:
        self.space = MemorySpace()
        self.store = MemoryStore(self.space)
        self.folder = folder
        self.wants = Wants()
        self.source = Source()
        self.planner = Planner(settings, [self.wants], strict=True)
        self.connector = DesiredStateConnector(self.store, patience=600.0)
        self.metrics = PlannerMetrics(slo=Slo(ttft=0.5))
        said = {"advisory": settings.advisory, "source": "a test", "connector": "wishes", "every": settings.base}
        self.keeping = TickLog(
            said, metrics=self.metrics, records=LineWriter(folder / RECORDS), store=MemoryStore(self.space), ttl=5.0
        )
        self.driver = PlannerDriver(
            settings,
            self.planner,
            LiveObserver(self.source, self.connector, window=settings.base),
            self.connector,
            self.keeping,
            state=folder / STATE,
        )

    async def pool(self, *replicas: tuple[str, str], desired: int = 1, **more: Any) -> None:
        found = tuple(Replica(id=name, state=state, role="aggregated") for name, state in replicas)  # type: ignore[arg-type]
        kind = more.pop("kind", "process")
        report = PoolStatus(pool=Pool(model="m", desired=desired, replicas=found, **more), kind=kind)
        await put(self.store, POOLS + "main", report)

    async def wish(self) -> PoolSpec | None:
        raw = (await self.store.list(DESIRED)).get(DESIRED + "main")
        return None if raw is None else decode(PoolSpec, raw)

    async def report(self) -> PlannerReport | None:
        raw = (await MemoryStore(self.space).list(REPORT)).get(REPORT)
        return None if raw is None else reports.decode(raw)

    def ticks(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in newest(self.folder / RECORDS, 1000)]


@asynccontextmanager
async def scene(folder: Path, settings: PlanningSettings = SETTINGS) -> AsyncIterator[Scene]:
    found = Scene(folder, settings)
    await found.pool(("main-0", "ready"), limit=8)
    try:
        yield found
    finally:
        await found.driver.close()


async def until(met: Callable[[], Any]) -> Any:
    async with asyncio.timeout(PATIENCE):
        while True:
            value = met()
            value = await value if asyncio.iscoroutine(value) else value
            if value:
                return value
            await asyncio.sleep(0.01)


async def test_what_is_planned_is_wished_once_and_reported_with_its_reason(tmp_path):
    async with scene(tmp_path) as s:
        s.wants.replicas = 3
        await s.driver.start()
        wish = await until(s.wish)
        assert (wish.replicas, wish.by, wish.timeout) == (3, PLANNER, 600.0)
        await until(lambda: len(s.ticks()) > 5)
        assert await s.wish() == wish  # the same word is not written again
        report = await until(s.report)
        assert (report.policy, report.health, report.reason[0].text) == ("static", {"m": "fresh"}, "a test wants 3")
        assert [tick["outcome"] for tick in s.ticks()].count("apply") == 1
        assert s.wants.seen[-1].observation.models["m"].pools["main"].pool.desired == 3


async def test_changes_of_role_are_wished_for_the_youngest(tmp_path):
    async with scene(tmp_path) as s:
        await s.pool(("main-0", "ready"), ("main-9", "ready"), ("main-10", "ready"), desired=3)
        s.wants.replicas, s.wants.flips = 3, (Flip(model="m", frm="aggregated", to="prefill"),)
        await s.driver.start()
        assert set(await until(lambda: s.store.list(ROLES))) == {ROLES + "main-10"}


async def test_what_can_not_be_is_an_alarm_once(tmp_path, monkeypatch):
    async with scene(tmp_path) as s:

        async def refuses(targets: Any, flips: Any, because: Any) -> dict[str, str]:
            return dict.fromkeys(targets, "its servers are run by somebody else")

        monkeypatch.setattr(s.connector, "scale", refuses)
        s.wants.replicas = 3
        await s.driver.start()
        await until(lambda: len(s.ticks()) > 5)
        report = await until(s.report)
        assert [each.reason.code for each in report.alarms] == ["not_scaled"]
        assert "run by somebody else" in report.alarms[0].reason.text
        assert await s.wish() is None
        assert 'penstock_planner_alarms_total{code="not_scaled"} 1' in s.metrics.render()


async def test_servers_of_somebody_else_stay_as_many_as_they_are(tmp_path):
    async with scene(tmp_path) as s:
        await s.pool(("main-0", "ready"), kind="urls")
        s.wants.replicas = 3
        await s.driver.start()
        await until(lambda: len(s.ticks()) > 3)
        assert s.ticks()[0]["pools"]["main"]["target"] == 1
        assert s.ticks()[0]["bound"]
        assert await s.wish() is None


async def test_a_store_that_is_away_makes_it_blind_and_changes_nothing(tmp_path, caplog):
    async with scene(tmp_path) as s:
        await s.driver.start()
        await until(lambda: len(s.ticks()) > 2)
        s.wants.replicas = 4
        s.space.outage = "the test took it away"
        await until(lambda: any(tick["outcome"] == "blind" for tick in s.ticks()))
        assert s.ticks()[0]["pools"] == {}
        s.space.outage = None
        assert (await until(s.wish)).replicas == 4
        assert "the planner's status can't be written" in caplog.text


async def test_a_broken_source_takes_nothing_away(tmp_path):
    async with scene(tmp_path) as s:
        await s.pool(("main-0", "ready"), ("main-1", "ready"), desired=2)
        s.source.traffic = None
        await s.driver.start()
        await until(lambda: len(s.ticks()) > 3)
        tick = s.ticks()[0]
        assert (tick["outcome"], tick["pools"]["main"]["target"]) == ("hold", 2)
        assert "main stays at 2 instead of 1" in tick["bound"][0]["text"]
        assert (await until(s.report)).health == {"m": "broken"}
        assert await s.wish() is None


async def test_a_bug_in_looking_is_logged_and_the_next_tick_goes_on(tmp_path, monkeypatch, caplog):
    async with scene(tmp_path) as s:
        broken = [True]
        read = s.source.read

        async def sometimes(at: float) -> Reading:
            if broken.pop() if broken else False:
                raise RuntimeError("a bug")
            return await read(at)

        monkeypatch.setattr(s.source, "read", sometimes)
        await s.driver.start()
        await until(lambda: any(tick["outcome"] == "keep" for tick in s.ticks()))
        assert s.ticks()[-1]["outcome"] == "blind"
        assert "by a bug of ours" in caplog.text


async def test_a_successor_goes_on_where_the_one_before_ended(tmp_path):
    async with scene(tmp_path) as s:
        s.wants.replicas = 3
        await s.driver.start()
        await until(lambda: len(s.ticks()) > 4)
    before = max(tick["tick"] for tick in s.ticks())
    async with scene(tmp_path) as other:
        await other.driver.start()
        await until(lambda: other.source.state == b'"restored"')
        await until(lambda: max(tick["tick"] for tick in other.ticks()) > before)

        async def newer() -> PlannerReport | None:
            report = await other.report()
            return report if report is not None and report.tick > before else None

        assert (await until(newer)).restarts == 1


@pytest.mark.parametrize("left", [b"no state at all", msgspec.msgpack.encode({"version": 1, "restarts": 2})])
async def test_a_state_that_can_not_be_read_costs_only_itself(tmp_path, left, caplog):
    (tmp_path / STATE).write_bytes(left)
    async with scene(tmp_path) as s:
        await s.driver.start()
        assert (await until(s.report)).restarts == 0
        assert "can't be" in caplog.text


async def test_the_report_goes_with_its_planner(tmp_path):
    async with scene(tmp_path) as s:
        await s.driver.start()
        await until(s.report)
    assert await s.report() is None


async def test_gauges_are_of_the_record_and_the_look(tmp_path):
    async with scene(tmp_path) as s:
        s.wants.replicas = 3
        await s.driver.start()
        await until(lambda: len(s.ticks()) > 2)
        text = s.metrics.render()
        for line in (
            'dynamo_planner_num_decode_replicas{model="m"} 1',
            'dynamo_planner_predicted_num_decode_replicas{model="m"} 3',
            'dynamo_planner_observed_requests_per_second{model="m"} 5',
            'dynamo_planner_observed_request_duration_seconds{model="m"} 1.5',
            'dynamo_planner_observed_input_sequence_tokens{model="m"} 100',
            "dynamo_planner_sla_target_ttft_ms 500",
            'dynamo_planner_engine_queued_prefill_tokens{model="m",worker_id="main-0",dp_rank="0"} 700',
            'dynamo_planner_plugin_override_active{plugin="wants"} 1',
            'penstock_planner_pool_target{pool="main"} 3',
            'penstock_planner_source_fresh{model="m",health="fresh"} 1',
        ):
            assert f"{line}\n" in text
        assert "dynamo_planner_observed_ttft_ms{" not in text  # nobody knows it: that is no 0
        assert "engine_queued_decode_kv_tokens{" not in text
        assert "sla_target_itl" not in text


# --- what people see --------------------------------------------------------------------------------------------------


async def test_a_frontend_follows_the_report_and_finds_what_is_wrong(tmp_path):
    async with scene(tmp_path) as s:
        planned = PlannerStatus(MemoryStore(s.space), lambda: True)
        following = asyncio.create_task(planned.run())
        try:
            assert planned.report is None
            await s.pool(("main-0", "failed"), desired=1)
            s.source.traffic = None
            await s.driver.start()
            await until(planned.findings)
            texts = " ".join(finding.text for finding in planned.findings())
            assert "the planner can't read the traffic of m (broken): nothing is taken away meanwhile" in texts
            assert "1 replica of main did not come to serve" in texts
            status = planned.report
            assert status is not None
            shown = planner_text(status)
            assert "policy static, every 0.05 s; it scales by wishes" in shown
            assert "main: 1 wanted, 0 ready, 1 can't be started, 1 given up" in shown
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def test_a_binding_ceiling_is_a_finding_a_limit_and_a_gauge(tmp_path):
    async with scene(tmp_path) as s:
        planned = PlannerStatus(MemoryStore(s.space), lambda: True)
        following = asyncio.create_task(planned.run())
        text = "the ceiling binds: 3 more GPUs would keep 99.0% of m's requests in SLO instead of 12.0%"
        s.wants.bound = (Reason(code="ceiling", text=text, facts={"model": "m", "more_gpus": 3}),)
        try:
            await s.driver.start()
            await until(planned.findings)
            assert [finding.text for finding in planned.findings()] == [text]
            status = planned.report
            assert status is not None and f"  limit: {text}" in planner_text(status)
            assert 'penstock_planner_ceiling_short_gpus{model="m"} 3' in s.metrics.render()
            assert 'penstock_planner_alarms_total{code="ceiling"} 1' in s.metrics.render()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def test_decisions_are_told_with_reasons_candidates_and_what_was_rejected(tmp_path):
    async with scene(tmp_path) as s:
        s.wants.replicas = 30
        await s.driver.start()
        await until(lambda: any(tick["outcome"] == "apply" for tick in s.ticks()))
        await until(lambda: s.ticks()[0]["outcome"] != "apply")
        past = decisions_of(tmp_path, 10, AdminClient("http://127.0.0.1"))
        assert past.last is not None and past.last.tick >= past.decisions[0].tick
        assert all(decision.outcome != "keep" for decision in past.decisions)
        text = decision_text(past.decisions[-1])
        assert "main 1 -> 8" in text
        assert "because a test wants 30" in text
        assert "limit: " in text
        assert "candidates of wants" in text
        assert "ATTAINMENT" in text
        assert "wants (propose): override main=30" in text


def test_the_newest_records_are_read_from_the_end(tmp_path):
    path = tmp_path / "records"
    assert newest(path, 5) == []
    kept, changed = b'{"outcome":"keep"}', b'{"outcome":"apply","n":%d}'
    with path.open("wb") as file:
        for number in range(20_000):
            file.write((changed % number if number % 5000 == 0 else kept) + b"\n")
        file.write(b'{"half')
    assert newest(path, 3) == [kept] * 3
    assert newest(path, 3, every=False) == [changed % 15_000, changed % 10_000, changed % 5_000]
    assert len(newest(path, 100_000)) == 20_000


def test_the_newest_records_go_on_in_the_part_before(tmp_path):
    path = tmp_path / "planner.jsonl"
    (tmp_path / "planner.1.jsonl").write_bytes(b"1\n2\n3\n")
    assert newest(path, 2) == [b"3", b"2"]  # the next part has no line yet
    path.write_bytes(b"4\n5\n")
    assert newest(path, 1) == [b"5"]
    assert newest(path, 3) == [b"5", b"4", b"3"]
    assert newest(path, 9) == [b"5", b"4", b"3", b"2", b"1"]


def test_a_disk_that_is_full_stops_no_planner(tmp_path, caplog):
    from penstock.runtime.planning.planner_driver import PlannerState, write_state

    with caplog.at_level(logging.WARNING):
        write_state(tmp_path / "nowhere" / STATE, PlannerState(restarts=0, machine=msgspec.Raw(b"\x80"), observing=b""))
    assert "can't be written" in caplog.text

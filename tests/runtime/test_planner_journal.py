"""Does a planner's journal come to the same decisions again, from any segment, and point at one that differs?"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.planner_study.scenario import ITL, LAYOUTS, TTFT, known_speeds, plan_of
from penstock.kernel.machine import Effect, Event, Nanos
from penstock.kernel.values import Role, Slo
from penstock.planner.journal import planner_book
from penstock.planner.planner import Planner
from penstock.planner.policies import PolicyInputs, plugins_of
from penstock.planner.policies import slo as policy
from penstock.planner.settings import BudgetSettings, PlannerSettings, StartSettings
from penstock.runtime.records import journal_writer
from penstock.runtime.records.journal_writer import JournalWriter
from penstock_lab.cli.replay import text_of
from penstock_lab.report.journal_replay import replay
from penstock_lab.simulate.simulated_cluster import SimulatedCluster
from tests.planner.test_scenarios import arrivals, edge

SECONDS = 600.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy with other things ends no journal."""
    monkeypatch.setattr(journal_writer, "SNAPSHOT_MAX", 60.0)


class Journalled(Planner):
    """A planner that is written down."""

    journal: JournalWriter | None = None

    def handle(self, now: Nanos, event: Event) -> Sequence[Effect]:
        effects = super().handle(now, event)
        if self.journal is not None:
            self.journal.watch(now, "planner", event, effects)
            self.journal.flush()
        return effects


def write(folder: Path, name: str, segment: int = 1 << 30) -> None:
    """Let a planner scale a cluster through a burst, and journal it."""
    settings = PlannerSettings(
        policy=name,
        budget=BudgetSettings(max_gpus=12),
        start=StartSettings(assumed=30.0),
        mode="aggregated",
    )
    roles: dict[Role, Any] = {role: known_speeds() for role in LAYOUTS["aggregated"]}
    inputs = PolicyInputs(slo=Slo(ttft=TTFT, itl=ITL), speeds={"": roles})
    planner = Journalled(settings, plugins_of(settings, inputs), strict=True)
    planner.journal = JournalWriter(
        folder, planner_book(planner, inputs), wall_ns=1, segment_bytes=segment, segments=100
    )
    planner.journal.begin(0)
    rate = edge(4)
    requests = arrivals(lambda at: 2.0 * rate if 200.0 <= at < 300.0 else 0.5 * rate, SECONDS)
    SimulatedCluster(plan_of({"aggregated": 3}, 30.0, SECONDS), requests, planner=planner).run()


@pytest.mark.parametrize("name", ["slo", "throughput-fpm", "hybrid", "sla-classic", "load-fpm"])
def test_every_segment_comes_to_the_same_decisions_by_itself(tmp_path: Path, name: str) -> None:
    write(tmp_path / "journal" / "planner-1", name, segment=1 << 16)
    segments = sorted((tmp_path / "journal" / "planner-1").iterdir())
    assert len(segments) > 2
    whole = replay(tmp_path, [])
    assert whole.mismatch is None and whole.problems == [] and whole.decisions > 100
    for segment in segments:
        assert replay(segment, []).mismatch is None


def test_another_decision_is_pointed_at_with_its_pool_and_reason(tmp_path: Path, monkeypatch: Any) -> None:
    write(tmp_path / "journal" / "planner-1", "slo")
    monkeypatch.setattr(policy, "KEEP_MARGIN", 1.0)
    monkeypatch.setattr(policy, "LEARN", -1000.0)
    found = replay(tmp_path, ["router.mode=kv"])  # which asks routers only
    wrong = found.mismatch
    assert wrong is not None and wrong.kind == "planner" and wrong.event == "Observed"
    assert wrong.recorded and wrong.replayed and wrong.recorded[0][0] == "main"
    text = text_of(found, False, 10)
    assert "it was:  tick " in text and "main " in text

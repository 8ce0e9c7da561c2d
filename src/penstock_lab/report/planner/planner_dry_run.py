"""Dry run of a planner under a trace: the same machine over simulated pools; its decisions, and their cost."""

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from penstock.config.reading.load import resolved_yaml
from penstock.kernel.machine import SECOND, Effect, Event, Nanos
from penstock.kernel.plurals import counted
from penstock.kernel.request_record import RequestRecord
from penstock.planner.journal import planner_book
from penstock.planner.tick_record import TickRecord
from penstock.runtime.planning.planner_assembly import build_planner
from penstock.runtime.planning.planner_report import RECORDS
from penstock.runtime.records.journal_writer import JournalWriter
from penstock.runtime.records.run_folder import RunFolder
from penstock.runtime.supervision.terminal import this_command
from penstock_lab.config.described_speeds import inputs_of
from penstock_lab.report.planner.planner_report_page import write_planner_report
from penstock_lab.report.simulation.simulation_options import SimulateOptions
from penstock_lab.report.simulation.simulation_run import traffic_of, variants_of
from penstock_lab.simulate.simulated_cluster import PLANNER, SimulatedCluster

SHOWN = 20
"""Most decisions printed; the run folder has all."""
TTFT, ITL = 0.5, 0.05
"""Service level in seconds where the config has none."""


def dry_run(config: str | None, overrides: Sequence[str], trace: Path, *, start_up: float, out: Path) -> str:
    """Simulate the config's pools under a trace, with its planner, and return the result as text.

    Args:
        start_up: seconds until a new worker serves.
        out: folder in which the run leaves its records.
    Raises:
        ConfigError: the config, the trace or the policy is at fault.
    """
    options = SimulateOptions(config=config, overrides=tuple(overrides), trace=trace, start_up=start_up, out=out)
    (variant,) = variants_of(options)
    promised = variant.settings.slo
    ttft, itl = promised.planned
    slo = promised.otherwise(ttft, itl)
    folder = RunFolder.create(out, "dry-run", config=resolved_yaml(variant.settings))
    records, requests = folder.writer(RECORDS), folder.writer("requests.jsonl")
    changes: list[str] = []
    outcomes: Counter[str] = Counter()
    good = judged = 0

    def ticked(record: TickRecord) -> None:
        records.write(record)
        outcomes[record.outcome] += 1
        if record.outcome in ("apply", "advise"):
            changes.append(f"  second {record.at:,.0f}: {record.why}")
        if record.tick % 500 == 0:
            records.flush()

    def ended(record: RequestRecord) -> None:
        nonlocal good, judged
        requests.write(record)
        if judged % 2_000 == 0:
            requests.flush()
        judged += record.outcome != "cancelled"
        good += record.within(slo)

    traffic, notes = traffic_of(options)
    inputs = inputs_of(variant.settings)
    planner = build_planner(variant.settings, inputs)
    journal = JournalWriter(folder.path / "journal" / PLANNER, planner_book(planner, inputs), wall_ns=time.time_ns())

    def watch(now: Nanos, name: str, event: Event, effects: Sequence[Effect]) -> None:
        if name == PLANNER:
            journal.watch(now, name, event, effects)
            journal.flush()

    cluster = SimulatedCluster(
        variant.plan,
        traffic(),
        planner=planner,
        ticked=ticked,
        record=ended,
        watch=watch if variant.settings.runs.journal else None,
    )
    if variant.settings.runs.journal:
        journal.begin(0)
    cluster.run()
    for file in (records, requests, journal):
        file.flush()
    report = write_planner_report(folder.path, slo=slo)
    share = f"{100 * good / judged:.2f} %" if judged else "none"
    shown = changes if len(changes) <= SHOWN else [*changes[: SHOWN // 2], "  ...", *changes[-SHOWN // 2 :]]
    return "\n".join(
        [
            *notes,
            f"{cluster.end / SECOND:,.0f} s simulated, {counted(judged, 'request')}: {share} within "
            f"TTFT {1e3 * ttft:g} ms and ITL {1e3 * itl:g} ms, for {cluster.gpu_hours():.3f} GPU-hours; "
            f"{counted(len(changes), 'change')} in {counted(sum(outcomes.values()), 'tick')}.",
            *shown,
            f"All of them, with candidates: {this_command()} explain scale --run {folder.path}",
            f"Drawn: {report}",
        ]
    )

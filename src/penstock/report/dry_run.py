"""What would a planner do under a trace? The same machine over simulated pools; its decisions, and what they cost."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock.config.load import resolved_yaml
from penstock.kernel.machine import SECOND
from penstock.kernel.records import RequestRecord
from penstock.planner.counts import slo_of
from penstock.planner.record import TickRecord
from penstock.report.planner import write_planner_report
from penstock.report.simulate import traffic_of, variants_of
from penstock.report.simulate_options import SimulateOptions
from penstock.runtime.planning.building import build_planner
from penstock.runtime.planning.report import RECORDS, changes_of, reason_of
from penstock.runtime.run_folder import RunFolder
from penstock.simulate.cluster import Cluster

SHOWN = 20
"""Decisions that are printed; the run folder has all."""
TTFT, ITL = 0.5, 0.05
"""Seconds that are kept where the config says nothing."""


def dry_run(config: str | None, overrides: Sequence[str], trace: Path, *, start_up: float, out: Path) -> str:
    """Simulate the config's pools under a trace, with its planner, and return what came of it as text.

    Args:
        start_up: seconds until a new worker serves.
        out: folder in which the run leaves its records.
    Raises:
        ConfigError: the config, the trace or the policy is at fault.
    """
    options = SimulateOptions(config=config, overrides=tuple(overrides), trace=trace, start_up=start_up, out=out)
    (variant,) = variants_of(options)
    slo = variant.settings.planning.slo
    ttft, itl = slo.ttft or TTFT, slo.itl or ITL
    folder = RunFolder.create(out, "dry-run", config=resolved_yaml(variant.settings))
    records, requests = folder.writer(RECORDS), folder.writer("requests.jsonl")
    changes: list[str] = []
    outcomes: Counter[str] = Counter()
    good = judged = 0

    def ticked(record: TickRecord) -> None:
        records.write(record)
        outcomes[record.outcome] += 1
        if record.outcome in ("apply", "advise"):
            told = ", ".join(f"{pool} {was} -> {now}" for pool, (was, now) in changes_of(record.pools).items())
            changes.append(f"  second {record.at:,.0f}: {told or 'roles change'}, because {reason_of(record)}")
        if record.tick % 500 == 0:
            records.flush()

    def ended(record: RequestRecord) -> None:
        nonlocal good, judged
        requests.write(record)
        if judged % 2_000 == 0:
            requests.flush()
        judged += record.outcome != "cancelled"
        good += record.within(ttft, itl)

    traffic, notes = traffic_of(options)
    plan = msgspec.structs.replace(variant.plan, slo=slo_of(variant.settings.planning.slo))
    cluster = Cluster(plan, traffic(), planner=build_planner(variant.settings), ticked=ticked, record=ended)
    cluster.run()
    records.flush()
    requests.flush()
    report = write_planner_report(folder.path, slo=(ttft, itl))
    share = f"{100 * good / judged:.2f} %" if judged else "none"
    shown = changes if len(changes) <= SHOWN else [*changes[: SHOWN // 2], "  ...", *changes[-SHOWN // 2 :]]
    return "\n".join(
        [
            *notes,
            f"{cluster.end / SECOND:,.0f} s simulated, {judged:,} requests: {share} within TTFT {1e3 * ttft:g} ms and "
            f"ITL {1e3 * itl:g} ms, for {cluster.gpu_hours():.3f} GPU-hours; "
            f"{len(changes)} changes in {sum(outcomes.values())} ticks.",
            *shown,
            f"All of them, with candidates: penstock explain scale --run {folder.path}",
            f"Drawn: {report}",
        ]
    )

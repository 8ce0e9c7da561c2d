"""CSV files of a planner's report: one file for each kind of lane, with every tick in it."""

from functools import partial
from pathlib import Path

from penstock.report.csv_file import write_csv
from penstock.report.planner.planner_analysis import PlannerAnalysis

_write = partial(write_csv, digits=9)


def write_tables(folder: Path, story: PlannerAnalysis) -> None:
    """Write the CSV files.

    Raises:
        ConfigError: the folder can't be written.
    """
    _write(
        folder / "planner-attainment.csv",
        ("from_s", "until_s", "judged", "in_slo", "share"),
        ((w.at, w.until, w.judged, w.in_slo, w.share) for w in story.attained),
    )
    _write(
        folder / "planner-models.csv",
        ("at_s", "tick", "model", "health", "requests_per_s", "isl", "osl", "hit_rate", "ttft_s", "itl_s", "judged",
         "in_slo", "queued"),
        (
            (t.at, t.tick, name, m.health, m.rate, m.shape.isl, m.shape.osl, m.shape.hit_rate, m.ttft, m.itl, m.judged,
             m.in_slo, m.queued)
            for t in story.ticks
            for name, m in t.models.items()
        ),
    )  # fmt: skip
    _write(
        folder / "planner-forecast.csv",
        ("model", "made_s", "at_s", "q50", "low", "q90", "high", "actual", "idle"),
        (
            (model, *forecast[:-1], int(forecast.idle))
            for model, forecasts in story.forecasts.items()
            for forecast in forecasts
        ),
    )
    _write(
        folder / "planner-pools.csv",
        ("at_s", "tick", "pool", "desired", "proposed", "target", "ready", "starting", "draining", "failed",
         "given_up", "gpus_each"),
        (
            (t.at, t.tick, name, p.desired, p.proposed, p.target, p.ready, p.starting, p.draining, p.failed,
             p.given_up, p.gpus)
            for t in story.ticks
            for name, p in t.pools.items()
        ),
    )  # fmt: skip
    bound = dict(zip(story.bound.times, story.bound.values))
    perfect = dict(zip(story.bound_cost.times, story.bound_cost.values))
    gpus = dict(zip(story.gpus.times, story.gpus.values))
    _write(
        folder / "planner-cost.csv",
        ("at_s", "gpus", "gpu_hours", "perfect_gpus", "perfect_gpu_hours"),
        (
            (at, gpus.get(at), paid, bound.get(at), perfect.get(at))
            for at, paid in zip(story.cost.times, story.cost.values)
        ),
    )
    _write(
        folder / "planner-decisions.csv",
        ("at_s", "tick", "outcome", "pool", "from", "to", "why"),
        (
            (d.at, d.tick, d.outcome, pool, old, new, d.whys[pool])
            for d in story.decisions
            for pool, (old, new) in d.changes.items()
        ),
    )
    _write(
        folder / "planner-plugins.csv",
        ("at_s", "tick", "plugin", "stage", "result", "targets", "why"),
        (
            (t.at, t.tick, result.id, result.stage, result.result,
             " ".join(f"{pool}={count}" for pool, count in result.targets.items()),
             " | ".join(b.text for b in result.reasons))
            for t in story.ticks
            for result in t.plugin_results
        ),
    )  # fmt: skip

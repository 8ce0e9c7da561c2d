"""Command ``penstock study``: compares scaling policies in simulation, and writes the report."""

import time
from pathlib import Path

import click

from penstock.cli.shared.amount import SECONDS

EPILOG = """\b
Examples:
  penstock study planner
  penstock study planner --time 10m --out study
  penstock study planner --full --traces ../traces --docs docs/bench/planner-study.md

Each run is kept in OUT/cells.jsonl: a study that was cut off goes on where it was. The default takes about an hour on
two cores, --full a night.
"""


@click.group("study", epilog=EPILOG, short_help="Hold policies against each other in simulation.")
def command() -> None:
    """Hold policies against each other in simulation."""


@command.command("planner", epilog=EPILOG)
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/study"), show_default=True, help="Folder.")
@click.option("--docs", type=click.Path(dir_okay=False, path_type=Path), help="Markdown file for the tables.")
@click.option("--full", is_flag=True, help="Every traffic, start-up time and seed.")
@click.option(
    "--traces", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder of public traces."
)
@click.option("--processes", type=click.IntRange(1), default=2, show_default=True, help="Runs side by side.")
@click.option("--time", "limit", type=SECONDS, help="Begin no run after so long, and write down what there is.")
@click.option("--only", multiple=True, metavar="NAME", help="Only these policies, static or clairvoyant; repeated.")
def planner(
    out: Path,
    docs: Path | None,
    full: bool,
    traces: Path | None,
    processes: int,
    limit: float | None,
    only: tuple[str, ...],
) -> int:
    """Attainment against GPU-hours of the planner's policies, other autoscalers, static fleets and a clairvoyant."""
    from penstock.report.study.study_run import StudyOptions, main

    until = None if limit is None else time.monotonic() + limit
    return main(StudyOptions(out, docs, full, traces, processes, until, only))

"""Command ``penstock study``: compares scaling policies, and split with co-located engines; writes the report."""

import time
from pathlib import Path

import click

from penstock.cli.shared.option_values import SECONDS

EPILOG = """\b
Examples:
  penstock study planner
  penstock study planner --time 10m --out study
  penstock study planner --full --traces ../traces --docs docs/bench/planner-study.md
  penstock study disaggregation --model Llama-3.1-70B --traffic 16k/2k

Each run of the planner's study is kept in OUT/cells.jsonl: a study that was cut off goes on where it was. The default
takes about an hour on two cores, --full a night.
"""


@click.group("study", epilog=EPILOG, short_help="Hold policies, or split and co-located engines, against each other.")
def command() -> None:
    """Hold policies, or split and co-located engines, against each other."""


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


DESIGN_EPILOG = """\b
Examples:
  penstock study disaggregation
  penstock study disaggregation --gpu b200 --ttft 500ms --out study
  penstock study disaggregation --traces ../traces --docs docs/bench/disaggregation-study.md

The search compares over a million deployments in a second, the simulations take about ten.
"""


@command.command("disaggregation", epilog=DESIGN_EPILOG)
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/design"), show_default=True, help="Folder.")
@click.option("--docs", type=click.Path(dir_okay=False, path_type=Path), help="Markdown file for the tables.")
@click.option("--gpu", default="gb200", show_default=True, help="GPU of the table.")
@click.option("--model", "models", multiple=True, metavar="NAME", help="Only these models; repeated.")
@click.option("--traffic", multiple=True, metavar="PROMPT/ANSWER", help="Only this traffic, such as 16k/2k; repeated.")
@click.option("--ttft", type=SECONDS, default="2s", show_default=True, help="What a prompt's passes may take.")
@click.option(
    "--traces", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder of public traces."
)
@click.option("--simulate/--no-simulate", "simulated", default=True, help="Simulate queues, failures, KV reuse.")
def disaggregation(
    out: Path,
    docs: Path | None,
    gpu: str,
    models: tuple[str, ...],
    traffic: tuple[str, ...],
    ttft: float,
    traces: Path | None,
    simulated: bool,
) -> int:
    """Tokens/s per GPU against tokens/s per user: split engines beside co-located ones, over all mappings."""
    from penstock.profiler.design_space.study_command import DesignOptions, main

    return main(DesignOptions(out, docs, gpu, models, traffic, ttft, traces, simulated))

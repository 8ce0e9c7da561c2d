"""Command ``penstock study``: compares split with co-located engines over a design space; writes the report."""

from pathlib import Path

import click

from penstock.cli.shared.option_values import SECONDS

EPILOG = """\b
Examples:
  penstock study disaggregation
  penstock study disaggregation --gpu b200 --ttft 500ms --out study
  penstock study disaggregation --traces ../traces --docs docs/bench/disaggregation-study.md

The search compares over a million deployments in a second, the simulations take about ten.
"""


@click.group("study", epilog=EPILOG, short_help="Hold split and co-located engines against each other.")
def command() -> None:
    """Hold split and co-located engines against each other."""


@command.command("disaggregation", epilog=EPILOG)
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
    from penstock_lab.profiler.design_space.study_command import DesignOptions, main

    return main(DesignOptions(out, docs, gpu, models, traffic, ttft, traces, simulated))

"""Command ``penstock tune``: searches better settings by simulation, and holds out traffic to prove them."""

from pathlib import Path
from typing import Any

import click

from penstock.cli.shared.option_values import SECONDS
from penstock.cli.shared.output import json_option
from penstock.cli.shared.settings_flags import SettingsCommand, settings_options
from penstock_lab.cli.traffic_flags import check_traffic, traffic_options

EPILOG = """\b
Examples:
  penstock tune cluster.yaml --trace requests.jsonl --slo-ttft 1s --slo-itl 30ms
  penstock tune cluster.yaml --trace requests.jsonl --vary router.mode=kv,round_robin --trials 20
  penstock tune --workload agent --rate 12 --duration 20m --trials 120 --out tuned

Every trial is a simulation of the same requests with the production router and planner. OUT/tuned.yaml is the proposed
config; 'penstock config show' and 'penstock simulate' take it like any other.
"""


@click.command("tune", cls=SettingsCommand, epilog=EPILOG, short_help="Search better settings by simulation.")
@click.argument("config", required=False, metavar="[CONFIG]")
@traffic_options
@click.option("--model", help="Model of the config; unset where it has only one.")
@click.option(
    "--vary",
    multiple=True,
    metavar="NAME=VALUE,VALUE",
    help="Vary only this setting, repeated: these; unset varies router, chunk, planner or replicas.",
)
@click.option("--trials", type=click.IntRange(2, 10_000), default=60, show_default=True, help="Configurations to try.")
@click.option(
    "--hold-out",
    type=click.FloatRange(0.05, 0.9),
    default=0.3,
    show_default=True,
    help="Share of the traffic's time, at its end, that is not searched and proves the gain.",
)
@click.option(
    "--attainment",
    type=click.FloatRange(0, 1),
    default=0.99,
    show_default=True,
    help="Share of requests within the SLO that is wanted; the cheapest settings that reach it are proposed.",
)
@click.option("--start-up", type=SECONDS, default=0.0, show_default=True, help="Time until a new worker serves.")
@click.option("--slo-ttft", type=SECONDS, help="TTFT that counts as good; unset is slo.ttft, else 2 s.")
@click.option("--slo-itl", type=SECONDS, help="Mean ITL that counts as good; unset is slo.itl, else 25 ms.")
@click.option("--jobs", type=click.IntRange(1), help="Trials that run at once; unset is one for each core.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("runs/tune"), show_default=True, help="Folder of results."
)
@settings_options
@json_option
def command(
    as_json: bool,
    config: str | None,
    overrides: tuple[str, ...],
    vary: tuple[str, ...],
    trials: int,
    hold_out: float,
    attainment: float,
    out: Path,
    **options: Any,
) -> int:
    """Search settings of CONFIG under a trace or a workload: attainment against GPU-hours, and what to change.

    CONFIG is a YAML file, or - for standard input; without one it is the embedded default.
    """
    check_traffic(options)
    from penstock_lab.profiler.tuning.tuning_run import TuneOptions, main
    from penstock_lab.report.simulation.simulation_options import SimulateOptions

    simulate = SimulateOptions(json=as_json, config=config, overrides=overrides, **options)
    return main(
        TuneOptions(simulate=simulate, vary=vary, trials=trials, hold_out=hold_out, attainment=attainment, out=out)
    )

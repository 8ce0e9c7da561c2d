"""Command ``penstock simulate``: a config as for ``up``, traffic, and faults of the workers."""

from pathlib import Path
from typing import Any

import click

from penstock.cli.shared.option_values import BYTES, SECONDS, out_option
from penstock.cli.shared.output import json_option
from penstock.cli.shared.settings_flags import SettingsCommand, settings_options
from penstock_lab.cli.traffic_flags import check_traffic, html_option, traffic_options

EPILOG = """\b
Examples:
  penstock simulate --workload chat --rate 8 --hours 1
  penstock simulate cluster.yaml --trace conversation_trace.jsonl --compare router.mode=kv,round_robin
  penstock simulate --workload agent --workers 8 --compare router.cost.overlap_credit=0,1,2 --json
  penstock simulate --workload rag --rate 4 --prefill 2 --decode 2
  penstock simulate --workload images --rate 6 --images count=2,side=1280 --workers 3 --encode 1
  penstock simulate --workload chat --adapters count=200 --compare models.sim.pools.main.max_cpu_loras=8,32
  penstock simulate --workload agent --host-cache 64GiB --disk-cache 2TiB --compare router.mode=kv,round_robin
  penstock simulate --model Qwen3-32B --gpu h100 --gpus 2 --concurrency 32 --workload fixed --prompt 1k --answer 256
  penstock simulate --workload rag --hours 1 --fault at=600,kind=fail,worker=main-0 --start-up 90s
  penstock simulate --workload chat --hours 24 --policy my_policies:Reactive --policy-interval 30s

The router that decides is the one that serves; engines are the simulated ones of the config. No time passes but the
computer's own. Each variant leaves a run folder with the files of a live run and a report.html.
"""


@click.command(
    "simulate", cls=SettingsCommand, epilog=EPILOG, short_help="Run a cluster on virtual time and compare settings."
)
@click.argument("config", required=False, metavar="[CONFIG]")
@traffic_options
@click.option("--hours", type=click.FloatRange(0, min_open=True), help="End of arrivals: --duration in hours.")
@click.option("--workers", type=click.IntRange(1), help="Engines of every pool, instead of the config's.")
@click.option("--host-cache", type=BYTES, help="Host memory of each engine for KV blocks, such as 256GiB.")
@click.option("--disk-cache", type=BYTES, help="Disk of each engine for KV blocks, such as 2TiB; needs --host-cache.")
@click.option("--prefill", type=click.IntRange(1), help="Engines that only prefill; needs --decode.")
@click.option("--decode", type=click.IntRange(1), help="Engines that go on with what those have prefilled.")
@click.option("--encode", type=click.IntRange(1), help="Engines that only encode images, beside the others.")
@click.option(
    "--adapters",
    metavar="FIELD=VALUE,...",
    help="LoRA adapters that requests name, such as count=200,skew=1 (the n-th 1/n as often),base=0.1 (none).",
)
@click.option(
    "--model",
    help="Model of the config; unset where it has only one. With --gpu: a well-known name or a config.json.",
)
@click.option("--gpu", help="No CONFIG: simulate --model on this GPU, such as h100, by its data sheet.")
@click.option("--gpus", type=click.IntRange(1), default=1, show_default=True, help="With --gpu: GPUs per engine.")
@click.option(
    "--concurrency",
    type=click.IntRange(1),
    help="So many clients, each with one request at a time; ends after 10 each.",
)
@click.option(
    "--compare",
    multiple=True,
    metavar="NAME=VALUE,VALUE",
    help="A run for each value of a knob; repeated: for each combination.",
)
@click.option("--jobs", type=click.IntRange(1), help="Variants that run at once; unset is one for each core.")
@click.option("--closed-loop", is_flag=True, help="A session's next turn waits for the answer before it.")
@click.option(
    "--fault",
    "fault",
    multiple=True,
    metavar="FIELD=VALUE,...",
    help="at, kind (fail, drain, undrain, add, cordon, uncordon, flip, restart), worker, pool, restart, role; "
    "may be repeated.",
)
@click.option("--faults", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="JSON list of faults.")
@click.option("--start-up", type=SECONDS, default=0.0, show_default=True, help="Time until a new worker serves.")
@click.option(
    "--start-up-sigma", type=click.FloatRange(0), default=0.0, show_default=True, help="Spread of its logarithm."
)
@click.option("--policy", metavar="MODULE:NAME", help="Object whose decide(observation) returns the number of workers.")
@click.option("--policy-interval", type=SECONDS, default=30.0, show_default=True, help="How often it is asked.")
@click.option("--slo-ttft", type=SECONDS, help="TTFT that counts as good; unset is slo.ttft, else 2 s.")
@click.option("--slo-itl", type=SECONDS, help="Mean ITL that counts as good; unset is slo.itl, else 25 ms.")
@out_option
@html_option
@click.option("--decisions/--no-decisions", default=True, show_default=True, help="Write decisions.jsonl.")
@settings_options
@json_option
def command(
    as_json: bool,
    config: str | None,
    overrides: tuple[str, ...],
    hours: float | None,
    fault: tuple[str, ...],
    faults: Path | None,
    **options: Any,
) -> int:
    """Simulate the cluster of CONFIG under a trace or a workload, once per variant, and compare what came of it.

    CONFIG is a YAML file, or - for standard input; without one it is the embedded default.
    """
    check_traffic(options)
    if hours is not None and options["duration"] is not None:
        raise click.UsageError("--hours and --duration say the same: give one")
    if hours is not None:
        options["duration"] = hours * 3600
    if options["gpu"] is not None and (config is not None or options["model"] is None):
        raise click.UsageError("--gpu needs --model and goes without CONFIG")
    from penstock_lab.report.simulation.simulation_options import SimulateOptions, fault_of, faults_of
    from penstock_lab.report.simulation.simulation_run import main

    script = [fault_of(text) for text in fault] + ([] if faults is None else faults_of(faults))
    return main(SimulateOptions(json=as_json, config=config, overrides=overrides, faults=script, **options))

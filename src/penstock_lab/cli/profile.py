"""Command ``penstock profile``: measures an engine, and says which size serves an SLA best."""

from pathlib import Path
from typing import Any

import click

from penstock.cli.shared.admin_client import admin_key_option
from penstock.cli.shared.cluster_tls import cluster_tls, tls_options
from penstock.cli.shared.option_values import SECONDS, Amount
from penstock.cli.shared.output import json_option, print_json
from penstock.cli.shared.settings_flags import SettingsCommand, load_to_start, pool_overrides, settings_options

EPILOG = """\b
Examples:
  penstock profile http://127.0.0.1:8001 --isl 3000 --osl 150 --ttft 500ms --itl 20ms
  penstock profile org/my-model --engine vllm --tp 1,2,4 --time 30m --out profiles/my-model
  penstock profile sim --sim.timing.kind roofline --sim.timing.model Llama-3.1-8B --sim.timing.gpu h100
  penstock profile http://127.0.0.1:8000 --watch 10m      all engines of a cluster, or the one at this URL
  penstock profile check profiles/today http://127.0.0.1:8001 --rate 2 --requests 60
  penstock profile diff profiles/monday profiles/today

An engine that is given by URL must serve nothing else meanwhile, but for --watch, which sends nothing. A run that was
cut off goes on with the same --out. --output-dir and plain milliseconds are those of Dynamo's profile_sla.
"""


EPILOG_DIFF = """\b
Example:
  penstock profile diff profiles/monday profiles/today
"""
EPILOG_CHECK = """\b
Examples:
  penstock profile check profiles/today http://127.0.0.1:8001 --rate 2 --requests 60
  penstock profile check profiles/today http://127.0.0.1:8001 --prompt 1k --ledger docs/bench/accuracy.md
"""


class _Latency(Amount):
    """A latency; a plain number is milliseconds, as in Dynamo's profile_sla."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        plain = isinstance(value, str) and value.replace(".", "", 1).isdigit()
        return super().convert(f"{value}ms" if plain else value, param, ctx)


class ProfileGroup(click.Group):
    """A group whose own name measures: ``penstock profile MODEL`` is ``penstock profile run MODEL``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if args and args[0] in self.commands else ["run", *args])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, cmd_name) or self.commands["run"]


@click.group("profile", cls=ProfileGroup, short_help="Measure an engine: TTFT, ITL, start, and which size to take.")
def command() -> None:
    """Measure an engine."""


@command.command("run", cls=SettingsCommand, cluster=False, pool=True, epilog=EPILOG)
@click.argument("target", required=False, metavar="[MODEL|URL]")
@click.option(
    "--config", type=click.Path(dir_okay=False, path_type=Path), help="Cluster config; its first pool counts."
)
@click.option(
    "--engine", type=click.Choice(["llamacpp", "sim", "vllm"]), default="sim", show_default=True, help="Kind."
)
@click.option("--out", "--output-dir", type=click.Path(file_okay=False, path_type=Path), default=Path("profile"),
              show_default=True, help="Folder of the profile.")  # fmt: skip
@click.option("--isl", type=click.IntRange(1), default=3000, show_default=True, help="Prompt tokens to pick for.")
@click.option("--osl", type=click.IntRange(1), default=150, show_default=True, help="Output tokens.")
@click.option("--ttft", type=_Latency("s"), default="500ms", show_default=True, help="SLA; a plain number is ms.")
@click.option("--itl", type=_Latency("s"), default="20ms", show_default=True, help="SLA; a plain number is ms.")
@click.option("--tp", help="Tensor-parallel sizes, such as 1,2,4.  [default: what the machine has GPUs for]")
@click.option("--prefill-interpolation-granularity", "prefill_granularity", type=click.IntRange(3), default=16,
              show_default=True, help="Most prompt lengths.")  # fmt: skip
@click.option("--decode-interpolation-granularity", "decode_granularity", type=click.IntRange(1), default=6,
              show_default=True, help="Contexts of decode.")  # fmt: skip
@click.option("--max-context", "longest", type=click.IntRange(200), help="Longest context.  [default: 32,768 or less]")
@click.option("--time", "seconds", type=SECONDS, help="Begin no point after so long.")
@click.option("--gpu-hours", type=click.FloatRange(0, min_open=True), help="The same for GPU-hours.")
@click.option("--gpus", type=click.IntRange(1), help="Most GPUs to use.")
@click.option("--no-mixed", "mixed", is_flag=True, default=True, flag_value=False, help="Leave mixed passes out.")
@click.option("--transfer-from", "partner", metavar="URL", help="Engine whose KV it takes: what a transfer costs.")
@click.option("--stats", metavar="ENDPOINT", help="Where the statistics plug-in of the engine at URL publishes.")
@click.option("--watch", type=SECONDS, help="Send nothing: listen to the passes of an engine or cluster that serves.")
@click.option("--model", help="With --watch: which one of a cluster's models.")
@admin_key_option
@tls_options
@json_option
@settings_options
def run(target: str | None, config: Path | None, as_json: bool, overrides: tuple[str, ...], **options: Any) -> int:
    """Measure an engine by URL, or one of MODEL that is started here for each tensor-parallel size."""
    import asyncio

    from penstock.kernel.values import RequestShape, Slo
    from penstock_lab.profiler.measurement.profile_run import ProfileOptions
    from penstock_lab.profiler.measurement.profile_run import run as measure
    from penstock_lab.profiler.measurement.recommendation import recommendation_lines
    from penstock_lab.profiler.measurement.sweep import SweepOptions

    sizes = tuple(_size_of_text(each) for each in (options["tp"] or "").split(",") if each)
    shape = RequestShape(float(options["isl"]), float(options["osl"]))
    url = target if target is not None and target.startswith(("http://", "https://")) else None
    model, pool = _pool_of(target if url is None else None, config, options["engine"], overrides)
    if options["watch"] is not None:
        if url is None:
            raise click.UsageError("--watch needs the URL of an engine that serves.")
        from penstock_lab.profiler.measurement.pass_watch import watch

        manifest = asyncio.run(
            watch(
                url,
                options["watch"],
                options["out"],
                sizes[0] if sizes else None,
                options["stats"],
                model=options["model"],
                key=options["admin_key"],
                access=_watched_access(pool),
            )
        )
        click.echo("\n".join(manifest.left_out))
        return 0
    sweep = SweepOptions(
        shape=shape,
        transfer=options["partner"] is not None,
        **{name: options[name] for name in ("prefill_granularity", "decode_granularity", "longest", "mixed")},
    )
    chosen = ProfileOptions(
        sweep=sweep,
        slo=Slo(ttft=options["ttft"], itl=options["itl"]),
        pool=pool,
        model=model if url is None else None,
        url=url,
        sizes=sizes,
        **{name: options[name] for name in ("out", "partner", "stats", "seconds", "gpu_hours", "gpus")},
    )
    manifest = asyncio.run(measure(chosen))
    if as_json:
        print_json(manifest)
        return 0
    click.echo("\n".join(recommendation_lines(manifest.prefill, manifest.decode)))
    for text in manifest.left_out:
        click.echo(f"Left out: {text}")
    click.echo(f"Profile: {chosen.out}, report: {chosen.out / 'report.html'}")
    return 0


@command.command("diff", epilog=EPILOG_DIFF)
@click.argument("before", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("now", type=click.Path(exists=True, file_okay=False, path_type=Path))
@json_option
def diff(before: Path, now: Path, as_json: bool) -> int:
    """Say what differs between two profiles: the engine's facts, and the points beyond their noise."""
    from penstock.config.files.profile_manifest import read_measured
    from penstock_lab.profiler.measurement.profile_diff import difference

    found = difference(read_measured(before), read_measured(now))
    if as_json:
        print_json(found)
    else:
        click.echo("\n".join(found.lines()))
    return 0


@command.command("check", epilog=EPILOG_CHECK)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("url")
@click.option("--rate", type=click.FloatRange(0, min_open=True), default=2.0, show_default=True, help="Requests/s.")
@click.option("--requests", type=click.IntRange(2), default=60, show_default=True, help="How many.")
@click.option("--prompt", help="Prompt lengths, as in penstock bench.  [default: those of the profile]")
@click.option("--answer", help="Output lengths.  [default: those of the profile]")
@click.option("--seed", type=int, default=1, show_default=True, help="Other arrivals.")
@click.option("--ledger", type=click.Path(dir_okay=False, path_type=Path), help="Markdown file that gets a row.")
@click.option("--runs", type=click.Path(file_okay=False, path_type=Path), default=Path("runs"), help="Run folders.")
@json_option
def check(folder: Path, url: str, as_json: bool, **options: Any) -> int:
    """Load an engine, and compare with what its profile predicts; exit status 1 where it is no longer predictable."""
    from penstock_lab.profiler.measurement.accuracy import measured_and_predicted, note

    ledger, chosen = options.pop("ledger"), {name: value for name, value in options.items() if value is not None}
    accuracy = measured_and_predicted(folder, url, **chosen)
    if ledger is not None:
        note(ledger, accuracy)
    if as_json:
        print_json(accuracy)
    else:
        click.echo("\n".join(accuracy.lines()))
    return 0 if accuracy.predictable else 1


def _watched_access(pool: Any) -> Any:
    """Return the access to watched engines: of the pool's settings, and the TLS that the command was given."""
    from penstock.adapters.engines.http.engine_access import read_access

    access = read_access(pool.access, "access")
    return access._replace(tls=access.tls or cluster_tls())


def _size_of_text(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise click.BadParameter(f"{text!r} is not a number of GPUs", param_hint="--tp")
    return int(text)


def _pool_of(
    target: str | None, config: Path | None, engine: str, overrides: tuple[str, ...]
) -> tuple[str | None, Any]:
    """Return the model and the pool to start: those of a config, else of the command line."""
    import json

    if config is not None:
        models = load_to_start(str(config), overrides).settings.models
        name = target if target in models else next(iter(models))
        return name, next(iter(models[name].pools.values()))
    name = target or "sim"
    pool: dict[str, object] = {"engine": engine, "replicas": 1}
    if engine == "vllm" and target is not None:
        from penstock.cli.shared.checkpoint import checkpoint_of

        checkpoint = checkpoint_of(target)
        name, pool["model_path"] = checkpoint.name, checkpoint.model
    elif engine == "llamacpp" and target is not None:
        name, pool["model_path"] = Path(target).stem, str(Path(target).expanduser().resolve())
    model = {name: {"tokenizer": "builtin:sim" if engine == "sim" else None, "pools": {"main": pool}}}
    settings = load_to_start(None, [f"models={json.dumps(model)}", *pool_overrides(overrides, name)]).settings
    return (name if target is not None else None), settings.models[name].pools["main"]

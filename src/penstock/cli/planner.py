"""Command ``penstock planner``: plans for a cluster elsewhere, only advises, or runs on a trace (``--dry-run``)."""

import os
from pathlib import Path

import click

from penstock import extension
from penstock.cli.shared.admin_client import AdminClient, admin_key_option
from penstock.cli.shared.cluster_tls import cluster_tls, tls_options
from penstock.cli.shared.option_values import out_option
from penstock.cli.shared.settings_flags import SettingsCommand, settings_options
from penstock.frontend.admin.admin_answers import ClusterStatus
from penstock.kernel.errors import ConfigError

EPILOG = """\b
Examples:
  penstock planner --url http://127.0.0.1:8000 --advisory     what it would do with a running cluster
  penstock planner planner.yaml --url http://127.0.0.1:8000   scale it
  penstock planner examples/planner-virtual.yaml              from a Prometheus, for an orchestrator of your own
  penstock planner cluster.yaml --dry-run trace.jsonl --start-up 120
  penstock planner --report runs/RUN                          draw what one did

A cluster whose config has a section 'planner:' has its own planner, which 'penstock up' runs; this command is for
those without one. The section says policy, budget, source and connector;
docs/guides/planner-operating.md explains them.
"""


@click.command(
    "planner", cls=SettingsCommand, epilog=EPILOG, short_help="Decide how many workers there should be, and say why."
)
@click.argument("config", required=False, metavar="[CONFIG]")
@click.option("--url", metavar="URL", help="A running cluster: its frontends are asked, and its pools scaled.")
@click.option("--advisory", is_flag=True, help="Say what should be and why, and touch nothing.")
@click.option(
    "--dry-run",
    "trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="TRACE",
    help="Let it plan for the config's pools, simulated under a trace.",
)
@click.option(
    "--start-up",
    type=click.FloatRange(0),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="With --dry-run: time until a new worker serves.",
)
@click.option(
    "--report",
    "drawn",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="RUN",
    help="Draw planner-report.html of a run folder, with its numbers as CSV beside it.",
)
@out_option
@admin_key_option
@tls_options
@settings_options
def command(
    config: str | None,
    url: str | None,
    advisory: bool,
    trace: Path | None,
    start_up: float,
    drawn: Path | None,
    out: Path,
    admin_key: str | None,
    overrides: tuple[str, ...],
) -> int:
    """Decide how many workers there should be, tick by tick, and say why; until Ctrl-C."""
    if trace is not None and (url is not None or advisory):
        raise click.UsageError("--dry-run touches nothing by itself: leave --url and --advisory out")
    if drawn is not None:
        click.echo(f"The planner's report is {extension.entry('run', 'planner page')(drawn)}")
        return 0
    own = "true" if url is None else "false"  # a cluster elsewhere has other pools than the config
    given = (*overrides, *(("planner.advisory=true",) if advisory else ()), f"planner.enabled={own}")
    if trace is not None:
        dry_run = extension.entry("run", "planner dry run")
        click.echo(dry_run(config, given, trace, start_up=start_up, out=out))
        return 0
    from penstock.config.reading.load import load

    loaded = load(config, given, os.environ)  # it starts no engine, so no program has to exist
    if url is not None:
        _check_alone(url, admin_key, advisory or loaded.settings.planner.advisory)
    from functools import partial

    from penstock.frontend import logs
    from penstock.runtime.planning.planner_node import plan
    from penstock.runtime.planning.tick_log import PlannerDiagnostics

    logs.setup(loaded.settings.logs.format, loaded.settings.logs.level)
    key = admin_key or os.environ.get("PENSTOCK_ADMIN_KEY")
    watch = partial(PlannerDiagnostics, loaded.settings.planner)
    return plan(loaded.settings, url=url, key=key, tls=cluster_tls(), say=click.echo, watch=watch)


def _check_alone(url: str, admin_key: str | None, advisory: bool) -> None:
    """Refuse to scale pools that another planner scales."""
    planner = AdminClient(url, admin_key).get("/admin/status", ClusterStatus).planner
    if planner is not None and not planner.advisory and not advisory:
        raise ConfigError(
            f"the cluster at {url} has a planner already (policy {planner.policy}), and two would undo each other",
            hint="give --advisory to only compare, or start the cluster with planner.enabled=false",
        )

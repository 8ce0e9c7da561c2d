"""Command ``penstock up``: starts a whole cluster from a config and stays until Ctrl-C."""

import click

from penstock.cli.shared.settings_flags import SettingsCommand, load_to_start, settings_options

EPILOG = """\b
Examples:
  penstock up                                     the simulated default on http://127.0.0.1:8000
  penstock up cluster.yaml
  penstock up --models.sim.pools.main.replicas 8 --router.mode round_robin
  penstock up --set frontend.port=0               any free port

Ctrl-C lets running requests end; a second one cuts them off. A config with a problem starts nothing: exit status 2.
SIGHUP reads CONFIG again and takes what may change while the cluster runs.
"""


@click.command(
    "up", cls=SettingsCommand, epilog=EPILOG, short_help="Start a cluster from a config, or the simulated default."
)
@click.argument("config", required=False, metavar="[CONFIG]")
@click.option("--wait", is_flag=True, help="Start although no attached server answers yet: supervise.wait.")
@settings_options
def command(config: str | None, wait: bool, overrides: tuple[str, ...]) -> int:
    """Start a cluster: its engines, its frontend, and the router between them.

    CONFIG is a YAML file, or - for standard input; without one it is the embedded default.
    """
    overrides = (*(["supervise.wait=true"] if wait else []), *overrides)
    loaded = load_to_start(config, overrides)
    from penstock.cli.shared.cluster_run import check_engine_parsers, run_cluster

    check_engine_parsers(loaded.settings)
    again = None if config is None or config == "-" else lambda: load_to_start(config, overrides)
    return run_cluster(loaded, "up", reload=again)

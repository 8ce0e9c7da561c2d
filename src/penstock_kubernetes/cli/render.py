"""Command ``penstock render``: prints a config as files of other tools."""

import click

from penstock.cli.shared.settings_flags import SettingsCommand, settings_options

EPILOG = """\b
Examples:
  penstock render compose plan/penstock.yaml > compose.yaml
  penstock render compose cluster.yaml --set models.sim.pools.main.replicas=2
  penstock render kubernetes cluster.yaml | kubectl apply -f -
"""


@click.group("render", epilog=EPILOG, short_help="Print a config as files of other tools.")
def command() -> None:
    """Print a config as files of other tools."""


@command.command("compose", cls=SettingsCommand, epilog=EPILOG)
@click.argument("config", required=False, metavar="[CONFIG]")
@settings_options
def compose(config: str | None, overrides: tuple[str, ...]) -> int:
    """Print a compose file: a service for each engine of CONFIG, one for the frontend, on one host."""
    from penstock.config.reading.load import load
    from penstock_lab.profiler.deployment_plan.compose_file import compose_yaml

    click.echo(compose_yaml(load(config, overrides).settings), nl=False)
    return 0


@command.command("kubernetes", cls=SettingsCommand, epilog=EPILOG)
@click.argument("config", required=False, metavar="[CONFIG]")
@settings_options
def kubernetes(config: str | None, overrides: tuple[str, ...]) -> int:
    """Print Kubernetes manifests: a Deployment for each pool of CONFIG, one for frontends and planner, their rights."""
    from penstock.config.reading.load import load
    from penstock_kubernetes.kubernetes_manifests import kubernetes_yaml

    click.echo(kubernetes_yaml(load(config, overrides).settings), nl=False)
    return 0

"""Command ``penstock top``: the status, redrawn until q or Ctrl-C."""

import click

from penstock.cli.shared.admin_client import AdminClient
from penstock.cli.shared.cluster_options import cluster_options
from penstock.cli.shared.live_screen import watch
from penstock.cli.status import status_screen

EPILOG = """\b
Examples:
  penstock top
  penstock top --every 0.5
"""


@click.command("top", epilog=EPILOG, short_help="Watch a cluster live.")
@cluster_options
@click.option("--every", type=click.FloatRange(0.1, 60), default=1.0, show_default=True, help="Seconds between looks.")
@click.option("--looks", type=click.IntRange(1), help="End after so many looks; without it, at q.")
def command(client: AdminClient, every: float, looks: int | None) -> int:
    """Watch a cluster live: requests, workers, queues, findings, as status --watch does. q or Ctrl-C ends it."""
    watch(client, every, looks, status_screen)
    return 0

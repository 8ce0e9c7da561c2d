"""Command ``penstock logs``: the log of a worker, a frontend or another process of a cluster."""

from pathlib import Path

import click

from penstock.cli.shared.admin_client import AdminClient
from penstock.cli.shared.cluster_names import workers
from penstock.cli.shared.cluster_options import cluster_options
from penstock.cli.shared.followed_file import follow_option, last_lines, run_folder_of, run_option
from penstock.config.reading.problems import did_you_mean
from penstock.kernel.errors import ConfigError

EPILOG = """\b
Examples:
  penstock logs main-0
  penstock logs main-0 -f                 go on until Ctrl-C
  penstock logs frontend-0 --lines 1000
  penstock logs planner --run runs/RUN    of a run that is over

They are the files in logs/ of the run folder. Servers that were attached by URL have logs of their own.
"""


@click.command("logs", epilog=EPILOG, short_help="Show the log of a worker or another process.")
@click.argument("name", metavar="WORKER", shell_complete=workers)
@click.option("--lines", "-n", type=click.IntRange(0), default=50, show_default=True, help="Last lines to show.")
@follow_option
@run_option
@cluster_options
def command(client: AdminClient, name: str, lines: int, follow: bool, run: Path | None) -> int:
    """Show the log of WORKER, or of another process of the cluster, such as frontend-0 or planner."""
    folder = run_folder_of(client, run) / "logs"
    names = sorted(path.stem for path in folder.glob("*.log"))
    if name not in names:
        hint = did_you_mean(name, names, otherwise=f"there is {', '.join(names) or 'none'}")
        raise ConfigError(f"{folder} has no log of {name}", hint=hint)
    for line in last_lines(folder / f"{name}.log", lines, follow=follow):
        click.echo(line)
    return 0

"""How does a command run a cluster to its end? The supervisor, and then the report of what happened."""

from collections.abc import Callable
from pathlib import Path

import click

from penstock.config.load import Loaded
from penstock.kernel.errors import PenstockError


def run_cluster(loaded: Loaded, command: str, *, reload: Callable[[], Loaded] | None = None) -> int:
    """Run until Ctrl-C, draw the run folder's report, and return the exit status.

    Args:
        reload: reads the settings again at SIGHUP.
    """
    from penstock.runtime.supervisor import run

    return run(loaded, command=command, finished=_report, reload=reload)


def _report(folder: Path) -> None:
    requests = folder / "requests.jsonl"
    if not requests.exists():
        return  # nobody asked for anything: there is nothing to draw
    from penstock.report.html import write_report

    try:
        click.echo(f"Report: {write_report(folder)}")
    except PenstockError as error:
        click.echo(f"penstock: the report could not be drawn: {error}", err=True)

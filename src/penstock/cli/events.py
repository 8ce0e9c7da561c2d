"""Command ``penstock events``: what operators, the planner and the supervisor did, with times, over restarts."""

import itertools
from pathlib import Path

import click
import msgspec

from penstock.cli.shared.admin_client import AdminClient
from penstock.cli.shared.cluster_options import cluster_options
from penstock.cli.shared.followed_file import follow_option, last_lines, run_folder_of, run_option
from penstock.cli.shared.output import json_option, print_json
from penstock.runtime.records.change_log import FILE, Change, change_in, changes_in

EPILOG = """\b
Examples:
  penstock events
  penstock events -f                      go on until Ctrl-C
  penstock events --run runs/RUN          until the end of a run that is over
  penstock events --json | jq '.[] | select(.by != "supervisor")'

Starts, stops, crashes, drains, scalings and changes of settings, from changes.jsonl of this run's folder and of those
beside it of earlier runs with the same name and port. Times are UTC.
"""


@click.command("events", epilog=EPILOG, short_help="Show what happened to a cluster, and who did it.")
@click.option("--lines", "-n", type=click.IntRange(1), default=50, show_default=True, help="Newest events to show.")
@follow_option
@run_option
@cluster_options
@json_option
def command(client: AdminClient, lines: int, follow: bool, run: Path | None, as_json: bool) -> int:
    """Show what happened to a cluster, and who did it, the newest last."""
    folder = run_folder_of(client, run)
    past = changes_of(folder)[-lines:]
    if as_json:
        print_json(past)
    else:
        click.echo("\n".join(map(line_of, past)) or "Nothing has happened yet.")
    new = last_lines(folder / FILE, 0, follow=True) if follow else iter(())
    for change in filter(None, map(change_in, new)):
        click.echo(msgspec.json.encode(change).decode() if as_json else line_of(change))
    return 0


def line_of(change: Change) -> str:
    """Return a change in one line."""
    return f"{change.time[:10]} {change.time[11:19]}Z {change.text}"


def changes_of(run: Path) -> list[Change]:
    """Return the changes of a run and of the earlier runs of its cluster beside it, the oldest first."""
    mine = list(changes_in(run))
    begun = next((change for change in mine if change.key.startswith("start ")), None)
    others: list[Change] = []
    for path in [] if begun is None else run.resolve().parent.glob(f"*/{FILE}"):
        if path.parent != run.resolve():
            changes = changes_in(path.parent)
            first = list(itertools.islice(changes, 1))
            if first and first[0].key == begun.key and first[0].time < begun.time:  # type: ignore[union-attr]
                others += [*first, *changes]
    return sorted([*others, *mine], key=lambda change: change.time)

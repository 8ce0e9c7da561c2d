"""Command ``penstock usage``: tokens and requests per tenant and key, as a table or CSV."""

import csv
import json
import time
from pathlib import Path

import click
from msgspec.structs import asdict, fields

from penstock.cli.shared.admin_client import AdminClient
from penstock.cli.shared.cluster_options import cluster_options
from penstock.cli.shared.followed_file import run_option
from penstock.cli.shared.option_values import SECONDS
from penstock.cli.shared.output import json_option, show, table
from penstock.kernel.errors import ConfigError
from penstock.runtime.records.usage_table import UsageRow, UsageTable, usage_of

EPILOG = """\b
Examples:
  penstock usage                          of the running cluster, since it started
  penstock usage --since 24h --csv usage.csv
  penstock usage --run runs/RUN           of a run that is over

The sums are those of the run's requests.jsonl, of which runs.records_bytes are kept.
"""
COLUMNS = [field.name for field in fields(UsageRow)]


@click.command("usage", epilog=EPILOG, short_help="Show tokens and requests per tenant and key.")
@click.option("--csv", "csv_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the rows as CSV.")
@click.option("--since", type=SECONDS, help="Only requests that arrived within this time, such as 24h.")
@run_option
@cluster_options
@json_option
def command(client: AdminClient, csv_file: Path | None, since: float | None, run: Path | None, as_json: bool) -> int:
    """Show what each tenant and key took."""
    if run is None:
        query = "" if since is None else f"?since={since:g}"
        found = client.get(f"/admin/usage{query}", UsageTable)
    else:
        found = usage_of(run, 0.0 if since is None else max(0.0, _seconds_since_start(run) - since))
    if csv_file is not None:
        with csv_file.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            writer.writerows(asdict(row).values() for row in found.rows)
    show(as_json, found, usage_text(found))
    return 0


def usage_text(usage: UsageTable) -> str:
    """Return the usage as a table."""
    if not usage.rows:
        return "No request has ended."
    rows = [["-" if value is None else value for value in asdict(row).values()] for row in usage.rows]
    text = table([column.replace("_", " ") for column in COLUMNS], rows)
    return text if not usage.dropped else f"{text}\nOlder records were deleted: runs.records_bytes keeps more."


def _seconds_since_start(run: Path) -> float:
    """Return the seconds since a run started."""
    try:
        return time.time() - float(json.loads((run / "run.json").read_text())["clock_anchor"]["wall_ns"]) / 1e9
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{run / 'run.json'} does not say when the run started: {error}") from error

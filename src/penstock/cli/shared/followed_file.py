"""Followed file: the last lines of a file in a run folder, and those that are appended until Ctrl-C."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import click

from penstock.cli.shared.admin_client import AdminClient
from penstock.frontend.admin.admin_answers import ClusterStatus
from penstock.kernel.errors import ConfigError

EVERY = 0.2
"""Seconds between two looks at a file that is followed."""
SCANNED_MAX = 4 << 20
"""Bytes at a file's end among which the last lines are."""

run_option = click.option(
    "--run",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of a run, live or simulated, instead of a running cluster.",
)
follow_option = click.option("--follow", "-f", is_flag=True, help="Go on with what is added, until Ctrl-C.")


def run_folder_of(client: AdminClient, run: Path | None) -> Path:
    """Return the folder that was given, or that of the running cluster.

    Raises:
        ConfigError: the cluster's folder is not on this machine.
    """
    if run is not None:
        return run
    folder = Path(client.get("/admin/status", ClusterStatus).run)
    if not folder.is_dir():
        raise ConfigError(
            f"the run folder of {client.url}, {folder}, is not on this machine",
            hint="ask on the machine of the cluster; of pods, kubectl logs shows what they wrote",
        )
    return folder


def last_lines(path: Path, count: int, *, follow: bool) -> Iterator[str]:
    """Yield the last whole lines; where they are followed then each new one, also where the file is replaced or cut."""
    at, end, rest = 0, 0, b""
    first = True
    while first or follow:
        try:
            with path.open("rb") as file:
                now = os.fstat(file.fileno())
                if now.st_ino != at or now.st_size < end:
                    at, end, rest = now.st_ino, max(0, now.st_size - SCANNED_MAX) if first else 0, b""
                file.seek(end)
                data = file.read()
        except FileNotFoundError:
            data = b""  # it is about to be made
        end += len(data)
        *lines, rest = (rest + data).split(b"\n")
        yield from (line.decode(errors="replace") for line in (lines[max(0, len(lines) - count) :] if first else lines))
        first = False
        if follow:
            time.sleep(EVERY)

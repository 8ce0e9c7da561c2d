"""Command ``penstock top``: the status, redrawn until q or Ctrl-C."""

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from penstock.cli.shared.admin_client import AdminClient, ClusterUnreachable
from penstock.cli.shared.cluster_options import cluster_options
from penstock.cli.shared.output import cell, fitted
from penstock.cli.status import (
    MODEL_HEADINGS,
    MODEL_SPARE,
    WORKER_HEADINGS,
    crash_lines,
    finding_line,
    head_lines,
    model_rows,
    worker_rows,
    worker_spare,
)
from penstock.frontend.admin.cluster_status import ClusterStatus
from penstock.router.status_rows import OUTCOMES, StatusCounts

EPILOG = """\b
Examples:
  penstock top
  penstock top --every 0.5
"""

TIMEOUT = 5.0
"""Seconds for one answer; with an older status on the screen it is better to ask again."""
MISSES_MAX = 30
"""Requests in a row without an answer before it gives up."""


@click.command("top", epilog=EPILOG, short_help="Watch a cluster live.")
@cluster_options
@click.option("--every", type=click.FloatRange(0.1, 60), default=1.0, show_default=True, help="Seconds between looks.")
@click.option("--looks", type=click.IntRange(1), help="End after so many looks; without it, at q.")
def command(client: AdminClient, every: float, looks: int | None) -> int:
    """Watch a cluster live: requests, workers, queues, findings. q or Ctrl-C ends it."""
    client.timeout = TIMEOUT
    status = client.get("/admin/status", ClusterStatus)
    try:
        with _keys() as left:
            _watch(client, status, every, looks, left)
    except KeyboardInterrupt:
        return 0  # the usual way to leave it
    return 0


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits so many seconds, and returns at once when q is pressed.

    Without a terminal there are no keys, and the function only waits.
    """
    try:
        stdin = sys.stdin.fileno()
        before = termios.tcgetattr(stdin)
    except (OSError, ValueError, termios.error):
        yield _wait
        return

    def left(seconds: float) -> bool:
        end = time.monotonic() + seconds
        while select.select([stdin], [], [], max(0.0, end - time.monotonic()))[0]:
            pressed = os.read(stdin, 64)
            if b"q" in pressed.lower() or not pressed:  # nothing: the terminal is gone
                return True
        return False

    tty.setcbreak(stdin)
    try:
        yield left
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)


def _wait(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _watch(
    client: AdminClient, status: ClusterStatus, every: float, looks: int | None, left: Callable[[float], bool]
) -> None:
    from rich.live import Live

    before, read_at, misses, done = status, time.monotonic(), 0, 1
    with Live(screen_of(status, None, None), refresh_per_second=4, transient=False) as live:
        while looks is None or done < looks:
            if left(every):
                return
            done += 1
            try:
                status = client.get("/admin/status", ClusterStatus)
            except ClusterUnreachable as error:
                misses += 1
                if misses >= MISSES_MAX:
                    raise
                live.update(screen_of(before, None, f"{error.message}; shown is the last answer"))
                continue
            now = time.monotonic()
            live.update(screen_of(status, requests_per_second(before.requests, status.requests, now - read_at), None))
            before, read_at, misses = status, now, 0


def requests_per_second(before: StatusCounts, after: StatusCounts, seconds: float) -> float | None:
    """Return how many requests ended per second between two reports; None where the counts fell."""
    counts: list[int] = [sum(getattr(requests, outcome) for outcome in OUTCOMES) for requests in (before, after)]
    if seconds <= 0 or counts[1] < counts[0]:
        return None
    return (counts[1] - counts[0]) / seconds


def screen_of(status: ClusterStatus, rate: float | None, note: str | None) -> Any:
    """Return the whole screen for rich."""
    from rich.console import Console, Group
    from rich.text import Text

    width = Console().width
    head = head_lines(status)
    if rate is not None:
        head[1] += f"; {rate:.1f} requests end per second"
    parts: list[Any] = [Text("\n".join(head))]
    parts.append(_table(*fitted(MODEL_HEADINGS, model_rows(status), width, MODEL_SPARE)))
    # The URL is wide and never changes: `penstock status` has it.
    rows = [row[:-1] for row in worker_rows(status)]
    parts.append(_table(*fitted(WORKER_HEADINGS[:-1], rows, width, worker_spare(status))))
    parts += [Text(f"Restarted {line}", style="yellow") for line in crash_lines(status)]
    for finding in status.findings:
        parts.append(Text(finding_line(finding), style="red" if finding.level == "error" else "yellow"))
    if note:
        parts.append(Text(note, style="bold red"))
    return Group(*parts)


def _table(headings: list[str], rows: list[list[Any]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False)
    for index, heading in enumerate(headings):
        numbers = bool(rows) and all(isinstance(row[index], int | float) for row in rows)
        made.add_column(heading, justify="right" if numbers else "left", no_wrap=True)
    for row in rows:
        made.add_row(*(Text(cell(value)) for value in row))
    return made

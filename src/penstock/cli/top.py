"""What does ``penstock top`` show? The status, drawn again and again until Ctrl-C."""

import time
from typing import Any

import click

from penstock.cli.client import Client, Unreachable, admin_key_option, url_option
from penstock.cli.output import cell
from penstock.cli.status import MODEL_HEADINGS, WORKER_HEADINGS, finding_line, head_lines, model_rows, worker_rows

EPILOG = """\b
Examples:
  penstock top
  penstock top --every 0.5
"""

MISSES_MAX = 30
"""Looks in a row without an answer after which it gives up."""


@click.command("top", epilog=EPILOG, short_help="Watch a cluster live.")
@url_option
@admin_key_option
@click.option("--every", type=click.FloatRange(0.1, 60), default=1.0, show_default=True, help="Seconds between looks.")
@click.option("--looks", type=click.IntRange(1), help="End after so many looks; without it, at Ctrl-C.")
def command(url: str, admin_key: str | None, every: float, looks: int | None) -> int:
    """Watch a cluster live: requests, workers, queues, findings. Ctrl-C ends it."""
    client = Client(url, admin_key, timeout=5.0)
    found = client.get("/admin/status")
    try:
        _watch(client, found, every, looks)
    except KeyboardInterrupt:
        return 0  # the ordinary way to leave it
    return 0


def _watch(client: Client, found: dict[str, Any], every: float, looks: int | None) -> None:
    from rich.live import Live

    before, seen, misses, done = found, time.monotonic(), 0, 1
    with Live(screen_of(found, None, None), refresh_per_second=4, transient=False) as live:
        while looks is None or done < looks:
            time.sleep(every)
            done += 1
            try:
                found = client.get("/admin/status")
            except Unreachable as error:
                misses += 1
                if misses >= MISSES_MAX:
                    raise
                live.update(screen_of(before, None, f"{error.message}; shown is the last answer"))
                continue
            now = time.monotonic()
            live.update(screen_of(found, requests_per_second(before, found, now - seen), None))
            before, seen, misses = found, now, 0


def requests_per_second(before: dict[str, Any], after: dict[str, Any], seconds: float) -> float | None:
    """Return how many requests ended per second between two looks; None where the counts can't tell."""
    names = ("ok", "failed", "rejected", "cancelled", "expired")
    counts = [
        sum(value for name in names if isinstance(value := (found.get("requests") or {}).get(name), int))
        for found in (before, after)
    ]
    if seconds <= 0 or counts[1] < counts[0]:
        return None
    return (counts[1] - counts[0]) / seconds


def screen_of(found: dict[str, Any], rate: float | None, note: str | None) -> Any:
    """Return the whole screen for rich."""
    from rich.console import Group
    from rich.text import Text

    head = head_lines(found)
    if rate is not None:
        head[1] += f"; {rate:.1f} requests end per second"
    parts: list[Any] = [Text("\n".join(head))]
    parts.append(_table(MODEL_HEADINGS, model_rows(found)))
    # The URL is wide and never changes: `penstock status` has it.
    parts.append(_table(WORKER_HEADINGS[:-1], [row[:-1] for row in worker_rows(found)]))
    for finding in found.get("findings") or []:
        parts.append(Text(finding_line(finding), style="red" if finding.get("level") == "error" else "yellow"))
    if note:
        parts.append(Text(note, style="bold red"))
    return Group(*parts)


def _table(headings: tuple[str, ...], rows: list[list[Any]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False)
    for index, heading in enumerate(headings):
        numbers = bool(rows) and all(isinstance(row[index], int | float) for row in rows)
        made.add_column(heading, justify="right" if numbers else "left", no_wrap=index == 0)
    for row in rows:
        made.add_row(*(Text(cell(value)) for value in row))
    return made

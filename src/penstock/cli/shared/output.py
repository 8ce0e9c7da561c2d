"""Output of the commands: tables for people, JSON with a stable key order for scripts."""

import json
import shutil
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click
import msgspec

from penstock.kernel.time_windows import QUANTILES

F = TypeVar("F", bound=Callable[..., Any])

WALL_KEYS = {
    "uptime": "wall_uptime_s",
    "since": "wall_since_s",
    "queued": "wall_queued_s",
    "at": "wall_at_ns",
    "arrived": "wall_arrived_ns",
    "closed": "wall_closed_ns",
    "dispatched": "wall_dispatched_ns",
    "first": "wall_first_ns",
    "last": "wall_last_ns",
    "arrival": "wall_arrival_s",
    "ttft": "wall_ttft_s",
    "e2e": "wall_e2e_s",
    "lateness": "wall_lateness_s",
    "longest": "wall_longest_s",
    "recent": "wall_recent_s",
    **{f"{name}_{quantile}": f"wall_{name}_{quantile}_s" for name in ("ttft", "itl") for quantile in QUANTILES},
}
"""Measured wall-clock times differ from run to run; a script that compares runs leaves ``wall*`` out."""


def json_option(command: F) -> F:
    """Add ``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON for a script.")(command)


def print_json(data: Any) -> None:
    """Print indented JSON; measured times are under keys that begin with ``wall``."""
    click.echo(json.dumps(walled(msgspec.to_builtins(data)), indent=2, ensure_ascii=False))


def show(as_json: bool, data: Any, text: str) -> None:
    """Print the data as `print_json` does, or the text for people."""
    if as_json:
        print_json(data)
    else:
        click.echo(text)


def walled(data: Any) -> Any:
    """Rename every measured time to a key that begins with ``wall`` and ends in its unit."""
    if isinstance(data, dict):
        return {
            (WALL_KEYS.get(key, key) if value is None or isinstance(value, int | float) else key): walled(value)
            for key, value in data.items()
        }
    if isinstance(data, list | tuple):
        return [walled(item) for item in data]
    return data


def table(headings: Sequence[str], rows: Sequence[Sequence[Any]], *, indent: str = "") -> str:
    """Return a table in columns; numbers are right-aligned, and an unknown value is ``-``."""
    cells = [[cell(value) for value in row] for row in rows]
    widths = [max(len(heading), *(len(row[i]) for row in cells), 0) for i, heading in enumerate(headings)]
    right = [bool(rows) and all(_is_number(row[i]) for row in rows) for i in range(len(headings))]
    lines = []
    for row in [list(headings), *cells]:
        padded = [
            text.rjust(width) if is_right else text.ljust(width) for text, width, is_right in zip(row, widths, right)
        ]
        lines.append(indent + "  ".join(padded).rstrip())
    return "\n".join(lines)


def terminal_width() -> int:
    """Return how many columns a line may have: those of the terminal, or 80 without one."""
    return shutil.get_terminal_size((80, 24)).columns


def fitted(
    headings: Sequence[str], rows: Sequence[Sequence[Any]], width: int, spare: Sequence[str]
) -> tuple[list[str], list[list[Any]]]:
    """Return headings and rows of a table that is at most ``width`` columns wide, where that is possible.

    Args:
        spare: headings of columns that may be left out, the first one first. Where that is not enough the first
            column, which is a name, is shortened in its middle.
    """
    shown = list(headings)
    cells = [list(row) for row in rows]
    for heading in spare:
        if _width(shown, cells) <= width:
            break
        if heading in shown:
            at = shown.index(heading)
            del shown[at]
            cells = [row[:at] + row[at + 1 :] for row in cells]
    excess = _width(shown, cells) - width
    if excess > 0 and cells:
        longest = max(len(cell(row[0])) for row in cells)
        most = max(NAME_LEAST, longest - excess)
        cells = [[_shortened(cell(row[0]), most), *row[1:]] for row in cells]
    return shown, cells


NAME_LEAST = 12
"""Fewest characters shown of a name, however narrow the terminal is."""


def _width(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> int:
    return max(len(line) for line in table(headings, rows).split("\n"))


def _shortened(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    end = (most - 1) // 2
    return f"{text[: most - 1 - end]}…{text[-end:]}"


def wrapped(text: str, width: int, *, hang: str = "  ") -> str:
    """Break a sentence into lines; a word longer than a line, such as a path, stays whole."""
    return textwrap.fill(text, width, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False)


def cell(value: Any) -> str:
    """Write one value of a table."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.2f}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)


def percent(share: float | None) -> str:
    """Write a share; an unknown one is ``-``, not 0."""
    return "-" if share is None else f"{100 * share:.1f} %"


def seconds_text(seconds: float | None) -> str:
    """Write a duration in the unit that reads best."""
    if seconds is None:
        return "-"
    if seconds < 0.01:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool)) or _is_percent(value)


def _is_percent(value: Any) -> bool:
    return isinstance(value, str) and (value.endswith(" %") or value == "-")

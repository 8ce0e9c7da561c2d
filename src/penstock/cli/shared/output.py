"""Output of the commands: tables for people, JSON with a stable key order for scripts."""

import json
import os
import re
import shutil
import sys
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
        click.echo(painted(text))


_HEADINGS = re.compile(r"[A-Z][A-Z .]*(  +[A-Z][A-Z .]*)+")
_COLOURS = (
    (re.compile(r"^( *)(error)(?=:)", re.MULTILINE), "red"),
    (re.compile(r"^( *)(warning)(?=:)", re.MULTILINE), "yellow"),
    (re.compile(r"^()(\* .*)$", re.MULTILINE), "green"),
    (
        re.compile(r"(  )(failed|starting|draining|asleep|open|rejected)(?= |$)", re.MULTILINE),
        "yellow",
    ),
)
"""Words at the beginning of a line or a cell, and their colour; a chosen candidate's line is one."""


def painted(text: str) -> str:
    """Return text for people in colours; `click.echo` takes them out where a terminal does not want them."""
    for words, colour in _COLOURS:
        text = words.sub(r"\1" + click.style(r"\2", fg=colour), text)
    lines = (click.style(line, bold=True) if _HEADINGS.fullmatch(line.strip()) else line for line in text.split("\n"))
    return "\n".join(lines)


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


def text_width(wide: bool) -> int:
    """Return the columns for long text: as `terminal_width`, but lines are whole in a pipe, where they are searched."""
    narrow = sys.stdout.isatty() or "COLUMNS" in os.environ
    return terminal_width() if narrow and not wide else WIDE


def fitted(
    headings: Sequence[str], rows: Sequence[Sequence[Any]], width: int, spare: Sequence[str], *, text: str | None = None
) -> tuple[list[str], list[list[Any]]]:
    """Return headings and rows of a table that is at most ``width`` columns wide, where that is possible.

    Args:
        spare: headings of columns that may be left out, the first one first.
        text: heading of a column whose cells may be cut at their ends, where that is not enough. At last the first
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
    if excess > 0 and cells and text is not None:
        at = shown.index(text)
        most = max(NAME_LEAST, max(len(cell(row[at])) for row in cells) - excess)
        cells = [[*row[:at], _shortened_text(cell(row[at]), most), *row[at + 1 :]] for row in cells]
        excess = _width(shown, cells) - width
    if excess > 0 and cells:
        longest = max(len(cell(row[0])) for row in cells)
        most = max(NAME_LEAST, longest - excess)
        cells = [[_shortened(cell(row[0]), most), *row[1:]] for row in cells]
    return shown, cells


NAME_LEAST = 12
"""Fewest characters shown of a name, however narrow the terminal is."""
WIDE = 10_000
"""Columns of a line where everything should be shown."""
wide_option = click.option("--wide", is_flag=True, help="Show every column, however wide the terminal is.")


def fitted_table(
    headings: Sequence[str],
    rows: Sequence[Sequence[Any]],
    width: int,
    spare: Sequence[str],
    *,
    silent: Sequence[str] = (),
    text: str | None = None,
) -> str:
    """Return a table as `fitted` makes it, with a line that names what it leaves out, but for the ``silent``."""
    shown, cells = fitted(headings, rows, width, spare, text=text)
    absent = [heading for heading in headings if heading not in shown and heading not in silent]
    made = table(shown, cells)
    return f"{made}\n" + wrapped(f"--wide shows also: {', '.join(absent).lower()}.", width) if absent else made


def _width(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> int:
    return max(len(line) for line in table(headings, rows).split("\n"))


def _shortened_text(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"


def _shortened(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    end = (most - 1) // 2
    return f"{text[: most - 1 - end]}…{text[-end:]}"


def wrapped(text: str, width: int, *, hang: str = "  ") -> str:
    """Break each line of a text into lines; a word longer than a line, such as a path, stays whole."""
    return "\n".join(
        textwrap.fill(line, width, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False)
        for line in text.split("\n")
    )


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

"""Outcomes of commands: JSON with stable keys for files and scripts, a table and sentences for people."""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from penstock_lab.report.run.run_summary import LatencySpread, RunSummary

POINTS = ("mean", "p50", "p90", "p95", "p99", "max")
"""Fields of a `LatencySpread` that outcomes show."""
WIDE = 400
"""Columns of text where the output is no terminal, whose width would limit it."""


def json_text(data: Any) -> str:
    """Return indented JSON."""
    return json.dumps(msgspec.to_builtins(data), indent=2) + "\n"


def spread_fields(summary: RunSummary, names: Sequence[str]) -> dict[str, float | None]:
    """Return latencies of a run in seconds by name and point, such as ``ttft_p50_s``; None is unknown."""
    spreads: dict[str, LatencySpread | None] = {name: getattr(summary, name) for name in names}
    return {
        f"{name}_{point}_s": None if spread is None else getattr(spread, point)
        for name, spread in spreads.items()
        for point in POINTS
    }


def print_outcome(
    title: str,
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    lines: Iterable[str],
    *,
    words: Sequence[int] = (0,),
) -> None:
    """Print a table and sentences below it; the columns at ``words`` stand to the left, others, of numbers, right."""
    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else WIDE)
    table = Table(title=title, title_justify="left")
    for place, name in enumerate(head):
        table.add_column(name, justify="left" if place in words else "right")
    for cells in rows:
        table.add_row(*cells)
    console.print(table, markup=False)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)

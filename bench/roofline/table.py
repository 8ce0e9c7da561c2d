"""Fitted constants and their errors as the page's table."""

import statistics
from collections.abc import Mapping, Sequence

import msgspec
from closed_loop import Looped
from points import Point
from roofline_fit import NAMES

from penstock_lab.engine.settings import Calibration


class Row:
    """A point, and what the engine makes of it under one calibration after another."""

    def __init__(self, point: Point, *looped: Looped) -> None:
        self.group = point.group
        self.model = point.model
        self.tpot = [one.tpot / point.measured.tpot - 1.0 for one in looped]
        self.ttft = [one.ttft / (point.measured.ttft or one.ttft) - 1.0 for one in looped]


def constants(rows: Sequence[tuple[str, Calibration]]) -> list[str]:
    """Return a table of calibrations by name."""
    lines = [f"| fitted on | {' | '.join(NAMES)} |", f"|---|{'---:|' * len(NAMES)}"]
    for name, calibration in rows:
        values = msgspec.structs.asdict(calibration)
        lines.append(f"| {name} | {' | '.join(f'{values[key]:.3g}' for key in NAMES)} |")
    return lines


def as_setting(calibration: Calibration) -> str:
    """Return a fit as `sim.timing` takes it."""
    values = msgspec.structs.asdict(calibration)
    return f"`calibration: {{{', '.join(f'{key}: {values[key]:.3g}' for key in NAMES)}}}`"


def beside_of(beside: Mapping[str, float]) -> str:
    """Return seconds by engine in words."""
    return ", ".join(f"{engine} {1e3 * seconds:.0f}" for engine, seconds in beside.items())


def errors(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """Return the median size of the errors in per cent by group, signed in brackets for the first calibration."""
    head = " | ".join(f"{what} {name}" for what in ("TPOT", "TTFT") for name in names)
    rule = f"|---|---|---|---|---:|{'---:|' * 2 * len(names)}"
    lines = [f"| engine | GPU | model | weights | points | {head} |", rule]
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    for group in sorted(groups):
        lines.append(_line(" | ".join(group), groups[group], len(names)))
    for model in sorted({row.model for row in rows}):
        lines.append(_line(f"all | | {model} | ", [row for row in rows if row.model == model], len(names)))
    if rows:
        lines.append(_line("all | | | ", rows, len(names)))
    return lines


def _line(name: str, rows: Sequence[Row], count: int) -> str:
    cells = []
    for series in ("tpot", "ttft"):
        for i in range(count):
            values = [getattr(row, series)[i] for row in rows]
            signed = f" ({100 * statistics.median(values):+.0f})" if i == 0 else ""
            cells.append(f"{100 * statistics.median(abs(value) for value in values):.1f}{signed}")
    return f"| {name} | {len(rows)} | {' | '.join(cells)} |"

"""How do fitted constants and their errors become the page's table?"""

import statistics
from collections.abc import Iterable, Sequence

import msgspec
from points import Point

from penstock.engine.calibrate import NAMES, predicted_tpot
from penstock.engine.settings import Calibration

BEGIN, END = "<!-- begin table -->", "<!-- end table -->"
Group = tuple[str, str, str, str]


def error(point: Point, calibration: Calibration) -> float:
    """Return by what share the prediction is off: 0.1 is 10 % too long."""
    return predicted_tpot(point.measured, calibration) / point.measured.tpot - 1.0


def median(errors: Iterable[float]) -> str:
    """Return the median size of the errors in per cent."""
    sizes = [abs(value) for value in errors]
    return f"{100 * statistics.median(sizes):.1f}" if sizes else "-"


def constants(rows: Sequence[tuple[str, Calibration]]) -> list[str]:
    """Return a table of calibrations by name."""
    lines = [f"| fitted on half of | {' | '.join(NAMES)} |", f"|---|{'---:|' * len(NAMES)}"]
    for name, calibration in rows:
        values = msgspec.structs.asdict(calibration)
        lines.append(f"| {name} | {' | '.join(f'{values[key]:.3g}' for key in NAMES)} |")
    return lines


def errors(
    held: Sequence[Point],
    start: Calibration,
    everywhere: Calibration,
    without: dict[Group, Calibration],
    pairs: dict[tuple[str, str], Calibration],
) -> list[str]:
    """Return the held-out half by group: median error in per cent, and the median of the signed one."""
    lines = [
        "| engine | GPU | model | weights | points | start values | fitted | signed | group unseen | per engine, GPU |",
        "|---|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    groups: dict[Group, list[Point]] = {}
    for point in held:
        groups.setdefault(point.group, []).append(point)
    for group in sorted(groups):
        points = groups[group]
        fitted = [error(point, everywhere) for point in points]
        pair = pairs.get(group[:2])
        lines.append(
            f"| {' | '.join(group)} | {len(points)} | {median(error(point, start) for point in points)} "
            f"| {median(fitted)} | {100 * statistics.median(fitted):+.1f} "
            f"| {median(error(point, without[group]) for point in points)} "
            f"| {median(error(point, pair) for point in points) if pair else '-'} |"
        )
    lines.append(
        f"| all | | | | {len(held)} | {median(error(point, start) for point in held)} "
        f"| {median(error(point, everywhere) for point in held)} "
        f"| {100 * statistics.median(error(point, everywhere) for point in held):+.1f} "
        f"| {median(error(point, without[point.group]) for point in held)} "
        f"| {median(error(point, pairs[point.group[:2]]) for point in held if point.group[:2] in pairs)} |"
    )
    return lines


def page_with(page: str, text: str) -> str:
    """Return the page with its table replaced."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}"

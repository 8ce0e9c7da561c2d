"""Who keeps more at equal GPU-hours? Fronts per seed, medians over seeds, ties where seeds disagree, as Markdown."""

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from plan import GPUS, ITL, TTFT, Cell, Place

from penstock.planner.settings import PlannerSettings

EVEN = 0.5
"""Points within which nobody is ahead: seeds differ by as much."""
DEFAULT_KNOB = f"{PlannerSettings().slo.miss_cost:g}"
Done = Mapping[Cell, Mapping[str, Any]]


class Point(NamedTuple):
    """GPU-hours, the share of requests in SLO, and whose it is."""

    gpu_hours: float
    kept: float
    whose: str = ""


def page(done: Done, wanted: Sequence[Cell]) -> str:
    """Return the tables of all that was run, of whole seeds only: half of one would leave out somebody's best."""
    lacking = {(cell.place, cell.seed) for cell in wanted if cell not in done}
    whole = {cell: row for cell, row in done.items() if (cell.place, cell.seed) not in lacking}
    good = {cell: row for cell, row in whole.items() if "error" not in row}
    failed = sorted(cell.key for cell, row in whole.items() if "error" in row)
    day, cores = time.strftime("%Y-%m-%d", time.gmtime()), os.cpu_count()
    about = f"{day}, {cores} cores; TTFT {TTFT:g} s, mean ITL {ITL * 1e3:g} ms, at most {GPUS} GPUs; {len(good)} runs"
    missing = len(wanted) - len(whole)
    about += f". Seeds that are not whole are left out: {missing} of {len(wanted)} runs." if missing else "."
    if failed:
        about += f" Failed: {'; '.join(failed)}."
    if not good:
        return about
    parts = [about, summary(good)]
    for place in dict.fromkeys(cell.place for cell in good):
        parts.append(at_place(place, {cell: row for cell, row in good.items() if cell.place == place}))
    return "\n\n".join(parts)


def summary(done: Done) -> str:
    """Return ours beside static fleets and beside the best of Dynamo's modes at equal GPU-hours."""
    rows = []
    verdicts: dict[str, list[str]] = {"static fleets": [], "the best of Dynamo's modes": []}
    for place in dict.fromkeys(cell.place for cell in done):
        here = {cell: row for cell, row in done.items() if cell.place == place}
        static, peer = fronts(here, "static"), fronts(here, "peer")
        for knob in dict.fromkeys(cell.entry.knob for cell in here if cell.entry.kind == "ours"):
            mine = points(here, "slo", knob)
            for whom, other in zip(verdicts, (static, peer), strict=True):
                verdicts[whom].append(verdict(gains(mine, other)))
            rows.append(
                [
                    place.name,
                    knob.removeprefix("miss_cost "),
                    f"{_middle(p.kept for p in mine.values()):.1%}",
                    f"{_middle(p.gpu_hours for p in mine.values()):.2f}",
                    _gain(mine, static),
                    _gain(mine, peer),
                    _spared(mine, peer),
                    ", ".join(sorted({theirs.whose for _, theirs in beside(mine, peer)})) or "none so cheap",
                    str(len(mine)),
                ]
            )
    head = ["place", "miss_cost", "in SLO", "GPU-h", "over static", "over their best", "fewer misses"]
    head += ["which is", "seeds"]
    return (
        "### Ours at equal GPU-hours\n\nPoints (percentage points of all requests) that `slo` keeps more than static "
        "fleets, and than the best of all of Dynamo's modes and knobs (lines between the points of their fronts), at "
        "the same GPU-hours: median over seeds, and the range. A range with both signs, or a median within "
        f"{EVEN:g} points, is a *tie*. Where a front ends below ours, its last point counts: nobody has to spend "
        "more. *Fewer misses* says of their best's misses how many ours spares.\n\n"
        + f"**At the default knob, miss_cost {DEFAULT_KNOB}**\n\n"
        + _markdown(head, [row for row in rows if row[1] == DEFAULT_KNOB], "llrrrrrlr")
        + "\n\n**At every knob**\n\n"
        + _markdown(head, rows, "llrrrrrlr")
        + "\n\n"
        + " ".join(
            f"Against {whom} that is {said.count('ahead')} times ahead, {said.count('tie')} times a tie and "
            f"{said.count('behind')} times behind."
            for whom, said in verdicts.items()
        )
    )


def at_place(place: Place, done: Done) -> str:
    """Return everybody's runs at a place."""
    static, mine = fronts(done, "static"), fronts(done, "ours")
    rows = []
    for entry in dict.fromkeys(cell.entry for cell in done):
        kind, policy, knob = entry.kind, entry.policy, entry.knob
        found = [row for cell, row in done.items() if cell.entry == entry]
        theirs = points(done, policy, knob)
        rows.append(
            [
                {"peer": f"Dynamo: {policy}", "ours": "**ours: slo**", "static": "static"}[kind],
                knob,
                f"{_middle(row['attainment'] for row in found):.1%}",
                f"{_middle(row['gpu_hours'] for row in found):.2f}",
                "" if kind == "static" else _gain(theirs, static),
                "" if kind == "ours" else _gain(theirs, mine),
                "" if kind == "static" else f"{_middle(row['turns'] for row in found):.0f}",
                f"{_middle(row['ttft_p99'] for row in found):.2f}",
            ]
        )
    seeds = len({cell.seed for cell in done})
    head = ["who", "knob", "in SLO", "GPU-h", "over static", "over ours", "turns/h", "TTFT p99 s"]
    title = f"### {place.name[0].upper()}{place.name[1:]} ({seeds} seed{'s' if seeds > 1 else ''})"
    return f"{title}\n\n{_markdown(head, rows, 'llrrrrrr')}"


# --- fronts ---------------------------------------------------------------------------------------------------------


def points(done: Done, policy: str, knob: str) -> dict[int, Point]:
    """Return a policy's point per seed."""
    return {
        cell.seed: _point(cell, row)
        for cell, row in done.items()
        if cell.entry.policy == policy and cell.entry.knob == knob
    }


def fronts(done: Done, kind: str) -> dict[int, list[Point]]:
    """Return per seed the points of a kind that none of it beats in both, by rising GPU-hours."""
    found: dict[int, list[Point]] = defaultdict(list)
    for cell, row in done.items():
        if cell.entry.kind == kind:
            found[cell.seed].append(_point(cell, row))
    return {seed: front(each) for seed, each in found.items()}


def front(given: Iterable[Point]) -> list[Point]:
    """Return the points that are not beaten in both, by rising GPU-hours and share kept."""
    kept: list[Point] = []
    for point in sorted(given, key=lambda each: (each.gpu_hours, -each.kept)):
        if not kept or point.kept > kept[-1].kept:
            kept.append(point)
    return kept


def at(found: Sequence[Point], gpu_hours: float) -> Point | None:
    """Return what a front keeps at so many GPU-hours; None where it has nothing so cheap."""
    before: Point | None = None
    for point in found:
        if point.gpu_hours > gpu_hours:
            if before is None:
                return None
            part = (gpu_hours - before.gpu_hours) / (point.gpu_hours - before.gpu_hours)
            nearer = before if part < 0.5 else point
            return Point(gpu_hours, before.kept + part * (point.kept - before.kept), nearer.whose)
        before = point
    return before


# --- small things ---------------------------------------------------------------------------------------------------


def _point(cell: Cell, row: Mapping[str, Any]) -> Point:
    whose = cell.entry.policy if cell.entry.knob == "default" else f"{cell.entry.policy} ({cell.entry.knob})"
    return Point(row["gpu_hours"], row["attainment"], whose)


def beside(mine: Mapping[int, Point], others: Mapping[int, Sequence[Point]]) -> list[tuple[Point, Point]]:
    """Return each seed's point with what another front keeps at the same GPU-hours, where it has something so cheap."""
    found = ((point, at(others.get(seed, ()), point.gpu_hours)) for seed, point in mine.items())
    return [(point, other) for point, other in found if other is not None]


def gains(mine: Mapping[int, Point], others: Mapping[int, Sequence[Point]]) -> list[float]:
    """Return by how many points more is kept than by another front at the same GPU-hours, seed by seed."""
    return [100.0 * (point.kept - other.kept) for point, other in beside(mine, others)]


def verdict(found: Sequence[float]) -> str:
    """Return in a word what gains come to; nothing where there is nothing to compare."""
    if not found:
        return ""
    if min(found) < 0.0 < max(found) or abs(statistics.median(found)) < EVEN:
        return "tie"
    return "ahead" if found[0] > 0.0 else "behind"


def _gain(mine: Mapping[int, Point], others: Mapping[int, Sequence[Point]]) -> str:
    found = gains(mine, others)
    if not found:
        return "-"
    text = _ranged(found, _signed)
    return f"{text} tie" if verdict(found) == "tie" else text


def _spared(mine: Mapping[int, Point], others: Mapping[int, Sequence[Point]]) -> str:
    """Return which share of another front's misses at the same GPU-hours are not missed."""
    found = [(p.kept - other.kept) / (1.0 - other.kept) for p, other in beside(mine, others) if other.kept < 1.0]
    return _ranged(found, "{:.0%}".format) if found else "-"


def _ranged(found: Sequence[float], shown: Callable[[float], str]) -> str:
    """Return the median, and the range where there are several."""
    text = shown(statistics.median(found))
    return text if len(found) < 2 else f"{text} ({shown(min(found))} to {shown(max(found))})"


def _signed(points: float) -> str:
    return f"{round(points, 1) + 0.0:+.1f}"  # without the sum, a little below zero reads -0.0


def _middle(values: Iterable[float]) -> float:
    return statistics.median(values)


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]], align: str) -> str:
    rule = ["---:" if each == "r" else "---" for each in align]
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join(rule) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])

"""Timeline of many quantities as one SVG: lanes below each other, with one time axis and one cross-hair."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.report.run.chart_svg import SERIES, SvgAxis, SvgRuler, tick_text

WIDTH, LEFT, RIGHT = 920, 74, 20
GAP, FOOT, ROW = 30, 34, 18
POINTS = 1500
"""Most points drawn of a line: more than the page has pixels across."""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class LaneTrace:
    """One line of a lane; points in ascending time. ``steps``: a value holds until the next."""

    name: str
    points: Points
    steps: bool = False
    dashed: bool = False
    colour: int | None = None


@dataclass(frozen=True, slots=True)
class LaneBand:
    """Area between two lines: (time, low, high)."""

    name: str
    points: Sequence[tuple[float, float, float]]
    colour: int = 0


@dataclass(frozen=True, slots=True)
class LaneSpan:
    """A coloured stretch of time; ``kind`` is a class of the page's style: fresh, stale or broken."""

    row: str
    start: float
    end: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class LaneFlag:
    """A moment with a text and a ``link`` on the page."""

    at: float
    text: str
    link: str
    row: str = ""


@dataclass(frozen=True, slots=True)
class Lane:
    """One quantity. ``limits``: (name, value) drawn across."""

    axis: SvgAxis
    traces: Sequence[LaneTrace] = ()
    bands: Sequence[LaneBand] = ()
    limits: Sequence[tuple[str, float]] = ()
    spans: Sequence[LaneSpan] = ()
    flags: Sequence[LaneFlag] = ()
    height: int = 110
    title: str = ""
    data: str = ""
    """File with its numbers, beside the page."""

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys([span.row for span in self.spans] + [flag.row for flag in self.flags]))

    @property
    def empty(self) -> bool:
        drawn = any(trace.points for trace in self.traces) or any(band.points for band in self.bands)
        return not (drawn or self.spans or self.flags)


def draw_lanes(title: str, begin: float, end: float, lanes: Sequence[Lane], unit: Literal["s", "min", "h"]) -> str:
    """Return an SVG of all lanes that are not empty.

    Args:
        begin, end: seconds.
        unit: of the time axis.
    """
    scale = {"s": 1.0, "min": 60.0, "h": 3600.0}[unit]
    across = SvgRuler(SvgAxis("", least=begin / scale, most=end / scale), [begin / scale], LEFT, WIDTH - RIGHT)
    shown = [lane for lane in lanes if not lane.empty]
    height = sum(_height(lane) + GAP for lane in shown) + FOOT
    name = html.escape(title, quote=True)
    parts = [
        f'<svg class="lanes" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{name}" '
        f'data-left="{LEFT}" data-right="{WIDTH - RIGHT}" data-begin="{begin / scale:g}" data-end="{end / scale:g}">'
        f"<title>{name}</title>"
    ]
    top = 20
    for lane in shown:
        parts.append(_lane(lane, across, scale, top))
        top += _height(lane) + GAP
    bottom = top - GAP
    for tick in across.ticks():
        at = across.place(tick)
        parts.append(f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{tick_text(tick, SvgAxis(""))}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text class="axis" x="{middle}" y="{bottom + 32}" text-anchor="middle">time of the run ({unit})</text>'
    )
    parts.append(f'<line class="hair" x1="0" y1="14" x2="0" y2="{bottom}" visibility="hidden"/></svg>')
    return "".join(parts)


def thin(points: Points, most: int = POINTS) -> Points:
    """Leave out points that would not be visible: first repeats of a value, then all but each stretch's extremes."""
    distinct = [
        point
        for place, point in enumerate(points)
        if place in (0, len(points) - 1) or not points[place - 1][1] == point[1] == points[place + 1][1]
    ]
    if len(distinct) <= most:
        return distinct
    size = -(-len(distinct) * 2 // most)
    thinned: list[tuple[float, float]] = []
    for start in range(0, len(distinct), size):
        part = distinct[start : start + size]
        low, high = min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])
        thinned += sorted({low, high, part[0]})
    return [*thinned, distinct[-1]]


def _height(lane: Lane) -> int:
    return ROW * len(lane.rows) or lane.height


def _lane(lane: Lane, across: SvgRuler, scale: float, top: int) -> str:
    height = _height(lane)
    parts = [f'<text class="axis" x="{LEFT}" y="{top - 6}">{html.escape(lane.title or lane.axis.label)}</text>']
    parts.append(_legend(lane, top - 6))
    for tick in across.ticks():
        at = across.place(tick)
        parts.append(f'<line class="grid" x1="{at:.1f}" y1="{top}" x2="{at:.1f}" y2="{top + height}"/>')
    if lane.spans or lane.flags:
        return "".join([*parts, _rows(lane, across, scale, top)])
    values = [value for trace in lane.traces for _, value in trace.points]
    values += [value for band in lane.bands for _, *both in band.points for value in both]
    up = SvgRuler(lane.axis, values + [value for _, value in lane.limits], top + height, top)
    for tick in up.ticks():
        at = up.place(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{tick_text(tick, lane.axis)}</text>')
    for band in lane.bands:
        edge = [(across.place(at / scale), up.place(low), up.place(high)) for at, low, high in band.points]
        if edge:
            upper = " ".join(f"{x:.1f},{high:.1f}" for x, _, high in edge)
            lower = " ".join(f"{x:.1f},{low:.1f}" for x, low, _ in reversed(edge))
            parts.append(f'<polygon class="band" style="fill:var(--s{band.colour})" points="{upper} {lower}"/>')
    for number, trace in enumerate(lane.traces):
        d = _path(trace, across, up, scale)
        if d:
            colour = number % SERIES if trace.colour is None else trace.colour
            dash = ' stroke-dasharray="5 4"' if trace.dashed else ""
            parts.append(f'<path class="line" style="stroke:var(--s{colour})"{dash} d="{d}"/>')
    for name, value in lane.limits:
        at = up.place(value)
        parts.append(f'<line class="mark" x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}"/>')
        parts.append(
            f'<text class="mark" x="{WIDTH - RIGHT - 4}" y="{at - 4:.1f}" text-anchor="end">{html.escape(name)}</text>'
        )
    return "".join(parts)


def _rows(lane: Lane, across: SvgRuler, scale: float, top: int) -> str:
    parts = []
    for place, row in enumerate(lane.rows):
        y = top + ROW * place
        parts.append(f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end">{html.escape(row[:11])}</text>')
        for span in lane.spans:
            if span.row == row:
                x, until = across.place(span.start / scale), across.place(span.end / scale)
                parts.append(
                    f'<rect class="{span.kind}" x="{x:.1f}" y="{y + 2}" width="{max(until - x, 0.5):.1f}" height="12">'
                    f"<title>{html.escape(span.text)}</title></rect>"
                )
        for flag in lane.flags:
            if flag.row == row:
                x = across.place(flag.at / scale)
                parts.append(
                    f'<a href="{html.escape(flag.link, quote=True)}"><rect class="flag" x="{x - 2:.1f}" y="{y + 1}" '
                    f'width="4" height="14"><title>{html.escape(flag.text)}</title></rect></a>'
                )
    return "".join(parts)


def _path(trace: LaneTrace, across: SvgRuler, up: SvgRuler, scale: float) -> str:
    parts: list[str] = []
    for at, value in thin(trace.points):
        x, y = across.place(at / scale), up.place(value)
        if not parts:
            parts.append(f"M{x:.1f} {y:.1f}")
        elif trace.steps:
            parts.append(f"H{x:.1f}V{y:.1f}")
        else:
            parts.append(f"L{x:.1f} {y:.1f}")
    return "".join(parts)


def _legend(lane: Lane, y: int) -> str:
    names = [
        (trace.name, number % SERIES if trace.colour is None else trace.colour)
        for number, trace in enumerate(lane.traces)
        if trace.points
    ]
    names += [(band.name, band.colour) for band in lane.bands if band.points]
    if len(names) < 2:
        return ""
    parts, x = [], WIDTH - RIGHT
    for name, colour in reversed(names):
        x -= 7 * len(name) + 22
        parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" style="fill:var(--s{colour})"/>')
        parts.append(f'<text x="{x + 14}" y="{y}">{html.escape(name)}</text>')
    return "".join(parts)

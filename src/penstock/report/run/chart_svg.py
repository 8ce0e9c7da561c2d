"""Line and bar charts as inline SVG without a library, with units on their axes.

Colours are CSS variables of the page (``--ink``, ``--grid``, ``--s0`` ...), so that one drawing serves light and dark.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 34, 14, 46
SERIES = 6
"""Colours that the page defines; a further series starts over."""
LEAST = 1e-100
"""Values not above it count as zero: logarithms and ticks of such numbers would fail."""

Scale = Literal["linear", "log"]


@dataclass(frozen=True, slots=True)
class SvgLine:
    """One series: points in ascending x."""

    name: str
    points: Sequence[tuple[float, float]]
    steps: bool = False


@dataclass(frozen=True, slots=True)
class SvgMark:
    """A limit drawn across the plot: at an x, or at a y."""

    name: str
    at: float
    axis: Literal["x", "y"]


@dataclass(frozen=True, slots=True)
class SvgAxis:
    """Label of an axis with its unit, its scale and its bounds."""

    label: str
    scale: Scale = "linear"
    least: float | None = None
    most: float | None = None
    percent: bool = False


def line_chart(title: str, x: SvgAxis, y: SvgAxis, lines: Sequence[SvgLine], marks: Sequence[SvgMark] = ()) -> str:
    """Return an SVG of the lines, or a sentence where there is no point to draw."""
    points = [point for line in lines for point in line.points if x.scale == "linear" or point[0] > LEAST]
    if not points:
        return f'<p class="none">{html.escape(title)}: nothing was measured.</p>'
    across = SvgRuler(x, [p[0] for p in points] + [m.at for m in marks if m.axis == "x"], LEFT, WIDTH - RIGHT)
    up = SvgRuler(y, [p[1] for p in points] + [m.at for m in marks if m.axis == "y"], HEIGHT - BOTTOM, TOP)
    parts = [_open(title), *_grid(across, up, x, y)]
    for number, line in enumerate(lines):
        path = _path(line, across, up)
        if path:
            parts.append(f'<path class="line" style="stroke:var(--s{number % SERIES})" d="{path}"/>')
    for mark in marks:
        parts.append(_mark(mark, across, up))
    parts.append("</svg>")
    if len(lines) > 1:
        parts.append(_legend([line.name for line in lines]))
    return "".join(parts)


def bar_chart(title: str, label: str, bars: Sequence[tuple[str, float, str]]) -> str:
    """Return an SVG of horizontal bars.

    Args:
        label: of the value axis, with its unit.
        bars: (name, value from 0 on, text at its end).
    """
    if not bars:
        return f'<p class="none">{html.escape(title)}: nothing was measured.</p>'
    row, left = 26, 150
    height = len(bars) * row + BOTTOM
    most = max(value for _, value, _ in bars) or 1.0
    reach = WIDTH - left - 210  # room for the text at a bar's end
    parts = [_open(title, height)]
    for number, (name, value, text) in enumerate(bars):
        y = number * row + 6
        wide = value / most * reach
        parts.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{html.escape(name)}</text>')
        parts.append(f'<rect x="{left}" y="{y}" width="{wide:.1f}" height="18" rx="2" style="fill:var(--s0)"/>')
        parts.append(f'<text x="{left + wide + 6:.1f}" y="{y + 14}">{html.escape(text)}</text>')
    parts.append(f'<text class="axis" x="{left}" y="{height - 16}">{html.escape(label)}</text></svg>')
    return "".join(parts)


class SvgRuler:
    """Places values between two pixels, and chooses ticks."""

    def __init__(self, axis: SvgAxis, values: Sequence[float], start: float, end: float) -> None:
        self.log = axis.scale == "log"
        known = [value for value in values if not self.log or value > LEAST] or [1.0]
        low = min(known) if axis.least is None else axis.least
        high = max(known) if axis.most is None else axis.most
        if self.log:
            low, high = 10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high))
            if low == high:
                high = low * 10
        elif high - low <= LEAST:
            high = low + (abs(low) if abs(low) > LEAST else 1.0)
        self.low, self.high, self._start, self._end = low, high, start, end

    def place(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log10(max(value, self.low)), math.log10(low), math.log10(high)
        return self._start + (value - low) / (high - low) * (self._end - self._start)

    def ticks(self) -> list[float]:
        if self.log:
            first, last = round(math.log10(self.low)), round(math.log10(self.high))
            tens = [10.0**power for power in range(first, last + 1)]
            if len(tens) > 3:
                return tens
            return [ten * step for ten in tens for step in (1, 2, 5) if ten * step <= self.high * 1.0001]
        rough = (self.high - self.low) / 5
        size = 10 ** math.floor(math.log10(rough))
        step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        count = math.floor(self.high / step + 1e-9) - first + 1
        return [(first + index) * step for index in range(count)]


def _open(title: str, height: int = HEIGHT) -> str:
    name = html.escape(title, quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{name}"><title>{name}</title>'


def _grid(across: SvgRuler, up: SvgRuler, x: SvgAxis, y: SvgAxis) -> list[str]:
    parts: list[str] = []
    for tick in across.ticks():
        at = across.place(tick)
        parts.append(f'<line class="grid" x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{tick_text(tick, x)}</text>')
    for tick in up.ticks():
        at = up.place(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{tick_text(tick, y)}</text>')
    middle_x, middle_y = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text class="axis" x="{middle_x}" y="{HEIGHT - 8}" text-anchor="middle">{html.escape(x.label)}</text>'
    )
    parts.append(
        f'<text class="axis" transform="translate(14 {middle_y}) rotate(-90)" text-anchor="middle">'
        f"{html.escape(y.label)}</text>"
    )
    return parts


def _path(line: SvgLine, across: SvgRuler, up: SvgRuler) -> str:
    parts: list[str] = []
    for x, y in line.points:
        if across.log and x <= LEAST:
            continue
        at_x, at_y = across.place(x), up.place(y)
        if not parts:
            parts.append(f"M{at_x:.1f} {at_y:.1f}")
        elif line.steps:
            parts.append(f"H{at_x:.1f}V{at_y:.1f}")
        else:
            parts.append(f"L{at_x:.1f} {at_y:.1f}")
    return "".join(parts)


def _mark(mark: SvgMark, across: SvgRuler, up: SvgRuler) -> str:
    name = html.escape(mark.name)
    if mark.axis == "x":
        at = across.place(mark.at)
        line = f'<line class="mark" x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{HEIGHT - BOTTOM}"/>'
        side, text_at = ("end", at - 5) if at > WIDTH / 2 else ("start", at + 5)
        return f'{line}<text class="mark" x="{text_at:.1f}" y="{TOP + 12}" text-anchor="{side}">{name}</text>'
    at = up.place(mark.at)
    line = f'<line class="mark" x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}"/>'
    return f'{line}<text class="mark" x="{WIDTH - RIGHT - 4}" y="{at - 5:.1f}" text-anchor="end">{name}</text>'


def _legend(names: Sequence[str]) -> str:
    entries = (
        f'<span><i style="background:var(--s{number % SERIES})"></i>{html.escape(name)}</span>'
        for number, name in enumerate(names)
    )
    return f'<p class="legend">{"".join(entries)}</p>'


def tick_text(value: float, axis: SvgAxis) -> str:
    if axis.percent:
        return f"{value:.0%}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:g}"

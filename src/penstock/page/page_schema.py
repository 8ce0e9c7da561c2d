"""Schema of the page: what is shown of a run, as plain data. Builders fill it, the browser's files draw it.

A live page makes its charts in the browser, of the same shape. Numbers are seconds, shares of 1 and counts; the browser
writes them with their units. A number that is not known is None, never 0.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

POINTS = 1500
"""Most points of a series: more than a page has pixels across."""

Unit = Literal["count", "share", "seconds", "rate", "hours", "time"]
"""How a number is written: ``rate`` is per second, ``time`` a moment of the run."""
Drawn = Literal["line", "steps", "points", "spans", "hidden"]
"""How a series is drawn: ``steps`` hold until the next point, ``spans`` are thick lines in the lanes of a chart,
``hidden`` is the edge of a band."""
Colour = Literal["", "s0", "s1", "s2", "s3", "s4", "s5", "good", "warn", "bad"]
"""A colour of the page's style, and with it how the line is dashed; empty takes the next one."""


class Axis(msgspec.Struct, frozen=True, omit_defaults=True):
    """One axis: its name, how its numbers are written, and its scale."""

    label: str = ""
    unit: Unit = "count"
    log: bool = False


class Series(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a chart: ``values`` at ascending ``at``. A None in between breaks the line.

    ``limit``: what must not be exceeded, with its name at its end.
    """

    name: str
    at: list[float]
    values: list[float | None]
    drawn: Drawn = "line"
    colour: Colour = ""
    limit: bool = False


class Mark(msgspec.Struct, frozen=True):
    """A named line across the chart: at an x, or at a y."""

    name: str
    at: float
    axis: Literal["x", "y"]


class ChartNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """A text for a moment of a chart, or for the time until ``until``, shown when the pointer is there.

    ``link``: id of the table row that a click leads to.
    """

    at: float
    text: str
    until: float | None = None
    link: str = ""


class Chart(msgspec.Struct, frozen=True, omit_defaults=True):
    """One chart.

    Args:
        about: what is counted and in which unit, beside the title.
        kind: ``lines`` over x; ``bars``, one for each of ``names``; or ``lanes`` below each other, one for each of
            ``names``, whose series have the number of their lane as value.
        band: the numbers of two series, lower and upper; the area between them is shaded.
        csv: name of a file beside the page that has the numbers.
        empty: what is said where there is nothing to draw.
    """

    title: str
    series: list[Series]
    about: str = ""
    x: Axis = Axis()
    y: Axis = Axis()
    kind: Literal["lines", "bars", "lanes"] = "lines"
    names: list[str] = []
    band: tuple[int, int] | None = None
    marks: list[Mark] = []
    notes: list[ChartNote] = []
    csv: str = ""
    empty: str = "nothing was measured"


class Column(msgspec.Struct, frozen=True, omit_defaults=True):
    """One column of a table; numbers stand to the right, ``text`` to the left, and ``long`` text may wrap."""

    name: str
    kind: Literal["number", "text", "long"] = "number"


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """One row of a table. ``id``: where a link leads; ``chosen``: is set off; ``more``: a table that the row opens."""

    cells: list[str]
    id: str = ""
    chosen: bool = False
    more: "Table | None" = None


class Table(msgspec.Struct, frozen=True, omit_defaults=True):
    """One table of text. ``folded``: only its caption shows until it is opened."""

    caption: str
    head: list[Column]
    rows: list[Row]
    empty: str = "nothing"
    folded: bool = False


class KeyFigure(msgspec.Struct, frozen=True, omit_defaults=True):
    """One number that is read first: ``value`` is text with its unit."""

    name: str
    value: str
    note: str = ""


class PageNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """A sentence above everything else, and what to do."""

    level: Literal["info", "warning", "error"]
    text: str
    hint: str = ""


class Section(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of the page. ``shared``: its charts have one time axis and one pointer, and stand below each other.

    ``files``: names of files beside the page that have its numbers. ``zoom``: what of a shared axis is shown first.
    """

    heading: str
    text: list[str] = []
    charts: list[Chart] = []
    tables: list[Table] = []
    shared: bool = False
    zoom: tuple[float, float] | None = None
    files: list[str] = []


class Page(msgspec.Struct, frozen=True, omit_defaults=True):
    """All that is shown of one run."""

    title: str
    about: str
    sections: list[Section]
    notes: list[PageNote] = []
    figures: list[KeyFigure] = []


def over_time(title: str, series: list[Series], about: str = "", unit: Unit = "count", **more: Any) -> Chart:
    """Return a chart of series over the time of a run; ``unit`` is that of their values."""
    return Chart(title, series, about, Axis(unit="time"), Axis(unit=unit), **more)


def bars(
    title: str, name: str, names: Sequence[str], values: Sequence[float | None], about: str = "", **more: Any
) -> Chart:
    """Return a chart with a bar of each value; ``name`` says what they are, ``names`` whose."""
    places = [float(place) for place in range(len(names))]
    series = [Series(name, places, [*values])] if names else []
    return Chart(title, series, about, kind="bars", names=[*names], **more)


def series_of(
    name: str, points: Iterable[tuple[float, float | None]], drawn: Drawn = "line", colour: Colour = ""
) -> Series:
    """Return a series of (x, value) points, without those that could not be seen."""
    kept = thin([*points])
    return Series(name, [at for at, _ in kept], [value for _, value in kept], drawn, colour)


def thin(points: Sequence[tuple[float, float | None]], most: int = POINTS) -> Sequence[tuple[float, float | None]]:
    """Leave out points that would not be visible: first repeats of a value, then all but each stretch's extremes."""
    distinct = [
        point
        for place, point in enumerate(points)
        if place in (0, len(points) - 1) or not points[place - 1][1] == point[1] == points[place + 1][1]
    ]
    if len(distinct) <= most:
        return distinct
    size = -(-len(distinct) * 2 // most)
    thinned: list[tuple[float, float | None]] = []
    for start in range(0, len(distinct), size):
        part = distinct[start : start + size]
        known = [point for point in part if point[1] is not None]
        low, high = (pick(known, key=lambda p: p[1] or 0.0, default=part[0]) for pick in (min, max))
        thinned += sorted({low, high, part[0]}, key=lambda point: point[0])
    return [*thinned, distinct[-1]]


def percent(share: float | None) -> str:
    """Return a share as a figure or a cell of a table has it."""
    return "unknown" if share is None else f"{share:.1%}"


def text_table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], *, folded: bool = False) -> Table:
    """Return a table whose columns of words stand to the left, and those of numbers to the right."""
    cells = [Row([*row]) for row in rows]
    columns = [
        Column(name, "text" if any(cell[:1].isalpha() and cell != "unknown" for cell in column) else "number")
        for name, column in zip(head, zip(*(row.cells for row in cells)) if cells else [()] * len(head))
    ]
    return Table(caption, columns, cells, folded=folded)


def table_section(heading: str, text: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Section:
    """Return a section of one table, below a text where there is one."""
    return Section(heading, [text] if text else [], tables=[text_table(heading, head, rows)])

"""How does every layout do under every load? Runs side by side in two processes, each layout until it is overloaded."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from cell import Cell, measure
from plan import GIVEN_UP, WHOLE, Layout, Work

Row = dict[str, Any]
"""One line of results.jsonl: part, work, layout, family, conditional, link, rate, seed, and the fields of `Outcome`."""


@dataclass(frozen=True, slots=True)
class Climb:
    """One layout of one work with one seed, from the lightest load up."""

    part: str
    work: Work
    layout: Layout
    seed: int
    rates: Sequence[float]
    traces: Path | None
    count: int | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """What its rows say of it."""
        layout = self.layout
        return self.part, self.work.name, layout.name, layout.conditional, layout.link, self.seed


def climbed(climb: Climb) -> list[Row]:
    """Run one climb."""
    rows: list[Row] = []
    for rate in climb.rates:
        found = measure(Cell(climb.work, climb.layout, rate, climb.seed), climb.traces, climb.count)
        rows.append(
            {
                "part": climb.part,
                "work": climb.work.name,
                "layout": climb.layout.name,
                "family": climb.layout.family,
                "conditional": climb.layout.conditional,
                "link": climb.layout.link,
                "rate": rate,
                "seed": climb.seed,
                **found.as_dict(),
            }
        )
        if found.shares[-1] < GIVEN_UP:
            break
    return rows


def run(climbs: Sequence[Climb], processes: int) -> Iterator[list[Row]]:
    """Run all climbs; yields the rows of each."""
    if processes == 1 or not climbs:
        yield from map(climbed, climbs)
        return
    with get_context("spawn").Pool(processes) as pool:
        yield from pool.imap(climbed, climbs)


def key_of(row: Row) -> tuple[Any, ...]:
    """Return the key of the climb that a row is of."""
    return tuple(row.get(name) for name in ("part", "work", "layout", "conditional", "link", "seed"))


def variants(layout: Layout, work: Work) -> list[Layout]:
    """Return the other settings of a layout.

    Of a split, each other rule of when a prefill stays on the worker that answers, and a slow link; the rule by time
    weighs the middle pair of the work. Of an aggregated one, prompts that are not split over passes.
    """
    middle = work.pairs[middle_of(work)]
    by_time = replace(layout, conditional="slo", slo=middle)
    if layout.family == "aggregated":
        return [replace(layout, chunk=WHOLE, whole=True)]
    if layout.family == "mix":
        return [by_time]
    return [
        replace(layout, conditional="thresholds"),
        replace(layout, conditional="auto"),
        by_time,
        replace(layout, link=0.1),
    ]


def middle_of(work: Work) -> int:
    """Return the number of the pair with the middle TTFT and the second ITL."""
    return len(work.ttft) // 2 * len(work.itl) + 1

"""Cells of a study: each is a simulation or a search of several; they run in parallel and are kept in a file."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TextIO

import msgspec

from bench.planner_study import clairvoyant
from bench.planner_study.contenders import BY_NAME, CONTENDERS
from bench.planner_study.metric_faults import FAULTS
from bench.planner_study.scenario import LAYOUTS, StudyResult, fleet, run, sizing_of, tables
from bench.planner_study.traffic import ALL, OWN, PUBLIC
from penstock.kernel.values import Role

STATIC, CLAIRVOYANT = "static", "clairvoyant"
START_UPS = (0.0, 60.0, 120.0, 300.0)
SEEDS = (1, 2, 3)
BESIDE = ("thresholds latency", "Ray-Serve-like")
"""The two best others in a first round, which run on the whole grid."""


class StudyCell(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    Args:
        knob: the contender's; for ``static`` a factor on the cheapest fleet at the mean rate.
        fault: of the metrics; see `bench.planner_study.metric_faults`.
    """

    traffic: str
    layout: str
    start_up: float
    seed: int
    contender: str
    knob: float = 0.0
    fault: str = ""

    @property
    def key(self) -> str:
        parts = (
            self.traffic,
            self.layout,
            f"{self.start_up:g}",
            self.seed,
            self.contender,
            f"{self.knob:g}",
            self.fault,
        )
        return "|".join(str(part) for part in parts)


class StudyRow(msgspec.Struct, frozen=True, kw_only=True):
    """A cell and its results: one, or those of every schedule in a search."""

    cell: StudyCell
    results: tuple[StudyResult, ...]


STATIC_SIZES = (0.8, 1.0, 1.2, 1.4, 1.6, 1.9, 2.2, 2.6)


def cells(*, full: bool, traces: Path | None) -> list[StudyCell]:
    """Return the runs of a study, the most informative first.

    Args:
        full: the whole grid with every seed, which takes a night on two cores.
        traces: folder of the public traces; None leaves them out.
    """
    own = [traffic.name for traffic in OWN]
    public = [traffic.name for traffic in PUBLIC if traces is not None and (traces / str(traffic.file)).is_file()]
    names = [*own, *public]
    grid = names if full else ["waves and a burst", "a slow wave and a burst", "ramps", *public[:1]]
    cells: dict[str, StudyCell] = {}

    def add(
        policy: str,
        knob: float,
        traffic: Iterable[str],
        layouts: Iterable[str],
        start_ups: Iterable[float],
        seeds: Iterable[int] = SEEDS if full else SEEDS[:1],
    ) -> None:
        for name in traffic:
            for layout in layouts:
                for start_up in start_ups:
                    for seed in seeds:
                        cell = StudyCell(
                            traffic=name, layout=layout, start_up=start_up, seed=seed, contender=policy, knob=knob
                        )
                        cells.setdefault(cell.key, cell)

    defaults = {contender.name: contender.default for contender in CONTENDERS}
    both = tuple(LAYOUTS)

    def add_fronts(traffic: Sequence[str], *seeds: Iterable[int]) -> None:
        for knob in BY_NAME["slo"].sweep:
            add("slo", knob, traffic, both[:1], (120.0,), *seeds)
        # The clairvoyant's fleets are for one mix of requests: traffic whose mix changes over the run has none.
        alike = [name for name in traffic if ALL[name].stretch is None]
        add(CLAIRVOYANT, 0.0, alike, both[:1], (120.0,), *seeds)
        for size in STATIC_SIZES:
            add(STATIC, size, traffic, both[:1], (120.0,), *seeds)

    # At a start-up of 120 s: fronts of ours, of static fleets and of the clairvoyant on all traffic.
    add_fronts(names)
    # All others with the knob swept, on three kinds of traffic.
    swept = ["a slow wave and a burst", "ramps", "bursts"]
    for contender in CONTENDERS:
        for knob in contender.sweep:
            add(contender.name, knob, swept, both[:1], (120.0,))
        add(contender.name, contender.default, swept, both, (0.0, 120.0))
    add(CLAIRVOYANT, 0.0, swept, both[1:], (120.0,))
    for size in STATIC_SIZES:
        add(STATIC, size, swept, both[1:], (120.0,))
    # Ours and two beside it on the whole grid.
    for policy in ("slo", *BESIDE):
        add(policy, defaults[policy], grid, both, START_UPS)
    for fault in FAULTS:
        for policy in ("slo", *BESIDE):
            cell = StudyCell(
                traffic="a slow wave and a burst",
                layout="aggregated",
                start_up=120.0,
                seed=1,
                contender=policy,
                knob=defaults[policy],
                fault=fault,
            )
            cells.setdefault(cell.key, cell)
    # How much of it is chance: the same fronts from other seeds, on traffic that was not used for tuning.
    add_fronts([name for name in own if not ALL[name].tuning], SEEDS)
    return list(cells.values())


def carry_out(cell: StudyCell, traces: str | None) -> StudyRow:
    """Run one cell."""
    traffic = ALL[cell.traffic]
    requests = traffic.requests(cell.seed, None if traces is None else Path(traces))
    seconds = traffic.seconds
    if cell.contender == CLAIRVOYANT:
        results = clairvoyant.search(requests, seconds, cell.layout, cell.start_up)
        return StudyRow(cell=cell, results=tuple(results))
    # A public trace has its own lengths, and fleets for ours would have the wrong size.
    sizing = tables(cell.layout) if traffic.file is None else sizing_of(cell.layout, requests)
    if cell.contender == STATIC:
        mean = len(requests) / seconds
        workers: dict[Role, int] = {
            role: max(1, round(count * cell.knob)) for role, count in fleet(cell.layout, mean, sizing).items()
        }
        return StudyRow(cell=cell, results=(run(requests, workers, cell.start_up, seconds),))
    first = fleet(cell.layout, sum(request.at < 60.0 for request in requests) / 60.0, sizing)
    made = BY_NAME[cell.contender].make(cell.knob, cell.layout)
    distort = FAULTS[cell.fault](seconds) if cell.fault else None
    return StudyRow(cell=cell, results=(run(requests, first, cell.start_up, seconds, distort=distort, **made),))


def read(path: Path) -> dict[str, StudyRow]:
    """Return the cells that are already done, by key; a last line that was cut off is left out."""
    rows: dict[str, StudyRow] = {}
    if path.is_file():
        for line in path.read_text().splitlines():
            try:
                done = msgspec.json.decode(line, type=StudyRow)
            except msgspec.DecodeError:
                continue
            rows[done.cell.key] = done
    return rows


def do_all(
    wanted: Sequence[StudyCell],
    path: Path,
    *,
    traces: Path | None,
    processes: int,
    until: float | None,
    on_done: Callable[[int, int, StudyRow], object],
) -> Iterator[StudyRow]:
    """Run the cells that are not in the file yet, and write each as it is done; yield the earlier ones too.

    Args:
        until: monotonic time after which no new cell is begun; None runs all.
        on_done: takes (done, of how many, the newest row).
    """
    known = read(path)
    missing = [cell for cell in wanted if cell.key not in known]
    yield from (known[cell.key] for cell in wanted if cell.key in known)
    folder = None if traces is None else str(traces)
    with ProcessPoolExecutor(processes) as pool, path.open("a+") as file:
        _end_line(file)
        waiting = iter(missing)
        running: dict[Any, StudyCell] = {}

        def fill() -> None:
            while len(running) < processes and (until is None or time.monotonic() < until):
                cell = next(waiting, None)
                if cell is None:
                    return
                running[pool.submit(carry_out, cell, folder)] = cell

        fill()
        number = 0
        while running:
            future = next(as_completed(running))
            del running[future]
            done = future.result()
            number += 1
            file.write(msgspec.json.encode(done).decode() + "\n")
            file.flush()
            on_done(number, len(missing), done)
            fill()
            yield done


def _end_line(file: TextIO) -> None:
    """End a last line that was cut off, so that the next line is not lost with it."""
    if file.tell():
        file.seek(0)
        if not file.read().endswith("\n"):
            file.write("\n")


def as_rows(done: Iterable[StudyRow]) -> Iterator[Mapping[str, Any]]:
    """Yield a flat row per result, for a CSV file."""
    for each in done:
        for number, result in enumerate(each.results):
            row = {**msgspec.to_builtins(each.cell), "try": number, **msgspec.to_builtins(result)}
            row["alarms"] = json.dumps(row["alarms"], sort_keys=True)
            yield row

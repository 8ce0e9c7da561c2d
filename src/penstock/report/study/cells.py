"""Which runs make up a study? Cells, each a simulation or a search of several, done side by side and kept in a file."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TextIO

import msgspec

from penstock.kernel.values import Role
from penstock.report.study import clairvoyant
from penstock.report.study.contenders import BY_NAME, CONTENDERS
from penstock.report.study.faults import FAULTS
from penstock.report.study.traces import ALL, OWN, PUBLIC
from penstock.report.study.world import LAYOUTS, Result, fleet, run, sizing_of, tables

STATIC, CLAIRVOYANT = "static", "clairvoyant"
START_UPS = (0.0, 60.0, 120.0, 300.0)
SEEDS = (1, 2, 3)
BESIDE = ("thresholds latency", "Ray-Serve-like")
"""Two that did best beside ours in a first round, and run on the whole grid."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    Args:
        knob: the contender's; of ``static`` a factor on the fleet that is cheapest at the mean rate.
        fault: of the metrics; see `penstock.report.study.faults`.
    """

    traffic: str
    layout: str
    start_up: float
    seed: int
    who: str
    knob: float = 0.0
    fault: str = ""

    @property
    def key(self) -> str:
        parts = (self.traffic, self.layout, f"{self.start_up:g}", self.seed, self.who, f"{self.knob:g}", self.fault)
        return "|".join(str(part) for part in parts)


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """A cell and its results: one, or those of every schedule that a search tried."""

    cell: Cell
    results: tuple[Result, ...]


STATIC_SIZES = (0.8, 1.0, 1.2, 1.4, 1.6, 1.9, 2.2, 2.6)


def cells(*, full: bool, traces: Path | None) -> list[Cell]:
    """Return the runs of a study, those first that say most.

    Args:
        full: the whole grid with every seed, which takes a night on two cores.
        traces: folder of the public traces; None leaves them out.
    """
    own = [traffic.name for traffic in OWN]
    public = [traffic.name for traffic in PUBLIC if traces is not None and (traces / str(traffic.file)).is_file()]
    names = [*own, *public]
    grid = names if full else ["waves and a burst", "a slow wave and a burst", "ramps", *public[:1]]
    found: dict[str, Cell] = {}

    def add(
        who: str,
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
                        cell = Cell(traffic=name, layout=layout, start_up=start_up, seed=seed, who=who, knob=knob)
                        found.setdefault(cell.key, cell)

    defaults = {contender.name: contender.default for contender in CONTENDERS}
    both = tuple(LAYOUTS)

    def add_fronts(traffic: Sequence[str], *seeds: Iterable[int]) -> None:
        for knob in BY_NAME["slo"].sweep:
            add("slo", knob, traffic, both[:1], (120.0,), *seeds)
        # The clairvoyant's fleets are those of one mix of requests: traffic whose mix changes on its way has none.
        alike = [name for name in traffic if ALL[name].stretch is None]
        add(CLAIRVOYANT, 0.0, alike, both[:1], (120.0,), *seeds)
        for size in STATIC_SIZES:
            add(STATIC, size, traffic, both[:1], (120.0,), *seeds)

    # At a start-up of 120 s: fronts of ours, of static fleets and of the clairvoyant on all traffic.
    add_fronts(names)
    # Everybody else with the knob swept, on two kinds of traffic.
    two = ["a slow wave and a burst", "ramps"]
    for contender in CONTENDERS:
        for knob in contender.sweep:
            add(contender.name, knob, two, both[:1], (120.0,))
        add(contender.name, contender.default, two, both, (0.0, 120.0))
    add(CLAIRVOYANT, 0.0, two, both[1:], (120.0,))
    for size in STATIC_SIZES:
        add(STATIC, size, two, both[1:], (120.0,))
    # Ours and two beside it on the whole grid.
    for who in ("slo", *BESIDE):
        add(who, defaults[who], grid, both, START_UPS)
    for fault in FAULTS:
        for who in ("slo", *BESIDE):
            cell = Cell(
                traffic="a slow wave and a burst",
                layout="aggregated",
                start_up=120.0,
                seed=1,
                who=who,
                knob=defaults[who],
                fault=fault,
            )
            found.setdefault(cell.key, cell)
    # How much of it is chance: the same fronts from other seeds, on what was not tuned on.
    add_fronts([name for name in own if not ALL[name].tuning], SEEDS)
    return list(found.values())


def carry_out(cell: Cell, traces: str | None) -> Done:
    """Do one cell."""
    traffic = ALL[cell.traffic]
    requests = traffic.requests(cell.seed, None if traces is None else Path(traces))
    seconds = traffic.seconds
    if cell.who == CLAIRVOYANT:
        found = clairvoyant.search(requests, seconds, cell.layout, cell.start_up)
        return Done(cell=cell, results=tuple(found))
    # A public trace has lengths of its own, and fleets for ours would be of another size.
    sizing = tables(cell.layout) if traffic.file is None else sizing_of(cell.layout, requests)
    if cell.who == STATIC:
        mean = len(requests) / seconds
        workers: dict[Role, int] = {
            role: max(1, round(count * cell.knob)) for role, count in fleet(cell.layout, mean, sizing).items()
        }
        return Done(cell=cell, results=(run(requests, workers, cell.start_up, seconds),))
    first = fleet(cell.layout, sum(request.at < 60.0 for request in requests) / 60.0, sizing)
    made = BY_NAME[cell.who].make(cell.knob, cell.layout, cell.start_up)
    distort = FAULTS[cell.fault](seconds) if cell.fault else None
    return Done(cell=cell, results=(run(requests, first, cell.start_up, seconds, distort=distort, **made),))


def read(path: Path) -> dict[str, Done]:
    """Return the cells that are done already, by key; a last line that was cut off is left out."""
    found: dict[str, Done] = {}
    if path.is_file():
        for line in path.read_text().splitlines():
            try:
                done = msgspec.json.decode(line, type=Done)
            except msgspec.DecodeError:
                continue
            found[done.cell.key] = done
    return found


def do_all(
    wanted: Sequence[Cell],
    path: Path,
    *,
    traces: Path | None,
    processes: int,
    until: float | None,
    told: Callable[[int, int, Done], object],
) -> Iterator[Done]:
    """Do what is not in the file yet, and write each down as it is done; yield those too that were there.

    Args:
        until: monotonic time after which nothing new is begun; None does all.
        told: takes (done, of how many, the newest).
    """
    known = read(path)
    missing = [cell for cell in wanted if cell.key not in known]
    yield from (known[cell.key] for cell in wanted if cell.key in known)
    folder = None if traces is None else str(traces)
    with ProcessPoolExecutor(processes) as pool, path.open("a+") as file:
        _end_line(file)
        waiting = iter(missing)
        running: dict[Any, Cell] = {}

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
            told(number, len(missing), done)
            fill()
            yield done


def _end_line(file: TextIO) -> None:
    """End a last line that was cut off: what is written next must not be lost with it."""
    if file.tell():
        file.seek(0)
        if not file.read().endswith("\n"):
            file.write("\n")


def as_rows(done: Iterable[Done]) -> Iterator[Mapping[str, Any]]:
    """Yield a flat row per result, for a CSV file."""
    for each in done:
        for number, result in enumerate(each.results):
            row = {**msgspec.to_builtins(each.cell), "try": number, **msgspec.to_builtins(result)}
            row["alarms"] = json.dumps(row["alarms"], sort_keys=True)
            yield row

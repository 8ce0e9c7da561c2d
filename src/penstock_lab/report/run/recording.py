"""Recording of a finished run: its files as the time windows, loads and records of the page."""

import os
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from penstock.config.reading.load import load_resolved
from penstock.config.worker_names import pool_prefix
from penstock.kernel.errors import ConfigError
from penstock.kernel.machine import SECOND
from penstock.kernel.request_record import Explanation, RequestEnd, RequestRecord
from penstock.kernel.time_windows import (
    LoadSample,
    Timeline,
    TimeWindow,
    columns_of,
    pool_of,
    pools_of,
)
from penstock.kernel.values import Target
from penstock.planner.tick_record import TickRecord
from penstock.router.requests.request_close import closed_of
from penstock.router.selection.decision_summary import whole
from penstock.runtime.planning.planner_report import RECORDS
from penstock.runtime.records import segments
from penstock.runtime.records.timeline_view import LoadsView, RecordedColumns, RecordedWorker, TimelineView, events_of
from penstock_lab.report.planner.planner_analysis import CHANGES, lead_of
from penstock_lab.report.planner.planner_report_page import read_ticks
from penstock_lab.report.run.run_files import (
    deleted_records,
    json_of,
    last_line,
    lines,
    number_rows,
    recorded_explanation,
)
from penstock_lab.report.run.run_summary import slo_of

WINDOWS_MAX = 720
"""About the most windows sent to a browser, as many as of a live cluster: a day has them of two minutes."""
WIDTHS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400)
HOLD_LEAST = 5.0
"""Least seconds for which a load sample of the workers holds, where metrics.csv does not show its interval."""


class _Placed(msgspec.Struct):
    """Fields that are read of every decision."""

    at: int
    model: str
    chosen: Target
    left_out: int = 0
    table: str = ""


class _Candidate(msgspec.Struct):
    target: Target
    active_requests: int
    active_prefill_tokens: int
    active_blocks: int


class _Excluded(msgspec.Struct):
    target: Target


class _EngineSample(msgspec.Struct):
    """Loads of the workers in a decision."""

    candidates: list[_Candidate]
    excluded: list[_Excluded] = []


@dataclass(frozen=True, slots=True)
class RecordLines:
    """Lines of a file in the order of their times: seconds of the run, place in the file, and worker (or -1).

    ``files``: its segments, each with the place of its first byte; kept open, for a live cluster may delete some.
    """

    files: "RecordSegments"
    at: "np.ndarray[Any, np.dtype[np.float64]]"
    place: "np.ndarray[Any, np.dtype[np.uint64]]"
    workers: "np.ndarray[Any, np.dtype[np.int64]]"

    def newest(self, limit: int, before: float | None, worker: int | None = None) -> Iterator[bytes]:
        """Yield the last ``limit`` lines until ``before``, the newest first."""
        end = len(self.at) if before is None else int(np.searchsorted(self.at, before, side="right"))
        numbers = np.arange(end) if worker is None else np.flatnonzero(self.workers[:end] == worker)
        for number in numbers[-limit:][::-1]:
            yield self.files.line(int(self.place[number]))


class RecordSegments:
    """Segments of a file that was read once, as one sequence of bytes: lines by their places."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._files: list[BinaryIO] = []

    def lines(self, path: Path) -> Iterator[tuple[int, bytes]]:
        """Yield the whole lines with their places, the oldest first.

        Raises:
            ConfigError: there is no such file, or it can't be read.
        """
        if not segments.there(path):
            yield from ((0, line) for line in lines(path, needed=True))  # raises an error that names the missing file
        place = 0
        for file in segments.opened(path):
            self._starts.append(place)
            self._files.append(os.fdopen(os.dup(file.fileno()), "rb"))
            for line in file:
                if line.endswith(b"\n"):
                    yield place, line
                place += len(line)

    def line(self, place: int) -> bytes:
        """Return the line at a place."""
        number = bisect_right(self._starts, place) - 1
        file = self._files[number]
        file.seek(place - self._starts[number])
        return file.readline()

    def __del__(self) -> None:
        for file in self._files:
            file.close()


class Recording:
    """A run folder, read.

    Args:
        slo_ttft, slo_itl: targets in seconds, instead of the run's own.
    Raises:
        ConfigError: it is no run folder, or a file of it is damaged.
    Cost: about 5 us per request and 2 us per decision and candidate; in memory 24 bytes of each.
    """

    def __init__(self, folder: Path, slo_ttft: float | None = None, slo_itl: float | None = None) -> None:
        self.folder = folder.resolve()
        self.run = json_of(folder / "run.json")
        self.notes = deleted_records(folder)
        self.slo = slo_of(folder).otherwise(slo_ttft, slo_itl)
        self._kv_blocks = self._configured()
        self._tables = [table for path in sorted(folder.glob("metrics*.csv")) if (table := number_rows(path))]
        self._hold = max((_row_spacing(table) for table in self._tables), default=HOLD_LEAST)
        self._end = self._last()
        self.timeline = Timeline(next((width for width in WIDTHS if self._end / width <= WINDOWS_MAX), WIDTHS[-1]))
        self._worker_numbers: dict[str, int] = {}
        self._requests = self._read_requests()
        self._fill()
        for table in self._tables:
            self._read_metrics(table)
        self._decisions = self._read_decisions()
        for window in self.timeline.windows.values():
            window.slo_ttft, window.slo_itl = self.slo.ttft, self.slo.itl

    # --- routes of the page -----------------------------------------------------------------------------------------

    def whole_run(self) -> TimelineView:
        """Return the whole run, window by window."""
        windows = self.timeline.between(0, self._count)
        command = str(self.run.get("command", "run"))
        anchor = self.run.get("clock_anchor", {}).get("wall_ns")
        return TimelineView(
            kind="recorded",
            name=command,
            run=str(self.folder),
            # A simulated run has no time of day.
            zero=None if command == "simulate" or anchor is None else anchor / SECOND,
            now=self._end,
            width=self.timeline.width,
            windows_max=None,
            first=0,
            columns=columns_of(windows),
            pools=pools_of(windows),
            frontends={},
            events=events_of(self.folder),
            notes=self.notes,
            decisions=self._decisions is not None,
            planner=segments.there(self.folder / RECORDS),
        )

    def workers(self, at: float | None) -> LoadsView:
        """Return each worker's load in the window of a moment, or at the end."""
        moment = min(self._end if at is None else at, (self._count - 1) * self.timeline.width)
        start = moment // self.timeline.width * self.timeline.width
        return LoadsView(start, self.timeline.loads_at(moment))

    def worker(self, name: str) -> RecordedColumns | None:
        """Return one worker's load over the run, and its known facts; None where nothing is known."""
        load = self.timeline.worker_columns(name)
        if load is None:
            return None
        columns = load.columns["requests"]
        observed = [number for number, value in enumerate(columns) if value is not None]
        width = self.timeline.width
        card = RecordedWorker(
            id=name,
            pool=pool_of(name),
            kv_blocks=self._kv_blocks.get(pool_of(name)),
            decisions_for_it=self._count_for(name),
            first_s=(load.first + observed[0]) * width if observed else None,
            last_s=(load.first + observed[-1] + 1) * width if observed else None,
        )
        return RecordedColumns(width=width, first=load.first, columns=load.columns, card=card)

    def decisions(self, limit: int, before: float | None, worker: str | None) -> list[msgspec.Raw]:
        """Return decisions until ``before`` and for one worker, the newest first."""
        if self._decisions is None:
            return []
        number = None if worker is None else self._worker_numbers.get(worker, -1)
        return [msgspec.Raw(line) for line in self._decisions.newest(limit, before, number)]

    def requests(self, limit: int, before: float | None) -> list[RequestEnd]:
        """Return requests that ended until ``before``, the newest first."""
        decode = msgspec.json.Decoder(RequestRecord).decode
        return [closed_of(decode(line)) for line in self._requests.newest(limit, before)]

    def planner(self, limit: int) -> list[TickRecord]:
        """Return the planner's ticks, the newest first: all in which something changed, the rest thinned out."""
        if not segments.there(self.folder / RECORDS):
            return []
        ticks = read_ticks(self.folder)
        changed = [tick for tick in ticks if tick.outcome in CHANGES][-(limit // 2) :]
        step = -(-len(ticks) // max(1, limit - len(changed)))
        shown = {tick.tick: tick for tick in (*ticks[::step], *changed)}
        # The candidates of a choice are not drawn, and are most of a record.
        short = [
            msgspec.structs.replace(tick, evidence={"of": {"lead": lead_of(tick)}}, plugin_results=())
            for tick in shown.values()
        ]
        return sorted(short, key=lambda tick: -tick.at)

    def explain(self, request: str) -> Explanation[msgspec.Raw]:
        """Return a request's end and its decisions.

        Raises:
            ConfigError: there is no such request.
        """
        return recorded_explanation(self.folder, request)

    # --- reading ----------------------------------------------------------------------------------------------------

    @property
    def _count(self) -> int:
        return max(1, int(self._end // self.timeline.width) + 1)

    def _configured(self) -> dict[str, int]:
        """Return the KV blocks of each simulated pool's workers."""
        path = self.folder / "config.yaml"
        blocks: dict[str, int] = {}
        if path.exists() and path.read_text().strip():
            settings = load_resolved(path, {})
            for model, of_model in settings.models.items():
                for name, pool in of_model.pools.items():
                    simulated = pool.engine == "sim" or self.run.get("command") == "simulate"
                    # A GPU's capacity depends on files that may be gone; a simulation records the number.
                    if simulated and (pool.sim.kv_blocks != "auto" or pool.sim.timing.gpu is None):
                        blocks[pool_prefix(model, len(settings.models)) + name] = pool.sim.blocks
        return blocks

    def _last(self) -> float:
        """Return about when the run ended: it sets the width of the windows, and a few more may follow."""
        ends = [row["seconds"] for table in self._tables for row in table[-1:] if "seconds" in row]
        line = last_line(self.folder / "requests.jsonl")
        if line is not None:
            ends.append(_end_of(self._decoded(RequestRecord, line, "requests.jsonl")))
        return max(ends, default=0.0)

    def _read_requests(self) -> RecordLines:
        path = self.folder / "requests.jsonl"
        at, place = array("d"), array("Q")
        timeline, slo = self.timeline, self.slo
        decode, files = msgspec.json.Decoder(RequestRecord), RecordSegments()
        for start, line in files.lines(path):
            record = self._decoded(decode, line, path.name)
            end = _end_of(record)
            timeline.arrived(record.arrival, record.isl)
            if record.ttft is not None:
                timeline.first(record.arrival + record.ttft, record.ttft)
            timeline.ended(end, record, slo)
            at.append(end)
            place.append(start)
            self._end = max(self._end, end)
        return _in_order_of_time(files, at, place, array("q", [-1]) * len(at))

    def _fill(self) -> None:
        """Make the windows in which nothing happened: a finished run is known to have none there."""
        filled = {number: self.timeline.windows.get(number) or TimeWindow() for number in range(self._count)}
        self.timeline.windows = filled

    def _read_metrics(self, table: list[dict[str, float]]) -> None:
        """Add one process's samples of running and waiting requests; those of several processes add up."""
        period = _row_spacing(table)
        for row in table:
            if "seconds" not in row or "inflight" not in row or "queued" not in row:
                continue
            for window in self._covered(row["seconds"], period):
                window.queued = (window.queued or 0) + int(row["queued"])
                window.running = (window.running or 0) + int(row["inflight"] - row["queued"])

    def _covered(self, at: float, period: float) -> Iterator[TimeWindow]:
        """Yield the windows whose middle a sample covers, until the next sample."""
        width = self.timeline.width
        number = max(0, int(at / width + 0.5))
        while (number + 0.5) * width < at + period and number < self._count:
            yield self.timeline.windows[number]
            number += 1

    def _read_decisions(self) -> RecordLines | None:
        path = self.folder / "decisions.jsonl"
        if not segments.size(path):
            self.notes.append("This run has no decisions.jsonl, so neither reasons nor workers' loads are known")
            return None
        at, place, workers = array("d"), array("Q"), array("q")
        decode, files = msgspec.json.Decoder(_Placed), RecordSegments()
        last: dict[str, bytes] = {}
        number = -1
        looks: dict[int, list[bytes]] = {}
        for start, line in files.lines(path):
            placed = self._decoded(decode, line, path.name)
            seconds = placed.at / SECOND
            at.append(seconds)
            place.append(start)
            workers.append(self._worker_numbers.setdefault(placed.chosen.worker, len(self._worker_numbers)))
            window = int(seconds // self.timeline.width)
            if window != number:
                looks.setdefault(number, []).extend(last.values())
                number, last = window, {}
            if placed.table or not placed.left_out:
                last[placed.model] = line
        looks.setdefault(number, []).extend(last.values())
        self._take_looks(looks)
        return _in_order_of_time(files, at, place, workers)

    def _take_looks(self, looks: dict[int, list[bytes]]) -> None:
        """Store the worker loads of each window's last decision; they hold until the next one."""
        decode = msgspec.json.Decoder(_EngineSample).decode
        hold = max(0, round(max(self._hold, HOLD_LEAST) / self.timeline.width))
        loads: dict[str, LoadSample] = {}
        taken = -hold - 1
        before: TimeWindow | None = None
        for number, window in self.timeline.windows.items():
            lines = looks.get(number)
            if lines:
                loads, taken = self._loads([decode(whole(line)) for line in lines]), number
            if number - taken <= hold and loads:
                window.take_loads(loads, before)
                before = window

    def _loads(self, samples: list[_EngineSample]) -> dict[str, LoadSample]:
        loads: dict[str, LoadSample] = {}
        for one in samples:
            for candidate in one.candidates:
                name = candidate.target.worker
                ranks = loads.get(name)
                parts = (candidate.active_requests, candidate.active_prefill_tokens, candidate.active_blocks)
                if ranks is not None and ranks.requests is not None:
                    earlier = (ranks.requests, ranks.prefill_tokens or 0, ranks.blocks or 0)
                    parts = (parts[0] + earlier[0], parts[1] + earlier[1], parts[2] + earlier[2])
                loads[name] = LoadSample(*parts, self._kv_blocks.get(pool_of(name)), True)
            for excluded in one.excluded:
                name = excluded.target.worker
                loads.setdefault(name, LoadSample(None, None, None, self._kv_blocks.get(pool_of(name)), False))
        return dict(sorted(loads.items()))

    def _count_for(self, name: str) -> int | None:
        if self._decisions is None:
            return None
        return int(np.count_nonzero(self._decisions.workers == self._worker_numbers.get(name, -1)))

    def _decoded(self, decode: Any, line: bytes, name: str) -> Any:
        try:
            return (
                decode.decode(line)
                if isinstance(decode, msgspec.json.Decoder)
                else msgspec.json.decode(line, type=decode)
            )
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"{self.folder / name} is damaged: {error}: {line[:80].decode(errors='replace')}"
            ) from None


def _end_of(record: RequestRecord) -> float:
    """Return when a request ended, in seconds of the run."""
    if record.e2e is not None:
        return record.arrival + record.e2e
    times = [leg.last if leg.last is not None else leg.dispatched for leg in record.legs]
    return max(times, default=record.arrival + (record.queued or 0.0))


def _row_spacing(table: list[dict[str, float]]) -> float:
    """Return how many seconds apart nearly all rows of a table are."""
    times = [row["seconds"] for row in table if "seconds" in row]
    gaps = sorted(late - early for early, late in pairwise(times) if late > early)
    return gaps[len(gaps) // 2] if gaps else HOLD_LEAST


def _in_order_of_time(files: RecordSegments, at: array, place: array, workers: array) -> RecordLines:  # type: ignore[type-arg]
    times = np.frombuffer(at, np.float64) if len(at) else np.empty(0)
    order = np.argsort(times, kind="stable")
    places = np.frombuffer(place, np.uint64) if len(at) else np.empty(0, np.uint64)
    names = np.frombuffer(workers, np.int64) if len(at) else np.empty(0, np.int64)
    return RecordLines(files, times[order], places[order], names[order])

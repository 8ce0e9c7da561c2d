"""What happened in a run that is over, moment by moment? Its files as the windows, loads and records of the page."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from penstock.config.load import load_resolved
from penstock.config.names import pool_prefix
from penstock.kernel.errors import ConfigError
from penstock.kernel.machine import SECOND
from penstock.kernel.records import RequestRecord
from penstock.kernel.values import Target
from penstock.kernel.windows import Load, Timeline, Window, columns_of, pool_of, pools_of
from penstock.report import past
from penstock.report.planner import read_ticks
from penstock.report.planner_story import CHANGES, lead_of
from penstock.report.run_files import json_of, last_line, lines, number_rows
from penstock.runtime.planning.report import RECORDS

WINDOWS_MAX = 720
"""About the most windows that a browser is sent, as many as of a live cluster: a day has them of two minutes."""
WIDTHS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400)
HOLD_LEAST = 5.0
"""Seconds for which a look at the workers holds at least, where no row of metrics.csv says how often one looks."""


class _Placed(msgspec.Struct):
    """What of a decision is read of every line."""

    at: int
    model: str
    chosen: Target


class _Candidate(msgspec.Struct):
    target: Target
    active_requests: int
    active_prefill_tokens: int
    active_blocks: int


class _Excluded(msgspec.Struct):
    target: Target


class _Seen(msgspec.Struct):
    """What a decision tells of the workers."""

    candidates: list[_Candidate]
    excluded: list[_Excluded] = []


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines of a file in the order of their times: seconds of the run, place in the file, and of whom (or -1)."""

    path: Path
    at: "np.ndarray[Any, np.dtype[np.float64]]"
    place: "np.ndarray[Any, np.dtype[np.uint64]]"
    whom: "np.ndarray[Any, np.dtype[np.int64]]"

    def newest(self, limit: int, before: float | None, whom: int | None = None) -> Iterator[bytes]:
        """Go through the last ``limit`` lines until ``before``, the newest first."""
        end = len(self.at) if before is None else int(np.searchsorted(self.at, before, side="right"))
        found = np.arange(end) if whom is None else np.flatnonzero(self.whom[:end] == whom)
        with self.path.open("rb") as file:
            for number in found[-limit:][::-1]:
                file.seek(int(self.place[number]))
                yield file.readline()


class Recording:
    """A run folder, read.

    Args:
        slo_ttft, slo_itl: service level in seconds, instead of the run's own.
    Raises:
        ConfigError: it is no run's folder, or a file of it is damaged.
    Cost: about 5 us per request and 2 us per decision and candidate; in memory 24 bytes of each.
    """

    def __init__(self, folder: Path, slo_ttft: float | None = None, slo_itl: float | None = None) -> None:
        self.folder = folder.resolve()
        self.run = json_of(folder / "run.json")
        self.notes: list[str] = []
        own_ttft, own_itl, self._kv_blocks = self._configured()
        self.slo = (slo_ttft if slo_ttft is not None else own_ttft, slo_itl if slo_itl is not None else own_itl)
        self._tables = [table for path in sorted(folder.glob("metrics*.csv")) if (table := number_rows(path))]
        self._hold = max((_spacing(table) for table in self._tables), default=HOLD_LEAST)
        self._end = self._last()
        self.timeline = Timeline(next((width for width in WIDTHS if self._end / width <= WINDOWS_MAX), WIDTHS[-1]))
        self._whom: dict[str, int] = {}
        self._requests = self._read_requests()
        self._fill()
        for table in self._tables:
            self._read_metrics(table)
        self._decisions = self._read_decisions()
        for window in self.timeline.windows.values():
            window.slo_ttft, window.slo_itl = self.slo

    # --- what the page asks -----------------------------------------------------------------------------------------

    def told(self) -> dict[str, Any]:
        """Return the whole run, window by window."""
        windows = self.timeline.between(0, self._count)
        command = str(self.run.get("command", "run"))
        anchor = self.run.get("clock_anchor", {}).get("wall_ns")
        return {
            "kind": "recorded",
            "name": command,
            "run": str(self.folder),
            # What was simulated has no time of day.
            "zero": None if command == "simulate" or anchor is None else anchor / SECOND,
            "now": self._end,
            "width": self.timeline.width,
            "kept": None,
            "first": 0,
            "columns": columns_of(windows),
            "pools": pools_of(windows),
            "frontends": {},
            "notes": self.notes,
            "decisions": self._decisions is not None,
            "planner": (self.folder / RECORDS).exists(),
        }

    def workers(self, at: float | None) -> dict[str, Any]:
        """Return how loaded each worker was in the window of a moment, or at the end."""
        moment = min(self._end if at is None else at, (self._count - 1) * self.timeline.width)
        start = moment // self.timeline.width * self.timeline.width
        return {"at": start, "workers": self.timeline.told_loads(moment)}

    def worker(self, name: str) -> dict[str, Any] | None:
        """Return one worker's load over the run, and what is known of it; None where nothing is."""
        found = self.timeline.told_worker(name)
        if found is None:
            return None
        columns = found["columns"]["requests"]
        seen = [number for number, value in enumerate(columns) if value is not None]
        width = self.timeline.width
        card = {
            "id": name,
            "pool": pool_of(name),
            "kv_blocks": self._kv_blocks.get(pool_of(name)),
            "decisions_for_it": self._count_for(name),
            "first_seen_s": (found["first"] + seen[0]) * width if seen else None,
            "last_seen_s": (found["first"] + seen[-1] + 1) * width if seen else None,
        }
        return {**found, "card": card}

    def decisions(self, limit: int, before: float | None, worker: str | None) -> list[dict[str, Any]]:
        """Return the newest decisions first, of those until ``before`` and for one worker."""
        if self._decisions is None:
            return []
        whom = None if worker is None else self._whom.get(worker, -1)
        return [msgspec.json.decode(line) for line in self._decisions.newest(limit, before, whom)]

    def requests(self, limit: int, before: float | None) -> list[dict[str, Any]]:
        """Return the newest ends first, of those until ``before``."""
        decode = msgspec.json.Decoder(RequestRecord).decode
        return [past.closed_of(decode(line)) for line in self._requests.newest(limit, before)]

    def planner(self, limit: int) -> list[dict[str, Any]]:
        """Return what its planner did, the newest tick first: all in which something changed, the rest thinned out."""
        if not (self.folder / RECORDS).exists():
            return []
        ticks = read_ticks(self.folder)
        changed = [tick for tick in ticks if tick.outcome in CHANGES][-(limit // 2) :]
        step = -(-len(ticks) // max(1, limit - len(changed)))
        kept = {tick.tick: tick for tick in (*ticks[::step], *changed)}
        # What a choice was made from is not drawn, and is most of a record.
        short = [
            msgspec.structs.replace(tick, evidence={"of": {"lead": lead_of(tick)}}, said=()) for tick in kept.values()
        ]
        return [msgspec.to_builtins(tick) for tick in sorted(short, key=lambda tick: -tick.at)]

    def explain(self, request: str) -> dict[str, Any]:
        """Return a request's end and its decisions.

        Raises:
            ConfigError: there is no such request.
        """
        return past.explain(self.folder, request)

    # --- how it is read ---------------------------------------------------------------------------------------------

    @property
    def _count(self) -> int:
        return max(1, int(self._end // self.timeline.width) + 1)

    def _configured(self) -> tuple[float | None, float | None, dict[str, int]]:
        """Return the run's service level, and the KV blocks of each simulated pool's workers."""
        path = self.folder / "config.yaml"
        ttft = itl = None
        blocks: dict[str, int] = {}
        if path.exists() and path.read_text().strip():
            settings = load_resolved(path, {})
            ttft, itl = settings.slo.ttft, settings.slo.itl
            for model, of_model in settings.models.items():
                for name, pool in of_model.pools.items():
                    if pool.engine == "sim" or self.run.get("command") == "simulate":
                        blocks[pool_prefix(model, len(settings.models)) + name] = pool.sim.kv_blocks
        judged = (json_of(self.folder / "simulate.json") or json_of(self.folder / "bench.json")).get("slo", {})
        return judged.get("ttft_s", ttft), judged.get("itl_mean_s", itl), blocks

    def _last(self) -> float:
        """Return about when the run ended: windows are cut by it, and some more may come."""
        ends = [row["seconds"] for table in self._tables for row in table[-1:] if "seconds" in row]
        line = last_line(self.folder / "requests.jsonl")
        if line is not None:
            ends.append(_end_of(self._decoded(RequestRecord, line, "requests.jsonl")))
        return max(ends, default=0.0)

    def _read_requests(self) -> Lines:
        path = self.folder / "requests.jsonl"
        at, place = array("d"), array("Q")
        timeline, slo = self.timeline, self.slo
        decode = msgspec.json.Decoder(RequestRecord)
        for start, line in _placed_lines(path, needed=True):
            record = self._decoded(decode, line, path.name)
            end = _end_of(record)
            timeline.arrived(record.arrival, record.isl)
            if record.ttft is not None:
                timeline.first(record.arrival + record.ttft, record.ttft)
            timeline.ended(end, record, *slo)
            at.append(end)
            place.append(start)
            self._end = max(self._end, end)
        return _ordered(path, at, place, array("q", [-1]) * len(at))

    def _fill(self) -> None:
        """Make the windows in which nothing happened: that is known of a run that is over."""
        filled = {number: self.timeline.windows.get(number) or Window() for number in range(self._count)}
        self.timeline.windows = filled

    def _read_metrics(self, table: list[dict[str, float]]) -> None:
        """Take one process's looks at what runs and waits; those of several processes add up."""
        period = _spacing(table)
        for row in table:
            if "seconds" not in row or "inflight" not in row or "queued" not in row:
                continue
            for window in self._held(row["seconds"], period):
                window.queued = (window.queued or 0) + int(row["queued"])
                window.running = (window.running or 0) + int(row["inflight"] - row["queued"])

    def _held(self, at: float, period: float) -> Iterator[Window]:
        """Go through the windows whose middle a look at a moment holds for, until the next look."""
        width = self.timeline.width
        number = max(0, int(at / width + 0.5))
        while (number + 0.5) * width < at + period and number < self._count:
            yield self.timeline.windows[number]
            number += 1

    def _read_decisions(self) -> Lines | None:
        path = self.folder / "decisions.jsonl"
        if not path.exists() or not path.stat().st_size:
            self.notes.append("This run has no decisions.jsonl, so neither reasons nor workers' loads are known")
            return None
        at, place, whom = array("d"), array("Q"), array("q")
        decode = msgspec.json.Decoder(_Placed)
        last: dict[str, bytes] = {}
        number = -1
        looks: dict[int, list[bytes]] = {}
        for start, line in _placed_lines(path, needed=True):
            placed = self._decoded(decode, line, path.name)
            seconds = placed.at / SECOND
            at.append(seconds)
            place.append(start)
            whom.append(self._whom.setdefault(placed.chosen.worker, len(self._whom)))
            window = int(seconds // self.timeline.width)
            if window != number:
                looks.setdefault(number, []).extend(last.values())
                number, last = window, {}
            last[placed.model] = line
        looks.setdefault(number, []).extend(last.values())
        self._take_looks(looks)
        return _ordered(path, at, place, whom)

    def _take_looks(self, looks: dict[int, list[bytes]]) -> None:
        """Write down what the last decision of each window tells of the workers; it holds until the next look."""
        decode = msgspec.json.Decoder(_Seen).decode
        hold = max(0, round(max(self._hold, HOLD_LEAST) / self.timeline.width))
        loads: dict[str, Load] = {}
        taken = -hold - 1
        before: Window | None = None
        for number, window in self.timeline.windows.items():
            told = looks.get(number)
            if told:
                loads, taken = self._loads([decode(line) for line in told]), number
            if number - taken <= hold and loads:
                window.take_loads(loads, before)
                before = window

    def _loads(self, seen: list[_Seen]) -> dict[str, Load]:
        found: dict[str, Load] = {}
        for one in seen:
            for candidate in one.candidates:
                name = candidate.target.worker
                ranks = found.get(name)
                parts = (candidate.active_requests, candidate.active_prefill_tokens, candidate.active_blocks)
                if ranks is not None and ranks.requests is not None:
                    held = (ranks.requests, ranks.prefill_tokens or 0, ranks.blocks or 0)
                    parts = (parts[0] + held[0], parts[1] + held[1], parts[2] + held[2])
                found[name] = Load(*parts, self._kv_blocks.get(pool_of(name)), True)
            for excluded in one.excluded:
                name = excluded.target.worker
                found.setdefault(name, Load(None, None, None, self._kv_blocks.get(pool_of(name)), False))
        return dict(sorted(found.items()))

    def _count_for(self, name: str) -> int | None:
        if self._decisions is None:
            return None
        return int(np.count_nonzero(self._decisions.whom == self._whom.get(name, -1)))

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


def _placed_lines(path: Path, *, needed: bool) -> Iterator[tuple[int, bytes]]:
    """Go through a file's whole lines with their places."""
    place = 0
    for line in lines(path, needed=needed):
        yield place, line
        place += len(line)


def _end_of(record: RequestRecord) -> float:
    """Return when a request ended, in seconds of the run."""
    if record.e2e is not None:
        return record.arrival + record.e2e
    times = [leg.last if leg.last is not None else leg.dispatched for leg in record.legs]
    return max(times, default=record.arrival + (record.queued or 0.0))


def _spacing(table: list[dict[str, float]]) -> float:
    """Return how many seconds apart the rows of a table are, nearly all."""
    times = [row["seconds"] for row in table if "seconds" in row]
    gaps = sorted(late - early for early, late in pairwise(times) if late > early)
    return gaps[len(gaps) // 2] if gaps else HOLD_LEAST


def _ordered(path: Path, at: array, place: array, whom: array) -> Lines:  # type: ignore[type-arg]
    times = np.frombuffer(at, np.float64) if len(at) else np.empty(0)
    order = np.argsort(times, kind="stable")
    places = np.frombuffer(place, np.uint64) if len(at) else np.empty(0, np.uint64)
    names = np.frombuffer(whom, np.int64) if len(at) else np.empty(0, np.int64)
    return Lines(path, times[order], places[order], names[order])

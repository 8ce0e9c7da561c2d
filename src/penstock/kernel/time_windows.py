"""Time windows of a run: counts, TTFT and ITL of every few seconds, filled live or from request records.

A request counts in the window of its arrival as demand, in that of its first token with its TTFT, and in that of its
end with all the rest. Windows of several processes add up. Times are seconds since the start of the run.
"""

import math
from collections.abc import Mapping, Sequence
from struct import Struct
from typing import Any, NamedTuple

import msgspec

from penstock.kernel.latency_bins import Bins, count, join, quantiles
from penstock.kernel.request_record import RequestRecord
from penstock.kernel.values import NOTHING_PROMISED, Slo

QUANTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
COUNTED = (
    "arrived",
    "prompt_tokens",
    "output_tokens",
    "judged",
    "in_slo",
    "cached_tokens",
    "cache_reported_tokens",
)
"""Fields of a window that count requests or tokens."""
OUTCOMES = ("ok", "failed", "rejected", "expired", "cancelled", "unsent")
_PARTS = Struct("=5f")
_UNKNOWN = math.nan


class LoadSample(NamedTuple):
    """What a router had placed on one worker at one moment; None is not known."""

    requests: int | None
    prefill_tokens: int | None
    blocks: int | None
    kv_blocks: int | None
    ready: bool


class WorkerLoad(msgspec.Struct, frozen=True):
    """A `LoadSample` by the names of its fields, for readers outside."""

    requests: int | None
    prefill_tokens: int | None
    blocks: int | None
    kv_blocks: int | None
    ready: bool


class WorkerColumns(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's load over windows of ``width`` seconds from number ``first`` on, as columns; None is unknown."""

    width: float
    first: int
    columns: dict[str, list[int | None]]


class TimeWindow(msgspec.Struct, omit_defaults=True):
    """What happened in one window. Sums; tokens; latencies in `penstock.kernel.latency_bins`.

    ``judged``: requests that ended and of which it is known whether they were ``in_slo``; those that the client
    cancelled and answers whose first token was not observed are left out. ``cache_reported_tokens``: prompt tokens of
    the answers that report how many came from cache. What is sampled, and not counted, is None until the first sample.
    """

    arrived: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    ended: dict[str, int] = {}
    judged: int = 0
    in_slo: int = 0
    cached_tokens: int = 0
    cache_reported_tokens: int = 0
    ttft: Bins = {}
    itl: Bins = {}
    """Each request's own mean."""
    running: int | None = None
    queued: int | None = None
    slo_ttft: float | None = None
    slo_itl: float | None = None
    kv_use: float | None = None
    """Share of all workers' KV blocks that running requests hold; None where some worker does not report it."""
    pools: dict[str, tuple[int, int]] | None = None
    """Pool -> how many workers there are, and how many of them can take requests."""
    workers: tuple[str, ...] | None = None
    loads: bytes = b""
    """The numbers of each worker's `LoadSample`, as 32-bit floats: a thousand workers are 20 kB."""

    def take_loads(self, loads: Mapping[str, LoadSample], before: "TimeWindow | None") -> None:
        """Store the workers and their loads; ``before``: a window whose names are shared where they are equal."""
        names = tuple(loads)
        known = None if before is None else before.workers
        self.workers = known if known == names else names
        flat = bytearray()
        pools: dict[str, tuple[int, int]] = {}
        for name, load in loads.items():
            flat += _PARTS.pack(*(_UNKNOWN if part is None else part for part in load))
            there, ready = pools.get(pool_of(name), (0, 0))
            pools[pool_of(name)] = (there + 1, ready + load.ready)
        self.loads, self.pools, self.kv_use = bytes(flat), pools, _kv_use(loads)

    def all_loads(self) -> dict[str, LoadSample]:
        """Return the load of each worker."""
        return {name: self._load(number) for number, name in enumerate(self.workers or ())}

    def load(self, worker: str) -> LoadSample | None:
        """Return the load of one worker; None where it is not known."""
        if self.workers is None or worker not in self.workers:
            return None
        return self._load(self.workers.index(worker))

    def _load(self, number: int) -> LoadSample:
        *parts, ready = _PARTS.unpack_from(self.loads, number * _PARTS.size)
        requests, prefill, blocks, kv = (None if math.isnan(part) else int(part) for part in parts)
        return LoadSample(requests, prefill, blocks, kv, bool(ready))

    def add(self, other: "TimeWindow") -> None:
        """Add the window of another process at the same time; both know the same workers."""
        for name in COUNTED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for outcome, number in other.ended.items():
            self.ended[outcome] = self.ended.get(outcome, 0) + number
        join(self.ttft, other.ttft)
        join(self.itl, other.itl)
        self.running = None if self.running is None or other.running is None else self.running + other.running
        self.queued = None if self.queued is None or other.queued is None else self.queued + other.queued
        self.slo_ttft = other.slo_ttft if self.slo_ttft is None else self.slo_ttft
        self.slo_itl = other.slo_itl if self.slo_itl is None else self.slo_itl
        if self.pools is None:
            self.pools, self.kv_use = other.pools, other.kv_use
        if self.workers is None:
            self.workers, self.loads = other.workers, other.loads

    def without_loads(self) -> "TimeWindow":
        """Return it without the workers' loads, which every process of a cluster knows by itself."""
        return msgspec.structs.replace(self, workers=None, loads=b"")


class Timeline:
    """Windows by number: window n is from n * ``width`` on.

    Args:
        width: seconds of a window.
        windows_max: most windows that are kept, the oldest go; None keeps all.
    """

    def __init__(self, width: float, windows_max: int | None = None) -> None:
        self.width = width
        self.windows_max = windows_max
        self.windows: dict[int, TimeWindow] = {}

    def window(self, at: float) -> TimeWindow:
        """Return the window of a moment, made where it is new."""
        number = int(at // self.width)
        found = self.windows.get(number)
        if found is None:
            found = self.windows[number] = TimeWindow()
            if self.windows_max is not None:
                # Made in the order of time, so the first in the dict is the oldest.
                while len(self.windows) > self.windows_max or next(iter(self.windows)) <= number - self.windows_max:
                    del self.windows[next(iter(self.windows))]
        return found

    def arrived(self, at: float, isl: int | None) -> None:
        """A request is here; ``isl``: prompt tokens."""
        window = self.window(at)
        window.arrived += 1
        window.prompt_tokens += isl or 0

    def first(self, at: float, ttft: float) -> None:
        """A request's first output token is here."""
        count(self.window(at).ttft, ttft)

    def ended(self, at: float, record: RequestRecord, slo: Slo) -> None:
        """A request is over; the service level is that which holds now, in seconds."""
        window = self.window(at)
        outcome = record.outcome
        window.ended[outcome] = window.ended.get(outcome, 0) + 1
        window.output_tokens += record.osl
        if outcome == "ok":
            if record.itl is not None:
                count(window.itl, record.itl.mean)
            if record.cached is not None and record.isl:
                window.cached_tokens += record.cached
                window.cache_reported_tokens += record.isl
            if record.ttft is not None:
                window.judged += 1
                window.in_slo += record.within(slo)
            elif slo.of(record.service_class) == NOTHING_PROMISED:  # nothing is promised but an answer
                window.judged += 1
                window.in_slo += 1
        elif outcome != "cancelled":
            window.judged += 1

    def before(self, window: TimeWindow) -> TimeWindow | None:
        """Return the newest window other than this one."""
        return next((other for other in reversed(self.windows.values()) if other is not window), None)

    # --- reports ----------------------------------------------------------------------------------------------------

    def between(self, first: int, end: int) -> list[TimeWindow | None]:
        """Return windows ``first`` to ``end`` - 1; None for those in which nothing was recorded."""
        return [self.windows.get(number) for number in range(first, end)]

    def loads_at(self, at: float) -> dict[str, WorkerLoad] | None:
        """Return how loaded each worker was in the window of a moment; None where no sample was taken."""
        window = self.windows.get(int(at // self.width))
        if window is None or window.workers is None:
            return None
        return {name: WorkerLoad(*load) for name, load in window.all_loads().items()}

    def worker_columns(self, worker: str) -> WorkerColumns | None:
        """Return one worker's load over all windows, as columns; None where no window has it."""
        if not any(window.workers is not None and worker in window.workers for window in self.windows.values()):
            return None
        first = min(self.windows)
        loads = [
            None if window is None else window.load(worker) for window in self.between(first, max(self.windows) + 1)
        ]
        columns = {
            name: [None if load is None else getattr(load, name) for load in loads]
            for name in ("requests", "prefill_tokens", "blocks", "kv_blocks")
        }
        return WorkerColumns(width=self.width, first=first, columns=columns)


def pool_of(worker: str) -> str:
    """Return the pool of a worker's name, as ``main`` of ``main-3``."""
    return worker.rpartition("-")[0] or worker


def columns_of(windows: Sequence[TimeWindow | None]) -> dict[str, list[Any]]:
    """Return windows in the order of time as columns of equal length; None where something is not known.

    Cost: about 40 us per window in which a hundred requests ended.
    """
    looked = ("running", "queued", "slo_ttft", "slo_itl", "kv_use")
    found: dict[str, list[Any]] = {
        name: [None if window is None else getattr(window, name) for window in windows] for name in (*COUNTED, *looked)
    }
    for outcome in OUTCOMES:
        found[outcome] = [None if window is None else window.ended.get(outcome, 0) for window in windows]
    for name in ("ttft", "itl"):
        told = [
            [None] * len(QUANTILES) if window is None else quantiles(getattr(window, name), QUANTILES.values())
            for window in windows
        ]
        for number, quantile in enumerate(QUANTILES):
            found[f"{name}_{quantile}"] = [values[number] for values in told]
    return found


def _kv_use(loads: Mapping[str, LoadSample]) -> float | None:
    held = room = 0
    for load in loads.values():
        if load.blocks is None or load.kv_blocks is None:
            return None
        held += load.blocks
        room += load.kv_blocks
    return held / room if room else None


def pools_of(windows: Sequence[TimeWindow | None]) -> dict[str, dict[str, list[int | None]]]:
    """Return the columns of pools, by name: how many workers there were and how many could take requests."""
    counts = [None if window is None else window.pools for window in windows]
    names = sorted({name for pools in counts if pools is not None for name in pools})
    return {
        name: {
            part: [None if pools is None else pools.get(name, (0, 0))[place] for pools in counts]
            for place, part in enumerate(("there", "ready"))
        }
        for name in names
    }

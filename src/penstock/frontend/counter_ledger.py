"""Counter ledger of frontend processes: keeps the cluster's counts when a process is replaced or crashes.

Each process writes its own counts into the run folder every few seconds and at its end. A process that reports the
whole cluster's counts adds those of ended processes. Metrics are not kept so: Prometheus handles restarts.
"""

import logging
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from penstock.router.status_rows import OUTCOMES, ModelStatus, RouterStatus, StatusCounts, WorkerStatus

log = logging.getLogger("penstock.frontend")

FOLDER = "counts"
"""Folder in the run folder, with a file for each frontend process that there was."""


class ModelCounts(msgspec.Struct, kw_only=True):
    """Requests of one model at one process."""

    name: str
    inflight: int = 0
    ok: int = 0
    failed: int = 0
    rejected: int = 0
    cancelled: int = 0
    expired: int = 0


class WorkerCounts(msgspec.Struct, kw_only=True):
    """Requests to one worker from one process."""

    id: str
    requests: int
    failures: int


class ProcessCounts(msgspec.Struct, kw_only=True):
    """What one process has counted, of its status."""

    requests: StatusCounts
    models: list[ModelCounts]
    workers: list[WorkerCounts]

    def add_to(self, requests: StatusCounts, models: Sequence[ModelStatus], workers: Sequence[WorkerStatus]) -> None:
        """Add these counts to those of another process's status, which changes."""
        _add_counts(requests, self.requests)
        by_name = {each.name: each for each in self.models}
        for model in models:
            if model.name in by_name:
                _add_counts(model, by_name[model.name])
        by_id = {each.id: each for each in self.workers}
        for worker in workers:
            if worker.id in by_id:
                _add_counts(worker, by_id[worker.id])


class CounterLedger:
    """The counts of one process, and those of ended processes.

    Args:
        run: the run folder.
        name: of this process.
    """

    def __init__(self, run: Path, name: str) -> None:
        self._folder = run / FOLDER
        self._path = self._folder / f"{name}.json"
        self._name = name
        self._read: dict[str, tuple[int, ProcessCounts]] = {}
        """Process -> (when its file was written, what it holds)."""
        self._failing = False

    def write(self, status: RouterStatus) -> None:
        """Write this process's own counts; blocks. A failed write is logged once, and tried again the next time."""
        fresh = self._path.with_suffix(".new")
        try:
            self._folder.mkdir(exist_ok=True)
            fresh.write_bytes(msgspec.json.encode(ended_counts(status)))
            fresh.replace(self._path)  # whole or not at all: others read it
        except OSError as error:
            if not self._failing:
                log.warning("%s can't be written, so its counts end with this process: %s", self._path, error)
            self._failing = True
            return
        self._failing = False

    def ended(self, alive: Collection[str]) -> list[ProcessCounts]:
        """Return the counts of ended processes; blocks."""
        counts = []
        for path in sorted(self._folder.glob("*.json")):
            name = path.stem
            if name == self._name or name in alive:
                continue
            written = path.stat().st_mtime_ns
            known = self._read.get(name)
            if known is None or known[0] != written:
                known = self._read[name] = (written, msgspec.json.decode(path.read_bytes(), type=ProcessCounts))
            counts.append(known[1])
        return counts


def counts_of(status: msgspec.Struct) -> ProcessCounts:
    """Return the counts of a process's status: a `RouterStatus`, or what a peer answers."""
    return msgspec.convert(status, ProcessCounts, from_attributes=True)


def ended_counts(status: RouterStatus) -> ProcessCounts:
    """Return the counts of a status to keep: those of ended requests."""
    counts = counts_of(status)
    over = {outcome: getattr(counts.requests, outcome) for outcome in OUTCOMES}
    for model in counts.models:
        model.inflight = 0
    return msgspec.structs.replace(counts, requests=StatusCounts(total=sum(over.values()), **over))


def _add_counts(into: msgspec.Struct, counts: msgspec.Struct) -> None:
    """Add each number of ``counts`` to the field of the same name."""
    for name in counts.__struct_fields__:
        number = getattr(counts, name)
        if isinstance(number, int):
            setattr(into, name, getattr(into, name) + number)

"""Where do a frontend's records go? Into the run folder, off the hot path; a full disk never stops traffic."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from penstock.kernel.machine import Nanos, seconds
from penstock.kernel.records import ItlSummary, RequestLeg, RequestRecord
from penstock.router.events import Closed

log = logging.getLogger("penstock.records")

FLUSH_EVERY = 0.5
"""Seconds between writes of what has gathered."""
ROW_EVERY = 5.0
"""Seconds between rows of metrics.csv."""


class RecordSink(Protocol):
    """Takes records; never blocks and never raises."""

    def write(self, record: Any) -> None:
        """Take one record (a msgspec struct or plain data)."""
        ...


class Writer(Protocol):
    """Holds what it took until it is flushed."""

    lost: int

    def flush(self) -> None:
        """Write out; may block, so it runs in a thread."""
        ...


class Discard:
    """Keeps nothing: for a frontend without a run folder."""

    lost = 0

    def write(self, record: Any) -> None:
        return None

    def flush(self) -> None:
        return None


def record_of(
    closed: Closed,
    *,
    offset: Nanos,
    blocks: list[int],
    itl: ItlSummary | None,
    ttft: float | None,
    e2e: float | None,
    service_class: str | None,
) -> RequestRecord:
    """Write one request down.

    Args:
        offset: nanoseconds from the start of the run to time 0 of this process's router.
        ttft, e2e: seconds after arrival, for a stream; an unary answer has no first token to see.
        service_class: the request's context_type, the only class that a live request names.
    """

    def at(moment: Nanos | None) -> float | None:
        return None if moment is None else seconds(moment + offset)

    return RequestRecord(
        id=closed.id,
        arrival=seconds(closed.arrived + offset),
        model=closed.model,
        outcome=closed.outcome,
        fault=closed.fault,
        service_class=service_class,
        isl=closed.isl,
        osl=closed.osl,
        cached=closed.cached,
        expected_cached=closed.expected_cached,
        blocks=blocks,
        legs=[
            RequestLeg(
                role=leg.role,
                worker=str(leg.target),
                dispatched=seconds(leg.dispatched + offset),
                first=at(leg.first),
                last=at(leg.last),
                failure=leg.failure,
            )
            for leg in closed.legs
        ],
        ttft=ttft,
        e2e=e2e,
        itl=itl,
        queued=closed.queued,
        status=closed.status,
        reason=closed.reason,
        attempts=closed.attempts,
        session=closed.session,
        program=closed.program,
    )


class CsvRows:
    """Append rows of numbers to a CSV file; unknown values are empty cells."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0
        self._columns: list[str] | None = None

    def append(self, row: dict[str, float | None]) -> None:
        """Write one row; the first row's names are the header. Blocks; counts what could not be written."""
        if self._columns is None:
            self._columns = list(row)
        cells = ",".join("" if row.get(name) is None else f"{row[name]:.9g}" for name in self._columns)
        try:
            fresh = not self.path.exists()
            with self.path.open("a") as file:
                if fresh:
                    file.write(",".join(self._columns) + "\n")
                file.write(cells + "\n")
        except OSError as error:
            if not self.lost:
                log.warning("%s can't be written: %s", self.path, error)
            self.lost += 1


async def keep_writing(
    writers: Sequence[Writer], rows: CsvRows | None, row: Callable[[], dict[str, float | None]]
) -> None:
    """Flush writers and append rows until cancelled."""
    next_row = time.monotonic() + ROW_EVERY
    while True:
        await asyncio.sleep(FLUSH_EVERY)
        await asyncio.to_thread(_flush, writers)
        if rows is not None and time.monotonic() >= next_row:
            next_row += ROW_EVERY
            await asyncio.to_thread(rows.append, row())


def _flush(writers: Sequence[Writer]) -> None:
    for writer in writers:
        writer.flush()

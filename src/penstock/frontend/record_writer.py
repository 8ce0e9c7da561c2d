"""Record writer of a frontend: writes records into the run folder off the hot path; a full disk never stops traffic."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from penstock.runtime.records.run_folder import CsvRows

FLUSH_EVERY = 0.5
"""Seconds between writes of the buffered records."""
ROW_EVERY = 5.0
"""Seconds between rows of metrics.csv."""


class RecordSink(Protocol):
    """Takes records; never blocks and never raises."""

    def write(self, record: Any) -> None:
        """Take one record (a msgspec struct or plain data)."""
        ...


class BackgroundWriter(Protocol):
    """Holds records until it is flushed."""

    lost: int

    def flush(self) -> None:
        """Write out; may block, so it runs in a thread."""
        ...


class DiscardingSink:
    """Discards records: for a frontend without a run folder."""

    lost = 0

    def write(self, record: Any) -> None:
        return None

    def flush(self) -> None:
        return None


async def keep_writing(
    enter: Callable[[], None],
    writers: Sequence[BackgroundWriter],
    rows: CsvRows | None,
    row: Callable[[], dict[str, float | None]],
) -> None:
    """Flush writers and append rows until cancelled; ``enter`` gives the writers what is due."""
    next_row = time.monotonic() + ROW_EVERY
    while True:
        await asyncio.sleep(FLUSH_EVERY)
        enter()
        await asyncio.to_thread(_flush, writers)
        if rows is not None and time.monotonic() >= next_row:
            next_row += ROW_EVERY
            await asyncio.to_thread(rows.append, row())


def _flush(writers: Sequence[BackgroundWriter]) -> None:
    for writer in writers:
        writer.flush()

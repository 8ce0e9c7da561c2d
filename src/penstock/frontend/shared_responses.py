"""Shared responses: stored responses in one SQLite file in a machine's shared memory, so that they outlive frontends.

Nothing waits for a write: a kill loses what was stored in its last moment.
"""

import logging
import shutil
import sqlite3
import time
from asyncio import get_running_loop
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from penstock.runtime.records.response_folder import RESPONSE_TTL, make_response_folder

T = TypeVar("T")
log = logging.getLogger("penstock.frontend")

BUSY = 2.0
"""Seconds to wait for another frontend's write, which takes a millisecond."""
FITTED_EVERY = 32
"""Parts of the whole size after which a process looks again whether all of them fit."""
SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = OFF;
PRAGMA secure_delete = ON;
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner TEXT, used REAL, size INTEGER, running INTEGER, response BLOB
);
CREATE INDEX IF NOT EXISTS used ON responses (used, size);
"""
"""What is deleted is overwritten."""
FIT = """
DELETE FROM responses WHERE id IN (
    SELECT id FROM (SELECT id, sum(size) OVER (ORDER BY used DESC, id) AS newer FROM responses) WHERE newer > ?
)
"""


class HeldResponse(msgspec.Struct, frozen=True, array_like=True):
    """A stored response outside of its process; fields as of `penstock.frontend.response_store.StoredResponse`."""

    id: str
    owner: str
    session: str
    body: bytes
    messages: bytes = b""
    """Of revisions before `items`; nothing."""
    items: bytes = b""


class SharedResponse(NamedTuple):
    """A response from there. ``running``: it was being made when it was written."""

    response: HeldResponse
    running: bool


class SharedResponses:
    """The file of a run; its calls are carried out in order, by a thread of its own.

    Args:
        run: the run folder.
        size: most bytes of all responses, but half of what is free at most; the longest unused go first.
    """

    def __init__(self, run: Path, size: int, clock: Callable[[], float] = time.time) -> None:
        self._run, self._size, self._clock = run, size, clock
        self._database: sqlite3.Connection | None = None
        self._unfitted = size
        self._failing = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="responses")

    def put(self, response: HeldResponse, *, running: bool) -> None:
        """Write a response, or what has become of it."""
        now = self._clock()
        self._do(lambda database: self._put(database, response, running, now))

    async def get(self, id: str, owner: str) -> SharedResponse | None:
        """Return a response of this owner, and use it."""
        now = self._clock()

        def read(database: sqlite3.Connection) -> SharedResponse | None:
            key = (now, id, owner, now - RESPONSE_TTL)
            used = "UPDATE responses SET used = ? WHERE id = ? AND owner = ? AND used >= ? RETURNING response, running"
            row = database.execute(used, key).fetchone()
            return (
                None if row is None else SharedResponse(msgspec.msgpack.decode(row[0], type=HeldResponse), bool(row[1]))
            )

        return await self._answer(read)

    async def remove(self, id: str, owner: str) -> bool:
        """Delete a response of this owner; return whether it was there."""
        delete = "DELETE FROM responses WHERE id = ? AND owner = ?"
        return bool(await self._answer(lambda database: database.execute(delete, (id, owner)).rowcount))

    async def close(self) -> None:
        """Finish the writes."""
        closing = self._thread.submit(lambda: self._database.close() if self._database is not None else None)
        self._thread.shutdown(wait=False)
        await get_running_loop().run_in_executor(None, closing.result)

    async def _answer(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        future = self._do(work)
        return await get_running_loop().run_in_executor(None, future.result)

    # --- below: in the thread -----------------------------------------------------------------------------------------

    def _do(self, work: Callable[[sqlite3.Connection], T]) -> "Future[T | None]":
        return self._thread.submit(self._guarded, work)

    def _guarded(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """Do a piece of work; where that fails, the memory of this process has to do."""
        try:
            if self._database is None:
                folder = make_response_folder(self._run)
                self._size = min(self._size, shutil.disk_usage(folder).free // 2)
                self._database = sqlite3.connect(folder / "responses.db", timeout=BUSY, check_same_thread=False)
                self._database.executescript(SCHEMA)
            with self._database as database:
                done = work(database)
        except (OSError, sqlite3.Error) as error:
            if not self._failing:
                log.warning("stored responses end with this process, since shared memory fails: %s", error)
            self._failing = True
            return None
        self._failing = False
        return done

    def _put(self, database: sqlite3.Connection, response: HeldResponse, running: bool, now: float) -> None:
        data = msgspec.msgpack.encode(response)
        row = (response.id, response.owner, now, len(data), running, data)
        database.execute("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?)", row)
        database.execute("DELETE FROM responses WHERE used < ?", (now - RESPONSE_TTL,))
        self._unfitted += len(data)
        if self._unfitted > self._size / FITTED_EVERY:
            self._unfitted = 0
            database.execute(FIT, (self._size,))

"""Response store: the responses that a client may ask for again or go on from, for a time and within a size.

They are whole conversations, too large and too private for the discovery store: in memory of one process, and in one
SQLite file in memory of the machine (`SharedResponses`), so that they outlive frontends. Nothing waits for a write
there: a kill loses what was stored in its last moment. Other frontends ask for them, and one that ends hands them over
(`penstock.frontend.dialects.response_reach`).
"""

import asyncio
import logging
import shutil
import sqlite3
import time
from asyncio import get_running_loop
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from penstock.adapters.background_tasks import BackgroundTasks
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
        self._submit_work(lambda database: self._put(database, response, running, now))

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

        return await self._answer_of_thread(read)

    async def remove(self, id: str, owner: str) -> bool:
        """Delete a response of this owner; return whether it was there."""
        delete = "DELETE FROM responses WHERE id = ? AND owner = ?"
        return bool(await self._answer_of_thread(lambda database: database.execute(delete, (id, owner)).rowcount))

    async def close(self) -> None:
        """Finish the writes."""
        closing = self._thread.submit(lambda: self._database.close() if self._database is not None else None)
        self._thread.shutdown(wait=False)
        await get_running_loop().run_in_executor(None, closing.result)

    async def _answer_of_thread(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        future = self._submit_work(work)
        return await get_running_loop().run_in_executor(None, future.result)

    # --- below: in the thread -----------------------------------------------------------------------------------------

    def _submit_work(self, work: Callable[[sqlite3.Connection], T]) -> "Future[T | None]":
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


RESPONSE_BYTES_MAX = 256 * 1024 * 1024
"""Most bytes of all: some two thousand conversations of 30,000 tokens. The longest unused go first."""


@dataclass(slots=True)
class StoredResponse:
    """A response.

    Args:
        owner: the API key's name, or nothing where no keys are set.
        session: of its whole conversation, by which the router sends it where its cache is.
        body: the response object, as JSON.
        items: the conversation with its answer, as the JSON of the API's items; the answer's are also in the body.
        task: makes a background response.
    """

    id: str
    owner: str
    session: str
    body: bytes
    items: bytes = b""
    task: asyncio.Task[None] | None = None
    used: float = 0.0

    @property
    def size(self) -> int:
        return len(self.body) + len(self.items)

    def for_peers(self) -> HeldResponse:
        """Return what another process needs of it."""
        return HeldResponse(self.id, self.owner, self.session, self.body, items=self.items)


class ResponseStore:
    """All of one process, in the order of their last use.

    Args:
        shared: gets each as well; None keeps them in this process alone.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, shared: SharedResponses | None = None) -> None:
        self._clock = clock
        self._shared = shared
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._bytes = 0
        self._tasks = BackgroundTasks()

    def put(self, response: StoredResponse) -> None:
        """Take a response, or what has become of it."""
        self.remove(response.id)
        response.used = self._clock()
        self._responses[response.id] = response
        self._bytes += response.size
        if self._shared is not None:
            self._shared.put(response.for_peers(), running=response.task is not None)
        while self._responses and (self._bytes > RESPONSE_BYTES_MAX or self._oldest().used < self._too_old()):
            self.remove(self._oldest().id)

    def get(self, id: str, owner: str) -> StoredResponse | None:
        """Return a response of this owner, and use it."""
        response = self._responses.get(id)
        if response is None or response.owner != owner:
            return None
        if response.used < self._too_old():
            self.remove(id)
            return None
        response.used = self._clock()
        self._responses.move_to_end(id)
        return response

    async def from_shared(self, id: str, owner: str) -> StoredResponse | None:
        """Return a copy from shared memory; one that was being made by a process that has ended has failed."""
        copy = None if self._shared is None else await self._shared.get(id, owner)
        return None if copy is None else copied(failed(copy.response) if copy.running else copy.response)

    async def erase(self, id: str, owner: str) -> bool:
        """Delete a response from all memory of this machine; return whether it was there."""
        stored = self.get(id, owner)
        if stored is not None:
            self.remove(id)
            if stored.task is not None:
                stored.task.cancel()
        shared = self._shared is not None and await self._shared.remove(id, owner)
        return stored is not None or shared

    def all_for_peers(self) -> list[HeldResponse]:
        """Return all for another process, the longest unused first; what is still being made has failed."""
        return [_at_the_end(response) for response in self._responses.values() if response.used >= self._too_old()]

    def remove(self, id: str) -> None:
        """Drop a response from this process, where it is there."""
        response = self._responses.pop(id, None)
        if response is not None:
            self._bytes -= response.size

    def run(self, making: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin to make a background response."""
        return self._tasks.spawn(making)

    async def close(self) -> None:
        """Stop the background responses."""
        await self._tasks.close()
        if self._shared is not None:
            await self._shared.close()

    def _oldest(self) -> StoredResponse:
        return next(iter(self._responses.values()))

    def _too_old(self) -> float:
        return self._clock() - RESPONSE_TTL


def copied(response: HeldResponse) -> StoredResponse:
    """Return another process's response, which has no task here."""
    return StoredResponse(response.id, response.owner, response.session, response.body, response.items)


def _at_the_end(stored: StoredResponse) -> HeldResponse:
    """Return what a response is when its process ends."""
    return stored.for_peers() if stored.task is None else failed(stored.for_peers())


def failed(response: HeldResponse) -> HeldResponse:
    """Return what has become of a response that was being made by a process that has ended."""
    error = {"code": "server_error", "message": "the frontend process that made it has ended"}
    body = msgspec.json.encode({**msgspec.json.decode(response.body), "status": "failed", "error": error})
    return msgspec.structs.replace(response, body=body)

"""SQLite `Store` for discovery on one machine: keys, leases and watches in one database file.

docs/guides/discovery.md says what happens when the file or its disk fails; docs/why/sqlite-store.md why it is SQLite.
"""

import asyncio
import logging
import os
import secrets
import socket
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import starmap
from pathlib import Path
from typing import NamedTuple, TypeVar

from penstock.adapters.seams import StoreChange, StoreUnavailable, changes_between
from penstock.adapters.stores.entry_codec import ENTRY_LIMIT, EntryCodec, check_entry, check_key
from penstock.adapters.stores.lease_book import LeaseBook, LeaseRow
from penstock.adapters.stores.sqlite_database import SqliteDatabase, unavailable
from penstock.adapters.task_cancel import cancel_all
from penstock.kernel.secret import ClusterSecret

log = logging.getLogger(__name__)

T = TypeVar("T")

_SETTLE_SHARE = 0.5
"""Share of the longest ttl that we wait after an outage before a missing owner counts as gone. Owners renew every
third of their ttl, so by then each live owner has renewed."""

_DELETED = ""
"""The key, which no user can put, whose revision says when keys were last deleted: a reader then compares all keys."""

_LEASES = """
SELECT id, ttl, renewals, renewed FROM leases WHERE typeof(id) = 'text'
AND typeof(ttl) = 'real' AND typeof(renewals) = 'integer' AND typeof(renewed) = 'real'
"""
_CHANGES = f"""
SELECT revision, key, lease, entry FROM entries WHERE revision > ? AND typeof(key) = 'text'
AND typeof(entry) = 'blob' AND length(entry) <= {ENTRY_LIMIT} ORDER BY revision
"""
# A foreign writer is not held to our types; what is not of them is not read.


class _KnownEntry(NamedTuple):
    value: bytes
    lease: str | None


class SqliteStore:
    """A `Store` in a database.

    Args:
        root: the folder of the database; made where it is missing.
        poll: seconds between two reads of a watcher.
        secret: of the cluster. With it entries are signed, and foreign ones are left out.
    """

    def __init__(self, root: Path, *, poll: float = 0.2, secret: ClusterSecret | None = None) -> None:
        self.root = root
        self.poll = poll
        self.codec = EntryCodec(str(root), secret)
        self.renewal_failures = 0
        self._database = SqliteDatabase(root)
        self._book = LeaseBook()
        self._known: dict[str, _KnownEntry] = {}
        self._known_to = 0
        """The highest revision that was read, through connection number `_known_by`."""
        self._known_by = 0
        self._known_version = 0
        """Changes with what is known."""
        self._observed: dict[str, tuple[int, frozenset[str], dict[str, bytes]]] = {}
        """Prefix -> what a watcher found there last: of which version, and by which leases that were alive."""
        self._mine: dict[str, tuple[bytes, float]] = {}
        self._leases: dict[float, str] = {}
        self._tasks: dict[float, asyncio.Task[None]] = {}
        self._closed = False
        self._watchers = 0
        self._frozen = False
        self._followed = 0
        """How often the database had been replaced when the leases were last judged."""
        self._settled_at = 0.0
        self._me = f"{os.getpid()}-{secrets.token_hex(6)}"
        # One thread of our own: neither a slow disk nor another process's lock may hold the event loop.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")

    async def put(self, key: str, value: bytes, *, ttl: float | None = None) -> None:
        """Write a value, whole or not at all; with ``ttl`` (seconds) it lives as long as this process renews it.

        Raises:
            StoreUnavailable: it could not be written; nothing changed.
            ValueError: the key can't be one, the value is larger than 1 MiB, or ttl is not above 0.
        """
        check_entry(key, value, ttl)
        await self._run_in_thread("write", lambda: self._put(key, value, ttl))
        if ttl is not None and ttl not in self._tasks:
            self._tasks[ttl] = asyncio.create_task(self._renew(ttl), name=f"lease {ttl} s")

    async def delete(self, key: str) -> None:
        """Delete a key of any writer; an absent one is no error."""
        check_key(key)
        await self._run_in_thread("write", lambda: self._delete(key))

    async def list(self, prefix: str) -> dict[str, bytes]:
        """Return what is alive under a prefix."""
        return await self._run_in_thread("read", lambda: self._list(prefix))

    async def watch(self, prefix: str) -> AsyncIterator[Sequence[StoreChange]]:
        """Yield first everything alive under ``prefix`` (perhaps nothing), then changes, at most one batch a poll.

        Raises:
            StoreUnavailable: the database can't be read, or can't be written, so that owners can't renew and their
                silence means nothing. Also for a moment after that, until all had time to renew.
        """
        known: dict[str, bytes] | None = None
        self._watchers += 1
        try:
            while not self._closed:
                alive = await self._run_in_thread("read", lambda: self._observe(prefix))
                if alive is not known:
                    changes = changes_between(known or {}, alive)
                    if changes or known is None:
                        yield changes
                    known = alive
                await asyncio.sleep(self.poll)
        finally:
            self._watchers -= 1
            self._observed.pop(prefix, None)

    async def close(self) -> None:
        """Delete our leased keys and leases where the database can be written; they expire anyway."""
        if self._closed:
            return
        tasks = tuple(self._tasks.values())
        self._tasks.clear()
        await cancel_all(tasks)
        try:
            await self._run_in_thread("write", self._leave)
        except StoreUnavailable as error:
            log.warning("left the store without a word; our keys go when their ttl is over: %s", error)
        self._closed = True
        self._thread.submit(self._database.close)
        self._thread.shutdown(wait=False)

    async def _renew(self, ttl: float) -> None:
        wait = ttl / 3
        failing = False
        while True:
            await asyncio.sleep(wait)
            try:
                await self._run_in_thread("renew our lease in", lambda: self._touch(ttl))
            except StoreUnavailable as error:
                self.renewal_failures += 1
                if not failing:
                    log.warning("%s", error)
                failing, wait = True, min(1.0, ttl / 3)
                continue
            if failing:
                log.info("our lease in %s is renewed again", self.root)
            failing, wait = False, ttl / 3

    async def _run_in_thread(self, doing: str, work: Callable[[], T]) -> T:
        if self._closed:
            raise StoreUnavailable(f"the store in {self.root} was closed by this process")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except (OSError, sqlite3.Error) as error:
            raise unavailable(doing, self._database.path, error) from error

    # --- below: in the store's thread -------------------------------------------------------------------------------

    def _put(self, key: str, value: bytes, ttl: float | None) -> None:
        with self._database.transaction("IMMEDIATE") as database:
            lease = None if ttl is None else self._hold(database, ttl)
            self._write(database, key, value, lease)
        if ttl is None:
            self._mine.pop(key, None)
        else:
            self._mine[key] = (value, ttl)

    def _write(self, database: sqlite3.Connection, key: str, value: bytes, lease: str | None) -> None:
        entry = self.codec.encode(key, value, lease)
        database.execute("INSERT OR REPLACE INTO entries (key, lease, entry) VALUES (?, ?, ?)", (key, lease, entry))

    def _delete(self, key: str) -> None:
        with self._database.transaction("IMMEDIATE") as database:
            database.execute("DELETE FROM entries WHERE key = ?", (key,))
            _mark_deletion(database)
        self._mine.pop(key, None)

    def _touch(self, ttl: float) -> None:
        with self._database.transaction("IMMEDIATE") as database:
            self._hold(database, ttl)

    def _hold(self, database: sqlite3.Connection, ttl: float) -> str:
        """Renew our lease of this ttl; where the database has none, grant it and put what it held again."""
        lease = self._leases.setdefault(ttl, f"{self._me}-{len(self._leases)}")
        renew = "UPDATE leases SET renewals = renewals + 1, renewed = ? WHERE id = ?"
        if not database.execute(renew, (time.time(), lease)).rowcount:
            _sweep(database)
            row = (lease, ttl, os.getpid(), _this_host(), 0, time.time(), 0)
            database.execute("INSERT INTO leases VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            for key, (value, own) in self._mine.items():
                if own == ttl:
                    self._write(database, key, value, lease)
        return lease

    def _leave(self) -> None:
        if self._leases and self._database.path.exists():
            with self._database.transaction("IMMEDIATE") as database:
                for lease in self._leases.values():
                    _drop(database, lease)
        self._mine.clear()
        self._leases.clear()

    def _refresh(self) -> None:
        """Read all leases, a row of each process, and the entries that changed since the last call."""
        with self._database.transaction("DEFERRED") as database:
            if self._known_by != self._database.connections:
                self._known_by, self._known_to = self._database.connections, 0
                self._known.clear()
                self._known_version += 1
            leases = list(starmap(LeaseRow, database.execute(_LEASES)))
            changes = database.execute(_CHANGES, (self._known_to,)).fetchall()
            if any(key == _DELETED for _, key, _, _ in changes):
                there = {key for (key,) in database.execute("SELECT key FROM entries")}
                for key in self._known.keys() - there:
                    del self._known[key]
        self._book.look(leases)
        self._known_version += bool(changes)
        for revision, key, lease, entry in changes:
            self._known_to = revision
            if key == _DELETED:
                continue
            value = self.codec.decode(key, entry, lease)
            if value is None:
                self._known.pop(key, None)
            else:
                self._known[key] = _KnownEntry(value, lease)

    def _list(self, prefix: str) -> dict[str, bytes]:
        self._refresh()
        # Without a watcher no renewals were followed, so only the wall clock can decide.
        return self._select(prefix, self._book.alive.__contains__ if self._watchers else self._book.is_fresh)

    def _observe(self, prefix: str) -> dict[str, bytes]:
        try:
            self._refresh()
            late = self._book.late()
            if self._frozen or late:
                # Where nothing can be written no owner can renew: test that before an owner counts as gone.
                with self._database.transaction("IMMEDIATE") as database:
                    database.executemany("UPDATE leases SET late = late + 1 WHERE id = ?", [(lease,) for lease in late])
        except (OSError, sqlite3.Error):
            self._frozen = True
            raise
        if self._frozen or self._followed != self._database.replaced:
            self._frozen, self._followed = False, self._database.replaced
            self._book.forgive()
            self._settled_at = time.monotonic() + self._book.longest_ttl * _SETTLE_SHARE
        if time.monotonic() < self._settled_at:
            raise StoreUnavailable(
                f"the discovery database in {self.root} is back; its owners get time to renew", hint="nothing to do"
            )
        self._book.judge()
        version, leases, found = self._observed.get(prefix, (-1, frozenset(), {}))
        alive = self._book.alive
        if (version, leases) != (self._known_version, alive):
            found = self._select(prefix, alive.__contains__)
            self._observed[prefix] = self._known_version, alive, found
        return found

    def _select(self, prefix: str, is_alive: Callable[[str], bool]) -> dict[str, bytes]:
        return {
            key: value
            for key, (value, lease) in self._known.items()
            if key.startswith(prefix) and (lease is None or is_alive(lease))
        }


def _mark_deletion(database: sqlite3.Connection) -> None:
    database.execute("INSERT OR REPLACE INTO entries (key, entry) VALUES (?, x'')", (_DELETED,))


def _drop(database: sqlite3.Connection, lease: str) -> None:
    """Delete a lease and the keys that it holds; a key that another process took over has another lease."""
    database.execute("DELETE FROM entries WHERE lease = ?", (lease,))
    database.execute("DELETE FROM leases WHERE id = ?", (lease,))
    _mark_deletion(database)


def _sweep(database: sqlite3.Connection) -> None:
    """Delete what crashed processes of this host left."""
    here = "SELECT id, pid FROM leases WHERE host = ? AND typeof(pid) = 'integer' AND pid BETWEEN 1 AND 4194304"
    for lease, pid in database.execute(here, (_this_host(),)).fetchall():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            _drop(database, lease)
        except PermissionError:
            continue  # it runs, as another user


def _this_host() -> str:
    """Return the name of the scope in which a pid is valid: machine and pid namespace."""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = ""
    return f"{socket.gethostname()} {namespace}".strip()

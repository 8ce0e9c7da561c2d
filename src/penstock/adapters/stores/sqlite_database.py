"""SQLite database of a store: one file that the processes of a machine share, opened again where it was replaced."""

import errno
import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal

from penstock.adapters.seams import StoreUnavailable

NAME = "store.db"
VERSION = 1
"""Of the tables; it grows only where an older release would misunderstand them."""

BUSY = 1.0
"""Seconds to wait for another writer. A transaction takes well below a millisecond, so only a suspended process, or an
operator's open transaction, is met for longer."""

SCHEMA = f"""
PRAGMA journal_mode = WAL;
CREATE TABLE entries (revision INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT UNIQUE, lease TEXT, entry BLOB);
CREATE TABLE leases (
    id TEXT PRIMARY KEY, ttl REAL, pid INTEGER, host TEXT, renewals INTEGER, renewed REAL, late INTEGER
) WITHOUT ROWID;
PRAGMA user_version = {VERSION};
"""
"""Each put gives its key a new, higher revision, also where the key was there before. ``late`` counts how often
watchers found a lease late."""

CONNECTION = """
PRAGMA synchronous = OFF;
PRAGMA wal_autocheckpoint = 64;
"""
"""Nothing is flushed to the disk: only a power cut loses what the kernel holds, and that ends all processes of the
cluster as well; the next ``penstock up`` has a folder of its own. A kill loses nothing. The log of changes (WAL) is
used again from its beginning after 64 pages (256 KiB), so on a full disk leases can mostly still be renewed."""

_HINTS = {
    ("SQLITE_FULL", "SQLITE_IOERR_SHMSIZE", "ENOSPC", "EDQUOT"): "free some space on that disk",
    ("SQLITE_READONLY", "EROFS", "EACCES", "EPERM"): "let this user write there; is the file system read-only?",
    ("SQLITE_BUSY", "EAGAIN"): "another process holds it: a suspended one of this cluster, or an open sqlite3 shell",
    ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_ERROR"): (
        "move its folder away: owners put their entries into a new one, and only desired states are lost"
    ),
    ("SQLITE_CANTOPEN", "ENOTDIR", "EEXIST"): "is its folder readable, and a folder? Move what stands there away",
}
"""Beginnings of the names of SQLite's and the system's errors -> the operator's next step."""


class SqliteDatabase:
    """The database in a folder; all calls come from one thread.

    Args:
        folder: made where it is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self.connections = 0
        """How often it was opened; what was read before may not hold in another file."""
        self.replaced = 0
        """How often another file, or none, stood at its path."""
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None

    @contextmanager
    def transaction(self, kind: Literal["DEFERRED", "IMMEDIATE"]) -> Iterator[sqlite3.Connection]:
        """Read from one snapshot (``DEFERRED``), or write all or nothing (``IMMEDIATE``).

        Raises:
            OSError, sqlite3.Error: nothing was written.
        """
        connection = self._open()
        try:
            connection.execute(f"BEGIN {kind}")
            yield connection
            connection.execute("COMMIT")
        except BaseException:
            self.close()  # that rolls back; the next transaction opens what is there by then
            raise

    def close(self) -> None:
        """Close the connection, where there is one."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.close()

    def _open(self) -> sqlite3.Connection:
        # A deleted file stays readable and writable for those who have it open, and unseen by all others.
        found = self._identity()
        if self._file is not None and found != self._file:
            self.close()
            self.replaced += 1
        if found is None:
            self._create()
            found = self._identity()
        self._file = found
        if self._connection is None:
            uri = f"{self.path.absolute().as_uri()}?mode=rw"
            connection = sqlite3.connect(uri, uri=True, timeout=BUSY, isolation_level=None)
            try:
                connection.executescript(CONNECTION)
                (version,) = connection.execute("PRAGMA user_version").fetchone()
                if version != VERSION:
                    raise sqlite3.DatabaseError(f"its tables have version {version}, and this release reads {VERSION}")
            except BaseException:
                connection.close()
                raise
            self._connection = connection
            self.connections += 1
        return self._connection

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def _create(self) -> None:
        """Make a whole database under another name and rename it, so that nobody opens a half of one."""
        folder = self.path.parent
        folder.mkdir(parents=True, exist_ok=True)
        with _creating(folder):
            if self.path.exists():
                return  # another process was first
            draft = folder / f"{NAME}-draft"
            # The log and the index of a deleted database would be taken for those of the new one.
            for path in (draft, self.path):
                for suffix in ("-wal", "-shm", "-journal"):
                    path.with_name(path.name + suffix).unlink(missing_ok=True)
            draft.unlink(missing_ok=True)
            with closing(sqlite3.connect(draft, isolation_level=None)) as connection:
                connection.executescript(CONNECTION + SCHEMA)
            draft.replace(self.path)


@contextmanager
def _creating(folder: Path) -> Iterator[None]:
    """Hold a folder against other processes that would create its database; the kernel releases it for a killed one."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    end = time.monotonic() + BUSY
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.005)
        yield
    finally:
        os.close(descriptor)


def unavailable(doing: str, path: Path, error: OSError | sqlite3.Error) -> StoreUnavailable:
    """Return the error: what could not be done, why, and what to do next."""
    if isinstance(error, OSError):
        reason, name = error.strerror or str(error), errno.errorcode.get(error.errno or 0, "")
    else:
        # Errors of Python's own, and ours, have no name: they are about what stands in the file.
        reason, name = str(error), getattr(error, "sqlite_errorname", "SQLITE_ERROR")
    hints = (hint for names, hint in _HINTS.items() if name.startswith(names))
    hint = next(hints, "membership stays as it is until this works again")
    return StoreUnavailable(f"can't {doing} the discovery database {path}: {reason}", hint=hint)

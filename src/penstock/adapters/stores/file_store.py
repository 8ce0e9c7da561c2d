"""File `Store` for discovery on one machine: keys, leases and watches in a directory.

docs/guides/discovery.md describes the files and what happens when the directory fails.
"""

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from penstock.adapters.seams import StoreChange, StoreUnavailable
from penstock.adapters.stores.file_layout import (
    KEY_SUFFIX,
    KEYS,
    LEASE_SUFFIX,
    LEASES,
    VALUE_LIMIT,
    FileEntry,
    FileLease,
    ForeignEntry,
    decode,
    decode_lease,
    encode,
    file_name,
    is_running,
    this_host,
    unavailable,
    write_whole,
)
from penstock.adapters.stores.lease_book import LeaseBook
from penstock.kernel.errors import PenstockError
from penstock.kernel.message_version import NewerVersion
from penstock.kernel.secret import ClusterSecret

log = logging.getLogger(__name__)

T = TypeVar("T")

_SETTLE_SHARE = 0.5
"""Share of the longest ttl that we wait after an outage before a missing owner counts as gone. Owners renew
every third of their ttl, so by then each live owner has renewed."""


class FileStore:
    """A `Store` in a directory.

    Args:
        root: the directory; made where it is missing.
        poll: seconds between two reads of a watcher.
        sync: flush to the disk on each write. Off by default: after a power cut the processes are gone as well.
        secret: of the cluster. With it entries are signed, and foreign ones are left out.
    """

    def __init__(
        self, root: Path, *, poll: float = 0.2, sync: bool = False, secret: ClusterSecret | None = None
    ) -> None:
        self.root = root
        self.poll = poll
        self.ignored = 0
        """Files under ``keys`` that were half written or foreign."""
        self.foreign = 0
        """Files that were not written with our secret."""
        self.newer = 0
        """Files of a newer release."""
        self._secret = secret
        self.renewal_failures = 0
        self._sync = sync
        self._keys, self._leases = root / KEYS, root / LEASES
        self._book = LeaseBook(self._leases)
        self._files: dict[str, tuple[tuple[int, int, int], FileEntry | None]] = {}
        self._mine: dict[str, tuple[bytes, float]] = {}
        self._lease_ids: dict[float, str] = {}
        self._tasks: dict[float, asyncio.Task[None]] = {}
        self._made = False
        self._closed = False
        self._watchers = 0
        self._frozen = False
        self._settled_at = 0.0
        self._me = secrets.token_hex(6)
        self._drafts = 0
        # One thread of our own: a slow disk must not hold the event loop, nor wait behind others in a shared pool.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")

    async def put(self, key: str, value: bytes, *, ttl: float | None = None) -> None:
        """Write a value, whole or not at all; with ``ttl`` (seconds) it lives as long as this process renews it.

        Raises:
            StoreUnavailable: it could not be written; nothing changed.
            ValueError: the key can't be one, the value is larger than 1 MiB, or ttl is not above 0.
        """
        if len(value) > VALUE_LIMIT:
            raise ValueError(f"the value of {key} has {len(value)} bytes; at most {VALUE_LIMIT}")
        if ttl is not None and not ttl > 0:
            raise ValueError(f"ttl is {ttl} s; it must be above 0")
        file_name(key)
        await self._do("write", lambda: self._put(key, value, ttl))
        if ttl is not None and ttl not in self._tasks:
            self._tasks[ttl] = asyncio.create_task(self._renew(ttl), name=f"lease {ttl} s")

    async def delete(self, key: str) -> None:
        """Delete a key of any writer; an absent one is no error."""
        name = file_name(key)
        await self._do("write", lambda: self._delete(key, name))

    async def list(self, prefix: str) -> dict[str, bytes]:
        """Return what is alive under a prefix."""
        return await self._do("read", lambda: self._list(prefix))

    async def watch(self, prefix: str) -> AsyncIterator[Sequence[StoreChange]]:
        """Yield first everything alive under ``prefix`` (perhaps nothing), then changes, at most one batch a poll.

        Raises:
            StoreUnavailable: the directory can't be read, or can't be written, so that owners can't renew and
                their silence means nothing. Also for a moment after that, until all had time to renew.
        """
        known: dict[str, bytes] | None = None
        self._watchers += 1
        try:
            while not self._closed:
                alive = await self._do("read", lambda: self._observe(prefix))
                changes = _difference(known or {}, alive)
                if changes or known is None:
                    yield changes
                known = alive
                await asyncio.sleep(self.poll)
        finally:
            self._watchers -= 1

    async def close(self) -> None:
        """Delete our leased keys and leases where the directory is writable; they expire anyway."""
        if self._closed:
            return
        tasks = tuple(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            await self._do("write", self._leave)
        except StoreUnavailable as error:
            log.warning("left the store without a word; our keys go when their ttl is over: %s", error)
        self._closed = True
        self._thread.shutdown(wait=False)

    # --- below: in the store's thread -------------------------------------------------------------------------------

    async def _do(self, doing: str, work: Callable[[], T]) -> T:
        if self._closed:
            raise StoreUnavailable(f"the store in {self.root} was closed by this process")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except OSError as error:
            raise unavailable(doing, self.root, error) from error

    def _put(self, key: str, value: bytes, ttl: float | None) -> None:
        self._make()
        lease = None if ttl is None else self._hold(ttl)
        self._write_key(key, value, lease)
        if ttl is None:
            self._mine.pop(key, None)
        else:
            self._mine[key] = (value, ttl)

    def _write_key(self, key: str, value: bytes, lease: str | None) -> None:
        entry = FileEntry(key=key, value=value, lease=lease)
        write_whole(self._keys / file_name(key), encode(entry, self._secret), self._draft(), sync=self._sync)

    def _delete(self, key: str, name: str) -> None:
        self._make()
        self._mine.pop(key, None)
        (self._keys / name).unlink(missing_ok=True)

    def _make(self) -> None:
        self._keys.mkdir(parents=True, exist_ok=True)
        self._leases.mkdir(parents=True, exist_ok=True)
        self._made = True

    def _hold(self, ttl: float) -> str:
        """Return the id of our lease of this ttl, creating it first where there is none."""
        lease = self._lease_ids.get(ttl)
        if lease is None:
            self._sweep()
            lease = f"{os.getpid()}-{self._me}-{len(self._lease_ids)}"
            self._write_lease(lease, ttl)
            self._lease_ids[ttl] = lease
        return lease

    def _write_lease(self, lease: str, ttl: float) -> None:
        raw = msgspec.json.encode(FileLease(ttl=ttl, pid=os.getpid(), host=this_host()))
        write_whole(self._leases / (lease + LEASE_SUFFIX), raw, self._draft(), sync=self._sync)

    def _draft(self) -> str:
        self._drafts += 1
        return f"{self._me}-{self._drafts}"

    def _sweep(self) -> None:
        """Remove the files of crashed processes of this host."""
        dead = set()
        here = this_host()
        for path in self._leases.glob("*" + LEASE_SUFFIX):
            try:
                lease = decode_lease(path.read_bytes())
            except FileNotFoundError:
                continue
            if lease is not None and lease.host == here and not is_running(lease.pid):
                dead.add(path.name.removesuffix(LEASE_SUFFIX))
        if not dead:
            return
        for name, entry in self._read_keys().items():
            if entry is not None and entry.lease in dead:
                (self._keys / name).unlink(missing_ok=True)
        for lease_id in dead:
            (self._leases / (lease_id + LEASE_SUFFIX)).unlink(missing_ok=True)

    def _leave(self) -> None:
        leases = set(self._lease_ids.values())
        for key in self._mine:
            path = self._keys / file_name(key)
            try:
                entry = self._decoded(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            if entry is not None and entry.lease in leases:  # another process may have taken the key over
                path.unlink(missing_ok=True)
        self._mine.clear()
        for lease in leases:
            (self._leases / (lease + LEASE_SUFFIX)).unlink(missing_ok=True)
        self._lease_ids.clear()

    async def _renew(self, ttl: float) -> None:
        wait = ttl / 3
        failing = False
        while True:
            await asyncio.sleep(wait)
            try:
                await self._do("renew our lease in", lambda: self._touch(ttl))
            except StoreUnavailable as error:
                self.renewal_failures += 1
                if not failing:
                    log.warning("%s", error)
                failing, wait = True, min(1.0, ttl / 3)
                continue
            if failing:
                log.info("our lease in %s is renewed again", self.root)
            failing, wait = False, ttl / 3

    def _touch(self, ttl: float) -> None:
        lease = self._lease_ids.get(ttl)
        if lease is None:
            return
        try:
            os.utime(self._leases / (lease + LEASE_SUFFIX))
        except FileNotFoundError:
            # The directory was emptied or made anew: write all our keys and leases again.
            self._make()
            self._write_lease(lease, ttl)
            for key, (value, own) in self._mine.items():
                if own == ttl:
                    self._write_key(key, value, lease)

    def _read_keys(self) -> dict[str, FileEntry | None]:
        """Read the key files that changed; returns all, by file name, None for foreign files."""
        files: dict[str, tuple[tuple[int, int, int], FileEntry | None]] = {}
        with os.scandir(self._keys) as entries:
            for item in entries:
                if not item.name.endswith(KEY_SUFFIX):
                    continue
                try:
                    stat = item.stat()
                    if stat.st_size > 2 * VALUE_LIMIT:
                        continue
                    stamp = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
                    before = self._files.get(item.name)
                    if before is not None and before[0] == stamp:
                        files[item.name] = before
                        continue
                    entry = self._decoded(Path(item.path))
                except (FileNotFoundError, IsADirectoryError):
                    continue
                if entry is not None and file_name(entry.key) != item.name:
                    entry = None  # a copy under another name, as an editor leaves it
                self.ignored += entry is None
                files[item.name] = (stamp, entry)
        self._files = files
        return {name: entry for name, (_, entry) in files.items()}

    def _decoded(self, path: Path) -> FileEntry | None:
        """Read one key's file; count what is not this cluster's."""
        try:
            return decode(path.read_bytes(), self._secret)
        except ForeignEntry as error:
            self.foreign += 1
            self._tell(self.foreign, error)
        except NewerVersion as error:
            self.newer += 1
            self._tell(self.newer, error)
        return None

    def _tell(self, count: int, error: PenstockError) -> None:
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th...: a foreign writer must not fill the log
            log.warning("left out of %s (%d so far): %s", self.root, count, error)

    def _list(self, prefix: str) -> dict[str, bytes]:
        if not self._made:
            self._make()
        # Without a watcher no renewals were followed, so only the wall clock can decide: a fresh book.
        book = self._book if self._watchers else LeaseBook(self._leases)
        book.look()
        return _select(self._read_keys(), prefix, book)

    def _observe(self, prefix: str) -> dict[str, bytes]:
        try:
            if not self._made:
                self._make()
            self._book.look()
            if self._frozen or self._book.has_silent():
                # In a read-only directory no owner can renew: test that before an owner counts as gone.
                os.utime(self._leases)
            entries = self._read_keys()
        except OSError:
            self._frozen = True
            raise
        if self._frozen:
            self._frozen = False
            self._book.forgive()
            self._settled_at = time.monotonic() + self._book.longest_ttl * _SETTLE_SHARE
        if time.monotonic() < self._settled_at:
            raise StoreUnavailable(
                f"the discovery directory {self.root} is back; its owners get time to renew", hint="nothing to do"
            )
        self._book.judge()
        return _select(entries, prefix, self._book)


def _select(entries: dict[str, FileEntry | None], prefix: str, book: LeaseBook) -> dict[str, bytes]:
    return {
        entry.key: entry.value
        for entry in entries.values()
        if entry is not None and entry.key.startswith(prefix) and (entry.lease is None or book.is_alive(entry.lease))
    }


def _difference(known: dict[str, bytes], alive: dict[str, bytes]) -> list[StoreChange]:
    changes = [StoreChange(key, None) for key in known if key not in alive]
    changes += [StoreChange(key, value) for key, value in alive.items() if known.get(key) != value]
    return changes

"""`ObjectStore`: one object per block in S3, Azure Blob or Google Cloud, by obstore (extra ``object``).

An object is a record header and the payload. Its name has all that `records` needs, so that opening costs a listing
and no read: ``<key hex>.<generation>.<parent hex, or ->``. Engines may share a prefix: each lists what the others
stored before it was opened, and later part by part (`listed`); a block that another one has deleted is absent.

The package retries failed requests itself (`RETRIES`); a request that outlives its deadline goes on until the
client's own limit, and its slot is busy until then.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, cast

from xxhash import xxh3_64_intdigest

from penstock.kernel.errors import ConfigError
from penstock_kv.transfer.storage.block_store import BlockIo, BlockResult, StoredRecord
from penstock_kv.transfer.storage.record_header import (
    SIZE,
    RecordHeader,
    check_record,
    misfit,
    pack_header,
    parse_header,
)

try:
    import obstore
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    INSTALLED = True
except ModuleNotFoundError:
    INSTALLED = False

if TYPE_CHECKING:
    from obstore.store import ObjectStore as ObjectClient
    from obstore.store import S3Config

log = logging.getLogger(__name__)

CONCURRENCY = 16
"""Requests at a time: object stores answer in tens of milliseconds, and 16 blocks of 1 MiB fill a 10 Gb/s link."""
QUEUE_LIMIT = 1024
"""Blocks that wait for a request at most."""
LISTED_MAX = 10_000
"""Objects of one part of a listing: ten requests, which cost as much as ten reads."""
LISTED_AT_ONCE = 1_000
"""As many as one answer has."""
REQUEST_TIMEOUT = timedelta(seconds=30)
RETRIES = 3
CHECK_THREADS = 2


def missing(what: str) -> ConfigError:
    """Return the error of one that needs the extra, where it is not installed."""
    return ConfigError(f"{what}: the package obstore is missing", hint="pip install 'penstock[object]'")


def object_client(url: str, options: Mapping[str, str] | None) -> "ObjectClient":
    """Return a client of one bucket or container, and there of one prefix.

    Raises:
        BaseError, ValueError: obstore can't make one of this URL.
    """
    return from_url(
        url,
        config=cast("S3Config", dict(options or {})),
        client_options={"allow_http": True, "timeout": REQUEST_TIMEOUT},
        retry_config={"max_retries": RETRIES, "retry_timeout": REQUEST_TIMEOUT},
    )


class ObjectName(NamedTuple):
    """What an object's name says."""

    key: bytes
    generation: int
    parent: bytes | None

    def text(self) -> str:
        parent = "-" if self.parent is None else self.parent.hex()
        return f"{self.key.hex()}.{self.generation}.{parent}"


def parse_name(text: str) -> ObjectName | None:
    """Return what a name says; None where the object is none of ours."""
    try:
        key, generation, parent = text.split(".")
        name = ObjectName(bytes.fromhex(key), int(generation), None if parent == "-" else bytes.fromhex(parent))
    except ValueError:
        return None
    return name if name.text() == text else None


class _Turn:
    """One block's request; `expired` once nobody waits for it."""

    def __init__(self, block: BlockIo) -> None:
        self.block = block
        self.begun = False
        self.expired = False


class ObjectStore:
    """A `BlockStore` of objects.

    Args:
        url: ``s3://BUCKET/PREFIX``, ``az://CONTAINER/PREFIX`` or ``gs://BUCKET/PREFIX``.
        block_bytes: of a payload.
        slots: how many blocks this handle may have.
        options: of the client, such as ``endpoint`` and ``access_key_id``; what is absent comes from the environment
            (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AZURE_STORAGE_ACCOUNT_NAME, ...).

    Raises:
        ConfigError: the extra is not installed, the URL is none, or the store can't be listed.
    Cost: opening lists the prefix, 1,000 objects in a request.
    """

    def __init__(self, url: str, block_bytes: int, slots: int, *, options: Mapping[str, str] | None = None) -> None:
        if not INSTALLED:
            raise missing("object tier")
        self.block_bytes = block_bytes
        self.slots = slots
        try:
            self._store = object_client(url, options)
            listed = list(chain.from_iterable(obstore.list(self._store)))
        except (BaseError, OSError, ValueError) as error:
            raise ConfigError(
                f"object tier: {url} can't be listed: {_cause(error)}",
                hint="check the URL, the endpoint (AWS_ENDPOINT_URL for S3) and the credentials",
            ) from error
        names = [
            name
            for each in sorted(listed, key=lambda each: each["last_modified"])
            if each["size"] == SIZE + block_bytes and (name := parse_name(each["path"].rpartition("/")[2]))
        ]
        if len(names) > slots:
            log.warning("object tier: %s has %d blocks; the %d newest are used", url, len(names), slots)
        self._names: dict[int, ObjectName] = dict(enumerate(names[-slots:]))
        """Per slot, the object of its block."""
        self._records = [StoredRecord(slot, *name) for slot, name in self._names.items()]
        self._permits = asyncio.Semaphore(CONCURRENCY)
        self._late: dict[asyncio.Task[BlockResult], int] = {}
        self._deletions: dict[str, asyncio.Task[None]] = {}
        self._waiting = 0
        self._pool = ThreadPoolExecutor(CHECK_THREADS, "penstock-object")

    async def write(self, blocks: Sequence[BlockIo], deadline: float) -> list[BlockResult]:
        return await self._run(blocks, self._write, deadline)

    async def read(self, blocks: Sequence[BlockIo], deadline: float) -> list[BlockResult]:
        return await self._run(blocks, self._read, deadline)

    def forget(self, slots: Sequence[int]) -> None:
        """Forget at once, and delete the objects; `close` waits for that."""
        for slot in slots:
            name = self._names.pop(slot, None)
            if name is not None:
                self._delete(name)

    def records(self) -> list[StoredRecord]:
        return self._records

    async def listed(self, after: str) -> tuple[list[ObjectName], str]:
        """List a part of the prefix, in the order of the names: what is there by now, of this handle or of others.

        Args:
            after: path after which it begins; empty begins from the start.
        Returns: at most `LISTED_MAX` blocks of this size, and the path after which the next part begins.
        Raises:
            OSError: the store can't be listed.
        """
        names: list[ObjectName] = []
        count = 0
        try:
            async for part in obstore.list(self._store, offset=after or None, chunk_size=LISTED_AT_ONCE):
                count += len(part)
                after = max(each["path"] for each in part)
                sized = (each["path"] for each in part if each["size"] == SIZE + self.block_bytes)
                names += [name for path in sized if (name := parse_name(path.rpartition("/")[2]))]
                if count >= LISTED_MAX:
                    return names, after
        except BaseError as error:
            raise OSError(_cause(error)) from error
        return names, ""

    def adopt(self, slot: int, name: ObjectName) -> None:
        """Let an empty slot be a block that another engine has stored."""
        self._names[slot] = name

    def busy(self) -> frozenset[int]:
        return frozenset(self._late.values())

    async def close(self) -> None:
        open_ones = [*self._late, *self._deletions.values()]
        if open_ones:
            await asyncio.wait(open_ones, timeout=REQUEST_TIMEOUT.total_seconds())
        self._pool.shutdown(wait=False)

    async def _run(
        self, blocks: Sequence[BlockIo], call: Callable[[_Turn], Awaitable[BlockResult]], deadline: float
    ) -> list[BlockResult]:
        if deadline <= 0:
            return [BlockResult("late", "the deadline had passed")] * len(blocks)
        turns = [_Turn(each) for each in blocks]
        tasks = [asyncio.ensure_future(self._in_turn(turn, call)) for turn in turns]
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=deadline)
        finally:
            for turn, task in zip(turns, tasks, strict=True):
                if not task.done():
                    turn.expired = True
                    if turn.begun:
                        self._late[task] = turn.block.slot
                        task.add_done_callback(self._late.pop)
                    else:
                        task.cancel()
        late = BlockResult("late", f"not done within {deadline:g} s")
        return [late if turn.expired else task.result() for turn, task in zip(turns, tasks, strict=True)]

    async def _in_turn(self, turn: _Turn, call: Callable[[_Turn], Awaitable[BlockResult]]) -> BlockResult:
        if cause := misfit(turn.block, self.slots, self.block_bytes):
            return BlockResult("failed", cause)
        if self._waiting >= QUEUE_LIMIT:
            return BlockResult("failed", f"{QUEUE_LIMIT} requests wait already")
        self._waiting += 1
        try:
            await self._permits.acquire()
        finally:
            self._waiting -= 1
        turn.begun = True
        try:
            return await call(turn)
        except FileNotFoundError:
            return BlockResult("absent")
        except (BaseError, OSError) as error:
            return BlockResult("failed", _cause(error))
        finally:
            self._permits.release()

    async def _write(self, turn: _Turn) -> BlockResult:
        block = turn.block
        name = ObjectName(block.key, block.generation, block.parent)
        loop = asyncio.get_running_loop()
        checksum = block.checksum
        if checksum is None:
            checksum = await loop.run_in_executor(self._pool, xxh3_64_intdigest, block.buffer)
        header = RecordHeader(block.slot, block.key, block.parent, self.block_bytes, block.generation, 0, checksum)
        if (deletion := self._deletions.get(name.text())) is not None:
            await asyncio.wait([deletion])
        before = self._names.pop(block.slot, None)
        if before is not None and before != name:
            self._delete(before)
        payload = bytes(block.buffer)  # the request may outlive the caller's interest in its buffer
        await obstore.put_async(self._store, name.text(), [pack_header(header), payload], use_multipart=False)
        if turn.expired:
            self._delete(name)
        else:
            self._names[block.slot] = name
        return BlockResult("ok", checksum=checksum)

    async def _read(self, turn: _Turn) -> BlockResult:
        block = turn.block
        name = self._names.get(block.slot)
        if name is None:
            return BlockResult("absent")
        if name.generation != block.generation:
            return BlockResult("stale", f"the slot's object has generation {name.generation}, not {block.generation}")
        size = SIZE + self.block_bytes
        # One byte more than a record has: a longer object is noticed and still not read whole.
        answer = await obstore.get_async(self._store, name.text(), options={"range": (0, size + 1)})
        raw = memoryview(await answer.bytes_async())
        if len(raw) != size:
            return BlockResult("corrupt", f"the object has {answer.meta['size']} bytes, not {size}")
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._take, turn, raw)

    def _take(self, turn: _Turn, raw: memoryview) -> BlockResult:
        """Check a record, and copy its payload where it is right and still wanted."""
        result = check_record(parse_header(raw[:SIZE]), turn.block, raw[SIZE:])
        if result.outcome == "ok" and not turn.expired:
            turn.block.buffer[:] = raw[SIZE:]
        return result

    def _delete(self, name: ObjectName) -> None:
        task = asyncio.ensure_future(self._deleted(name.text()))
        self._deletions[name.text()] = task
        task.add_done_callback(lambda _: self._deletions.pop(name.text(), None))

    async def _deleted(self, path: str) -> None:
        try:
            await obstore.delete_async(self._store, path)
        except FileNotFoundError:
            pass
        except (BaseError, OSError) as error:
            log.warning("object tier: %s could not be deleted: %s", path, _cause(error))


def _cause(error: Exception) -> str:
    """Return the first line of an error; the package's have a page of them."""
    return str(error).partition("\n")[0]

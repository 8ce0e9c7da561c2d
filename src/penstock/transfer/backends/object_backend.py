"""`ObjectBackend`: reads and writes objects of S3, Azure Blob or Google Cloud storage, by obstore (extra ``object``).

A read is a request of byte ranges. Object stores have no writes of a part: a transfer that covers an object is one
request, and any other one reads the object, changes it and writes it back, provided that nobody changed it meanwhile.
An object has no checksum of ours: blocks that must fail closed go through `ObjectStore`.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, cast

from penstock.kernel.errors import ConfigError
from penstock.transfer.descriptors import MemoryRegion
from penstock.transfer.storage.object_store import CONCURRENCY, INSTALLED, missing, object_client
from penstock.transfer.transfer_backend import BackendBase, Capabilities, TransferOrder
from penstock.transfer.transfer_status import PieceFailed, TransferStatus

if INSTALLED:
    import obstore
    from obstore.exceptions import BaseError

if TYPE_CHECKING:
    from obstore import UpdateVersion

BATCH_BYTES = 32 << 20
"""Of an object that one request reads: the answer is a copy before it is in the region."""


class ObjectBackend(BackendBase):
    """A client of one bucket or container, and there of one prefix.

    Args:
        url: ``s3://BUCKET/PREFIX``, ``az://ACCOUNT/CONTAINER/PREFIX`` or ``gs://BUCKET/PREFIX``.
        options: of the client, such as ``endpoint``; what is absent comes from the environment.

    Raises:
        ConfigError: the extra is not installed, or the URL is none.
    """

    name = "object"
    capabilities = Capabilities(kinds=frozenset({("dram", "object")}), reach="storage", notifications=False, rank=50)

    def __init__(self, url: str, options: Mapping[str, str] | None = None) -> None:
        if not INSTALLED:
            raise missing("object backend")
        try:
            self._store = object_client(url, options)
        except (BaseError, ValueError) as error:
            raise ConfigError(
                f"object backend: url {url!r}: {error}", hint="such as s3://BUCKET/PREFIX, with its credentials"
            ) from error
        self._permits = asyncio.Semaphore(CONCURRENCY)
        self._locks: dict[int, asyncio.Lock] = {}

    def registered(self, region: MemoryRegion) -> None:
        if region.kind == "object":
            self._locks[region.id] = asyncio.Lock()

    def deregistered(self, region: MemoryRegion) -> None:
        self._locks.pop(region.id, None)

    async def move(self, order: TransferOrder) -> None:
        async with asyncio.TaskGroup() as group:
            for id, positions in order.by_region().items():
                group.create_task(self._move_object(order, positions, id))

    async def _move_object(self, order: TransferOrder, positions: list[int], id: int) -> None:
        """Move the pieces of one object; what happens to one request happens to all of its pieces."""
        region = self.owner.regions.get(id)
        try:
            if region is None:
                raise PieceFailed(TransferStatus.NOT_FOUND, f"object region {id} was deregistered")
            if order.direction == "read":
                await self._read(order, positions, region)
            else:
                # Transfers of one agent to one object go one after the other, or each would undo the others.
                async with self._locks[id], self._permits:
                    await self._write(order, positions, region)
        except FileNotFoundError as error:
            _fail(order, positions, TransferStatus.NOT_FOUND, error)
        except (BaseError, OSError, ValueError) as error:
            _fail(order, positions, TransferStatus.BACKEND, error)
        except PieceFailed as error:
            _fail(order, positions, error.status, error)

    async def _read(self, order: TransferOrder, positions: list[int], region: MemoryRegion) -> None:
        start = 0
        while start < len(positions):
            batch: list[int] = []
            size = 0
            while start < len(positions) and (not batch or size + order.pieces[positions[start]].length <= BATCH_BYTES):
                batch.append(positions[start])
                size += order.pieces[positions[start]].length
                start += 1
            pieces = [order.pieces[position] for position in batch]
            async with self._permits:
                answers = await obstore.get_ranges_async(
                    self._store,
                    region.key,
                    starts=[piece.remote_offset for piece in pieces],
                    lengths=[piece.length for piece in pieces],
                )
            for position, piece, answer in zip(batch, pieces, answers):
                data = memoryview(answer).cast("B")
                if len(data) != piece.length:
                    ended = f"object {region.key!r} ends within a descriptor"
                    order.failed(position, PieceFailed(TransferStatus.NOT_FOUND, ended))
                    continue
                end = piece.local_offset + piece.length
                piece.local.bytes_of().data[piece.local_offset : end] = data
                order.succeeded(position)

    async def _write(self, order: TransferOrder, positions: list[int], region: MemoryRegion) -> None:
        pieces = [order.pieces[position] for position in positions]
        covered = 0
        for piece in sorted(pieces, key=lambda piece: piece.remote_offset):
            if piece.remote_offset > covered:
                break
            covered = max(covered, piece.remote_offset + piece.length)
        if covered >= region.info.size:
            body = bytearray(region.info.size)
            mode: Literal["overwrite"] | UpdateVersion = "overwrite"
        else:
            answer = await obstore.get_async(self._store, region.key)
            body = bytearray(await answer.bytes_async())
            if len(body) != region.info.size:
                raise PieceFailed(TransferStatus.MISMATCH, f"object {region.key!r} has {len(body)} bytes")
            versions = {"e_tag": answer.meta["e_tag"], "version": answer.meta["version"]}
            mode = cast("UpdateVersion", {name: each for name, each in versions.items() if each is not None})
        for piece in pieces:
            local = piece.local.bytes_of().data[piece.local_offset : piece.local_offset + piece.length]
            body[piece.remote_offset : piece.remote_offset + piece.length] = local
        await obstore.put_async(self._store, region.key, bytes(body), use_multipart=False, mode=mode)
        for position in positions:
            order.succeeded(position)


def _fail(order: TransferOrder, positions: Sequence[int], status: TransferStatus, error: Exception) -> None:
    cause = PieceFailed(status, str(error).partition("\n")[0])
    for position in positions:
        if order.statuses[position] == 1:
            order.failed(position, cause)

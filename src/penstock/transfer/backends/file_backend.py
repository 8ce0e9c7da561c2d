"""`FileBackend`: reads and writes files of this agent by positioned I/O in threads, direct where it is aligned."""

import os
from asyncio import gather
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from penstock.transfer.descriptors import MemoryRegion, TransferPiece
from penstock.transfer.transfer_backend import (
    BackendBase,
    Capabilities,
    Direction,
    TransferOrder,
    in_thread,
)
from penstock.transfer.transfer_status import PieceFailed, TransferStatus

THREADS = 8
"""Of one agent. Measured on a virtual disk: 4 reach the disk's limit with blocks from 256 KiB, 16 with 64 KiB."""
DIRECT_ALIGNMENT = 4096
"""Of offset, length and address for O_DIRECT: no disk in use has larger sectors."""


class FileBackend(BackendBase):
    """Carries transfers between memory and the agent's own files. Written bytes are not synced to the disk."""

    name = "file"
    capabilities = Capabilities(kinds=frozenset({("dram", "file")}), reach="storage", notifications=False, rank=20)

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="transfer-file")

    async def move(self, order: TransferOrder) -> None:
        files = {id: self.owner.regions.get(id) for id in {piece.remote.id for piece in order.pieces}}
        present = {id: region for id, region in files.items() if region is not None}
        for region in present.values():
            region.pins += 1
        try:
            turns = iter(range(len(order.pieces)))  # each thread takes the next piece; next() of one is atomic
            threads = [
                in_thread(order, _work, order, present, turns, executor=self._threads)
                for _ in range(min(THREADS, len(order.pieces)))
            ]
            for error in await gather(*threads, return_exceptions=True):  # the last one ends it, not the first fault
                if error is not None:
                    raise error
        finally:
            for region in present.values():
                region.pins -= 1

    async def close(self) -> None:
        self._threads.shutdown(wait=False)  # a hanging disk must not hold up the close


def _work(order: TransferOrder, files: dict[int, MemoryRegion], turns: Iterator[int]) -> None:
    for index in turns:
        if order.cancelled:
            return
        piece = order.pieces[index]
        try:
            if piece.remote.id not in files:
                raise PieceFailed(TransferStatus.NOT_FOUND, f"file region {piece.remote.id} was deregistered")
            move_piece(order.direction, piece, files[piece.remote.id])
        except (OSError, PieceFailed) as error:
            order.failed(index, error)
        else:
            order.succeeded(index)


def move_piece(direction: Direction, piece: TransferPiece, file: MemoryRegion) -> None:
    """Read or write one piece wholly.

    Raises:
        PieceFailed: the file has ended before the piece.
    """
    memory = piece.local.bytes_of()[piece.local_offset : piece.local_offset + piece.length]
    view, offset = memory.data, piece.remote_offset
    aligned = not (offset | piece.length | memory.ctypes.data) % DIRECT_ALIGNMENT
    fileno = file.direct_fd if aligned and file.direct_fd >= 0 else file.descriptor_fd
    while view:
        count = os.preadv(fileno, [view], offset) if direction == "read" else os.pwritev(fileno, [view], offset)
        if count == 0:
            raise PieceFailed(TransferStatus.NOT_FOUND, f"{file.path} ends at byte {offset}, within a descriptor")
        view, offset = view[count:], offset + count

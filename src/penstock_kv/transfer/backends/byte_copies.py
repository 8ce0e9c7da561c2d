"""Copies of a transfer's pieces between memory of this process: NumPy slices, or torch where a GPU has the bytes.

A slice copy of 256 KiB takes 18 us, of which NumPy needs less than 1 us, and it gives up the GIL. The C library copies
hundreds of megabytes at once past the caches, and blocks through them, for which their old bytes are read first: three
passes over the bus in place of two. So one thread gets two thirds of one large copy's speed from blocks of any size
(9.4 of 14.1 GB/s on an idle Xeon), and large transfers have several.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

from penstock_kv.transfer import vram
from penstock_kv.transfer.descriptors import MemoryRegion
from penstock_kv.transfer.transfer_backend import TransferOrder, in_thread
from penstock_kv.transfer.transfer_status import PieceFailed, TransferStatus

INLINE_BYTES = 1 << 20
"""Transfers up to this size are copied in the event loop: some 0.1 ms, as long as a thread takes to wake."""
THREADS = min(4, len(os.sched_getaffinity(0)))
"""Of one transfer: four cores copy what a memory channel or two can."""
SHARE_BYTES = 4 << 20
"""That a thread is woken for: half a millisecond of copying."""
WINDOW_BYTES = 64 << 20
"""Copies that a GPU is given before they are waited for: a millisecond of its bus, then a look at `cancelled`."""


async def copy_pieces(order: TransferOrder, regions: Mapping[int, MemoryRegion | None]) -> None:
    """Copy all pieces; the peer's regions are given by id, None for one that is gone."""
    for index, piece in enumerate(order.pieces):
        if regions[piece.remote.id] is None:
            order.failed(
                index,
                PieceFailed(TransferStatus.NOT_FOUND, f"{order.peer.name!r} has no region {piece.remote.id} any more"),
            )
    there = {id: region for id, region in regions.items() if region is not None}
    for region in there.values():
        region.pins += 1
    try:
        size = sum(piece.length for piece in order.pieces)
        # Looked at once: every thread would go through all pieces again.
        on_gpu = any(region.kind == "vram" for region in (*there.values(), *(piece.local for piece in order.pieces)))
        if size <= INLINE_BYTES:
            copy_now(order, there, order.open_pieces(), on_gpu)
        else:
            await _copy_in_threads(order, there, size, on_gpu)
    finally:
        for region in there.values():
            region.pins -= 1


async def _copy_in_threads(order: TransferOrder, there: Mapping[int, MemoryRegion], size: int, on_gpu: bool) -> None:
    threads = 1 if on_gpu else max(1, min(THREADS, size // SHARE_BYTES))
    pieces = order.open_pieces()
    shares = (in_thread(order, copy_now, order, there, pieces[part::threads], on_gpu) for part in range(threads))
    for result in await asyncio.gather(*shares, return_exceptions=True):  # also when cancelled: all threads have ended
        if isinstance(result, BaseException):
            raise result


def copy_now(order: TransferOrder, there: Mapping[int, MemoryRegion], indices: Sequence[int], on_gpu: bool) -> None:
    """Copy some pieces, until the order is cancelled."""
    if on_gpu:
        _copy_tensors(order, there, indices)
        return
    pieces, statuses, read = order.pieces, order.statuses, order.direction == "read"
    arrays = {id: region.bytes_of() for id, region in there.items()}
    for index in indices:
        if order.cancelled:
            return
        local, start, remote, offset, length = pieces[index]
        here, other = local.bytes_of(), arrays[remote.id]
        if read:
            here[start : start + length] = other[offset : offset + length]
        else:
            other[offset : offset + length] = here[start : start + length]
        statuses[index] = 0


def _copy_tensors(order: TransferOrder, there: Mapping[int, MemoryRegion], indices: Sequence[int]) -> None:
    tensors: dict[int, Any] = {}

    def tensor(region: MemoryRegion) -> Any:
        if id(region) not in tensors:
            tensors[id(region)] = vram.as_tensor(region.bytes_of()) if region.tensor is None else region.tensor
        return tensors[id(region)]

    under_way: list[int] = []
    size = 0

    def settle() -> None:
        vram.synchronise({each.device for each in tensors.values()})
        for index in under_way:
            order.succeeded(index)
        under_way.clear()

    for index in indices:
        if order.cancelled:
            break
        local, start, remote, offset, length = order.pieces[index]
        here = tensor(local)[start : start + length]
        other = tensor(there[remote.id])[offset : offset + length]
        target, source = (here, other) if order.direction == "read" else (other, here)
        target.copy_(source, non_blocking=True)
        under_way.append(index)
        size += length
        if size >= WINDOW_BYTES:
            settle()
            size = 0
    settle()

"""Descriptors of memory: a registered region, a part of one, and what another agent learns of it.

A descriptor names a region and an offset, never an address: each side checks it against the region's size before a byte
moves, and a peer's descriptor that outlives its region names nothing.
"""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from penstock_kv.transfer.transfer_status import TransferRefused, TransferStatus

MemoryKind = Literal["dram", "vram", "file"]
ByteArray = npt.NDArray[np.uint8]


class Descriptor(msgspec.Struct, frozen=True, array_like=True):
    """Bytes [offset, offset + length) of a region; ``region`` is its id at the agent that registered it."""

    region: int
    offset: int
    length: int


class RegionInfo(msgspec.Struct, frozen=True):
    """What a peer learns of a region: enough to check a descriptor, nothing to reach the memory with.

    Args:
        size: bytes.
        label: of the owner, for messages.
        writable: whether a peer may write.
    """

    id: int
    kind: MemoryKind
    size: int
    label: str = ""
    writable: bool = True


class MemoryRegion:
    """A region that this process registered.

    Args:
        array: dram: the bytes. Also what `SharedMemory` maps.
        path: of a file; for dram in shared memory, where other processes find it.
        descriptor_fd: open file of ``path``, or the memfd; -1 where there is none.
        tensor: vram: one-dimensional torch tensor of bytes.
        pinned: dram that is page-locked for copies with a GPU.
        pins: transfers that may still touch it; it can't be deregistered meanwhile.
    """

    __slots__ = ("array", "descriptor_fd", "info", "path", "pinned", "pins", "tensor")

    def __init__(
        self,
        info: RegionInfo,
        *,
        array: ByteArray | None = None,
        path: str = "",
        descriptor_fd: int = -1,
        tensor: Any = None,
        pinned: bool = False,
    ) -> None:
        self.info = info
        self.array = array
        self.path = path
        self.descriptor_fd = descriptor_fd
        self.tensor = tensor
        self.pinned = pinned
        self.pins = 0

    @property
    def id(self) -> int:
        return self.info.id

    @property
    def kind(self) -> MemoryKind:
        return self.info.kind

    @property
    def constant(self) -> bool:
        """Whether nobody can write it, this process included."""
        return self.array is not None and not self.array.flags.writeable

    def bytes_of(self) -> ByteArray:
        """Return the bytes of a dram region, shape (size,)."""
        if self.array is None:
            raise TransferRefused(TransferStatus.NOT_SUPPORTED, f"region {self.id} is {self.kind}, not dram")
        return self.array

    def descriptor(self, offset: int = 0, length: int | None = None) -> Descriptor:
        """Return a descriptor of a part; without ``length`` up to the end."""
        part = Descriptor(self.id, offset, self.info.size - offset if length is None else length)
        check_bounds(part, self.info)
        return part

    def blocks(self, indices: Iterable[int], block_bytes: int) -> list[Descriptor]:
        """Return a descriptor for each block of equal size."""
        return [self.descriptor(index * block_bytes, block_bytes) for index in indices]


class TransferPiece(NamedTuple):
    """One pair of equally long parts, checked: ``local`` of this process, ``remote`` of the peer."""

    local: MemoryRegion
    local_offset: int
    remote: RegionInfo
    remote_offset: int
    length: int


def check_bounds(part: Descriptor, region: RegionInfo) -> None:
    """Check that a descriptor has bytes, and only bytes of its region.

    Raises:
        TransferRefused: INVALID.
    """
    if part.length <= 0:
        raise TransferRefused(TransferStatus.INVALID, f"a descriptor of region {region.id} has {part.length} bytes")
    if part.offset < 0 or part.offset + part.length > region.size:
        raise TransferRefused(
            TransferStatus.INVALID,
            f"bytes [{part.offset}, {part.offset + part.length}) are not within region {region.id} {region.label!r}"
            f" of {region.size} bytes",
        )


def byte_array(buffer: Any) -> tuple[ByteArray, bool]:
    """Return the bytes of a contiguous buffer without a copy, and whether they may be written.

    Args:
        buffer: anything with the buffer protocol, such as a NumPy array, bytearray, mmap or memoryview.
    """
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise TransferRefused(TransferStatus.INVALID, "the buffer is not contiguous", hint="register a contiguous one")
    return np.frombuffer(view.cast("B"), np.uint8), not view.readonly

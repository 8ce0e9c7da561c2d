"""`TransferAgent`: registers memory, knows its peers by their metadata, and prepares transfers with them."""

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple

import msgspec

from penstock_kv.transfer.agent_metadata import AgentMetadata, check_shapes, decode_metadata
from penstock_kv.transfer.descriptors import (
    ByteArray,
    Descriptor,
    MemoryKind,
    MemoryRegion,
    RegionInfo,
    TransferPiece,
    byte_array,
    check_bounds,
)
from penstock_kv.transfer.layouts.kv_shape import KvShape
from penstock_kv.transfer.shared_memory import SharedMemory
from penstock_kv.transfer.transfer_backend import Direction, RemoteAgent, TransferBackend
from penstock_kv.transfer.transfer_handle import TransferHandle
from penstock_kv.transfer.transfer_status import PieceFailed, TransferRefused, TransferStatus
from penstock_kv.transfer.vram import is_on_gpu, pin, tensor_bytes, unpin

NOTIFICATIONS_LIMIT = 65_536
"""Notifications that nobody took; the oldest one goes and is counted. A decode worker takes some hundred per second."""
NOTIFICATION_BYTES_LIMIT = 64 << 20
"""Bytes of all of them: 1 KiB each, which names a request and its blocks, and four times the longest that a backend
carries."""
DEADLINE = 30.0
"""Seconds of a transfer without a deadline of its own: 30 GB at the 1 GB/s of a slow disk."""


class Notification(NamedTuple):
    """What a peer sent with a finished transfer, or by itself."""

    peer: str
    epoch: int
    payload: bytes


class TransferAgent:
    """One party of transfers, in one event loop.

    A restarted process makes an agent of the same name and a higher epoch: peers refuse transfers with the old
    metadata, and go on with the new one.

    Args:
        name: unique among the agents that meet.
        backends: tried in the order of their rank.
        shape: of the KV blocks in the regions; peers with another one are refused.
        epoch: default: the time of the start, in nanoseconds.
    """

    def __init__(
        self,
        name: str,
        backends: Sequence[TransferBackend],
        *,
        shape: KvShape | None = None,
        epoch: int | None = None,
    ) -> None:
        self.name = name
        self.epoch = time.time_ns() if epoch is None else epoch
        self.shape = shape
        self.notifications_dropped = 0
        self._backends = {each.name: each for each in sorted(backends, key=lambda each: each.capabilities.rank)}
        if len(self._backends) < len(backends):
            raise TransferRefused(TransferStatus.INVALID, f"two backends of {name!r} have the same name")
        self._regions: dict[int, MemoryRegion] = {}
        self._next_region = 1
        self._remotes: dict[str, RemoteAgent] = {}
        self._own = RemoteAgent(name, self.epoch, {}, {})
        self._active: set[TransferHandle] = set()
        self._notifications: deque[Notification] = deque()
        self._notification_bytes = 0
        self._notifying = threading.Lock()
        """Backends deliver in threads, as fast as peers send, whatever the event loop is doing."""
        self._arrived = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        for backend in self._backends.values():
            backend.attach(self)

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the backends; afterwards peers can reach this agent."""
        self._loop = asyncio.get_running_loop()
        for backend in self._backends.values():
            await backend.start()

    async def close(self) -> None:
        """Cancel what is active, wait until no memory is touched, and stop."""
        for handle in list(self._active):
            handle.cancel()
        for handle in list(self._active):
            await handle.settle()
        for backend in reversed(self._backends.values()):
            await backend.close()
        for region in list(self._regions.values()):
            self._drop(region)

    async def __aenter__(self) -> "TransferAgent":
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- regions ------------------------------------------------------------------------------------------------------

    @property
    def regions(self) -> Mapping[int, MemoryRegion]:
        """Return the registered regions by id. An id is never used again."""
        return MappingProxyType(self._regions)

    def register_memory(
        self, buffer: Any, *, label: str = "", writable: bool = True, pinned: bool = False
    ) -> MemoryRegion:
        """Register a contiguous buffer of this process, which stays valid as long as the region.

        Args:
            pinned: page-lock it while it is registered, for copies with a GPU (`vram.pin`).
        """
        array, mutable = byte_array(buffer)
        return self._register_dram(array, label, writable and mutable, pinned)

    def register_shared(
        self, shared: SharedMemory, *, label: str = "", writable: bool = True, pinned: bool = False
    ) -> MemoryRegion:
        """Register memory that other processes of this host can map; the caller closes it after the region."""
        place = {"path": shared.path, "descriptor_fd": shared.fileno}
        return self._register_dram(shared.array, label, writable, pinned, **place)

    def register_file(
        self, path: Path, *, size: int | None = None, label: str = "", writable: bool = True
    ) -> MemoryRegion:
        """Register a file.

        Args:
            size: make the file that long first, and create it where it is absent; default: it is as long as it is.
        """
        flags = (os.O_RDWR if writable else os.O_RDONLY) | (os.O_CREAT if size is not None else 0) | os.O_CLOEXEC
        file = os.open(path, flags, 0o600)
        if size is not None:
            os.ftruncate(file, size)
        length = os.fstat(file).st_size if size is None else size
        return self._register("file", length, label, writable, path=str(path), descriptor_fd=file)

    def register_tensor(self, tensor: Any, *, label: str = "", writable: bool = True) -> MemoryRegion:
        """Register a contiguous torch tensor: one on a GPU as vram, any other as dram."""
        flat = tensor_bytes(tensor)
        if not is_on_gpu(tensor):
            return self.register_memory(flat.numpy(), label=label, writable=writable)
        return self._register("vram", flat.numel(), label, writable, tensor=flat)

    def deregister(self, region: MemoryRegion) -> None:
        """Take a region back: peers that still name it are refused.

        Raises:
            TransferRefused: NOT_ALLOWED while a transfer may touch it.
        """
        if self._regions.get(region.id) is not region:
            raise TransferRefused(TransferStatus.NOT_FOUND, f"region {region.id} is not registered")
        if region.pins:
            raise TransferRefused(
                TransferStatus.NOT_ALLOWED,
                f"{region.pins} transfers may still touch region {region.id} {region.info.label!r}",
                hint="wait until their handles are not busy",
            )
        self._drop(region)

    def _drop(self, region: MemoryRegion) -> None:
        del self._regions[region.id], self._own.regions[region.id]
        for backend in self._backends.values():
            backend.deregistered(region)
        if region.pinned:
            unpin(region.bytes_of())
        if region.kind == "file":
            os.close(region.descriptor_fd)

    def _register_dram(self, array: ByteArray, label: str, writable: bool, pinned: bool, **place: Any) -> MemoryRegion:
        if pinned:
            pin(array)
        return self._register("dram", array.size, label, writable, array=array, pinned=pinned, **place)

    def _register(self, kind: MemoryKind, size: int, label: str, writable: bool, **place: Any) -> MemoryRegion:
        if size <= 0:
            raise TransferRefused(TransferStatus.INVALID, f"a region {label!r} of {size} bytes")
        region = MemoryRegion(RegionInfo(self._next_region, kind, size, label, writable), **place)
        self._next_region += 1
        self._regions[region.id] = region
        self._own.regions[region.id] = region.info
        for backend in self._backends.values():
            backend.registered(region)
        return region

    # --- peers --------------------------------------------------------------------------------------------------------

    def metadata(self) -> bytes:
        """Return what a peer's `add_remote` takes. Make it anew after regions have changed."""
        return AgentMetadata(
            name=self.name,
            epoch=self.epoch,
            digest="" if self.shape is None else self.shape.digest,
            shape=self.shape,
            regions=[region.info for region in self._regions.values()],
            parts={name: backend.metadata_part() for name, backend in self._backends.items()},
        ).encode()

    def add_remote(self, data: bytes) -> RemoteAgent:
        """Get to know a peer, or what is new about it; no connection is made. Parts of unknown backends are ignored.

        A higher epoch means that the peer was restarted: transfers with the old one fail, and new ones connect anew.

        Raises:
            TransferRefused: it can't be read, its KV shape differs, or a later epoch is known.
        """
        metadata = decode_metadata(data)
        if metadata.name == self.name:
            raise TransferRefused(TransferStatus.INVALID, f"a peer has this agent's own name, {self.name!r}")
        check_shapes(self.shape, metadata)
        regions = {region.id: region for region in metadata.regions}
        known = self._remotes.get(metadata.name)
        if known is not None and known.epoch == metadata.epoch:
            known.regions, known.parts = regions, metadata.parts
            return known
        if known is not None:
            if known.epoch > metadata.epoch:
                raise TransferRefused(
                    TransferStatus.MISMATCH,
                    f"{metadata.name!r} was restarted since this metadata was made",
                    hint="get its metadata again",
                )
            self.remove_remote(metadata.name)
        self._remotes[metadata.name] = RemoteAgent(metadata.name, metadata.epoch, regions, metadata.parts)
        return self._remotes[metadata.name]

    def remove_remote(self, name: str) -> None:
        """Forget a peer: its active transfers fail, its connections close."""
        peer = self._remotes.pop(name, None)
        if peer is None:
            raise TransferRefused(TransferStatus.NOT_FOUND, f"there is no peer {name!r}")
        gone = PieceFailed(TransferStatus.DISCONNECTED, f"{name!r} with epoch {peer.epoch} was removed or restarted")
        for handle in [each for each in self._active if each.peer is peer]:
            handle.fail(gone, TransferStatus.DISCONNECTED)
        for backend in self._backends.values():
            backend.disconnect(peer)

    def remote(self, name: str) -> RemoteAgent:
        """Return a peer; by its own name the agent itself, which is how its files are reached."""
        if name == self.name:
            self._own.parts = {each.name: each.metadata_part() for each in self._backends.values()}
            return self._own
        if name not in self._remotes:
            raise TransferRefused(
                TransferStatus.NOT_FOUND, f"there is no peer {name!r}", hint="add its metadata by add_remote first"
            )
        return self._remotes[name]

    # --- transfers ----------------------------------------------------------------------------------------------------

    def prepare(
        self,
        direction: Direction,
        local: Sequence[Descriptor],
        remote: Sequence[Descriptor],
        peer: str,
        *,
        notification: bytes | None = None,
        deadline: float = DEADLINE,
        backend: str | None = None,
        checksums: Sequence[int] | None = None,
    ) -> TransferHandle:
        """Check everything about a transfer and choose its backend; nothing moves before the handle is posted.

        Args:
            local: parts of this agent's regions, shape (n,).
            remote: parts of the peer's regions, shape (n,); each as long as its counterpart.
            notification: for the peer, after all descriptors succeeded.
            deadline: seconds from the post to the last byte.
            backend: the only one to try; default: the first by rank that can.
            checksums: of a read into dram: XXH3-64 that each descriptor's bytes must have, shape (n,); else it fails.

        Raises:
            TransferRefused: INVALID, NOT_FOUND, NOT_ALLOWED or NOT_SUPPORTED; the message names the descriptor.
        """
        other = self.remote(peer)
        if not deadline > 0:
            raise TransferRefused(TransferStatus.INVALID, f"the deadline is {deadline} s", hint="it is above 0")
        if not local or len(local) != len(remote):
            raise TransferRefused(
                TransferStatus.INVALID,
                f"{len(local)} local and {len(remote)} remote descriptors",
                hint="as many of both",
            )
        if checksums is not None and (direction != "read" or len(checksums) != len(local)):
            raise TransferRefused(
                TransferStatus.INVALID,
                f"{len(checksums)} checksums for a {direction} of {len(local)} descriptors",
                hint="give a read one for each, or none",
            )
        pieces = [self._piece(index, *pair, other) for index, pair in enumerate(zip(local, remote))]
        infos = {piece.remote.id: piece.remote for piece in pieces}
        regions = {piece.local.id: piece.local for piece in pieces}
        if direction == "write":
            fixed = [info for info in infos.values() if not info.writable]
        else:  # what a peer may not write this agent itself may, unless the buffer is constant
            fixed = [each.info for each in regions.values() if each.constant]
        for region in fixed:
            raise TransferRefused(TransferStatus.NOT_ALLOWED, f"region {region.id} {region.label!r} is read-only")
        chosen = self.negotiate(other, list(regions.values()), list(infos.values()), notification is not None, backend)
        return TransferHandle(
            self,
            chosen,
            direction,
            other,
            pieces,
            deadline=deadline,
            notification=notification,
            checksums=checksums,
        )

    def negotiate(
        self,
        peer: RemoteAgent,
        local: Sequence[MemoryRegion],
        remote: Sequence[RegionInfo],
        notify: bool = False,
        backend: str | None = None,
    ) -> TransferBackend:
        """Return the first backend by rank that reaches these regions.

        Raises:
            TransferRefused: NOT_SUPPORTED, with each backend's reason.
        """
        reasons = []
        for name, each in self._backends.items():
            if backend is None or name == backend:
                reason = self._refusal(each, peer, local, remote, notify)
                if reason is None:
                    return each
                reasons.append(f"{name}: {reason}")
        if not reasons:
            reasons = [f"{self.name!r} has {', '.join(self._backends) or 'no backends'}, not {backend}"]
        raise TransferRefused(
            TransferStatus.NOT_SUPPORTED, f"no way to the regions of {peer.name!r}: {'; '.join(reasons)}"
        )

    def _refusal(
        self,
        backend: TransferBackend,
        peer: RemoteAgent,
        local: Sequence[MemoryRegion],
        remote: Sequence[RegionInfo],
        notify: bool,
    ) -> str | None:
        kinds = {(mine.kind, theirs.kind) for mine in local for theirs in remote} - backend.capabilities.kinds
        if kinds:
            return "it can't move " + ", ".join(sorted(f"{mine} to or from {theirs}" for mine, theirs in kinds))
        if backend.capabilities.reach == "storage" and peer is not self._own:
            return "it reaches this agent's own storage only"
        if backend.name not in peer.parts:
            return f"{peer.name!r} does not have it"
        if notify and not backend.capabilities.notifications:
            return "it can't notify"
        try:
            return backend.refusal(peer, local, remote)
        except msgspec.MsgspecError as error:
            return f"its part of the metadata can't be read: {error}"

    def _piece(self, index: int, mine: Descriptor, theirs: Descriptor, peer: RemoteAgent) -> TransferPiece:
        region, info = self._regions.get(mine.region), peer.regions.get(theirs.region)
        if region is None or info is None:
            owner, id = (self.name, mine.region) if region is None else (peer.name, theirs.region)
            raise TransferRefused(TransferStatus.NOT_FOUND, f"descriptor {index}: {owner!r} has no region {id}")
        length = mine.length
        if length != theirs.length:
            raise TransferRefused(
                TransferStatus.INVALID, f"descriptor {index}: {length} bytes here, {theirs.length} bytes there"
            )
        if not (0 < length <= region.info.size - mine.offset and mine.offset >= 0):
            check_bounds(mine, region.info)
        if not (length <= info.size - theirs.offset and theirs.offset >= 0):
            check_bounds(theirs, info)
        return TransferPiece(region, mine.offset, info, theirs.offset, length)

    def check_current(self, peer: RemoteAgent) -> None:
        """Refuse where the peer of a prepared transfer has left, or was restarted."""
        if peer is not self._own and self._remotes.get(peer.name) is not peer:
            raise TransferRefused(
                TransferStatus.MISMATCH,
                f"{peer.name!r} with epoch {peer.epoch} was removed or restarted",
                hint="prepare the transfer again",
            )

    def check_registered(self, pieces: Sequence[TransferPiece]) -> None:
        """Refuse where a local region of a prepared transfer was deregistered."""
        for region in {piece.local.id: piece.local for piece in pieces}.values():
            if self._regions.get(region.id) is not region:
                raise TransferRefused(TransferStatus.NOT_FOUND, f"region {region.id} was deregistered")

    def began(self, handle: TransferHandle) -> None:
        self._active.add(handle)

    def settled(self, handle: TransferHandle) -> None:
        self._active.discard(handle)

    # --- notifications ------------------------------------------------------------------------------------------------

    async def notify(self, peer: str, payload: bytes, *, deadline: float = DEADLINE) -> None:
        """Send a notification of its own, by the first backend that can and that the peer has."""
        other = self.remote(peer)
        for backend in self._backends.values():
            able = backend.capabilities.notifications and backend.name in other.parts
            if able and backend.refusal(other, (), ()) is None:
                async with asyncio.timeout(deadline):
                    await backend.notify(other, payload)
                return
        raise TransferRefused(TransferStatus.NOT_SUPPORTED, f"no backend can notify {peer!r}")

    def deliver(self, peer: str, epoch: int, payload: bytes) -> None:
        """Take a notification from a backend, in any thread."""
        known = self._remotes.get(peer)
        if self._loop is None or self._loop.is_closed() or (known is not None and known.epoch > epoch):
            return  # of the peer's life before its restart, or of ours
        with self._notifying:
            first = not self._notifications
            self._notifications.append(Notification(peer, epoch, payload))
            self._notification_bytes += len(payload)
            while len(self._notifications) > NOTIFICATIONS_LIMIT or self._notification_bytes > NOTIFICATION_BYTES_LIMIT:
                self._notification_bytes -= len(self._notifications.popleft().payload)
                self.notifications_dropped += 1
        if first:
            self._loop.call_soon_threadsafe(self._arrived.set)

    def take_notifications(self) -> list[Notification]:
        """Return the notifications that arrived, in order, and forget them."""
        with self._notifying:
            taken = list(self._notifications)
            self._notifications.clear()
            self._notification_bytes = 0
        return taken

    async def wait_for_notifications(self) -> list[Notification]:
        """Wait for at least one notification; the caller sets the deadline."""
        while not (taken := self.take_notifications()):
            self._arrived.clear()
            await self._arrived.wait()
        return taken

"""`TransferBackend`: the Protocol behind which memcpy, shared memory, TCP and NIXL carry transfers."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec
from xxhash import xxh3_64_intdigest

from penstock_kv.transfer.descriptors import MemoryKind, MemoryRegion, RegionInfo, TransferPiece
from penstock_kv.transfer.transfer_status import PieceFailed, TransferStatus

Direction = Literal["read", "write"]
"""``read`` copies from the peer to here, ``write`` from here to the peer."""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend can do.

    Args:
        kinds: pairs (kind of the local region, kind of the peer's region).
        reach: how far: the same process, the same host, or the network. Storage is of the agent itself.
        notifications: whether the peer can be told.
        rank: of two that could carry a transfer, the lower one does.
        checks: whether it compares the checksums of an order while the bytes arrive; else the handle does it after.
    """

    kinds: frozenset[tuple[MemoryKind, MemoryKind]]
    reach: Literal["process", "host", "network", "storage"]
    notifications: bool
    rank: int
    checks: bool = False


@dataclass(slots=True)
class RemoteAgent:
    """Another agent as its metadata describes it.

    Args:
        epoch: of its start; a restarted agent has a higher one.
        regions: by id.
        parts: backend's name -> its part of the metadata; of unknown backends, too.
    """

    name: str
    epoch: int
    regions: dict[int, RegionInfo]
    parts: dict[str, bytes]


@dataclass(slots=True)
class TransferOrder:
    """A posted transfer as a backend sees it. Reports may come from any thread, one per piece.

    Args:
        seconds: until its deadline, from the post on.
        checksums: XXH3-64 that each piece of a read must have, shape as ``pieces``; None where nobody knows.
        cancelled: nobody wants the result any more: stop as soon as you can.
    """

    direction: Direction
    peer: RemoteAgent
    pieces: Sequence[TransferPiece]
    seconds: float
    checksums: Sequence[int] | None = None
    statuses: bytearray = field(init=False)
    errors: dict[int, BaseException] = field(default_factory=dict)
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.statuses = bytearray(b"\1") * len(self.pieces)

    def succeeded(self, index: int) -> None:
        """Report that a piece's bytes are all at their target."""
        self.statuses[index] = 0

    def failed(self, index: int, error: BaseException) -> None:
        """Report that a piece did not arrive; a `PieceFailed` says its status, any other error is BACKEND."""
        self.statuses[index] = 2
        self.errors[index] = error

    def failed_rest(self, error: BaseException) -> None:
        """Report a cause for all pieces without a report, such as a lost connection."""
        for index in self.open_pieces():
            self.failed(index, error)

    def check(self) -> None:
        """Compare what arrived in dram with the checksums, at some 10 GB/s; a piece that has another one failed."""
        for index, checksum in enumerate(self.checksums or ()):
            piece = self.pieces[index]
            if self.cancelled:
                return
            if self.statuses[index] == 0:
                arrived = piece.local.bytes_of()[piece.local_offset : piece.local_offset + piece.length]
                if xxh3_64_intdigest(arrived.data) != checksum:
                    self.failed(index, PieceFailed(TransferStatus.MISMATCH, "what arrived has another checksum"))

    def open_pieces(self) -> list[int]:
        """Return the pieces without a report."""
        return [index for index, status in enumerate(self.statuses) if status == 1]

    def by_region(self) -> dict[int, list[int]]:
        """Return the places of the pieces, by the id of the peer's region."""
        places: dict[int, list[int]] = {}
        for place, piece in enumerate(self.pieces):
            places.setdefault(piece.remote.id, []).append(place)
        return places


class LocalAgent(Protocol):
    """What a backend needs of the agent that it belongs to. Its calls come from, and go to, the agent's event loop."""

    name: str
    epoch: int

    @property
    def regions(self) -> Mapping[int, MemoryRegion]:
        """Return what is registered now: a server of peers' requests checks against this, not against metadata."""
        ...

    def metadata(self) -> bytes:
        """Return what peers need to know of the agent."""
        ...

    def deliver(self, peer: str, epoch: int, payload: bytes) -> None:
        """Take a notification of a peer. Any thread may call it."""
        ...


class TransferBackend(Protocol):
    """Carries transfers. One agent owns it; `attach` comes first, once, and `start` before the first transfer."""

    name: str
    capabilities: Capabilities

    def attach(self, owner: LocalAgent) -> None:
        """Remember the agent."""
        ...

    async def start(self) -> None:
        """Open what peers connect to; afterwards `metadata_part` is complete."""
        ...

    def registered(self, region: MemoryRegion) -> None:
        """Prepare a region, of any kind: one that it can't use it ignores."""
        ...

    def deregistered(self, region: MemoryRegion) -> None:
        """Undo `registered`; no transfer of ours touches the region any more, and peers' requests must be refused."""
        ...

    def metadata_part(self) -> bytes:
        """Return what a peer's backend of the same name needs to reach this one; no secrets."""
        ...

    def refusal(self, peer: RemoteAgent, local: Sequence[MemoryRegion], remote: Sequence[RegionInfo]) -> str | None:
        """Return why these regions of the peer can't be reached, or None. Kinds are checked before. Does no I/O.

        ``peer`` may be the agent itself: that is how files are named.
        """
        ...

    async def move(self, order: TransferOrder) -> None:
        """Move all pieces and report each; returns when nothing touches the memory any more.

        A fault of one piece is reported and the others go on. What is raised is the cause of all pieces without a
        report. The task is cancelled where the handle is, or its deadline has passed: it then ends as soon as it can,
        but not before a thread of its own has let go of the memory.
        """
        ...

    async def notify(self, peer: RemoteAgent, payload: bytes) -> None:
        """Deliver a notification after everything that was moved before. Raises where the peer did not get it."""
        ...

    def disconnect(self, peer: RemoteAgent) -> None:
        """Forget connections to this epoch of a peer."""
        ...

    async def close(self) -> None:
        """Stop; peers' requests are refused from here on."""
        ...


class BackendBase:
    """A `TransferBackend` that has nothing to open, prepare or tell, as storage of the agent itself."""

    _owner: LocalAgent | None = None

    @property
    def owner(self) -> LocalAgent:
        assert self._owner is not None, "attach comes first"
        return self._owner

    def attach(self, owner: LocalAgent) -> None:
        self._owner = owner

    async def start(self) -> None:
        """Nothing to open."""

    def registered(self, region: MemoryRegion) -> None:
        """Nothing to prepare: a transfer looks its regions up."""

    def deregistered(self, region: MemoryRegion) -> None:
        """Nothing to undo."""

    def metadata_part(self) -> bytes:
        return b""

    def refusal(self, peer: RemoteAgent, local: Sequence[MemoryRegion], remote: Sequence[RegionInfo]) -> str | None:
        return None

    async def notify(self, peer: RemoteAgent, payload: bytes) -> None:
        raise PieceFailed(TransferStatus.NOT_SUPPORTED, "storage has nobody to notify")

    def disconnect(self, peer: RemoteAgent) -> None:
        """Nothing is connected."""

    async def close(self) -> None:
        """Nothing is open."""


async def in_thread(
    order: TransferOrder, work: Callable[..., None], *arguments: Any, executor: Executor | None = None
) -> None:
    """Run blocking work of a transfer in a thread, and end only when the thread has.

    A cancelled task sets ``order.cancelled``, which the work reads between its pieces.
    """
    task = asyncio.get_running_loop().run_in_executor(executor, work, *arguments)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        order.cancelled = True
        while not task.done():  # a second cancel must not free the memory early
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                continue
        raise


def status_of(error: BaseException) -> TransferStatus:
    """Return the status that an error of a backend means."""
    if isinstance(error, PieceFailed):
        return error.status
    if isinstance(error, ConnectionError | EOFError):
        return TransferStatus.DISCONNECTED
    return TransferStatus.BACKEND

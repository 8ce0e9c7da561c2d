"""`TransferConnector`: operations between two processes: one offers memory, the other reads or writes it.

The shape is that of Dynamo's Python connector: the passive side creates a readable or writable operation and sends its
`RdmaMetadata`; the active side begins a read or write with it; both wait for completion.
"""

import asyncio
import itertools
from collections.abc import Sequence
from types import TracebackType
from typing import Any, ClassVar, Literal

import msgspec

from penstock.transfer.descriptors import Descriptor, MemoryRegion, check_bounds
from penstock.transfer.transfer_agent import DEADLINE, Notification, TransferAgent
from penstock.transfer.transfer_backend import Direction
from penstock.transfer.transfer_handle import TransferHandle
from penstock.transfer.transfer_status import (
    TransferFailed,
    TransferRefused,
    TransferState,
    TransferStatus,
)

Access = Literal["readable", "writable"]


class RdmaMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What the passive side sends to the active side, by any way: an HTTP body, ``kv_transfer_params``.

    Args:
        agent: metadata of the passive agent.
        access: what the active side may do.
        descriptors: of the passive agent's regions.
        completion: the notification that tells the passive side of the end.
    """

    agent: bytes
    access: Access
    descriptors: list[Descriptor]
    completion: bytes

    def to_json(self) -> str:
        """Return the metadata as JSON text."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> "RdmaMetadata":
        """Read metadata.

        Raises:
            TransferRefused: INVALID.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise TransferRefused(TransferStatus.INVALID, "the metadata of an operation can't be read") from error


class _Operation:
    """What passive and active operations share: the memory that they registered themselves."""

    def __init__(self, connector: "TransferConnector", data: Sequence[Any]) -> None:
        self._agent = connector.agent
        self._own: list[MemoryRegion] = []
        try:
            self.descriptors = [self._descriptor(each) for each in data]
        except BaseException:
            self._deregister()
            raise

    def _descriptor(self, data: Any) -> Descriptor:
        if isinstance(data, Descriptor):
            return data
        tensor = hasattr(data, "data_ptr")
        region = self._agent.register_tensor(data) if tensor else self._agent.register_memory(data)
        self._own.append(region)
        return region.descriptor()

    def _deregister(self) -> None:
        while self._own:
            self._agent.deregister(self._own[-1])
            self._own.pop()

    async def release(self) -> None:
        """Give the operation up, and deregister the buffers that it registered."""
        raise NotImplementedError

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.release()


class PassiveOperation(_Operation):
    """Memory that the peer may read or write once; it is complete when the peer's notification comes.

    A peer that fails or goes away sends none: the deadline ends the wait.
    """

    access: ClassVar[Access]

    def __init__(self, connector: "TransferConnector", data: Sequence[Any], deadline: float, completion: bytes) -> None:
        super().__init__(connector, data)
        try:
            self._check()
        except TransferRefused:
            self._deregister()
            raise
        self.status = TransferState.POSTED
        self._completion = completion
        self._arrived = asyncio.Event()
        self._end = asyncio.get_running_loop().time() + deadline
        self._agent.listen(completion, self._complete)

    def _check(self) -> None:
        if not self.descriptors:
            raise TransferRefused(TransferStatus.INVALID, f"a {self.access} operation has no descriptors")
        for each in self.descriptors:
            region = self._agent.regions.get(each.region)
            if region is None:
                raise TransferRefused(TransferStatus.NOT_FOUND, f"region {each.region} is not registered")
            check_bounds(each, region.info)
            if self.access == "writable" and not region.info.writable:
                raise TransferRefused(TransferStatus.NOT_ALLOWED, f"region {region.id} is read-only")

    def metadata(self) -> RdmaMetadata:
        """Return what the active side needs."""
        return RdmaMetadata(
            agent=self._agent.metadata(),
            access=self.access,
            descriptors=self.descriptors,
            completion=self._completion,
        )

    async def wait_for_completion(self) -> None:
        """Wait for the peer.

        Raises:
            TransferFailed: the deadline has passed or the operation was cancelled; written bytes are undefined.
        """
        try:
            async with asyncio.timeout_at(self._end):
                await self._arrived.wait()
        except TimeoutError:
            self._finish(TransferState.FAILED)
        if self.status is not TransferState.DONE:
            raise TransferFailed(f"the {self.access} operation is {self.status}: its peer did not complete it", [])

    def cancel(self) -> None:
        """Stop waiting. A peer that has begun goes on until `release` is possible."""
        self._finish(TransferState.CANCELLED)

    async def release(self) -> None:
        """Deregister the buffers of this operation.

        Raises:
            TransferRefused: NOT_ALLOWED while the peer may touch them.
        """
        self._finish(TransferState.CANCELLED)
        self._deregister()
        self.status = TransferState.RELEASED

    def _complete(self, notification: Notification) -> None:
        self._finish(TransferState.DONE)

    def _finish(self, state: TransferState) -> None:
        if self.status is TransferState.POSTED:
            self.status = state
            self._agent.listen(self._completion, None)
            self._arrived.set()


class ReadableOperation(PassiveOperation):
    """Memory that the peer may read."""

    access = "readable"


class WritableOperation(PassiveOperation):
    """Memory that the peer may write."""

    access = "writable"


class ActiveOperation(_Operation):
    """A read or write of memory that the peer offers; it has begun when it exists."""

    direction: ClassVar[Direction]

    def __init__(
        self, connector: "TransferConnector", remote: RdmaMetadata, data: Sequence[Any], deadline: float
    ) -> None:
        if remote.access != ("readable" if self.direction == "read" else "writable"):
            raise TransferRefused(
                TransferStatus.NOT_ALLOWED, f"a {self.direction} of an operation that is {remote.access}"
            )
        super().__init__(connector, data)
        try:
            peer = self._agent.add_remote(remote.agent).name
            lists = self.descriptors, remote.descriptors
            self.handle: TransferHandle = self._agent.prepare(
                self.direction, *lists, peer, notification=remote.completion, deadline=deadline
            )
            self.handle.post()
        except TransferRefused:
            self._deregister()
            raise

    @property
    def status(self) -> TransferState:
        return self.handle.state

    async def wait_for_completion(self) -> None:
        """Wait for the end.

        Raises:
            TransferFailed: with the results of all descriptors.
        """
        await self.handle.wait()
        self.handle.raise_for_failure()

    def cancel(self) -> None:
        """Stop; returns at once."""
        self.handle.cancel()

    async def release(self) -> None:
        """Cancel what is active, wait until the memory is free, and deregister the buffers of this operation."""
        self.handle.release()
        await self.handle.settle()
        self._deregister()


class ReadOperation(ActiveOperation):
    """Reads what the peer's `ReadableOperation` offers."""

    direction = "read"


class WriteOperation(ActiveOperation):
    """Writes to where the peer's `WritableOperation` lets."""

    direction = "write"


class TransferConnector:
    """Creates and begins operations over one agent.

    ``data`` is a sequence of descriptors of the agent's regions, or of buffers and tensors, which an operation
    registers until its release. Deadlines are seconds from the call.
    """

    def __init__(self, agent: TransferAgent) -> None:
        self.agent = agent
        self._numbers = itertools.count(1)

    async def create_readable(self, data: Sequence[Any], *, deadline: float = DEADLINE) -> ReadableOperation:
        """Offer memory for one read."""
        return ReadableOperation(self, data, deadline, self._completion())

    async def create_writable(self, data: Sequence[Any], *, deadline: float = DEADLINE) -> WritableOperation:
        """Offer memory for one write."""
        return WritableOperation(self, data, deadline, self._completion())

    async def begin_read(
        self, remote: RdmaMetadata, data: Sequence[Any], *, deadline: float = DEADLINE
    ) -> ReadOperation:
        """Begin to read what a peer offers into ``data``, after everything was checked.

        Raises:
            TransferRefused: nothing has moved.
        """
        return ReadOperation(self, remote, data, deadline)

    async def begin_write(
        self, remote: RdmaMetadata, data: Sequence[Any], *, deadline: float = DEADLINE
    ) -> WriteOperation:
        """Begin to write ``data`` to where a peer lets, after everything was checked.

        Raises:
            TransferRefused: nothing has moved.
        """
        return WriteOperation(self, remote, data, deadline)

    def _completion(self) -> bytes:
        return f"operation {next(self._numbers)} of {self.agent.name} {self.agent.epoch}".encode()

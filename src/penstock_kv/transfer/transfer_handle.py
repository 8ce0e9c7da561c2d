"""`TransferHandle`: one prepared transfer, which is posted, awaited, cancelled and posted again."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from penstock_kv.transfer.descriptors import MemoryRegion, TransferPiece
from penstock_kv.transfer.transfer_backend import (
    Direction,
    RemoteAgent,
    TransferBackend,
    TransferOrder,
    in_thread,
    status_of,
)
from penstock_kv.transfer.transfer_status import (
    STEPS,
    DescriptorResult,
    PieceFailed,
    TransferFailed,
    TransferRefused,
    TransferState,
    TransferStatus,
    causes,
)

_LATE = "the deadline passed"


class TransferOwner(Protocol):
    """What a handle needs of its agent."""

    def check_current(self, peer: RemoteAgent) -> None:
        """Refuse where the peer has left or was restarted."""
        ...

    def check_registered(self, pieces: Sequence[TransferPiece]) -> None:
        """Refuse where a local region was deregistered."""
        ...

    def began(self, handle: "TransferHandle") -> None: ...
    def settled(self, handle: "TransferHandle") -> None: ...


class TransferHandle:
    """A transfer between checked descriptors. `TransferAgent.prepare` makes it; one event loop uses it.

    Several transfers have no order among each other and lock no memory. Bytes of a target count once its descriptor
    succeeded; until `busy` is False a transfer that ended badly may still write to it.

    Args:
        backend: that carries it.
        deadline: seconds that a post may take, the notification included.
    """

    def __init__(
        self,
        owner: TransferOwner,
        backend: TransferBackend,
        direction: Direction,
        peer: RemoteAgent,
        pieces: Sequence[TransferPiece],
        *,
        deadline: float,
        notification: bytes | None,
        checksums: Sequence[int] | None,
    ) -> None:
        self.state = TransferState.NEW
        self.backend = backend
        self.direction = direction
        self.peer = peer
        self.deadline = deadline
        self.notification = notification
        self.error: BaseException | None = None
        self._owner = owner
        self._pieces = pieces
        self._checksums = checksums
        self._regions: list[MemoryRegion] = list({piece.local.id: piece.local for piece in pieces}.values())
        self._order: TransferOrder | None = None
        self._statuses = b""
        self._missed = TransferStatus.NOT_POSTED
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ended = asyncio.Event()

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def bytes_total(self) -> int:
        return sum(piece.length for piece in self._pieces)

    @property
    def busy(self) -> bool:
        """Tell whether the backend may still touch the memory."""
        return self._task is not None

    def post(self) -> None:
        """Begin to move; returns at once.

        Raises:
            TransferRefused: REPOST_ACTIVE, or the peer's epoch or a local region is another than at `prepare`.
        """
        if self.state is TransferState.POSTED or self.busy:
            raise TransferRefused(
                TransferStatus.REPOST_ACTIVE, "the transfer is active", hint="wait until busy is False"
            )
        after = self._after("post")
        self._owner.check_current(self.peer)
        self._owner.check_registered(self._pieces)
        self._missed = TransferStatus.UNKNOWN
        self.error = None
        self._statuses = b""
        self._ended.clear()
        self._order = TransferOrder(self.direction, self.peer, self._pieces, self.deadline, self._checksums)
        self.state = after
        for region in self._regions:
            region.pins += 1
        self._owner.began(self)
        self._task = asyncio.create_task(self._carry(self._order))
        self._task.add_done_callback(self._let_go)
        self._timer = asyncio.get_running_loop().call_later(self.deadline, self._expire)

    async def wait(self) -> TransferState:
        """Wait until the transfer is done, failed or cancelled; at most until its deadline."""
        if self.state is TransferState.NEW:
            raise TransferRefused(TransferStatus.NOT_POSTED, "the transfer was not posted")
        await self._ended.wait()
        return self.state

    async def wait_settled(self) -> TransferState:
        """Wait until the transfer has ended and nothing touches its memory; a cancelled task cancels it first."""
        try:
            await self.wait()
        except asyncio.CancelledError:
            self.cancel()
            while self.busy:
                try:
                    await self.settle()
                except asyncio.CancelledError:
                    continue
            raise
        await self.settle()
        return self.state

    async def settle(self) -> None:
        """Wait until the backend has let go of the memory, which a hanging disk can delay past the deadline."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def results(self) -> list[DescriptorResult]:
        """Return what came of each descriptor of the last post, in order."""
        if self._order is None:
            return [DescriptorResult(TransferStatus.NOT_POSTED)] * len(self._pieces)
        if self.state is TransferState.POSTED:
            return [self._result(index, TransferStatus.IN_PROGRESS) for index in range(len(self._pieces))]
        return [self._result(index, self._missed) for index in range(len(self._pieces))]

    def raise_for_failure(self) -> None:
        """Raise unless the transfer is done.

        Raises:
            TransferFailed: how many descriptors failed, the first cause, and all results.
        """
        if self.state is TransferState.DONE:
            return
        results = self.results()
        bad = [index for index, result in enumerate(results) if result.status is not TransferStatus.SUCCESS]
        first = f", first {bad[0]}: {results[bad[0]].cause or results[bad[0]].status.name.lower()}" if bad else ""
        cause = "" if self.error is None or first else f": {'; from '.join(causes(self.error))}"
        raise TransferFailed(
            f"{self.direction} of {len(results)} descriptors {'from' if self.direction == 'read' else 'to'}"
            f" {self.peer.name!r} by {self.backend.name} is {self.state}: {len(bad)} descriptors failed{first}{cause}",
            results,
        ) from self.error

    def cancel(self) -> None:
        """Stop a posted transfer; without effect on another. Never blocks: `settle` waits for the memory."""
        if self.state is TransferState.POSTED:
            self._end("cancel", None, TransferStatus.CANCELLED)

    def fail(self, error: BaseException, status: TransferStatus) -> None:
        """End a posted transfer badly, as when its peer was restarted; without effect on another."""
        if self.state is TransferState.POSTED:
            self._end("fail", error, status)

    def release(self) -> None:
        """Give the handle up; an active transfer is cancelled. Never blocks, and is final."""
        if self.state is TransferState.POSTED:
            self._end("release", None, TransferStatus.CANCELLED)
        elif self.state is not TransferState.RELEASED:
            self.state = self._after("release")

    def _after(self, trigger: str) -> TransferState:
        after = STEPS.get((self.state, trigger))
        if after is None:
            raise TransferRefused(TransferStatus.NOT_ALLOWED, f"{trigger} of a {self.state} transfer")
        return after

    def _result(self, index: int, open_status: TransferStatus) -> DescriptorResult:
        assert self._order is not None
        status = self._statuses[index] if self._statuses else self._order.statuses[index]
        if status == 0:
            return DescriptorResult(TransferStatus.SUCCESS)
        if status == 1:
            cause = "" if self.error is None else "; from ".join(causes(self.error))
            return DescriptorResult(open_status, cause if open_status is not TransferStatus.IN_PROGRESS else "")
        error = self._order.errors[index]
        return DescriptorResult(status_of(error), "; from ".join(causes(error)))

    async def _carry(self, order: TransferOrder) -> None:
        """Move and notify; what is raised is the cause of everything that has no report."""
        try:
            await self.backend.move(order)
            order.failed_rest(PieceFailed(TransferStatus.UNKNOWN, f"{self.backend.name} reported no result for it"))
            if order.checksums is not None and not self.backend.capabilities.checks:
                await in_thread(order, order.check)
            if self.notification is not None and not order.errors:
                await self.backend.notify(self.peer, self.notification)
        except Exception as error:
            order.failed_rest(error)
            raise

    def _expire(self) -> None:
        self.fail(PieceFailed(TransferStatus.LATE, f"{_LATE} after {self.deadline:g} s"), TransferStatus.LATE)

    def _end(self, trigger: str, error: BaseException | None, missed: TransferStatus) -> None:
        """Fix state and results. Reports that come later change nothing."""
        assert self._order is not None
        self.state = self._after(trigger)
        self.error = error
        self._missed = missed
        self._statuses = bytes(self._order.statuses)
        self._order.cancelled = True
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
        self._ended.set()

    def _let_go(self, task: asyncio.Task[None]) -> None:
        """Free the memory, then say how the transfer ended, unless its end came before."""
        for region in self._regions:
            region.pins -= 1
        self._task = None
        self._owner.settled(self)
        error = (
            PieceFailed(TransferStatus.CANCELLED, "its task was cancelled") if task.cancelled() else task.exception()
        )
        if self.state is not TransferState.POSTED:
            return
        assert self._order is not None
        if error is None and self._order.errors:
            error = self._order.errors[min(self._order.errors)]
        self._end("succeed" if error is None else "fail", error, TransferStatus.CANCELLED)

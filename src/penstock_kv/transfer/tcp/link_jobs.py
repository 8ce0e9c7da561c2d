"""Jobs of a `TcpLink`: read, write, ask, tell; each goes over one connection and reports per item."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count
from typing import NamedTuple

from penstock_kv.transfer.tcp.tcp_frames import (
    ITEMS_MAX,
    Answer,
    Checksums,
    MoveOutcome,
    Notice,
    Part,
    Question,
    ReadSpans,
    RegionSpan,
    WriteSpans,
    Wrote,
    span_groups,
)
from penstock_kv.transfer.tcp.tcp_stream import StreamEnded, StreamLate, TcpStream

WRITES_OPEN = 32
"""Groups of a write that may be unanswered: their answers fit into the connection's own buffers."""

Report = Callable[[int, MoveOutcome, str], None]
"""Takes position, outcome and cause of one item, once each, from the thread of a connection."""

_requests = count()


class JobFailure(NamedTuple):
    """What came of the items without a report, and why. ``again``: nothing has happened yet, another try may do."""

    outcome: MoveOutcome
    cause: str
    again: bool = False


class LinkJob:
    """Something to do over one connection of a link.

    Args:
        items: how many results there will be.
        report: takes them.
        seconds: from now until the deadline.
        epoch: of the peer's life that it is for; None takes any.
    """

    def __init__(self, items: int, report: Report, seconds: float, epoch: int | None = None) -> None:
        self.deadline = time.monotonic() + seconds
        self.epoch = epoch
        self.answered = False
        """Whether the peer answered anything: until then the job may go over another connection."""
        self.peer_epoch = 0
        """Of the peer that carried it out."""
        self._items, self._report, self._reported = items, report, 0
        self._lock = threading.Lock()
        self._stream: TcpStream | None = None
        self._begun = self._cancelled = False
        self._ended: Future[None] = Future()

    def run(self, stream: TcpStream) -> None:
        """Carry it out and report each item."""
        raise NotImplementedError

    def begin(self) -> bool:
        """Take the job out of a queue; return whether there is still something to do."""
        with self._lock:
            self._begun = True
            return not self._cancelled

    def carry(self, stream: TcpStream) -> None:
        """Run over a stream, which `cancel` may close meanwhile."""
        with self._lock:
            if self._cancelled:
                raise StreamLate("the job was cancelled")
            self._stream = stream
        try:
            stream.expire_at(self.deadline)
            self.run(stream)
        finally:
            with self._lock:
                self._stream = None

    def cancel(self) -> None:
        """Make the job end now where it waits, and soon where a connection carries it: that one is closed."""
        with self._lock:
            if self._cancelled:
                return
            self._cancelled = True
            if self._stream is not None:
                self._stream.close()
            begun = self._begun
        if not begun:
            self.end()

    @property
    def cancelled(self) -> bool:
        """Whether nobody wants the job any more."""
        return self._cancelled

    def seconds(self) -> float:
        """Return the time until the deadline, at least 0."""
        return max(0.0, self.deadline - time.monotonic())

    def report(self, outcome: MoveOutcome, cause: str = "") -> None:
        """Report the next item."""
        self._report(self._reported, outcome, cause)
        self._reported += 1

    def end(self, failure: JobFailure | None = None) -> None:
        """Report what was not reported; nothing of the job touches its buffers any more."""
        if failure is None:
            failure = JobFailure("failed", f"the peer answered {self._reported} of {self._items} items")
        if self._cancelled:
            failure = JobFailure("late", "the job was cancelled")
        while self._reported < self._items:
            self.report(failure.outcome, failure.cause)
        self.let_go()
        self._ended.set_result(None)

    def let_go(self) -> None:
        """Drop the buffers, so that their owner can unmap them."""

    async def wait(self) -> None:
        """Wait until nothing of the job touches its buffers; a cancelled task cancels the job first."""
        await wait_for_jobs([self])

    @property
    def over(self) -> asyncio.Future[None]:
        """A future of the running event loop: done when nothing of the job touches its buffers any more."""
        return asyncio.wrap_future(self._ended)


async def wait_for_jobs(jobs: Sequence[LinkJob]) -> None:
    """Wait until nothing of some jobs touches their buffers; a cancelled task cancels the jobs first."""
    cancelled = False
    for job in jobs:
        over = job.over
        while not over.done():
            try:
                await asyncio.shield(over)
            except asyncio.CancelledError:
                cancelled = True
                for each in jobs:
                    each.cancel()
    if cancelled:
        raise asyncio.CancelledError


class SpanReadJob(LinkJob):
    """Receive spans of the peer's regions into buffers of the same lengths; an item counts where its checksum is right.

    Args:
        sums: XXH3-64 that each span must have; without it that of the bytes as the peer sends them.
    """

    def __init__(
        self,
        spans: Sequence[RegionSpan],
        buffers: Sequence[memoryview],
        report: Report,
        seconds: float,
        epoch: int | None = None,
        *,
        sums: Sequence[int] | None = None,
    ) -> None:
        super().__init__(len(buffers), report, seconds, epoch)
        self._spans, self._buffers, self._sums = spans, buffers, sums

    def let_go(self) -> None:
        self._buffers = ()

    def run(self, stream: TcpStream) -> None:
        for start in range(self._reported, len(self._buffers), ITEMS_MAX):
            request, end = next(_requests), start + ITEMS_MAX
            known = self._sums is not None
            stream.send(ReadSpans(request, self.seconds(), list(self._spans[start:end]), known))
            self._take_answer(stream, request, start, self._buffers[start:end])

    def _take_answer(self, stream: TcpStream, request: int, first: int, buffers: Sequence[memoryview]) -> None:
        position = 0
        sums: list[int] = []
        while True:
            frame = stream.receive()
            if not isinstance(frame, Part) or frame.id != request or len(frame.ended) != len(sums):
                raise StreamEnded("the peer answered something else")
            self.answered = True
            for number, (checksum, (outcome, sent)) in enumerate(zip(sums, frame.ended), first + position - len(sums)):
                if outcome == "ok" and checksum != (sent if self._sums is None else self._sums[number]):
                    self.report("corrupt", "the bytes that arrived have another checksum")
                else:
                    self.report(outcome, "" if outcome == "ok" else f"the peer says {outcome}")
            if not frame.lengths:
                return
            if position + len(frame.lengths) > len(buffers):
                raise StreamEnded("the peer announced more payloads than were asked for")
            sums = []
            for length, buffer in zip(frame.lengths, buffers[position : position + len(frame.lengths)]):
                if length not in (0, len(buffer)):
                    raise StreamEnded(f"the peer announced {length} bytes where {len(buffer)} were asked for")
                sums.append(stream.take_payload(buffer) if length else 0)
            position += len(sums)


class WriteJob(LinkJob):
    """Send buffers into spans of the same lengths; an item counts where the peer finds the checksum right."""

    def __init__(
        self,
        spans: Sequence[RegionSpan],
        buffers: Sequence[memoryview],
        report: Report,
        seconds: float,
        epoch: int | None = None,
    ) -> None:
        super().__init__(len(spans), report, seconds, epoch)
        self._spans, self._buffers = spans, buffers

    def let_go(self) -> None:
        self._buffers = ()

    def run(self, stream: TcpStream) -> None:
        position = 0
        open_groups: deque[tuple[int, int]] = deque()
        for group in span_groups(self._spans):
            payloads = self._buffers[position : position + len(group)]
            position += len(group)
            request = next(_requests)
            stream.send(WriteSpans(request, self.seconds(), group))
            stream.send(Checksums([stream.send_payload(payload) for payload in payloads]))
            open_groups.append((request, len(group)))
            if len(open_groups) > WRITES_OPEN:
                self._take_answer(stream, *open_groups.popleft())
        while open_groups:
            self._take_answer(stream, *open_groups.popleft())

    def _take_answer(self, stream: TcpStream, request: int, items: int) -> None:
        frame = stream.receive()
        if not isinstance(frame, Wrote) or frame.id != request or len(frame.outcomes) != items:
            raise StreamEnded("the peer answered something else")
        self.answered = True
        for outcome in frame.outcomes:
            self.report(outcome, "" if outcome == "ok" else f"the peer says {outcome}")


class NoticeJob(LinkJob):
    """Give the peer's owner a message."""

    def __init__(self, body: bytes, report: Report, seconds: float, epoch: int | None = None) -> None:
        super().__init__(1, report, seconds, epoch)
        self._body = body

    def run(self, stream: TcpStream) -> None:
        request = next(_requests)
        stream.send(Notice(request, self._body))
        frame = stream.receive()
        if not isinstance(frame, Wrote) or frame.id != request or len(frame.outcomes) != 1:
            raise StreamEnded("the peer answered something else")
        self.answered = True
        self.report(frame.outcomes[0])


class QuestionJob(LinkJob):
    """Ask the peer's owner something; ``answer`` is what it says."""

    def __init__(self, topic: str, body: bytes, report: Report, seconds: float) -> None:
        super().__init__(1, report, seconds)
        self.answer = b""
        self._topic, self._body = topic, body

    def run(self, stream: TcpStream) -> None:
        request = next(_requests)
        stream.send(Question(request, self._topic, self._body))
        frame = stream.receive()
        if not isinstance(frame, Answer) or frame.id != request:
            raise StreamEnded("the peer answered something else")
        self.answered = True
        self.answer = frame.body
        self.report("ok")

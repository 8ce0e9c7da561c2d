"""KV event poller: reads the sockets of all KV event subscriptions of a process, in slices of the event loop's time.

A burst of hundreds of engines is more than a request can wait for. So each slice takes messages of the sockets in turn
until `SLICE` has passed, and everything else of the loop gets its turn before the next. What waits meanwhile is in
ZeroMQ's queues, at most `WAITING_MAX` messages of each engine, and beyond them with the engine.
"""

import asyncio
import logging
import time
from collections.abc import Callable

import zmq

from penstock.adapters.zmq_receive import MessageNotice, received

log = logging.getLogger(__name__)

SLICE = 0.001
"""Seconds: a fifth of the event loop's budget, and some five messages of 64 blocks."""
PER_TURN = 8
"""Messages of one socket before the next one gets its turn."""
WAITING_MAX = 256
"""Messages of one engine that wait in this process; the next stay with the engine, whose own queue is far longer."""
LAG_MAX = 10.0
"""Seconds after which what waits is skipped: the index must not go on as if so old a state were that of now. The gap
shows, and what is missing is replayed while the router knows that it does not know."""
REPLAYS_AT_ONCE = 8
"""Engines asked at once for what they sent before: their answers may have 10,000 batches each."""
WINDOW = 30.0
"""Seconds; the longest lag is that of the present window and the one before."""


class KvPoller:
    """Reads sockets that `add` gave it, all from one callback of the event loop.

    Args:
        clock, wall: seconds, of any origin and since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time) -> None:
        self.clock, self.wall = clock, wall
        self.skipped = 0
        """Messages that were skipped since they had waited for longer than `LAG_MAX`."""
        self.replays = asyncio.Semaphore(REPLAYS_AT_ONCE)
        self._turns: dict[PolledSocket, None] = {}
        """Sockets with messages, in the order of their turns."""
        self._next: asyncio.Handle | None = None
        self._longest = [0.0, 0.0]
        self._window_end = 0.0

    def add(
        self,
        socket: "zmq.Socket[bytes]",
        take: Callable[[list[bytes]], float | None],
        failed: Callable[[Exception], None],
        *,
        overrun: Callable[[], None] | None = None,
        paused: bool = False,
    ) -> "PolledSocket":
        """Read a socket from now on, in the running event loop.

        Args:
            take: gets each message's frames; returns when it was sent, in seconds since 1970 by its sender's clock, or
                None where that is of no account.
            failed: gets what ``take`` raised; the socket is not read any more.
            overrun: of a sender that drops what it can't send: called when its socket is empty after so many messages
                without a pause that some may have been dropped.
            paused: read nothing until `PolledSocket.release`.
        """
        return PolledSocket(self, socket, take, failed, overrun, paused)

    @property
    def lag(self) -> float:
        """Seconds for which the oldest message that waits has waited; 0 where none waits."""
        now = self.clock()
        return max((now - source.since for source in self._turns), default=0.0)

    @property
    def lag_longest(self) -> float:
        """Seconds of the longest lag of the last half minute or minute."""
        self.note_lag(self.lag)
        return max(self._longest)

    @property
    def waiting(self) -> int:
        """How many sockets have messages that wait."""
        return len(self._turns)

    def note_lag(self, lag: float) -> None:
        """Take a message's lag into account."""
        now = self.clock()
        if now >= self._window_end:
            fresh = now < self._window_end + WINDOW
            self._longest = [0.0, self._longest[0] if fresh else 0.0]
            self._window_end = now + WINDOW
        if lag > self._longest[0]:
            self._longest[0] = lag

    def queue(self, source: "PolledSocket") -> None:
        """Give a socket a turn."""
        self._turns[source] = None
        if self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._slice)

    def drop(self, source: "PolledSocket") -> None:
        """Give a socket no turn any more."""
        self._turns.pop(source, None)

    def _slice(self) -> None:
        self._next = None
        end = time.perf_counter() + SLICE
        while self._turns:
            source = next(iter(self._turns))
            del self._turns[source]
            if source.turn(end):
                self._turns[source] = None
            if time.perf_counter() >= end:
                break
        if self._turns:
            self._next = asyncio.get_running_loop().call_soon(self._slice)


class PolledSocket:
    """One socket of a `KvPoller`. ``since``: when what waits first was sent, or came, by the poller's clock."""

    def __init__(
        self,
        poller: KvPoller,
        socket: "zmq.Socket[bytes]",
        take: Callable[[list[bytes]], float | None],
        failed: Callable[[Exception], None],
        overrun: Callable[[], None] | None,
        paused: bool,
    ) -> None:
        self.since = 0.0
        self.arrived = asyncio.Event()
        """Set once a message came."""
        self._poller = poller
        self._socket = socket
        self._take = take
        self._failed = failed
        self._overrun = overrun
        self._paused = paused
        self._offset: float | None = None
        """The sender's clock behind ours, way included, as the first message after a pause showed it."""
        self._fresh = False
        """The next message is the first after a pause."""
        self._taken = 0
        """Messages since the last pause."""
        self._notice = MessageNotice(socket, self._readable)

    def release(self) -> None:
        """Read what waits, and what comes; from now on it may be late."""
        self._paused = False
        if self.arrived.is_set():
            self._begin(fresh=False)

    def close(self) -> None:
        """Read no more, and close the socket."""
        self._notice.close()
        self._poller.drop(self)
        if not self._socket.closed:
            self._socket.close(0)

    def turn(self, end: float) -> bool:
        """Take a few messages, until a time of the performance counter; return whether more may wait."""
        if self._overrun is not None and self._poller.clock() - self.since > LAG_MAX:
            self._skip()
        for _ in range(PER_TURN):
            if self._socket.closed or self._paused:
                return False
            frames = received(self._socket)
            if frames is None:
                return self._emptied()
            if not self._give(frames):
                return False
            if time.perf_counter() >= end:
                break
        return True

    def _readable(self) -> None:
        self.arrived.set()
        if not self._paused:
            self._begin(fresh=True)

    def _begin(self, *, fresh: bool) -> None:
        if self not in self._poller._turns:
            self.since, self._fresh, self._taken = self._poller.clock(), fresh, 0
            self._poller.queue(self)

    def _give(self, frames: list[bytes]) -> bool:
        try:
            sent = self._take(frames)
        except Exception as error:  # supervision boundary: one engine's events must not end those of all
            log.exception("a message of KV events could not be taken in")
            self.close()
            self._failed(error)
            return False
        self._taken += 1
        if sent is None:
            self.since = self._poller.clock()
        else:
            self._measure(sent)
        return True

    def _measure(self, sent: float) -> None:
        """Measure how late a message is: since it came, or since it was sent by a clock whose offset is known."""
        now, behind = self._poller.clock(), self._poller.wall() - sent
        lag = now - self.since
        if self._fresh:
            self._fresh, self._offset = False, behind - lag
        elif self._offset is not None:
            lag = min(lag, max(0.0, behind - self._offset))
        self.since = now - lag  # what still waits was sent later
        self._poller.note_lag(lag)

    def _emptied(self) -> bool:
        if self._taken >= WAITING_MAX and self._overrun is not None:
            self._overrun()
        return False

    def _skip(self) -> None:
        """Take only the last of the messages that wait: its number shows how many are missing."""
        last = None
        for _ in range(WAITING_MAX):
            frames = received(self._socket)
            if frames is None:
                break
            self._poller.skipped += last is not None
            last = frames
        if last is not None:
            self._fresh = False
            if self._offset is None:
                self.since = self._poller.clock()
            self._give(last)

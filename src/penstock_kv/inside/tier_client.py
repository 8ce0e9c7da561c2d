"""`TierClient`: an engine's connection to the tier process of its host. No call of it waits for the tier process.

One thread connects, sends and reads. The engine's thread hands over frames and polls what came. A connection that is
lost ends every open job as failed and every open question with 0 blocks; the thread then connects anew, with back-off,
and meanwhile everything is a miss. So it is while a tier process owes an answer that is late: it may be stopped, and
each further question, load or store would wait for it as well.

Who owns the rows of an open job: the tier process, until its `JobDone` or until the end of the stream, which it closes
only when it touches no row any more (and which the kernel closes for it when it is killed, after its last thread has
ended). So the client never gives rows back because it wants to close: it shuts its side and reads on to the end. A tier
process that was stopped (SIGSTOP) would go on writing one day, and nothing but its end frees its rows: it is killed
once a job is late, and its supervisor starts another.
"""

import contextlib
import logging
import os
import queue
import selectors
import signal
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from penstock_kv.inside.tier_protocol import (
    FRAME_MAX,
    VERSION,
    AnswerBlocks,
    AskBlocks,
    CancelJob,
    FromTiers,
    JobDone,
    LoadBlocks,
    PrefetchBlocks,
    PrefillSpeed,
    RemovedBlocks,
    RequestHints,
    StoreBlocks,
    StoredBlocks,
    TierHello,
    TierWelcome,
    ToTiers,
    UsedBlocks,
)

log = logging.getLogger("vllm.penstock")

ASK_LIMIT = 2.0
"""Seconds after which a question counts as answered with 0 blocks: computing them costs less than waiting longer."""
WELCOME_STEP = 0.5
"""Seconds between looks whether this engine ends while the tier process opens its tiers; a long index takes a while."""
BACKOFF_FIRST, BACKOFF_LAST = 0.1, 5.0
"""Seconds between attempts to connect: doubled from the first to the last."""
CLOSE_LIMIT = 10.0
"""Seconds for which `close` reads on; after that the process ends anyway, and nobody uses its rows."""
UNSENT_MAX = 32 << 20
"""Bytes of frames that may wait to be sent; further ones are not taken."""
UNPOLLED_MAX = 100_000
"""Announcements of stored or removed blocks that may wait for an idle engine; further ones are dropped and counted."""
LOOK = 0.1
"""Seconds between looks for jobs that are late."""
STOPPED = b"T"
"""State of a process in /proc."""
CREDENTIALS = struct.Struct("3i")
"""Of the peer of a unix socket: process, user, group."""
READ = 1 << 18

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(FromTiers).decode


class TiersLost(msgspec.Struct, frozen=True):
    """The connection ended: what the tiers of it had is unknown, until the next one tells it."""


class TierClient:
    """A client of one tier process, for one region.

    Args:
        path: of its unix socket; it need not be there yet.
        hello: what this engine is.
    """

    def __init__(self, path: str, hello: TierHello) -> None:
        self._path = path
        self._hello = hello
        self._lock = threading.Lock()
        self._connected = False
        self._closing = False
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._jobs: dict[int, tuple[int, float]] = {}
        """Open job -> its blocks, and when it is late."""
        self._asks: dict[int, float] = {}
        """Open question -> when it is late."""
        self._ask_number = 0
        self._late = False
        """Nothing has come since a question was late."""
        self._polled: queue.SimpleQueue[FromTiers | TiersLost] = queue.SimpleQueue()
        self.tiers: list[str] = []
        """Of the tier process, in its words."""
        self.dropped = 0
        """Announcements that an engine which did not poll has lost."""
        self.losses = 0
        """Connections that ended."""
        self._refusal = ""
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="penstock-tiers", daemon=True)
        self._thread.start()

    # --- the engine's side --------------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether a tier process takes jobs at this moment."""
        return self._connected

    @property
    def busy(self) -> bool:
        """Whether a job or question is open, or something waits to be polled."""
        return bool(self._jobs or self._asks) or not self._polled.empty()

    def ask(
        self, hashes: Sequence[bytes], group: int = 0, tokens_before: int = 0, hints: RequestHints | None = None
    ) -> int | None:
        """Ask how many leading blocks can be loaded; return the number of the `AnswerBlocks`. None: nobody is there."""
        with self._lock:
            self._ask_number += 1
            number = self._ask_number
            asked = AskBlocks(
                id=number,
                hashes=list(hashes),
                group=group,
                tokens_before=tokens_before,
                hints=hints or RequestHints(),
            )
            if self._late or not self._put(asked):
                return None
            self._asks[number] = time.monotonic() + _limit(asked.hints)
            return number

    def store(
        self,
        job: int,
        hashes: Sequence[bytes],
        rows: Sequence[int],
        group: int = 0,
        parent: bytes | None = None,
        hints: RequestHints | None = None,
    ) -> bool:
        """Offer blocks in rows; False: not taken, and no `JobDone` comes."""
        return self._begin(
            StoreBlocks(
                job=job,
                hashes=list(hashes),
                rows=list(rows),
                group=group,
                parent=parent,
                hints=hints or RequestHints(),
            )
        )

    def load(
        self,
        job: int,
        hashes: Sequence[bytes],
        rows: Sequence[int],
        group: int = 0,
        hints: RequestHints | None = None,
    ) -> bool:
        """Want blocks in rows; False: not taken, and no `JobDone` comes."""
        return self._begin(
            LoadBlocks(job=job, hashes=list(hashes), rows=list(rows), group=group, hints=hints or RequestHints())
        )

    def tell(self, message: CancelJob | UsedBlocks | PrefetchBlocks | PrefillSpeed) -> bool:
        """Send what has no answer; False where nobody is there to hear it."""
        with self._lock:
            return self._put(message)

    def poll(self) -> list[FromTiers | TiersLost]:
        """Return what came since the last call, with a failure for all that was lost and 0 blocks for what is late."""
        messages: list[FromTiers | TiersLost] = []
        with contextlib.suppress(queue.Empty):
            while True:
                messages.append(self._polled.get_nowait())
        now = time.monotonic()
        with self._lock:
            late = [number for number, limit in self._asks.items() if limit <= now]
            for number in late:
                del self._asks[number]
                self._late = True
        messages += [AnswerBlocks(id=number, blocks=0, reason="late") for number in late]
        return messages

    def wait_idle(self) -> None:
        """Wait until no job is open: nothing touches any row, and the results can be polled."""
        while self._jobs:
            time.sleep(0.002)

    def close(self) -> None:
        """Shut the connection and read on to its end, for at most `CLOSE_LIMIT`."""
        with self._lock:
            self._closing = True
        self._wake()
        self._thread.join(CLOSE_LIMIT)
        if self._thread.is_alive():
            log.warning("the tier process at %s does not end its side of the connection", self._path)

    def _begin(self, message: StoreBlocks | LoadBlocks) -> bool:
        with self._lock:
            if self._late or not self._put(message):
                return False
            self._jobs[message.job] = len(message.hashes), time.monotonic() + _limit(message.hints)
            return True

    def _put(self, message: ToTiers) -> bool:
        """Queue a frame; the lock is taken."""
        if not self._connected or self._closing or self._unsent_bytes > UNSENT_MAX:
            return False
        raw = _frame_message(message)
        if len(raw) > FRAME_MAX:
            return False
        self._unsent.append(raw)
        self._unsent_bytes += len(raw)
        self._wake()
        return True

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # then it has enough reasons to wake up
            self._wake_write.send(b"w")

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = BACKOFF_FIRST
        while not self._closing:
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
                    self._welcome(link)
                    pause = BACKOFF_FIRST
                    self._serve(link)
            except OSError as error:
                log.debug("no tier process at %s: %s", self._path, error)
            except Exception:  # supervision boundary: a fault of ours makes misses, and never reaches the engine
                log.exception("the connection to the tier process ended by a bug of ours")
            self._lost()
            self._sleep(pause)
            pause = min(BACKOFF_LAST, 2 * pause)
        self._wake_read.close()

    def _sleep(self, seconds: float) -> None:
        """Wait, but for a close."""
        end = time.monotonic() + seconds
        while not self._closing and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.05))

    def _welcome(self, link: socket.socket) -> None:
        link.settimeout(WELCOME_STEP)
        link.connect(self._path)
        link.sendall(_frame_message(self._hello))
        frames = _Frames()
        first: FromTiers | None = None
        while first is None:
            try:
                data = link.recv(READ)
            except TimeoutError:
                if self._closing:
                    raise
                continue
            if not data:
                raise ConnectionError("it ended the connection before it answered")
            first = next(frames.take(data), None)
        if not isinstance(first, TierWelcome) or first.error or first.version != VERSION:
            said = (
                first.error
                if isinstance(first, TierWelcome) and first.error
                else f"it speaks another protocol: {first}"
            )
            if said != self._refusal:
                log.error("the tier process at %s does not work for this engine: %s", self._path, said)
            self._refusal = said
            raise ConnectionError(said)
        self._refusal = ""
        log.info("the tier process at %s has the tiers %s", self._path, ", ".join(first.tiers) or "none")
        with self._lock:
            self.tiers = first.tiers
            self._connected, self._late = True, False

    def _serve(self, link: socket.socket) -> None:
        """Send and read until the other side closes."""
        link.setblocking(False)
        frames, unsent, shut = _Frames(), memoryview(b""), False
        with selectors.DefaultSelector() as selector:
            selector.register(link, selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)
            while True:
                if not shut and self._closing:
                    shut = _shut(link)
                if not shut and not len(unsent):
                    unsent = memoryview(self._next())
                waits = selectors.EVENT_READ | (selectors.EVENT_WRITE if len(unsent) and not shut else 0)
                selector.modify(link, waits)
                self._end_stopped(link)
                for key, events in selector.select(LOOK if self._jobs else None):
                    if key.fileobj is self._wake_read:
                        with contextlib.suppress(BlockingIOError):
                            self._wake_read.recv(READ)
                        continue
                    if events & selectors.EVENT_READ:
                        data = link.recv(READ)
                        if not data:
                            return
                        try:
                            for message in frames.take(data):
                                self._took(message)
                        except (msgspec.DecodeError, _BadFrame) as error:
                            log.error(
                                "the tier process at %s sent something that is not a frame: %s", self._path, error
                            )
                            frames, shut = _Deaf(), _shut(link)
                    if events & selectors.EVENT_WRITE and not shut:
                        try:
                            unsent = unsent[link.send(unsent) :]
                        except BrokenPipeError:
                            shut = True  # what it sent before it closed is still to be read

    def _end_stopped(self, link: socket.socket) -> None:
        """Kill a tier process that stands still past a job's limit."""
        with self._lock:
            late = any(limit <= time.monotonic() for _, limit in self._jobs.values())
        if not late:
            return
        pid, _, _ = CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
        try:
            # 0: it is in a process namespace that this one does not see into.
            if pid and Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:1] == [STOPPED]:
                os.kill(pid, signal.SIGKILL)
                log.error("the tier process at %s was stopped, with rows of a late job: %d was killed", self._path, pid)
        except OSError as error:  # it has ended, or is another user's
            log.debug("the tier process at %s can't be ended: %s", self._path, error)

    def _next(self) -> bytes:
        with self._lock:
            if not self._unsent:
                return b""
            raw = self._unsent.popleft()
            self._unsent_bytes -= len(raw)
            return raw

    def _took(self, message: FromTiers) -> None:
        self._late = False
        if isinstance(message, JobDone):
            with self._lock:
                blocks, _ = self._jobs.get(message.job, (None, 0.0))
            if blocks is None:
                return
            if len(message.done) != blocks:
                message = JobDone(job=message.job, done=[False] * blocks)
            self._polled.put(message)
            with self._lock:  # only now: `wait_idle` promises that the result can be polled
                self._jobs.pop(message.job, None)
        elif isinstance(message, AnswerBlocks):
            with self._lock:
                if self._asks.pop(message.id, None) is None:
                    return
            self._polled.put(message)
        elif isinstance(message, StoredBlocks | RemovedBlocks):
            if self._polled.qsize() >= UNPOLLED_MAX:
                self.dropped += len(message.hashes)
            else:
                self._polled.put(message)

    def _lost(self) -> None:
        """Fail what is open: at the end of the stream the tier process touches nothing any more."""
        with self._lock:
            if not self._connected:
                return
            self._connected = False
            self.losses += 1
            self._unsent.clear()
            self._unsent_bytes = 0
            jobs, asks = dict(self._jobs), list(self._asks)
            self._asks.clear()
            for job, (blocks, _) in jobs.items():
                self._polled.put(JobDone(job=job, done=[False] * blocks))
            for number in asks:
                self._polled.put(AnswerBlocks(id=number, blocks=0, reason="connection lost"))
            self._jobs.clear()
            self._polled.put(TiersLost())
        if not self._closing:
            log.warning("the tier process at %s is gone: %d open jobs failed", self._path, len(jobs))


def _limit(hints: RequestHints) -> float:
    """Return after how many seconds a question or job is late."""
    return ASK_LIMIT if hints.deadline is None else min(ASK_LIMIT, hints.deadline)


class _BadFrame(Exception):
    """A frame that is too long."""


class _Frames:
    """Cuts a stream into messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def take(self, data: bytes) -> Iterator[FromTiers]:
        """Yield the messages that are whole now.

        Raises:
            msgspec.DecodeError, _BadFrame: the stream is none of this protocol.
        """
        self._data += data
        at = 0
        while len(self._data) - at >= 4:
            length = int.from_bytes(self._data[at : at + 4], "little")
            if length > FRAME_MAX:
                raise _BadFrame(f"{length} bytes long")
            if len(self._data) - at - 4 < length:
                break
            message = _decode(bytes(self._data[at + 4 : at + 4 + length]))
            at += 4 + length
            yield message
        del self._data[:at]


class _Deaf(_Frames):
    """Takes no message any more: only the end of the stream counts."""

    def take(self, data: bytes) -> Iterator[FromTiers]:
        return iter(())


def _frame_message(message: ToTiers) -> bytes:
    raw = _encode(message)
    return len(raw).to_bytes(4, "little") + raw


def _shut(link: socket.socket) -> bool:
    with contextlib.suppress(OSError):  # the other side is gone already
        link.shutdown(socket.SHUT_WR)
    return True

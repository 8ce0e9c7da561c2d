"""`TcpLink`: the way to one peer's `TcpServer`: a few connections, and a bounded queue of jobs before them.

A connection that broke is made anew, after a pause that grows while the peer can't be reached. Jobs fail at once
during the pause, because a cache that waits for a dead peer is slower than none.
"""

import queue
import socket
import threading
import time
from dataclasses import dataclass

from penstock.kernel.errors import TransferError
from penstock.kernel.secret import ClusterSecret
from penstock_kv.transfer.tcp.link_jobs import JobFailure, LinkJob
from penstock_kv.transfer.tcp.tcp_stream import (
    HANDSHAKE_SECONDS,
    PeerIdentity,
    StreamEnded,
    StreamLate,
    StreamRefused,
    TcpStream,
    call,
)

STREAMS = 2
"""Connections of a link: a long transfer is divided among them, and a short one passes it by."""
SPLIT_BYTES = 8 << 20
"""From this size on a transfer is divided among the connections."""
JOBS_MAX = 256
"""Waiting jobs of a link; one more fails at once."""
CONNECT_SECONDS = 3.0
PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX = 0.05, 5.0
"""Between failed connections; doubled with each one in a row."""


class Unreached(TransferError):
    """The peer can't be reached."""


class TcpLink:
    """Connections to one peer; they are made when there is something to do.

    Args:
        me: name and epoch of this process.
        peer: name that must answer; None takes any holder of the secret.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: ClusterSecret,
        me: PeerIdentity,
        *,
        peer: str | None = None,
        streams: int = STREAMS,
    ) -> None:
        self.address = address
        self.peer = peer
        self.streams = streams
        self._secret, self._me = secret, me
        self._jobs: queue.Queue[LinkJob | None] = queue.Queue(JOBS_MAX)
        self._threads: list[threading.Thread] = []
        self._open: set[TcpStream] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._pause, self._pause_end, self._pause_cause = 0.0, 0.0, ""

    def submit(self, job: LinkJob) -> None:
        """Queue a job; never waits. A job that can't be queued ends at once."""
        with self._lock:
            if self._closed:
                full = "the link is closed"
            else:
                full = ""
                try:
                    self._jobs.put_nowait(job)
                except queue.Full:
                    full = f"{JOBS_MAX} jobs wait for this peer already"
            if not full and len(self._threads) < self.streams:
                thread = threading.Thread(target=self._work, name=f"tcp link {self.peer or ''}", daemon=True)
                self._threads.append(thread)
                thread.start()
        if full:
            job.end(JobFailure("failed", full))

    def close(self) -> None:
        """End every job and connection; afterwards nothing touches any buffer."""
        with self._lock:
            self._closed = True
            threads, streams = list(self._threads), list(self._open)
        for stream in streams:
            stream.close()
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is not None and job.begin():
                job.end(JobFailure("failed", "the link is closed"))
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            thread.join()

    def _work(self) -> None:
        way = _Way()
        while (job := self._jobs.get()) is not None:
            if job.begin():
                failure = self._attempt(job, way)
                if failure is not None and failure.again:
                    failure = self._attempt(job, way)
                job.end(failure)
            del job  # its owner may want to unmap the buffers
        self._drop(way)

    def _attempt(self, job: LinkJob, way: "_Way") -> JobFailure | None:
        """Carry a job out. No error outlives this call: its traceback would keep the job's buffers."""
        fresh = way.stream is None
        if way.stream is not None and job.epoch not in (None, way.peer.epoch):
            # The peer may have restarted since this connection was made.
            self._drop(way)
            fresh = True
        try:
            if way.stream is None:
                way.stream, way.peer = self._connect(job)
            if job.epoch not in (None, way.peer.epoch):
                return JobFailure("stale", f"{way.peer.name!r} was restarted")
            job.peer_epoch = way.peer.epoch
            job.carry(way.stream)
        except Unreached as error:
            return JobFailure("failed", error.message)
        except TransferError as error:
            self._drop(way)
            # A connection that was idle may have ended since; nothing has happened then.
            again = isinstance(error, StreamEnded) and not (fresh or job.answered or job.cancelled)
            return JobFailure("late" if isinstance(error, StreamLate) else "failed", error.message, again)
        return None

    def _drop(self, way: "_Way") -> None:
        stream, way.stream = way.stream, None
        if stream is not None:
            stream.close()
            with self._lock:
                self._open.discard(stream)

    def _connect(self, job: LinkJob) -> tuple[TcpStream, PeerIdentity]:
        if time.monotonic() < self._pause_end:
            raise Unreached(self._pause_cause)
        end = min(job.deadline, time.monotonic() + HANDSHAKE_SECONDS)
        try:
            stream, identity = self._reach(end)
        except (OSError, TransferError) as error:
            if isinstance(error, StreamLate) and job.seconds() == 0:
                raise  # too little time says nothing of the peer
            self._pause = min(max(PAUSE_SECONDS_MIN, 2 * self._pause), PAUSE_SECONDS_MAX)
            self._pause_cause = f"{self.address[0]}:{self.address[1]} can't be reached: {error}"
            self._pause_end = time.monotonic() + self._pause
            raise Unreached(self._pause_cause) from error
        self._pause = 0.0
        return stream, identity

    def _reach(self, end: float) -> tuple[TcpStream, PeerIdentity]:
        left = min(CONNECT_SECONDS, end - time.monotonic())
        if left <= 0:
            raise StreamLate("the deadline has passed")
        stream = TcpStream(socket.create_connection(self.address, timeout=left), listener=False)
        with self._lock:
            closed = self._closed
            self._open.add(stream)
        try:
            if closed:
                raise StreamEnded("the link is closed")
            identity = call(stream, self._secret, self._me, end)
            if self.peer not in (None, identity.name):
                raise StreamRefused(f"{identity.name!r} listens there, not {self.peer!r}")
        except TransferError:
            self._drop(_Way(stream))
            raise
        return stream, identity


@dataclass(slots=True)
class _Way:
    """The connection of one thread. ``peer``: who is at its other end."""

    stream: TcpStream | None = None
    peer: PeerIdentity = PeerIdentity("", 0)

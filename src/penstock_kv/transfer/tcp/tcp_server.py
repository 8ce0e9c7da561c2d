"""`TcpServer`: lets peers of the same cluster read and write registered regions, and ask questions.

One thread per connection, because on Linux a blocking receive into place is more than twice as fast as an event loop
(docs/bench/transfer.md). Payloads go from the region to the socket and from the socket to the region, without a copy.
"""

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.kernel.errors import InvariantError, TransferError
from penstock.kernel.secret import ClusterSecret
from penstock_kv.transfer.tcp.tcp_frames import (
    GROUP_ITEMS,
    ITEMS_MAX,
    Answer,
    Checksums,
    Frame,
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
from penstock_kv.transfer.tcp.tcp_stream import PeerIdentity, StreamEnded, StreamRefused, TcpStream, answer_call

CONNECTIONS_MAX = 256
"""Each costs a thread; one more is closed at once."""
REQUEST_SECONDS_MAX = 60.0
"""A request that names a longer time gets this: a peer that stops in the middle may not keep memory for ever."""
_DRAIN_BYTES = 64 << 10
LEAVE_SECONDS = 5.0
"""A closed connection lets go of a region within microseconds; longer is a bug."""


@dataclass(slots=True, eq=False)
class ServedRegion:
    """Memory that peers may read, and write where it is ``writable``. ``users``: streams with a call on it."""

    memory: memoryview
    writable: bool
    users: list[TcpStream] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class RegionUse:
    """Part of a region, for one call of one stream."""

    id: int
    region: ServedRegion
    view: memoryview


class RegionTable:
    """Regions by id. Calls come from the threads of the server's connections and from the owner's."""

    def __init__(self) -> None:
        self._regions: dict[int, ServedRegion] = {}
        self._changed = threading.Condition()

    def add(self, region: int, memory: memoryview, *, writable: bool) -> None:
        """Serve a region: contiguous bytes."""
        with self._changed:
            self._regions[region] = ServedRegion(memory.cast("B"), writable)

    def remove(self, region: int) -> None:
        """Serve a region no more. Connections in a call on it are closed; afterwards nothing touches its memory.

        Raises:
            InvariantError: a thread does not let go of it.
        """
        with self._changed:
            gone = self._regions.pop(region, None)
            if gone is None:
                return
            for stream in gone.users:
                stream.close()
            end = time.monotonic() + LEAVE_SECONDS
            while gone.users:
                if not self._changed.wait(end - time.monotonic()):
                    raise InvariantError(f"a connection still touches region {region} after it was closed")
        gone.memory.release()

    def use(self, spans: Sequence[RegionSpan], user: TcpStream, *, write: bool) -> list[RegionUse | MoveOutcome]:
        """Lend the memory of spans for one call, or say why not; `leave` must follow with what is lent."""
        with self._changed:
            return [self._use(span, user, write) for span in spans]

    def _use(self, span: RegionSpan, user: TcpStream, write: bool) -> RegionUse | MoveOutcome:
        region = self._regions.get(span.region)
        if region is None:
            return "absent"
        end = span.offset + span.length
        if not 0 <= span.offset < end <= len(region.memory) or (write and not region.writable):
            return "denied"
        region.users.append(user)
        return RegionUse(span.region, region, region.memory[span.offset : end])

    def leave(self, uses: Sequence[RegionUse], user: TcpStream) -> list[bool]:
        """End a call; return whether each region was served until now, and so whether what was moved counts."""
        for use in uses:
            use.view.release()
        with self._changed:
            for use in uses:
                use.region.users.remove(user)
            self._changed.notify_all()
            return [self._regions.get(use.id) is use.region for use in uses]


class TcpServer:
    """A listener and its connections.

    Args:
        me: name and epoch of this process.
        answers: topic -> what answers a question about it, in the thread of its connection.
        notice: takes the messages of peers, in the thread of their connection.
        log: takes one line for each connection that ends by a fault.
    """

    def __init__(
        self,
        me: PeerIdentity,
        secret: ClusterSecret,
        *,
        answers: Mapping[str, Callable[[bytes], bytes]] | None = None,
        notice: Callable[[PeerIdentity, bytes], None] | None = None,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.regions = RegionTable()
        self.faults: Counter[str] = Counter()
        """Connections by why they ended: ``refused`` (another secret), ``broken``, ``full``."""
        self._me, self._secret = me, secret
        self._answers, self._notice, self._log = dict(answers or {}), notice, log
        self._listener: socket.socket | None = None
        self._streams: dict[TcpStream, threading.Thread] = {}
        self._lock = threading.Lock()
        self._acceptor: threading.Thread | None = None

    def start(self, host: str, port: int = 0) -> tuple[str, int]:
        """Listen; return the address.

        Raises:
            OSError: the address is not ours, or taken.
        """
        self._listener = socket.create_server((host, port), backlog=64)
        self._acceptor = threading.Thread(target=self._accept, args=(self._listener,), name="tcp accept", daemon=True)
        self._acceptor.start()
        address = self._listener.getsockname()
        return str(address[0]), int(address[1])

    def close(self) -> None:
        """Close everything; afterwards no thread touches any region."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        # accept() wakes from this; it would not from close alone.
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        if self._acceptor is not None:
            self._acceptor.join()
        with self._lock:
            streams = dict(self._streams)
        for stream in streams:
            stream.close()
        for thread in streams.values():
            thread.join()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if self._listener is None:
                    return
                # Too many open files, for one: the next connection may do better, after a moment.
                self._fault("broken", f"a connection could not be accepted: {error}")
                time.sleep(0.1)
                continue
            stream = TcpStream(connection, listener=True)
            with self._lock:
                full = len(self._streams) >= CONNECTIONS_MAX
                if not full:
                    thread = threading.Thread(target=self._serve, args=(stream,), name="tcp serve", daemon=True)
                    self._streams[stream] = thread
            if full:
                stream.close()
                self._fault("full", f"a connection was closed: there are {CONNECTIONS_MAX}")
            else:
                thread.start()

    def _fault(self, kind: str, line: str) -> None:
        with self._lock:
            self.faults[kind] += 1
        self._log(line)

    def _serve(self, stream: TcpStream) -> None:
        peer = None
        try:
            peer = answer_call(stream, self._secret, self._me)
            while True:
                stream.expire_at(None)
                frame = stream.receive()
                self._answer(stream, peer, frame)
        except StreamRefused as error:
            self._fault("refused", error.message)
        except TransferError as error:
            if not isinstance(error, StreamEnded) or not error.clean:
                self._fault("broken", f"the connection of {peer.name if peer else 'a stranger'} ended: {error.message}")
        finally:
            stream.close()
            with self._lock:
                self._streams.pop(stream, None)

    def _answer(self, stream: TcpStream, peer: PeerIdentity, frame: Frame) -> None:
        match frame:
            case ReadSpans(id, seconds, spans, sums_known) if len(spans) <= ITEMS_MAX:
                stream.expire_at(_end_of_request(seconds))
                self._send_spans(stream, id, spans, check=not sums_known)
            case WriteSpans(id, seconds, spans) if len(spans) <= GROUP_ITEMS:
                stream.expire_at(_end_of_request(seconds))
                self._take_spans(stream, id, spans)
            case Question(id, topic, body) if topic in self._answers:
                stream.expire_at(_end_of_request(REQUEST_SECONDS_MAX))
                stream.send(Answer(id, self._answer_to(topic, body, peer)))
            case Notice(id, body) if self._notice is not None:
                stream.expire_at(_end_of_request(REQUEST_SECONDS_MAX))
                self._notice(peer, body)
                stream.send(Wrote(id, ["ok"]))
            case _:
                raise StreamEnded(f"{peer.name!r} sent a {type(frame).__name__}, which is not served here, or too long")

    def _answer_to(self, topic: str, body: bytes, peer: PeerIdentity) -> bytes:
        try:
            return self._answers[topic](body)
        except (msgspec.MsgspecError, TimeoutError) as error:
            raise StreamEnded(f"the question of {peer.name!r} about {topic} has no answer: {error}") from error

    def _send_spans(self, stream: TcpStream, request: int, spans: Sequence[RegionSpan], *, check: bool) -> None:
        ended: list[tuple[MoveOutcome, int]] = []
        for group in span_groups(spans):
            uses = self.regions.use(group, stream, write=False)
            lent = [use for use in uses if isinstance(use, RegionUse)]
            try:
                lengths = [len(use.view) if isinstance(use, RegionUse) else 0 for use in uses]
                stream.send(Part(request, ended, lengths))
                sums = iter([stream.send_payload(use.view, check=check) for use in lent])
            finally:
                served = iter(self.regions.leave(lent, stream))
            ended = [
                ("ok" if next(served) else "stale", next(sums)) if isinstance(use, RegionUse) else (use, 0)
                for use in uses
            ]
        stream.send(Part(request, ended, []))

    def _take_spans(self, stream: TcpStream, request: int, spans: Sequence[RegionSpan]) -> None:
        uses = self.regions.use(spans, stream, write=True)
        lent = [use for use in uses if isinstance(use, RegionUse)]
        sums: list[int] = []
        try:
            for use, span in zip(uses, spans):
                if isinstance(use, RegionUse):
                    sums.append(stream.take_payload(use.view))
                else:
                    _drain_payload(stream, span.length)
        finally:
            served = iter(self.regions.leave(lent, stream))
        checksums = stream.receive()
        if not isinstance(checksums, Checksums) or len(checksums.sums) != len(spans):
            raise StreamEnded("the checksums of a write did not come")
        arrived = iter(sums)
        outcomes: list[MoveOutcome] = []
        for use, right in zip(uses, checksums.sums):
            if not isinstance(use, RegionUse):
                outcomes.append(use)
            else:
                same = next(arrived) == right
                outcomes.append("stale" if not next(served) else "ok" if same else "corrupt")
        stream.send(Wrote(request, outcomes))


def _end_of_request(seconds: float) -> float:
    return time.monotonic() + max(0.0, min(seconds, REQUEST_SECONDS_MAX))


def _drain_payload(stream: TcpStream, length: int) -> None:
    scratch = memoryview(bytearray(min(max(length, 0), _DRAIN_BYTES)))
    while length > 0:
        stream.take_payload(scratch[: min(length, len(scratch))])
        length -= len(scratch)

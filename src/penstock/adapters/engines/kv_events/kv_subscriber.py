"""KV event subscriber of one engine rank: receives its batches over ZMQ and requests a replay of missed ones."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence

import xxhash
import zmq
import zmq.asyncio

from penstock.adapters.background_tasks import BackgroundTasks
from penstock.adapters.engines.kv_events.kv_event_codec import KvDecoder, WireError
from penstock.adapters.engines.kv_events.kv_publisher import END
from penstock.adapters.seams import KvBatch
from penstock.adapters.zmq_curve import Handshakes, connect_side
from penstock.adapters.zmq_receive import receive, receiving_socket
from penstock.kernel.errors import EngineError
from penstock.kernel.secret import ClusterSecret
from penstock.kernel.values import Tier

log = logging.getLogger(__name__)

MESSAGE_LIMIT = 64 << 20
"""Bytes of one message; a larger one drops the connection, which is made again."""
UNREAD_MAX = 100_000
"""Messages kept while this process is busy; more are lost and show as a gap."""
BIND = "@"
"""Before an endpoint: bind it here. vLLM and SGLang connect their PUB socket where its address has no star."""
SENT_KEPT = 64
"""Batches by which a process is known again: some may come of a new one before it is known that the old one ended."""
CHECKS = 3
"""Times that an engine is asked who it is, 2 s each: one that has just come may not listen for questions yet."""
REPLAY_LIMIT = 100_000
"""Batches in one replay answer."""
_BREATH = 64
"""Messages yielded without waiting before other tasks get a turn."""


def cleared_by(engine: str) -> Tier | None:
    """Return the tier that `AllBlocksCleared` of a kind of engine is about; None is all of them."""
    return "device" if engine == "vllm" else None


class KvSubscriber:
    """Receive the KV events of one rank of one engine.

    The connection is made again by itself. Then the engine is asked for a batch that it had sent before: where it has
    another one under that number, or none, another process publishes now, whatever its numbers are. Messages that can't
    be decoded are counted in ``malformed`` and left out, so that they show as a gap.

    Args:
        endpoint: PUB endpoint of the engine, or after ``@`` the address that the engine connects to.
        replay_endpoint: ROUTER endpoint, or None where it has none.
        topic: only messages with exactly this topic count; empty takes all.
        rank: written into each `KvBatch`.
        secret: of the cluster, for an engine that speaks CURVE; None for one that speaks plain.
        lost: called with the reason where what was sent before is of no use any more, and with what the engine has
            sent since: at the first handshake that fails, and where another process publishes.
        cleared: what this kind of engine clears at once; None for all.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        rank: int = 0,
        secret: ClusterSecret | None = None,
        lost: Callable[[str, Sequence[KvBatch]], None] | None = None,
        cleared: Tier | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.replay_endpoint = replay_endpoint
        self.received = 0
        self.malformed = 0
        self.foreign = 0
        """Messages of another topic that begins like ours."""
        self.handshakes = Handshakes(self._say_refused, self._disconnected, self._connected)
        """A failed one shows that the engine has another secret, or another mechanism than it reported."""
        self._secret = secret
        self._lost = lost
        self._sent: dict[int, int] = {}
        """Digests of the last batches, by their numbers: which process sent them."""
        self._doubted: tuple[int, int] | None = None
        """Number and digest of a batch that came before the connection ended, until the next one is known."""
        self.checks = BackgroundTasks()
        """Questions who publishes, after a connection ended."""
        self._topic = topic.encode()
        self._rank = rank
        self._decoder = KvDecoder(cleared)
        self._sockets: set[zmq.asyncio.Socket] = set()

    @property
    def dropped(self) -> dict[str, int]:
        """Well-formed events left out on purpose, by reason (`KvDecoder.dropped`)."""
        return dict(self._decoder.dropped)

    async def batches(self) -> AsyncIterator[KvBatch]:
        """Yield batches in the order in which they arrive, until the iterator is closed or `close` is called."""
        socket = self._socket(zmq.SUB)
        try:
            socket.setsockopt(zmq.SUBSCRIBE, self._topic)
            self.handshakes.watch(socket)
            self._attach(socket)
            count = 0
            while (frames := await receive(socket)) is not None:
                batch = self._batch(frames)
                if batch is not None:
                    self.received += 1
                    yield batch
                count += 1
                if count % _BREATH == 0:
                    await asyncio.sleep(0)  # a waiting message returns at once, and other tasks would starve
        finally:
            self._release(socket)

    async def replay(self, first: int, timeout: float = 2.0) -> list[KvBatch] | None:
        """Request the engine's batches from sequence ``first`` on.

        Args:
            first: sequence, from 0.
            timeout: seconds for the whole answer.
        Returns: what it still has, in order (its first may be later than ``first``), or None where the engine
            could not be reached or did not end its answer in time.
        """
        if self.replay_endpoint is None:
            return None
        socket = self._socket(zmq.DEALER)
        try:
            socket.connect(self.replay_endpoint)
            async with asyncio.timeout(timeout):
                await socket.send_multipart((b"", first.to_bytes(8, "big")))
                return await self._answer(socket)
        except TimeoutError:
            return None
        finally:
            self._release(socket)

    def close(self) -> None:
        """Close the sockets of all iterators and replays."""
        for task in self.checks:
            task.cancel()
        for socket in tuple(self._sockets):
            self._release(socket)

    def _attach(self, socket: zmq.asyncio.Socket) -> None:
        if not self.endpoint.startswith(BIND):
            socket.connect(self.endpoint)
            return
        address = self.endpoint.removeprefix(BIND)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise EngineError(
                f"{address} can't be bound for KV events: {error}",
                hint="only one frontend can hear an engine whose socket connects; give it an endpoint with a star",
            ) from error

    def _say_refused(self, endpoint: str) -> None:
        log.warning("KV events at %s can't be heard: the engine has another cluster secret, or none", endpoint)
        if self._lost is not None:
            self._lost("it has another cluster secret", ())

    def _disconnected(self) -> None:
        if self._doubted is None and self._sent:
            self._doubted = next(iter(self._sent.items()))

    def _connected(self) -> None:
        if self._doubted is not None and self._lost is not None:
            self.checks.spawn(self._check_process(*self._doubted), f"who publishes at {self.endpoint}")

    async def _check_process(self, number: int, digest: int) -> None:
        """Ask for a batch of before; where another process answers, or nobody can tell, what it sent is of no use."""
        for _ in range(CHECKS):
            self._doubted, self._sent = None, {}
            answer = await self.replay(number)
            if self._sent.get(number) == digest:
                return
            if answer is not None or self.replay_endpoint is None:
                break
        self._decoder.restart()
        past = await self.replay(0)
        log.warning("another process publishes KV events at %s now: what was cached before is gone", self.endpoint)
        if self._lost is not None:
            self._lost("another process publishes at its address now", past or ())

    async def _answer(self, socket: zmq.asyncio.Socket) -> list[KvBatch] | None:
        out: list[KvBatch] = []
        for count in range(REPLAY_LIMIT):
            frames = await socket.recv_multipart()
            # The topic frame is newer than the protocol, so the end marker is found by what every version has.
            if len(frames) >= 3 and frames[-2] == END:
                return out
            batch = self._batch(frames[1:] if frames and not frames[0] else frames, replayed=True)
            if batch is not None:
                out.append(batch)
            if count % _BREATH == _BREATH - 1:
                await asyncio.sleep(0)
        log.warning("replay from %s went on beyond %d batches; given up", self.replay_endpoint, REPLAY_LIMIT)
        return None

    def _batch(self, frames: list[bytes], *, replayed: bool = False) -> KvBatch | None:
        if len(frames) not in ((2, 3) if replayed else (3,)) or len(frames[-2]) != 8:
            self._reject(f"frames of {[len(frame) for frame in frames[:8]]} bytes")
            return None
        if self._topic and len(frames) == 3 and frames[0] != self._topic:
            self.foreign += 1
            return None
        try:
            decoded = self._decoder.decode(frames[-1])
        except WireError as error:
            self._reject(error.message)
            return None
        number = int.from_bytes(frames[-2], "big")
        self._sent[number] = xxhash.xxh3_64_intdigest(frames[-1])
        if len(self._sent) > SENT_KEPT:
            del self._sent[next(iter(self._sent))]
        return KvBatch(number, self._rank, decoded.events)

    def _reject(self, why: str) -> None:
        self.malformed += 1
        if self.malformed & (self.malformed - 1) == 0:  # the 1st, 2nd, 4th, 8th...: a flood must not fill the log
            log.warning("KV event message %d from %s left out: %s", self.malformed, self.endpoint, why)

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = receiving_socket(zmq.Context.instance(), kind, UNREAD_MAX, MESSAGE_LIMIT)
        socket.reconnect_ivl = 100
        socket.reconnect_ivl_max = 2_000
        connect_side(socket, self._secret)
        self._sockets.add(socket)
        return socket

    def _release(self, socket: zmq.asyncio.Socket) -> None:
        self._sockets.discard(socket)
        self.handshakes.forget(socket)
        if not socket.closed:
            socket.close(0)

"""KV event subscriber of one engine rank: receives its batches over ZMQ and requests a replay of missed ones."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import xxhash
import zmq

from penstock.adapters.background_tasks import BackgroundTasks
from penstock.adapters.engines.kv_events.kv_event_codec import KvDecoder, WireError
from penstock.adapters.engines.kv_events.kv_poller import WAITING_MAX, KvPoller, PolledSocket
from penstock.adapters.engines.kv_events.kv_publisher import END
from penstock.adapters.seams import KvBatch
from penstock.adapters.zmq_curve import Handshakes, connect_side
from penstock.adapters.zmq_receive import receiving_socket
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
CHECKS, CHECK_TIMEOUT = 3, 2.0
"""Times that an engine is asked who it is, and seconds of each: one that has just come may not listen yet."""
CONNECT_WAIT = 2.0
"""Seconds that the subscription's connection may take until the past is asked for without one."""
REPLAY_LIMIT = 100_000
"""Batches in one replay answer."""
PAST_KEPT = 1024
"""Batches of an answer about the past that are known again: more do not wait between subscription and answer."""


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
        lost: called with the reason where what was sent before is of no use any more: at the first handshake that
            fails, and where another process publishes.
        cleared: what this kind of engine clears at once; None for all.
        poller: of all subscriptions of this process; None makes one.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        rank: int = 0,
        secret: ClusterSecret | None = None,
        lost: Callable[[str], None] | None = None,
        cleared: Tier | None = None,
        poller: KvPoller | None = None,
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
        self._poller = KvPoller() if poller is None else poller
        self._sources: dict[zmq.Socket[bytes], PolledSocket] = {}
        self._live: PolledSocket | None = None
        self._connection = asyncio.Event()
        """Set once there was a connection for the subscription."""
        self._take: Callable[[KvBatch], None] | None = None
        self._past: dict[int, int] = {}
        """Digests of the last batches of the answer about the past, by their numbers."""
        self._covered = -1
        """Number up to which the past is known, until a later one comes by itself: those that waited are in it."""
        self._newest: int | None = None
        """Number of the last batch that came by itself."""
        self._ts = 0.0
        """When the last message was sent, by the engine's clock, in seconds since 1970."""

    @property
    def dropped(self) -> dict[str, int]:
        """Well-formed events left out on purpose, by reason (`KvDecoder.dropped`)."""
        return dict(self._decoder.dropped)

    def listen(self, take: Callable[[KvBatch], None], failed: Callable[[Exception], None]) -> None:
        """Subscribe. ``take`` gets the batches in the order in which they arrive, from `release` on until `close`.

        Args:
            failed: gets what ``take`` raised; nothing is received any more.
        Raises:
            EngineError: the address that the engine connects to can't be bound.
        """
        socket = self._socket(zmq.SUB)
        socket.setsockopt(zmq.SUBSCRIBE, self._topic)
        self._take = take
        source = self._poller.add(socket, self._received, failed, overrun=self._overrun, paused=True)
        self._sources[socket] = self._live = source
        self.handshakes.watch(socket)
        self._attach(socket)

    def release(self) -> None:
        """Let what came since `listen`, and what comes from now on, be taken."""
        if self._live is not None:
            self._live.release()

    async def arrived(self) -> None:
        """Wait until something came since `listen`."""
        assert self._live is not None
        await self._live.arrived.wait()

    async def replay(self, first: int, timeout: float = 2.0) -> list[KvBatch] | None:
        """Request the engine's batches from sequence ``first`` on.

        Args:
            first: sequence, from 0.
            timeout: seconds without a message after which the answer is given up.
        Returns: what it still has, in order (its first may be later than ``first``), or None where the engine
            could not be reached or did not end its answer in time.
        """
        batches: list[KvBatch] = []
        return batches if await self._recall(first, batches.append, timeout) else None

    async def past(self, first: int, take: Callable[[KvBatch], None], timeout: float = 2.0) -> bool:
        """Do the same before `release`, giving ``take`` each batch as it comes; return whether the answer ended.

        What comes both in the answer and by itself, being sent between subscription and answer, is taken once.
        """

        def remembered(batch: KvBatch) -> None:
            self._covered = batch.sequence
            self._past[batch.sequence] = self._sent[batch.sequence]
            if len(self._past) > PAST_KEPT:
                del self._past[next(iter(self._past))]
            take(batch)

        await self._subscribed()
        return await self._recall(first, remembered, timeout)

    def cover(self, number: int) -> None:
        """Take none of the batches up to a number that waited since `listen`: what they did is known."""
        self._covered = number

    async def newest_after(self, number: int, digest: int | None, timeout: float = 2.0) -> int | None:
        """Return the number of the engine's newest batch, where it has this one; None where it has another, or none.

        An engine that can't be asked is taken to have it, and nothing after it.
        """
        await self._subscribed()
        newest = await self._newest_since(number, timeout)
        if newest.last is None or newest.digest is None:
            return None if newest.ended else number
        return newest.last.sequence if digest in (None, newest.digest) else None

    def digest(self, number: int) -> int | None:
        """Return the digest of one of the last `SENT_KEPT` batches; None of another."""
        return self._sent.get(number)

    def close(self) -> None:
        """Close the sockets of the subscription and of all replays."""
        for task in self.checks:
            task.cancel()
        for socket in tuple(self._sources):
            self._release(socket)

    async def _subscribed(self) -> None:
        """Wait until there was a connection: what is sent between an answer and the subscription is in neither."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CONNECT_WAIT):
                await self._connection.wait()

    async def _recall(self, first: int, take: Callable[[KvBatch], None], timeout: float) -> bool:
        """Request batches, and give each to ``take``; return whether the answer came to its end."""
        if self.replay_endpoint is None:
            return False
        async with self._poller.replays:
            socket = self._socket(zmq.DEALER)
            answer = _ReplayAnswer(self, take)
            try:
                socket.connect(self.replay_endpoint)
                self._sources[socket] = self._poller.add(socket, answer.received, answer.failed)
                socket.send_multipart((b"", first.to_bytes(8, "big")))
                return await answer.ended(timeout)
            finally:
                self._release(socket)

    def _attach(self, socket: "zmq.Socket[bytes]") -> None:
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
            self._lost("it has another cluster secret")

    def _disconnected(self) -> None:
        if self._doubted is None and self._sent:
            self._doubted = next(iter(self._sent.items()))

    def _connected(self) -> None:
        self._connection.set()
        if self._doubted is not None and self._lost is not None:
            self.checks.spawn(self._check_process(*self._doubted), f"who publishes at {self.endpoint}")

    async def _check_process(self, number: int, digest: int) -> None:
        """Ask for a batch of before; where another process answers, or nobody can tell, what it sent is of no use."""
        for _ in range(CHECKS):
            self._doubted, self._sent = None, {}
            newest = await self._newest_since(number)
            if newest.digest == digest:
                self._catch_up(newest.last)
                return
            if newest.ended or self.replay_endpoint is None:
                break
        self._decoder.restart()
        self._covered, self._newest = -1, None
        log.warning("another process publishes KV events at %s now: what was cached before is gone", self.endpoint)
        if self._lost is not None:
            self._lost("another process publishes at its address now")
        await self._check_newest(0)

    def _overrun(self) -> None:
        """Ask for what the engine sent last: it may have dropped that, and say nothing for a long time."""
        if self.replay_endpoint is not None and self._newest is not None:
            self.checks.spawn(self._check_newest(self._newest), f"what {self.endpoint} sent last")

    async def _check_newest(self, number: int) -> None:
        self._catch_up((await self._newest_since(number)).last)

    async def _newest_since(self, number: int, timeout: float = CHECK_TIMEOUT) -> "_Newest":
        """Ask for what the engine sent from a number on."""
        digest: int | None = None
        last: KvBatch | None = None

        def look(batch: KvBatch) -> None:
            nonlocal digest, last
            if batch.sequence == number:
                digest = self._sent[number]
            last = batch

        return _Newest(await self._recall(number, look, timeout), digest, last)

    def _catch_up(self, last: KvBatch | None) -> None:
        """Take the last batch that the engine sent, where it did not come: its number shows what else is missing."""
        if last is not None and self._take is not None and (self._newest is None or last.sequence > self._newest):
            self._newest = last.sequence
            self._take(last)

    def _received(self, frames: list[bytes]) -> float | None:
        """Take one message; return when it was sent, by the engine's clock."""
        batch = self._batch(frames)
        if batch is None or self._take is None:
            return None
        if batch.sequence <= self._covered:
            if self._past.get(batch.sequence) in (None, self._sent[batch.sequence]):
                return self._ts
            self._past.clear()  # a number that comes again with something else is a new beginning
        self._covered = -1
        self.received += 1
        self._newest = batch.sequence
        self._take(batch)
        return self._ts

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
        self._ts = decoded.ts
        number = int.from_bytes(frames[-2], "big")
        self._sent[number] = xxhash.xxh3_64_intdigest(frames[-1])
        if len(self._sent) > SENT_KEPT:
            del self._sent[next(iter(self._sent))]
        return KvBatch(number, self._rank, decoded.events)

    def _reject(self, why: str) -> None:
        self.malformed += 1
        if self.malformed & (self.malformed - 1) == 0:  # the 1st, 2nd, 4th, 8th...: a flood must not fill the log
            log.warning("KV event message %d from %s left out: %s", self.malformed, self.endpoint, why)

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        # An engine's replay socket drops, without a word, what a connection does not take at once.
        messages = WAITING_MAX if kind == zmq.SUB else REPLAY_LIMIT
        socket = receiving_socket(kind, messages, MESSAGE_LIMIT)
        socket.reconnect_ivl = 100
        socket.reconnect_ivl_max = 2_000
        connect_side(socket, self._secret)
        return socket

    def _release(self, socket: "zmq.Socket[bytes]") -> None:
        self.handshakes.forget(socket)
        source = self._sources.pop(socket, None)
        if source is not None:
            source.close()
        elif not socket.closed:
            socket.close(0)


class _Newest(NamedTuple):
    """What an engine had sent from a number on: whether it told all, the digest of that batch, and the last one."""

    ended: bool
    digest: int | None
    last: KvBatch | None


class _ReplayAnswer:
    """The answer to one replay request."""

    def __init__(self, subscriber: KvSubscriber, take: Callable[[KvBatch], None]) -> None:
        self._subscriber = subscriber
        self._take = take
        self._count = 0
        self._end: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def received(self, frames: list[bytes]) -> None:
        """Take one message."""
        # The topic frame is newer than the protocol, so the end marker is found by what every version has.
        if len(frames) >= 3 and frames[-2] == END:
            self._settle(True)
            return
        self._count += 1
        if self._count > REPLAY_LIMIT:
            log.warning("replay from %s went on beyond %d batches; given up", self._subscriber.endpoint, REPLAY_LIMIT)
            self._settle(False)
        elif not self._end.done():
            batch = self._subscriber._batch(frames[1:] if frames and not frames[0] else frames, replayed=True)
            if batch is not None:
                self._take(batch)

    def failed(self, error: Exception) -> None:
        """What was received could not be taken in."""
        if not self._end.done():
            self._end.set_exception(error)

    async def ended(self, timeout: float) -> bool:
        """Wait for the end; return False where the answer is of no use, or nothing came for ``timeout`` seconds."""
        count = -1
        while not self._end.done() and self._count > count:
            count = self._count
            await asyncio.wait({self._end}, timeout=timeout)
        return self._end.result() if self._end.done() else False

    def _settle(self, whole: bool) -> None:
        if not self._end.done():
            self._end.set_result(whole)

"""KV relay client of a router: receives relayed KV events over NATS, detects gaps and requests the missing batches."""

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from penstock.adapters.background_tasks import BackgroundTasks
from penstock.adapters.nats_link import NatsLink
from penstock.adapters.seams import KvBatch
from penstock.kernel.message_version import NewerVersion
from penstock.kernel.secret import ClusterSecret
from penstock.kernel.values import Target, WorkerCard
from penstock.runtime.kv_events.jetstream_history import JetStreamHistory
from penstock.runtime.kv_events.kv_relay_messages import (
    Assembler,
    ForeignMessage,
    ReplayQuestion,
    SnapshotPart,
    decode,
    encode,
    epoch_of,
    subject,
)

if TYPE_CHECKING:
    from nats.aio.msg import Msg

log = logging.getLogger("penstock.feeds")

WAITING_MAX = 10_000
"""Messages kept while the router is busy; more are lost and show as a gap."""
TIMEOUT = 5.0
"""Seconds that a relay gets to answer where a beat showed a gap."""


class KvRelayClient:
    """The connection that all feeds of one router share.

    Args:
        link: to NATS; started with the first feed, closed here.
        prefix: of the subjects.
        secret: of the cluster.
        durable: the history, for a router that starts late; None: there is none.
    """

    def __init__(
        self, link: NatsLink, prefix: str, secret: ClusterSecret | None, durable: JetStreamHistory | None
    ) -> None:
        self.link = link
        self.prefix = prefix
        self.secret = secret
        self.durable = durable

    def feed(self, card: WorkerCard, rank: int) -> "KvRelayFeed":
        """Return the feed of one rank of a worker; call it with the event loop running."""
        self.link.start()
        return KvRelayFeed(self, Target(card.id, rank), epoch_of(card.events[rank]))

    async def close(self) -> None:
        await self.link.close()


class KvRelayFeed:
    """The events of one rank of one worker, with the methods of a `KvSubscriber`.

    Args:
        epoch: of the relay's numbers; messages of other epochs are ignored.
    """

    def __init__(self, shared: KvRelayClient, target: Target, epoch: int) -> None:
        prefix = shared.prefix
        self.replay_endpoint: str | None = subject(prefix, "ask", target)
        self.received = 0
        self.malformed = 0
        self.foreign = 0
        """Messages that were not signed with our secret."""
        self._link = shared.link
        self._subjects = {kind: subject(prefix, kind, target) for kind in ("kv", "beat", "ask")}
        self._rank = target.rank
        self._epoch = epoch
        self._secret = shared.secret
        self._durable = shared.durable
        self._newest = -1
        self._announced = -1
        """The number of the last beat."""
        self._asking = 0
        """Replay requests under way."""
        self._queue: asyncio.Queue[SnapshotPart] = asyncio.Queue()
        self._listening, self._arrived, self._released = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._tasks = BackgroundTasks()

    def listen(self, take: Callable[[KvBatch], None], failed: Callable[[Exception], None]) -> None:
        """Subscribe. ``take`` gets the batches in the order in which they arrive, from `release` on until `close`."""
        self._tasks.spawn(self._guarded(take, failed), f"relayed-{self._subjects['kv']}")

    def release(self) -> None:
        """Let what came since `listen`, and what comes from now on, be taken."""
        self._released.set()

    async def arrived(self) -> None:
        """Wait until something came since `listen`."""
        await self._arrived.wait()

    async def past(self, first: int, take: Callable[[KvBatch], None], timeout: float = 2.0) -> bool:
        """Request the batches from ``first`` on, and give each to ``take``; return whether there was an answer."""
        await self._listening.wait()
        answer = await self.replay(first, timeout)
        for batch in answer or ():
            take(batch)
            await asyncio.sleep(0)
        return answer is not None

    async def _guarded(self, take: Callable[[KvBatch], None], failed: Callable[[Exception], None]) -> None:
        try:
            await self._receive(take)
        except Exception as error:  # supervision boundary: a dead feed is logged, never silent
            log.exception("relayed KV events of %s can't be heard any more", self._subjects["kv"])
            failed(error)

    async def _receive(self, take: Callable[[KvBatch], None]) -> None:
        ends = [await self._link.listen(self._subjects[kind], self._heard) for kind in ("kv", "beat")]
        self._listening.set()
        assembler = Assembler(self._rank)
        try:
            await self._released.wait()
            while True:
                part = await self._queue.get()
                if part.beat:
                    for batch in await self._missed(part.sequence):
                        take(batch)
                    continue
                whole = assembler.add(part)
                # An answer had it already: a relay's numbers never go back, so it is no restart.
                if whole is not None and whole.sequence > self._newest:
                    self._saw(whole)
                    take(whole)
                    await asyncio.sleep(0)
        finally:
            for end in ends:
                await end()

    async def replay(self, first: int, timeout: float = 2.0) -> list[KvBatch] | None:
        """Request the batches from ``first`` on.

        Returns: what the relay still has of them, or one batch with everything that is held; None without an answer.
            The very first time, the broker's history, where there is one.
        """
        self._asking += 1
        try:
            return await self._replay(first, timeout)
        finally:
            self._asking -= 1

    async def _replay(self, first: int, timeout: float) -> list[KvBatch] | None:
        try:
            async with asyncio.timeout(timeout):
                await self._link.connected.wait()
        except TimeoutError:
            return None
        if first == 0 and self._durable is not None:
            durable, self._durable = self._durable, None
            parts = await durable.past(self._subjects["kv"], self._epoch, lambda raw: self._read(raw, "kv"))
            if parts:
                return self._joined(parts)
        where = self._subjects["ask"]
        question = encode(ReplayQuestion(epoch=self._epoch, first=first), where, self._secret)
        parts = []
        try:
            async for raw in self._link.ask(where, question, timeout):
                part = self._read(raw, "ask")
                if part is None or part.epoch != self._epoch:
                    continue
                if part.last:
                    return self._joined(parts)
                parts.append(part)
        except TimeoutError as error:
            log.debug("%s was not answered: %s", where, error)
        return None

    def close(self) -> None:
        """Receive no more."""
        for task in self._tasks:
            task.cancel()

    async def ended(self) -> None:
        """Wait until nothing is received any more, after `close`."""
        await self._tasks.close()

    async def _heard(self, message: "Msg") -> None:
        part = self._read(message.data, "beat" if message.subject == self._subjects["beat"] else "kv")
        if part is not None and part.epoch == self._epoch and self._queue.qsize() < WAITING_MAX:
            self._queue.put_nowait(part)
            self._arrived.set()

    async def _missed(self, announced: int) -> list[KvBatch]:
        """Request batches that a beat showed and that still miss at the next: a beat may overtake its batches."""
        due, self._announced = self._announced, announced
        if due <= self._newest or self._asking:  # a request under way may bring it; if not, the next beat shows that
            return []
        return await self.replay(self._newest + 1, TIMEOUT) or []

    def _joined(self, parts: list[SnapshotPart]) -> list[KvBatch]:
        assembler = Assembler(self._rank)
        batches = [batch for part in parts if (batch := assembler.add(part)) is not None]
        for batch in batches:
            self._saw(batch)
        return batches

    def _saw(self, batch: KvBatch) -> None:
        self.received += 1
        self._newest = max(self._newest, batch.sequence)

    def _read(self, raw: bytes, kind: str) -> SnapshotPart | None:
        try:
            return decode(SnapshotPart, raw, self._subjects[kind], self._secret)
        except ForeignMessage as error:
            self.foreign += 1
            self._log_left_out(self.foreign, error)
        except (NewerVersion, msgspec.DecodeError) as error:
            self.malformed += 1
            self._log_left_out(self.malformed, error)
        return None

    def _log_left_out(self, count: int, error: Exception) -> None:
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th...: a flood must not fill the log
            log.warning("relayed message %d left out: %s", count, error)

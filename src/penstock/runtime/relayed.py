"""How does a router hear KV events that a relay publishes on NATS? As those of an engine's own socket, gaps closed."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import msgspec

from penstock.adapters.nats_link import NatsLink
from penstock.adapters.seams import KvBatch
from penstock.kernel.secret import ClusterSecret
from penstock.kernel.values import Target, WorkerCard
from penstock.kernel.wire import NewerVersion
from penstock.runtime.durable import Durable
from penstock.runtime.relay_wire import Assembler, ForeignMessage, Part, Question, decode, encode, epoch_of, subject

if TYPE_CHECKING:
    from nats.aio.msg import Msg

log = logging.getLogger("penstock.feeds")

WAITING_MAX = 10_000
"""Messages kept while the router is busy; more are lost and show as a gap."""
TIMEOUT = 5.0
"""Seconds that a relay gets to answer where a beat showed that something is missing."""


class Relayed:
    """What all feeds of one router share.

    Args:
        link: to NATS; started with the first feed, closed here.
        prefix: of the subjects.
        secret: of the cluster.
        durable: where the past may stand, for a router that starts late.
    """

    def __init__(self, link: NatsLink, prefix: str, secret: ClusterSecret | None, durable: Durable | None) -> None:
        self.link = link
        self.prefix = prefix
        self.secret = secret
        self.durable = durable

    def feed(self, card: WorkerCard, rank: int) -> "RelayedFeed":
        """Return the feed of one rank of a worker; call it with the event loop running."""
        self.link.start()
        return RelayedFeed(self, Target(card.id, rank), epoch_of(card.events[rank]))

    async def close(self) -> None:
        await self.link.close()


class RelayedFeed:
    """The events of one rank of one worker; stands where a `KvSubscriber` would.

    Args:
        epoch: in which the relay counts; other epochs' messages mean nothing here.
    """

    def __init__(self, shared: Relayed, target: Target, epoch: int) -> None:
        prefix = shared.prefix
        self.replay_endpoint: str | None = subject(prefix, "ask", target)
        self.received = 0
        self.malformed = 0
        self.foreign = 0
        """Messages that were not signed with our secret."""
        self.beats_missed = 0
        """Beats that told of batches which had not come."""
        self._link = shared.link
        self._subjects = {kind: subject(prefix, kind, target) for kind in ("kv", "beat", "ask")}
        self._rank = target.rank
        self._epoch = epoch
        self._secret = shared.secret
        self._durable = shared.durable
        self._seen = -1
        self._told = -1
        """The number of the last beat."""
        self._asking = 0
        """Questions under way."""
        self._queue: asyncio.Queue[Part | None] = asyncio.Queue()

    async def batches(self) -> AsyncIterator[KvBatch]:
        """Yield batches in the order in which they arrive, until `close`."""
        ends = [await self._link.listen(self._subjects[kind], self._heard) for kind in ("kv", "beat")]
        assembler = Assembler(self._rank)
        try:
            while (part := await self._queue.get()) is not None:
                if part.beat:
                    for batch in await self._missed(part.sequence):
                        yield batch
                    continue
                found = assembler.add(part)
                # What an answer had already: a relay's numbers never go back, so it is no new beginning.
                if found is not None and found.sequence > self._seen:
                    self._saw(found)
                    yield found
        finally:
            for end in ends:
                await end()

    async def replay(self, first: int, timeout: float = 2.0) -> list[KvBatch] | None:
        """Ask for the batches from ``first`` on.

        Returns: what the relay still has of them, or one batch with everything that is held; None without an answer.
            The very first time, what the broker kept, where it keeps anything.
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
        question = encode(Question(epoch=self._epoch, first=first), where, self._secret)
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
        """End the iterators."""
        self._queue.put_nowait(None)

    async def _heard(self, message: "Msg") -> None:
        part = self._read(message.data, "beat" if message.subject == self._subjects["beat"] else "kv")
        if part is not None and part.epoch == self._epoch and self._queue.qsize() < WAITING_MAX:
            self._queue.put_nowait(part)

    async def _missed(self, told: int) -> list[KvBatch]:
        """Ask for what a beat told of and what did not come until the next one: a beat may overtake its batches."""
        due, self._told = self._told, told
        if due <= self._seen or self._asking:  # what is asked for already may hold it; if not, the next beat tells
            return []
        self.beats_missed += 1
        return await self.replay(self._seen + 1, TIMEOUT) or []

    def _joined(self, parts: list[Part]) -> list[KvBatch]:
        assembler = Assembler(self._rank)
        batches = [batch for part in parts if (batch := assembler.add(part)) is not None]
        for batch in batches:
            self._saw(batch)
        return batches

    def _saw(self, batch: KvBatch) -> None:
        self.received += 1
        self._seen = max(self._seen, batch.sequence)

    def _read(self, raw: bytes, kind: str) -> Part | None:
        try:
            return decode(Part, raw, self._subjects[kind], self._secret)
        except ForeignMessage as error:
            self.foreign += 1
            self._tell(self.foreign, error)
        except (NewerVersion, msgspec.DecodeError) as error:
            self.malformed += 1
            self._tell(self.malformed, error)
        return None

    def _tell(self, count: int, error: Exception) -> None:
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th...: a flood must not fill the log
            log.warning("relayed message %d left out: %s", count, error)

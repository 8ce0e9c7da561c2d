"""How do an engine's KV events get to routers that do not reach the engine? A relay beside it publishes them on NATS.

The relay hears the engine as a router would, keeps what it holds (`penstock.runtime.holdings`), numbers what it tells
on by itself, and answers for what was lost on the way: the batches from a number on, or, where those are not kept any
more, everything that is held.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.adapters.curve import MECHANISM
from penstock.adapters.ending import end
from penstock.adapters.engines.kv_subscriber import KvSubscriber
from penstock.adapters.nats_link import NatsLink
from penstock.adapters.seams import KvBatch
from penstock.kernel.hashing import SCHEME as OUR_HASHES
from penstock.kernel.secret import ClusterSecret
from penstock.kernel.values import KvCleared, KvEvent, Target, WorkerCard
from penstock.kernel.wire import NewerVersion
from penstock.router.events import KvObserved, ReplayEnded
from penstock.router.kv_stream import KvStream, StreamOutcome
from penstock.runtime.durable import Durable
from penstock.runtime.holdings import Holdings
from penstock.runtime.relay_wire import (
    SCHEME,
    ForeignMessage,
    Part,
    Question,
    decode,
    encode,
    endpoint,
    parts_of,
    subject,
)

if TYPE_CHECKING:
    from nats.aio.msg import Msg

log = logging.getLogger("penstock.relay")

BEAT = 1.0
"""Seconds between two words on how far the numbers are."""
KEPT = 4096
"""Batches kept for routers that missed some; who needs older ones is told everything that is held."""
REPLAY_TIMEOUT, REPLAY_PAUSE = 5.0, 1.0
"""Seconds that an engine gets to answer, and until it is asked again."""
_BREATH = 16


class Relays:
    """The relays of all engines that one process looks after.

    Args:
        link: to NATS; started and closed here.
        prefix: of the subjects.
        secret: of the cluster.
        durable: keeps events and snapshots for routers that start late, where that is wished.
    """

    def __init__(
        self, link: NatsLink, prefix: str, secret: ClusterSecret | None, durable: Durable | None = None
    ) -> None:
        self._link = link
        self._prefix = prefix
        self._secret = secret
        self._durable = durable
        self._relays: dict[str, tuple[WorkerCard, list[Relay]]] = {}
        """Worker -> the card with which they began, and one relay per rank."""
        self._leaving: set[asyncio.Task[None]] = set()

    def announced(self, card: WorkerCard) -> WorkerCard:
        """Relay a worker from now on, where it tells KV events; return the card that the routers shall see."""
        if not card.events or card.events[0].startswith(SCHEME):
            return card
        self._link.start()
        known = self._relays.get(card.id)
        if known is None or not _same_engine(known[0], card):
            for former in known[1] if known is not None else ():
                self._leave(former.close(), card.id)
            made = [
                Relay(self._link, self._prefix, card, rank, self._secret, self._durable)
                for rank in range(len(card.events))
            ]
            known = self._relays[card.id] = card, made
            for relay in made:
                relay.start()
        ends = tuple(endpoint(known[0], rank) for rank in range(len(card.events)))
        return msgspec.structs.replace(
            card, events=ends, replay=ends, events_security=None, topic="", hash_scheme=OUR_HASHES
        )

    def gone(self, worker: str) -> None:
        """A worker is taken out; one that is not relayed is no error."""
        known = self._relays.pop(worker, None)
        for relay in known[1] if known is not None else ():
            self._leave(relay.retire(), worker)

    async def close(self) -> None:
        """End all relays and leave NATS."""
        relays = [relay for _, made in self._relays.values() for relay in made]
        self._relays.clear()
        await asyncio.gather(*(relay.close() for relay in relays), *self._leaving)
        await self._link.close()

    def _leave(self, work: Coroutine[Any, Any, None], worker: str) -> None:
        task = asyncio.create_task(work, name=f"relay of {worker} leaves")
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)


def _same_engine(before: WorkerCard, card: WorkerCard) -> bool:
    """Tell whether a newer card is of the process that an older one was of, as where it was given another role."""
    return before.epoch == card.epoch or (
        before.pid is not None and (before.pid, before.events) == (card.pid, card.events)
    )


class Relay:
    """The events of one rank of one engine, on their way."""

    def __init__(
        self,
        link: NatsLink,
        prefix: str,
        card: WorkerCard,
        rank: int,
        secret: ClusterSecret | None,
        durable: Durable | None,
    ) -> None:
        self.holdings = Holdings(card)
        self.next = 0
        """The number of the batch that is told next."""
        self.answered = 0
        """Questions of routers that were answered."""
        self._target = Target(card.id, rank)
        self._link = link
        self._card = card
        self._secret = secret
        self._durable = durable
        self._subjects = {kind: subject(prefix, kind, self._target) for kind in ("kv", "beat", "ask")}
        plain = card.events_security != MECHANISM
        replay = card.replay[rank] if rank < len(card.replay) else None
        self._subscriber = KvSubscriber(
            card.events[rank], replay, card.topic, rank, secret=None if plain else secret, refused=self._refused
        )
        self._stream = KvStream()
        self._kept: deque[list[Part]] = deque(maxlen=KEPT)
        self._outbox: asyncio.Queue[list[Part]] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._unlisten: Callable[[], Coroutine[Any, Any, None]] | None = None

    def start(self) -> None:
        for work, name in (
            (self._hear(), "hear"),
            (self._send(), "send"),
            (self._beat(), "beat"),
            (self._listen(), "listen"),
        ):
            self._run(work, name)

    async def close(self) -> None:
        """End it."""
        self._subscriber.close()
        await end(tuple(self._tasks))

    async def retire(self) -> None:
        """End it, since its worker is gone for good."""
        await self.close()
        if self._durable is not None:
            await self._durable.forget(self._subjects["kv"])

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(self._guarded(work, name), name=f"relay-{self._target}-{name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Supervision boundary: a relay that stops is said aloud; the routers see its beat end."""
        try:
            await work
        except Exception:
            log.exception("the relay of %s does not %s any more", self._target, name)

    # --- from the engine --------------------------------------------------------------------------------------------

    async def _hear(self) -> None:
        batches = self._subscriber.batches()
        first = asyncio.ensure_future(anext(batches))  # subscribes before the past is asked for
        try:
            for batch in await self._past(first):
                self._observed(batch)
            self._observed(await first)
            count = 0
            async for batch in batches:
                self._observed(batch)
                count += 1
                if count % _BREATH == 0:
                    await asyncio.sleep(0)
        except StopAsyncIteration:
            return  # closed
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)

    async def _past(self, first: "asyncio.Future[KvBatch]") -> list[KvBatch]:
        while self._subscriber.replay_endpoint is not None:
            answer = await self._subscriber.replay(0, REPLAY_TIMEOUT)
            if answer is not None:
                return answer
            if (await asyncio.wait({first}, timeout=REPLAY_PAUSE))[0]:
                break
        return []

    def _observed(self, batch: KvBatch) -> None:
        self._take(self._stream.observe(self._of_engine(batch)))

    def _take(self, outcome: StreamOutcome) -> None:
        events: list[KvEvent] = []
        if outcome.clear:
            self.holdings.clear()
            events.append(KvCleared())
        for event in outcome.events:
            events += self.holdings.apply(event)
        if outcome.replay_from is not None:
            self._run(self._replay(outcome.replay_from), "replay")
        if outcome.note is not None:
            log.info("worker %s: %s", self._target, outcome.note)
        if not events:
            return
        parts = parts_of(self._card.epoch, self.next, events)
        self.next += 1
        self._kept.append(parts)
        self._outbox.put_nowait(parts)

    async def _replay(self, first: int) -> None:
        answer = await self._subscriber.replay(first, REPLAY_TIMEOUT)
        batches = None if answer is None else [self._of_engine(batch) for batch in answer]
        self._take(self._stream.replayed(ReplayEnded(id=0, batches=batches)))

    def _of_engine(self, batch: KvBatch) -> KvObserved:
        return KvObserved(
            worker=self._card.id, rank=batch.rank, epoch=self._card.epoch, sequence=batch.sequence, events=batch.events
        )

    def _refused(self) -> None:
        self._take(self._stream.lost("it has another cluster secret"))

    # --- to the routers ---------------------------------------------------------------------------------------------

    async def _send(self) -> None:
        where = self._subjects["kv"]
        while True:
            parts = await self._outbox.get()
            if self._durable is not None:
                await self._durable.ready()
            # Without a broker it is lost: routers see the gap, or the beat, and ask.
            sent = [await self._link.publish(where, encode(part, where, self._secret)) for part in parts]
            if self._durable is not None:
                await self._durable.told(where, parts[0].sequence, self._whole, lost=not all(sent))

    async def _beat(self) -> None:
        where = self._subjects["beat"]
        while True:
            beat = Part(epoch=self._card.epoch, sequence=self.next - 1, beat=True)
            await self._link.publish(where, encode(beat, where, self._secret))
            if self._durable is not None and self._outbox.empty():
                await self._durable.told(self._subjects["kv"], self.next - 1, self._whole)
            await asyncio.sleep(BEAT)

    async def _listen(self) -> None:
        unlisten = await self._link.listen(self._subjects["ask"], self._asked)
        try:
            await asyncio.Event().wait()
        finally:
            await unlisten()

    async def _asked(self, message: "Msg") -> None:
        where = self._subjects["ask"]
        try:
            question = decode(Question, message.data, where, self._secret)
        except (ForeignMessage, NewerVersion, msgspec.DecodeError) as error:
            log.debug("a question for %s is left without an answer: %s", self._target, error)
            return
        for part in self._answer(question):
            await self._link.publish(message.reply, encode(part, where, self._secret))
        self.answered += 1

    def _answer(self, question: Question) -> list[Part]:
        epoch = self._card.epoch
        last = Part(epoch=epoch, sequence=self.next - 1, last=True)
        oldest = self._kept[0][0].sequence if self._kept else self.next
        if question.epoch != epoch:
            return []  # it is meant for a relay that is gone, or for one to come
        if oldest <= question.first <= self.next:
            newer = [parts for parts in self._kept if parts[0].sequence >= question.first]
            return [*(part for parts in newer for part in parts), last]
        return [*self._whole(), last] if self.next else [last]

    def _whole(self) -> list[Part]:
        """Return everything that is held, as one batch with the number of the last."""
        return parts_of(self._card.epoch, self.next - 1, list(self.holdings.dump()), whole=True)

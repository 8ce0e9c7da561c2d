"""KV event relay: receives an engine's KV events beside it and publishes them on NATS for routers out of its reach.

The relay receives as a router would, keeps the engine's blocks (`penstock.runtime.kv_events.engine_blocks`), numbers
its own batches, and replays lost ones: the batches from a number on, or, where those are not kept any more, everything
that is held.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.adapters.background_tasks import BackgroundTasks
from penstock.adapters.engines.kv_events.kv_poller import KvPoller
from penstock.adapters.engines.kv_events.kv_subscriber import KvSubscriber, cleared_by
from penstock.adapters.nats_link import NatsLink
from penstock.adapters.seams import KvBatch
from penstock.adapters.task_cancel import end
from penstock.adapters.zmq_curve import MECHANISM
from penstock.kernel.hashing import SCHEME as OUR_HASHES
from penstock.kernel.message_version import NewerVersion
from penstock.kernel.secret import ClusterSecret
from penstock.kernel.values import KvCleared, KvEvent, Target, WorkerCard
from penstock.router.events import KvObserved, ReplayEnded
from penstock.router.kv_index.kv_event_stream import KvEventStream, StreamOutcome
from penstock.runtime.kv_events.engine_blocks import EngineBlocks
from penstock.runtime.kv_events.jetstream_history import JetStreamHistory
from penstock.runtime.kv_events.kv_relay_messages import (
    SCHEME,
    ForeignMessage,
    ReplayQuestion,
    SnapshotPart,
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
"""Seconds between two beats, which carry the highest number."""
REPLAYABLE = 4096
"""Batches kept for routers that missed some; a router that needs older ones gets everything that is held."""
REPLAY_TIMEOUT, REPLAY_PAUSE = 5.0, 1.0
"""Seconds that an engine gets to answer, and until the next request."""


class KvEventRelays:
    """The relays of all engines of one process.

    Args:
        link: to NATS; started and closed here.
        prefix: of the subjects.
        secret: of the cluster.
        durable: keeps events and snapshots for routers that start late; None: no history.
    """

    def __init__(
        self, link: NatsLink, prefix: str, secret: ClusterSecret | None, durable: JetStreamHistory | None = None
    ) -> None:
        self._link = link
        self._prefix = prefix
        self._secret = secret
        self._durable = durable
        self._relays: dict[str, tuple[WorkerCard, list[KvEventRelay]]] = {}
        """Worker -> the card with which they began, and one relay per rank."""
        self._leaving = BackgroundTasks()
        self._poller = KvPoller()

    def announced(self, card: WorkerCard) -> WorkerCard:
        """Relay a worker from now on, where it publishes KV events; return the card for the routers."""
        if not card.events or card.events[0].startswith(SCHEME):
            return card
        self._link.start()
        known = self._relays.get(card.id)
        if known is None or not _same_engine(known[0], card):
            for former in known[1] if known is not None else ():
                self._leave(former.close(), card.id)
            made = [
                KvEventRelay(self._link, self._prefix, card, rank, self._secret, self._durable, self._poller)
                for rank in range(len(card.events))
            ]
            known = self._relays[card.id] = card, made
            for relay in made:
                relay.start()
        ends = tuple(endpoint(known[0], rank) for rank in range(len(card.events)))
        return msgspec.structs.replace(
            card, events=ends, replay=ends, events_security=None, topic="", hash_scheme=OUR_HASHES
        )

    def remove(self, worker: str) -> None:
        """Stop relaying a worker that is gone; one that is not relayed is no error."""
        known = self._relays.pop(worker, None)
        for relay in known[1] if known is not None else ():
            self._leave(relay.retire(), worker)

    async def close(self) -> None:
        """End all relays and close the NATS connection."""
        relays = [relay for _, made in self._relays.values() for relay in made]
        self._relays.clear()
        await asyncio.gather(*(relay.close() for relay in relays), *self._leaving)
        await self._link.close()

    def _leave(self, work: Coroutine[Any, Any, None], worker: str) -> None:
        self._leaving.spawn(work, f"relay of {worker} leaves")


def _same_engine(before: WorkerCard, card: WorkerCard) -> bool:
    """Return whether a newer card is of the same process as an older one, such as after a change of role."""
    return before.epoch == card.epoch or (
        before.pid is not None and (before.pid, before.events) == (card.pid, card.events)
    )


class KvEventRelay:
    """The relay of one rank of one engine."""

    def __init__(
        self,
        link: NatsLink,
        prefix: str,
        card: WorkerCard,
        rank: int,
        secret: ClusterSecret | None,
        durable: JetStreamHistory | None,
        poller: KvPoller,
    ) -> None:
        self.holdings = EngineBlocks(card)
        self.next = 0
        """The number of the next batch."""
        self.answered = 0
        """Replay requests of routers that were answered."""
        self._target = Target(card.id, rank)
        self._link = link
        self._card = card
        self._secret = secret
        self._durable = durable
        self._subjects = {kind: subject(prefix, kind, self._target) for kind in ("kv", "beat", "ask")}
        plain = card.events_security != MECHANISM
        replay = card.replay[rank] if rank < len(card.replay) else None
        self._subscriber = KvSubscriber(
            card.events[rank],
            replay,
            card.topic,
            rank,
            secret=None if plain else secret,
            lost=self._lost,
            cleared=cleared_by(card.engine),
            poller=poller,
        )
        self._stream = KvEventStream()
        self._recent: deque[list[SnapshotPart]] = deque(maxlen=REPLAYABLE)
        self._outbox: asyncio.Queue[list[SnapshotPart]] = asyncio.Queue()
        self._tasks = BackgroundTasks()
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
        """End the relay."""
        self._subscriber.close()
        await end(self._tasks)

    async def retire(self) -> None:
        """End the relay, since its worker is gone for good."""
        await self.close()
        if self._durable is not None:
            await self._durable.forget(self._subjects["kv"])

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.spawn(self._guarded(work, name), f"relay-{self._target}-{name}")

    async def _guarded(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Supervision boundary: a relay that stops is logged; the routers notice that its beats end."""
        try:
            await work
        except Exception:
            log.exception("the relay of %s does not %s any more", self._target, name)

    # --- from the engine --------------------------------------------------------------------------------------------

    async def _hear(self) -> None:
        self._subscriber.listen(self._observed, self._failed)
        first = 0

        def take(batch: KvBatch) -> None:
            nonlocal first
            first = batch.sequence + 1
            self._observed(batch)

        while self._subscriber.replay_endpoint is not None and not await self._subscriber.past(
            first, take, REPLAY_TIMEOUT
        ):
            try:
                async with asyncio.timeout(REPLAY_PAUSE):
                    await self._subscriber.arrived()
                    break
            except TimeoutError:
                continue
        self._subscriber.release()

    def _failed(self, error: Exception) -> None:
        """Supervision boundary: a relay that stops is logged; the routers notice that its beats end."""
        log.error("the relay of %s does not hear any more: %s", self._target, error)

    def _observed(self, batch: KvBatch) -> None:
        self._apply_outcome(self._stream.observe(self._of_engine(batch)))

    def _apply_outcome(self, outcome: StreamOutcome) -> None:
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
        self._recent.append(parts)
        self._outbox.put_nowait(parts)

    async def _replay(self, first: int) -> None:
        answer = await self._subscriber.replay(first, REPLAY_TIMEOUT)
        batches = None if answer is None else [self._of_engine(batch) for batch in answer]
        self._apply_outcome(self._stream.replayed(ReplayEnded(id=0, batches=batches)))

    def _of_engine(self, batch: KvBatch) -> KvObserved:
        return KvObserved(
            worker=self._card.id, rank=batch.rank, epoch=self._card.epoch, sequence=batch.sequence, events=batch.events
        )

    def _lost(self, reason: str) -> None:
        self._apply_outcome(self._stream.lost(reason))

    # --- to the routers ---------------------------------------------------------------------------------------------

    async def _send(self) -> None:
        where = self._subjects["kv"]
        while True:
            parts = await self._outbox.get()
            if self._durable is not None:
                await self._durable.ready()
            # Without a broker it is lost: routers notice the gap, or the beat, and request a replay.
            sent = [await self._link.publish(where, encode(part, where, self._secret)) for part in parts]
            if self._durable is not None:
                await self._durable.published(where, parts[0].sequence, self._whole, lost=not all(sent))

    async def _beat(self) -> None:
        where = self._subjects["beat"]
        while True:
            beat = SnapshotPart(epoch=self._card.epoch, sequence=self.next - 1, beat=True)
            await self._link.publish(where, encode(beat, where, self._secret))
            if self._durable is not None and self._outbox.empty():
                await self._durable.published(self._subjects["kv"], self.next - 1, self._whole)
            await asyncio.sleep(BEAT)

    async def _listen(self) -> None:
        unlisten = await self._link.listen(self._subjects["ask"], self._question)
        try:
            await asyncio.Event().wait()
        finally:
            await unlisten()

    async def _question(self, message: "Msg") -> None:
        where = self._subjects["ask"]
        try:
            question = decode(ReplayQuestion, message.data, where, self._secret)
        except (ForeignMessage, NewerVersion, msgspec.DecodeError) as error:
            log.debug("a question for %s is left without an answer: %s", self._target, error)
            return
        for part in self._answer(question):
            await self._link.publish(message.reply, encode(part, where, self._secret))
        self.answered += 1

    def _answer(self, question: ReplayQuestion) -> list[SnapshotPart]:
        epoch = self._card.epoch
        last = SnapshotPart(epoch=epoch, sequence=self.next - 1, last=True)
        oldest = self._recent[0][0].sequence if self._recent else self.next
        if question.epoch != epoch:
            return []  # it is for an earlier or a later relay
        if oldest <= question.first <= self.next:
            newer = [parts for parts in self._recent if parts[0].sequence >= question.first]
            return [*(part for parts in newer for part in parts), last]
        return [*self._whole(), last] if self.next else [last]

    def _whole(self) -> list[SnapshotPart]:
        """Return everything that is held, as one batch with the number of the last batch."""
        return parts_of(self._card.epoch, self.next - 1, list(self.holdings.dump()), whole=True)

"""KV event feeds: one source per worker rank, an engine's socket or a relay, posted to the router; replay on demand."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from functools import partial

from penstock.adapters.background_tasks import BackgroundTasks
from penstock.adapters.engines.kv_events.kv_subscriber import KvSubscriber, cleared_by
from penstock.adapters.seams import KvBatch
from penstock.adapters.zmq_curve import MECHANISM
from penstock.kernel.hashing import SCHEME
from penstock.kernel.machine import Nanos
from penstock.kernel.secret import ClusterSecret
from penstock.kernel.values import KvStored, Target, WorkerCard
from penstock.router.events import KvObserved, KvSourceLost, ReplayEnded, ReplayWanted
from penstock.router.kv_index.engine_hash_map import wordless
from penstock.router.kv_index.image_placeholders import ImagePlaceholders
from penstock.runtime.kv_events.kv_event_relay_client import KvRelayClient, KvRelayFeed
from penstock.runtime.kv_events.kv_relay_messages import SCHEME as RELAYED
from penstock.runtime.live_driver import LiveDriver

log = logging.getLogger("penstock.feeds")

REPLAY_TIMEOUT = 5.0
"""Seconds until a requested replay counts as failed."""
REPLAY_PAUSE, REPLAY_PAUSE_MAX = 1.0, 60.0
"""Seconds until the request for an engine's earlier events is repeated; doubled each time."""
BATCHES_PER_TURN = 16
"""Batches applied before other tasks of the event loop get a turn."""


class KvEventFeeds:
    """Receive from every worker that publishes KV events, and carry out `ReplayWanted`.

    Args:
        secret: of the cluster, for engines whose events require it.
        relayed: client for relayed events; None where all are received directly.
    """

    def __init__(
        self, live: LiveDriver, secret: ClusterSecret | None = None, relayed: KvRelayClient | None = None
    ) -> None:
        self._live = live
        self._secret = secret
        self._relayed = relayed
        self.images: dict[str, ImagePlaceholders] = {}
        """Model -> images that its engines hold."""
        self._failed_before = 0
        self._subscribers: dict[Target, tuple[Source, WorkerCard]] = {}
        self._tasks: dict[Target, asyncio.Task[None]] = {}
        self._replays = BackgroundTasks()
        live.on(ReplayWanted, self._replay_wanted)

    def start(self, card: WorkerCard) -> None:
        """Receive from a worker: every rank that has an endpoint."""
        for rank, endpoint in enumerate(card.events):
            target = Target(card.id, rank)
            source = self._source(card, rank, endpoint)
            if source is None:
                self._lost(target, "they are relayed by NATS, and discovery.kv_events of this frontend is direct")
                continue
            self._subscribers[target] = (source, card)
            self._tasks[target] = asyncio.create_task(self._listen(target), name=f"kv-feed-{target}")

    async def stop(self, card: WorkerCard) -> None:
        """Stop receiving from a worker."""
        for rank in range(len(card.events)):
            await self._stop(Target(card.id, rank))

    @property
    def refused(self) -> list[Target]:
        """Ranks whose events can't be received at present, since they have another secret, or none."""
        return [
            target
            for target, (source, _) in self._subscribers.items()
            if (source.foreign if isinstance(source, KvRelayFeed) else source.handshakes.failing)
        ]

    @property
    def handshakes_failed(self) -> int:
        """Failed handshakes with engines, of all engines that ever joined."""
        return self._failed_before + sum(_failed(source) for source, _ in self._subscribers.values())

    @property
    def left_out(self) -> Counter[str]:
        """KV events that are well formed and say nothing that is understood here, by reason (`KvDecoder.dropped`)."""
        sources = [source for source, _ in self._subscribers.values() if isinstance(source, KvSubscriber)]
        return sum((Counter(source.dropped) for source in sources), Counter())

    async def close(self) -> None:
        for target in list(self._tasks):
            await self._stop(target)
        await self._replays.close()
        if self._relayed is not None:
            await self._relayed.close()

    def _source(self, card: WorkerCard, rank: int, endpoint: str) -> "Source | None":
        target = Target(card.id, rank)
        if endpoint.startswith(RELAYED):
            return None if self._relayed is None else self._relayed.feed(card, rank)
        replay = card.replay[rank] if rank < len(card.replay) else None
        secret = self._secret if card.events_security == MECHANISM else None
        lost = partial(self._lost, target)
        return KvSubscriber(
            endpoint, replay, card.topic, rank, secret=secret, lost=lost, cleared=cleared_by(card.engine)
        )

    async def _stop(self, target: Target) -> None:
        task = self._tasks.pop(target, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        feed = self._subscribers.pop(target, None)
        if feed is not None:
            self._failed_before += _failed(feed[0])
            feed[0].close()

    async def _listen(self, target: Target) -> None:
        subscriber, card = self._subscribers[target]
        batches = subscriber.batches()
        first = asyncio.ensure_future(anext(batches))  # subscribes before the past is requested
        try:
            # Events from before this subscription. One that is missed between shows as a gap.
            past = {batch.sequence: batch for batch in await self._past(target, subscriber, first)}
            for batch in past.values():
                self._live.post("router", self._observed(card, batch))
                await asyncio.sleep(0)
            turn = 0
            async for batch in _from(first, batches):
                if past.get(batch.sequence) == batch:
                    continue  # announced between subscription and answer, so it came both ways: no new beginning
                past.clear()
                self._live.post("router", self._observed(card, batch))
                turn += 1
                if turn % BATCHES_PER_TURN == 0:
                    await asyncio.sleep(0)
        except Exception as error:  # supervision boundary: a dead feed is logged, never silent
            log.exception("KV events of %s can't be heard any more", target)
            self._lost(target, str(error))
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)

    async def _past(self, target: Target, subscriber: "Source", first: "asyncio.Future[KvBatch]") -> Sequence[KvBatch]:
        """Request the past until an answer or an event comes: from an event's number the router detects the gap."""
        pause = REPLAY_PAUSE
        while subscriber.replay_endpoint is not None:
            answer = await subscriber.replay(0, REPLAY_TIMEOUT)
            if answer is not None:
                return answer
            log.warning("what %s cached before could not be asked; again in %g s, or at its next event", target, pause)
            if (await asyncio.wait({first}, timeout=pause))[0]:
                break
            pause = min(2 * pause, REPLAY_PAUSE_MAX)
        return ()

    def _lost(self, target: Target, reason: str, since: Sequence[KvBatch] = ()) -> None:
        self._live.post("router", KvSourceLost(worker=target.worker, rank=target.rank, reason=reason))
        for batch in since:
            self._live.post("router", self._observed(self._subscribers[target][1], batch))

    def _replay_wanted(self, now: Nanos, sender: str, effect: ReplayWanted) -> None:
        self._replays.spawn(self._replay(effect))

    async def _replay(self, wanted: ReplayWanted) -> None:
        feed = self._subscribers.get(Target(wanted.worker, wanted.rank))
        batches: list[KvObserved] | None = None
        if feed is not None:
            subscriber, card = feed
            answer = await subscriber.replay(wanted.first, REPLAY_TIMEOUT)
            if answer is not None:
                batches = [self._observed(card, batch) for batch in answer]
        self._live.post("router", ReplayEnded(id=wanted.id, batches=batches))

    def _observed(self, card: WorkerCard, batch: KvBatch) -> KvObserved:
        native = card.hash_scheme == SCHEME
        for event in batch.events:
            if isinstance(event, KvStored) and event.extras and event.tokens:
                size = card.block_size or event.block_size or len(event.tokens) // max(1, len(event.hashes))
                self.images.setdefault(card.model, ImagePlaceholders()).learn(event, size)
        # The text of an engine's blocks ends here: the router, and all its records, have hashes only.
        events = [wordless(event, native=native, block_size=card.block_size) for event in batch.events]
        return KvObserved(
            worker=card.id,
            rank=batch.rank,
            epoch=card.incarnation,
            sequence=batch.sequence,
            events=events,
            whole=batch.whole,
        )


async def _from(first: "asyncio.Future[KvBatch]", rest: AsyncIterator[KvBatch]) -> AsyncIterator[KvBatch]:
    """Yield a batch that is awaited already, then the rest."""
    yield await first
    async for batch in rest:
        yield batch


Source = KvSubscriber | KvRelayFeed
"""Source of a worker's events."""


def _failed(source: Source) -> int:
    """Count messages and handshakes refused because of the secret."""
    return source.foreign if isinstance(source, KvRelayFeed) else source.handshakes.failed

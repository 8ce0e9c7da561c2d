"""KV event feeds: one source per worker rank, an engine's socket or a relay, posted to the router; replay on demand."""

import asyncio
import logging
import time
from collections import Counter
from functools import partial

from penstock.adapters.background_tasks import BackgroundTasks
from penstock.adapters.engines.kv_events.kv_poller import KvPoller
from penstock.adapters.engines.kv_events.kv_subscriber import KvSubscriber, cleared_by
from penstock.adapters.seams import KvBatch
from penstock.adapters.task_cancel import end
from penstock.adapters.zmq_curve import MECHANISM
from penstock.kernel.hashing import SCHEME
from penstock.kernel.machine import Nanos
from penstock.kernel.plurals import counted
from penstock.kernel.secret import ClusterSecret
from penstock.kernel.values import KvStored, Target, WorkerCard
from penstock.router.events import KvObserved, KvSourceJoining, KvSourceLost, ReplayEnded, ReplayWanted
from penstock.router.kv_index.engine_hash_map import wordless
from penstock.router.kv_index.image_placeholders import ImagePlaceholders
from penstock.router.status_rows import StatusFinding
from penstock.runtime.kv_events.kv_event_relay_client import KvRelayClient, KvRelayFeed
from penstock.runtime.kv_events.kv_relay_messages import SCHEME as RELAYED
from penstock.runtime.kv_events.peer_blocks import PeerBlocksClient
from penstock.runtime.live_driver import LiveDriver

log = logging.getLogger("penstock.feeds")

LAG_SHOWN = 1.0
"""Seconds that KV events wait from which on that is a finding: a conversation's next turn comes no sooner."""
JOINING_SHOWN = 2.0
"""Seconds for which an engine's past is asked for until that is a finding."""
PART = 4
"""Batches of a replay that the router takes at once: about a millisecond."""
REPLAY_TIMEOUT = 5.0
"""Seconds until a requested replay counts as failed."""
REPLAY_PAUSE, REPLAY_PAUSE_MAX = 1.0, 60.0
"""Seconds until the request for an engine's earlier events is repeated; doubled each time."""


class KvEventFeeds:
    """Receive from every worker that publishes KV events, and carry out `ReplayWanted`.

    What an engine cached before this frontend came is asked of another frontend first, which tells what is held, and
    then of the engine, which tells all that happened. What it publishes meanwhile waits.

    Args:
        secret: of the cluster, for engines whose events require it.
        relayed: client for relayed events; None where all are received directly.
        peers: the other frontends; None where there are none.
    """

    def __init__(
        self,
        live: LiveDriver,
        secret: ClusterSecret | None = None,
        relayed: KvRelayClient | None = None,
        peers: PeerBlocksClient | None = None,
    ) -> None:
        self.poller = KvPoller()
        self._live = live
        self._secret = secret
        self._relayed = relayed
        self._peers = peers
        self.images: dict[str, ImagePlaceholders] = {}
        """Model -> images that its engines hold."""
        self._failed_before = 0
        self._subscribers: dict[Target, tuple[Source, WorkerCard]] = {}
        self._tasks: dict[Target, asyncio.Task[None]] = {}
        """Those that still ask for the past."""
        self._began: dict[Target, float] = {}
        """When those began to ask, by the monotonic clock."""
        self._opening = asyncio.Lock()
        """One at a time opens its sockets, which takes half a millisecond."""
        self._answering = asyncio.Lock()
        """One answer at a time is passed on, in parts."""
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
            self._live.post("router", KvSourceJoining(worker=card.id, rank=rank, on=True))
            self._began[target] = time.monotonic()
            task = self._tasks[target] = asyncio.create_task(self._join(target), name=f"kv-past-{target}")
            task.add_done_callback(partial(self._joined, target))

    async def stop(self, card: WorkerCard) -> None:
        """Stop receiving from a worker."""
        for rank in range(len(card.events)):
            await self._stop(Target(card.id, rank))

    @property
    def peer_answers(self) -> int:
        """Of how many ranks another frontend told what they held."""
        return 0 if self._peers is None else self._peers.taken

    @property
    def joining(self) -> int:
        """How many ranks' past is still being asked for."""
        return len(self._tasks)

    def findings(self) -> list[StatusFinding]:
        """Return findings about KV events that are late, and engines of whose past not all is known yet."""
        found: list[StatusFinding] = []
        poller, every = self.poller, len(self._subscribers)
        if poller.lag_longest > LAG_SHOWN:
            skipped = counted(poller.skipped, "batch", "batches")
            found.append(
                StatusFinding(
                    "warning",
                    f"KV events waited up to {poller.lag_longest:.1f} s in the last minute before the index had them; "
                    f"those of {poller.waiting:,} of {every:,} engines wait now, and {skipped} waited for so long that "
                    "they were skipped and asked for again",
                    "routing takes the caches to be as they were; this process has too little CPU for so many events",
                )
            )
        waited = max((time.monotonic() - began for began in self._began.values()), default=None)
        if waited is not None and waited > JOINING_SHOWN:
            found.append(
                StatusFinding(
                    "info",
                    f"what {len(self._began):,} of {every:,} engines cached before this frontend came is asked for, "
                    f"for {waited:.0f} s so far; until then it routes by what it placed there and what it heard of it",
                    "another frontend or the engines' replay_endpoint tell it; one that does not answer is asked again",
                )
            )
        return found

    def digest(self, target: Target, number: int) -> int | None:
        """Return the digest of a batch that a rank sent lately; None where it is not known."""
        source = self._subscribers.get(target)
        return source[0].digest(number) if source is not None and isinstance(source[0], KvSubscriber) else None

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
        for target in list(self._subscribers):
            await self._stop(target)
        await self._replays.close()
        if self._relayed is not None:
            await self._relayed.close()
        if self._peers is not None:
            await self._peers.close()

    def _source(self, card: WorkerCard, rank: int, endpoint: str) -> "Source | None":
        target = Target(card.id, rank)
        if endpoint.startswith(RELAYED):
            return None if self._relayed is None else self._relayed.feed(card, rank)
        replay = card.replay[rank] if rank < len(card.replay) else None
        secret = self._secret if card.events_security == MECHANISM else None
        lost = partial(self._lost, target)
        return KvSubscriber(
            endpoint,
            replay,
            card.topic,
            rank,
            secret=secret,
            lost=lost,
            cleared=cleared_by(card.engine),
            poller=self.poller,
        )

    async def _stop(self, target: Target) -> None:
        task = self._tasks.pop(target, None)
        if task is not None:
            del self._began[target]
            await end([task])
        feed = self._subscribers.pop(target, None)
        if feed is not None:
            self._failed_before += _failed(feed[0])
            feed[0].close()
            if isinstance(feed[0], KvRelayFeed):
                await feed[0].ended()

    async def _join(self, target: Target) -> None:
        """Subscribe to a rank and ask for its past, then let what it published meanwhile be taken."""
        source, card = self._subscribers[target]
        try:
            async with self._opening:
                source.listen(partial(self._heard, card), partial(self._failed, target))
                await asyncio.sleep(0)
            await self._past(target, source, card)
        except Exception as error:  # supervision boundary: a dead feed is logged, never silent
            log.exception("what %s cached before can't be taken in", target)
            self._failed(target, error)
        else:
            self._live.post("router", KvSourceJoining(worker=target.worker, rank=target.rank, on=False))
            source.release()

    def _joined(self, target: Target, task: "asyncio.Task[None]") -> None:
        if self._tasks.get(target) is task:
            del self._tasks[target], self._began[target]

    async def _past(self, target: Target, source: "Source", card: WorkerCard) -> None:
        """Request the past until an answer or an event comes: from an event's number the router detects the gap."""
        first = 0
        if self._peers is not None and isinstance(source, KvSubscriber):
            blocks = await self._peers.ask(card, target.rank)
            newest = None
            if blocks is not None:
                newest = await source.newest_after(blocks.sequence, blocks.digest, REPLAY_TIMEOUT)
            if blocks is not None and newest is not None:
                self._heard(card, KvBatch(blocks.sequence, target.rank, blocks.events, whole=True))
                source.cover(blocks.sequence)
                first = blocks.sequence + 1
                if newest == blocks.sequence:
                    return

        def take(batch: KvBatch) -> None:
            nonlocal first
            first = batch.sequence + 1  # an answer that breaks off is gone on with, not repeated
            self._heard(card, batch)

        pause = REPLAY_PAUSE
        while source.replay_endpoint is not None and not await source.past(first, take, REPLAY_TIMEOUT):
            log.warning("what %s cached before could not be asked; again in %g s, or at its next event", target, pause)
            try:
                async with asyncio.timeout(pause):
                    return await source.arrived()
            except TimeoutError:
                pause = min(2 * pause, REPLAY_PAUSE_MAX)

    def _heard(self, card: WorkerCard, batch: KvBatch) -> None:
        self._live.post("router", self._observed(card, batch))

    def _failed(self, target: Target, error: Exception) -> None:
        log.warning("KV events of %s can't be heard any more: %s", target, error)
        self._subscribers[target][0].close()
        self._live.post("router", KvSourceJoining(worker=target.worker, rank=target.rank, on=False))
        self._lost(target, str(error))

    def _lost(self, target: Target, reason: str) -> None:
        self._live.post("router", KvSourceLost(worker=target.worker, rank=target.rank, reason=reason))

    def _replay_wanted(self, now: Nanos, sender: str, effect: ReplayWanted) -> None:
        self._replays.spawn(self._replay(effect))

    async def _replay(self, wanted: ReplayWanted) -> None:
        feed = self._subscribers.get(Target(wanted.worker, wanted.rank))
        batches: list[KvObserved] | None = None
        if feed is not None:
            subscriber, card = feed
            answer = await subscriber.replay(wanted.first, REPLAY_TIMEOUT)
            if answer and answer[0].sequence == wanted.first and not answer[0].whole:
                async with self._answering:
                    while len(answer) > PART:
                        part, answer = answer[:PART], answer[PART:]
                        observed = [self._observed(card, batch) for batch in part]
                        self._live.post("router", ReplayEnded(id=wanted.id, batches=observed, more=True))
                        await asyncio.sleep(0)
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


Source = KvSubscriber | KvRelayFeed
"""Source of a worker's events."""


def _failed(source: Source) -> int:
    """Count messages and handshakes refused because of the secret."""
    return source.foreign if isinstance(source, KvRelayFeed) else source.handshakes.failed

"""`TierNode`: drives the tier machine, carries out its effects, and speaks for it to the engines that are connected."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import NamedTuple

import msgspec

from penstock.adapters.background_tasks import BackgroundTasks
from penstock.kernel.errors import ConfigError
from penstock.kernel.machine import Event, Nanos
from penstock.runtime.live_driver import LiveDriver
from penstock_kv.blocks.block_key import BlockKey, engine_keys
from penstock_kv.blocks.tiers.tier_events import (
    AskPeer,
    BlockHints,
    BlocksAnswered,
    BlocksAsked,
    BlocksOffered,
    BlocksRemoved,
    BlocksStored,
    BlocksUsed,
    BlocksWanted,
    CancelMove,
    EngineSpeed,
    ForgetRecords,
    JobCancelled,
    JobEnded,
    Move,
    PeerAnswered,
    PeersChanged,
    PrefetchWanted,
    TierFound,
    TierName,
)
from penstock_kv.blocks.tiers.tier_machine import TierMachine
from penstock_kv.inside.tier_protocol import (
    VERSION,
    AnswerBlocks,
    AskBlocks,
    CancelJob,
    JobDone,
    LoadBlocks,
    PrefetchBlocks,
    PrefillSpeed,
    RemovedBlocks,
    RequestHints,
    StoreBlocks,
    StoredBlocks,
    TierHello,
    TierWelcome,
    UsedBlocks,
)
from penstock_kv.tiers.block_carrier import ROW_BITS, BlockCarrier, SlabStore
from penstock_kv.tiers.engine_link import EngineJob, EngineLink, EngineRegion, identity_of
from penstock_kv.tiers.measured_prefill import MeasuredPrefill
from penstock_kv.tiers.peer_tiers import HostPlaces, PeerTiers
from penstock_kv.tiers.tier_contents import BlockName, RecordPlace, TierContents
from penstock_kv.tiers.tier_frames import FrameError, FrameStream
from penstock_kv.tiers.tier_metrics import TierMetrics
from penstock_kv.transfer.storage.block_store import BlockStore, StoredRecord
from penstock_kv.transfer.storage.object_store import ObjectStore
from penstock_kv.transfer.storage.shared_objects import SharedObjects

log = logging.getLogger("penstock.kv_tiers")

MACHINE = "tiers"
JOBS_MAX = 4096
"""Open jobs of one engine; more are refused at once, which is a miss or a block that is not stored."""
NAMES_PER_FRAME = 4096
EXPECTED_MAX = 1024
"""Prefetches that wait for their time; each holds the names of a prompt's blocks."""
EXPECTED_AFTER_MAX = 3600.0
"""Seconds: a session that pauses for longer is no longer one that comes back."""

EngineFrame = AskBlocks | StoreBlocks | LoadBlocks | CancelJob | UsedBlocks | PrefetchBlocks | PrefillSpeed
_decode = msgspec.msgpack.Decoder(EngineFrame).decode


class OpenTiers(NamedTuple):
    """Tiers for blocks of one size. ``lower``: those below the host; ``capacity``: blocks of each tier."""

    machine: TierMachine
    slab: SlabStore
    lower: Mapping[TierName, BlockStore]
    capacity: Mapping[TierName, int]


class TierNode:
    """The tiers of one kind of engine: they are opened for the first engine that connects.

    Args:
        open_tiers: from its first frame. Raises ConfigError where they can't be opened.
        peers: other engines' host tiers; None uses none.
    """

    def __init__(self, open_tiers: Callable[[TierHello], Awaitable[OpenTiers]], peers: PeerTiers | None = None) -> None:
        self.tiers: OpenTiers | None = None
        self.contents = TierContents()
        self.metrics = TierMetrics()
        self.links: dict[int, EngineLink] = {}
        self.jobs: dict[int, EngineJob] = {}
        self._expected: dict[int, asyncio.TimerHandle] = {}
        self.hello: TierHello | None = None
        """Of the first engine; later ones must have KV of the same kind."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once the process should end, and be started anew: the machine's state can't be trusted, or its only
        engine has KV of another kind now."""
        self._open_tiers = open_tiers
        self._peers = peers
        self._opening = asyncio.Lock()
        self._queries: dict[int, tuple[EngineLink, int, Sequence[BlockKey]]] = {}
        self._moves: dict[int, list[bool]] = {}
        """Move -> whether it was cancelled, in a list of one."""
        self._tasks = BackgroundTasks()
        self._numbers, self._job_ids, self._query_ids = count(1), count(1), count(1)

    # --- engines ------------------------------------------------------------------------------------------------------

    async def serve(self, hello: TierHello, stream: FrameStream) -> None:
        """Serve an engine until its connection ends, and return once nothing touches its rows any more."""
        try:
            link = await self._admit(hello, stream)
        except ConfigError as error:
            log.warning("engine %s is refused: %s", hello.worker, error)
            self.metrics.refused.add("engine")
            stream.send(TierWelcome(error=str(error)))
            return
        log.info("engine %s is connected with %d rows of %d bytes", link.name, hello.rows, hello.row_bytes)
        assert self.tiers is not None
        link.send(TierWelcome(tiers=["host", *self.tiers.lower, *([] if self._peers is None else ["peer"])]))
        measured = None
        if hello.stats:
            measured = MeasuredPrefill(hello.stats, lambda seconds: self.post(EngineSpeed(seconds_per_token=seconds)))
        announcing = asyncio.create_task(self._announce_all(link, stream), name=f"announcing-{link.number}")
        try:
            while (raw := await stream.read()) is not None:
                self._take(link, _decode(raw))
        except (FrameError, msgspec.DecodeError) as error:
            log.error("engine %s sent something that is not a frame of a job, and is cut off: %s", link.name, error)
            self.metrics.refused.add("frame")
        finally:
            announcing.cancel()
            if measured is not None:
                await measured.close()
            await self._leave(link)

    async def close(self) -> None:
        """Touch no engine's rows from now on, write what has to be written, and stop."""
        for link in list(self.links.values()):
            link.lose()
        for timer in self._expected.values():
            timer.cancel()
        self._expected.clear()
        if self.tiers is None:
            return
        for link in list(self.links.values()):
            await link.untouched.wait()
        self._driver.close()
        await self._tasks.close()
        if self._peers is not None:
            await self._peers.close()
        for store in (*self.tiers.lower.values(), self.tiers.slab):
            await store.close()

    def post(self, event: Event) -> None:
        """Give the machine an event; a fault of it ends this process, since blocks may be lost in its books."""
        try:
            self._driver.post(MACHINE, event)
        except Exception as error:  # noqa: BLE001 - the supervision boundary: `LiveDriver.post` has logged it
            if not self.failed.done():
                self.failed.set_exception(error)

    @property
    def now(self) -> Nanos:
        """The machine's time."""
        return self._driver.now()

    @property
    def open_moves(self) -> int:
        """Moves under way."""
        return len(self._moves)

    def render_metrics(self) -> str:
        """Return the text of a scrape."""
        under_way = {"jobs": len(self.jobs), "moves": len(self._moves), "connections": len(self.links)}
        capacity = {} if self.tiers is None else self.tiers.capacity
        if self.tiers is not None:
            state = self.tiers.machine.state
            self.metrics.read(state.tiers, state.counts)
        return self.metrics.render(self.contents.counts, capacity, under_way)

    async def _admit(self, hello: TierHello, stream: FrameStream) -> EngineLink:
        if hello.version != VERSION:
            raise ConfigError(
                f"the plug-in speaks version {hello.version} and this tier process {VERSION}",
                hint="install the same release of Penstock in the engine's environment",
            )
        engine_keys(
            (), hello.hash_algorithm, identity_of(hello, RequestHints())
        )  # refuses an algorithm that can't name stored KV
        region = EngineRegion(hello.region, offset=hello.offset, rows=hello.rows, row_bytes=hello.row_bytes)
        try:
            async with self._opening:
                if self.hello is None:
                    await self._open(hello)
                elif (kind := _describe_kv(hello)) != (ours := _describe_kv(self.hello)):
                    error = ConfigError(
                        f"this tier process keeps blocks of {ours}, not of {kind}",
                        hint="start one tier process for each model, dtype, layout and block size",
                    )
                    if not self.links and not self.failed.done():  # its engine was started anew with other settings
                        self.failed.set_exception(error)
                    raise error
        except BaseException:
            region.close()
            raise
        link = EngineLink(next(self._numbers), hello, region, stream)
        self.links[link.number] = link
        return link

    async def _open(self, hello: TierHello) -> None:
        tiers = self.tiers = await self._open_tiers(hello)
        self.hello = hello
        self._carrier = BlockCarrier(tiers.slab, tiers.lower, self.links.get, self._peers, lambda: self._driver.now())
        self._driver = LiveDriver({MACHINE: tiers.machine})
        on = self._driver.on
        on(Move, lambda now, sender, effect: self._begin(effect))
        on(CancelMove, lambda now, sender, effect: self._cancel_move(effect))
        on(AskPeer, lambda now, sender, effect: self._tasks.spawn(self._ask_peer(effect), f"ask-{effect.id}"))
        on(BlocksAnswered, lambda now, sender, effect: self._answer(effect))
        on(JobEnded, lambda now, sender, effect: self._end_job(effect))
        on(BlocksStored, lambda now, sender, effect: self._stored(effect))
        on(BlocksRemoved, lambda now, sender, effect: self._removed(effect))
        on(ForgetRecords, lambda now, sender, effect: tiers.lower[effect.tier].forget(effect.slots))
        for tier, store in tiers.lower.items():
            self._adopt(tier, store.records())
            log.info("tier %s has %d blocks of an earlier run", tier, self.contents.counts[tier])
            if isinstance(store, ObjectStore):
                shared = SharedObjects(store, tiers.machine.tiers[tier], partial(self._adopt, tier))
                self._tasks.spawn(shared.follow(), "shared-objects")
        if self._peers is not None:
            self._peers.changed = lambda peers: self.post(PeersChanged(peers=peers))
            await self._peers.open(HostPlaces(self.contents, tiers.slab))

    def _adopt(self, tier: TierName, records: Sequence[StoredRecord]) -> None:
        """Enter blocks that are in a tier without having been moved there by this process."""
        keys = [BlockKey(record.key) for record in records]
        parents = [None if record.parent is None else BlockKey(record.parent) for record in records]
        slots, generations = [record.slot for record in records], [record.generation for record in records]
        self.post(TierFound(tier=tier, keys=keys, slots=slots, generations=generations, parents=parents))
        self.contents.placed(tier, keys, (RecordPlace(record.slot, record.generation) for record in records))

    async def _leave(self, link: EngineLink) -> None:
        """End all that an engine wanted; return once nothing touches its rows any more."""
        link.lose()
        for job in list(link.jobs.values()):
            self.post(JobCancelled(job=job))
        await link.untouched.wait()
        del self.links[link.number]
        link.region.close()
        log.info("engine %s is gone", link.name)

    # --- frames of an engine ------------------------------------------------------------------------------------------

    def _take(self, link: EngineLink, message: EngineFrame) -> None:
        if isinstance(message, AskBlocks):
            keys = self._keys(link, message.hashes, message.group, message.hints)
            query = next(self._query_ids)
            self._queries[query] = (link, message.id, keys)
            hints = _block_hints(message.hints)
            self.post(BlocksAsked(query=query, keys=keys, tokens_before=message.tokens_before, hints=hints))
        elif isinstance(message, StoreBlocks):
            keys = self._keys(link, message.hashes, message.group, message.hints)
            parent = None
            if message.parent is not None:
                parent = link.keys([message.parent], message.group, message.hints)[0]
            job = self._job(link, message, keys)
            if job is not None:
                hints = _block_hints(message.hints)
                self.post(BlocksOffered(job=job, keys=keys, rows=_rows(link, message.rows), parent=parent, hints=hints))
        elif isinstance(message, LoadBlocks):
            keys = self._keys(link, message.hashes, message.group, message.hints)
            job = self._job(link, message, keys)
            if job is not None:
                self.post(
                    BlocksWanted(job=job, keys=keys, rows=_rows(link, message.rows), hints=_block_hints(message.hints))
                )
        elif isinstance(message, CancelJob):
            if message.job in link.jobs:
                self.post(JobCancelled(job=link.jobs[message.job]))
        elif isinstance(message, UsedBlocks):
            keys = self._keys(link, message.hashes, message.group, message.hints)
            self.post(BlocksUsed(keys=keys))
        elif isinstance(message, PrefetchBlocks):
            keys = self._keys(link, message.hashes, message.group, message.hints)
            self._expect(PrefetchWanted(keys=keys, hints=_block_hints(message.hints)), message.after)
        else:
            self.post(EngineSpeed(seconds_per_token=message.seconds_per_token))

    def _expect(self, event: PrefetchWanted, after: float) -> None:
        """Post a prefetch when it is due; what would be too many or too late is left out and counted."""
        if not after > 0:
            self.post(event)
        elif len(self._expected) >= EXPECTED_MAX or after > EXPECTED_AFTER_MAX:
            self.metrics.prefetched.add("refused", by=len(event.keys))
        else:
            number = next(self._job_ids)
            self._expected[number] = asyncio.get_running_loop().call_later(after, self._due, number, event)

    def _due(self, number: int, event: PrefetchWanted) -> None:
        del self._expected[number]
        self.post(event)

    def _keys(self, link: EngineLink, hashes: Sequence[bytes], group: int, hints: RequestHints) -> list[BlockKey]:
        """Return keys of an engine's blocks; those whose names were unknown, such as since a restart, are announced."""
        keys = link.keys(hashes, group, hints)
        news = self.contents.learned(keys, [BlockName(value, group, link.hello.weights) for value in hashes])
        for tier, names in news.items():
            self._announce(tier, names, list(self.links.values()))
        return keys

    def _job(self, link: EngineLink, message: StoreBlocks | LoadBlocks, keys: Sequence[BlockKey]) -> int | None:
        """Enter a job; return the machine's number of it, or None where it is refused."""
        if len(keys) != len(message.rows) or not link.region.valid(message.rows):
            raise FrameError(f"job {message.job} has {len(keys)} blocks for rows that are not those of its region")
        if message.job in link.jobs:
            raise FrameError(f"job {message.job} is open already")
        if len(link.jobs) >= JOBS_MAX:
            self.metrics.refused.add("jobs")
            link.send(JobDone(job=message.job, done=[False] * len(keys)))
            return None
        job = link.jobs[message.job] = next(self._job_ids)
        self.jobs[job] = EngineJob(link, message.job, "store" if isinstance(message, StoreBlocks) else "load")
        return job

    # --- effects ------------------------------------------------------------------------------------------------------

    def _begin(self, move: Move) -> None:
        cancelled = self._moves[move.id] = [False]
        self._tasks.spawn(self._carry(move, cancelled), f"move-{move.id}")

    async def _ask_peer(self, effect: AskPeer) -> None:
        blocks = 0 if self._peers is None else await self._peers.ask(effect.peer, effect.keys)
        self.post(PeerAnswered(id=effect.id, blocks=blocks))

    async def _carry(self, move: Move, cancelled: list[bool]) -> None:
        try:
            moved = await self._carrier.carry(move, lambda: cancelled[0])
        except Exception as error:
            log.exception("a move from %s to %s failed by a bug of ours", move.source, move.target)
            if not self.failed.done():
                self.failed.set_exception(error)
            return
        finally:
            del self._moves[move.id]
        assert self.tiers is not None
        self.metrics.moved(move.source, move.target, moved.counts, self.tiers.slab.block_bytes, moved.ended.seconds)
        if moved.cause and set(moved.counts) - {"ok", "cancelled", "lost"}:
            log.warning("%s to %s: %s: %s", move.source, move.target, dict(moved.counts), moved.cause)
        self.post(moved.ended)
        if move.target not in ("engine", "peer"):
            done = [number for number, arrived in enumerate(moved.ended.done) if arrived]
            generations = move.generations if move.target != "host" else [0] * len(move.keys)
            places = [RecordPlace(move.target_slots[number], generations[number]) for number in done]
            self.contents.placed(move.target, [move.keys[number] for number in done], places)  # type: ignore[arg-type]

    def _cancel_move(self, effect: CancelMove) -> None:
        if effect.id in self._moves:
            self._moves[effect.id][0] = True

    def _answer(self, effect: BlocksAnswered) -> None:
        link, id, keys = self._queries.pop(effect.query)
        for tier, blocks in self.contents.by_tier(keys[: effect.blocks]).items():
            self.metrics.hits.add(tier, by=blocks)
        if len(keys) > effect.blocks:
            self.metrics.misses.add(effect.reason, by=len(keys) - effect.blocks)
        assert self.tiers is not None
        costs = self.tiers.machine.costs(self.now)
        link.send(AnswerBlocks(id=id, blocks=effect.blocks, reason=effect.reason, costs=costs))

    def _end_job(self, effect: JobEnded) -> None:
        job = self.jobs.pop(effect.job)
        del job.link.jobs[job.id]
        done = sum(effect.done)
        self.metrics.jobs.add(job.kind, "true", by=done)
        self.metrics.jobs.add(job.kind, "false", by=len(effect.done) - done)
        job.link.send(JobDone(job=job.id, done=list(effect.done)))

    def _stored(self, effect: BlocksStored) -> None:
        self.metrics.stored.add(effect.tier, by=len(effect.keys))
        names = self.contents.stored(effect.tier, effect.keys, effect.parent, time.monotonic_ns())
        self._announce(effect.tier, names, list(self.links.values()))

    def _removed(self, effect: BlocksRemoved) -> None:
        self.metrics.removed.add(effect.tier, by=len(effect.keys))
        names = self.contents.removed(effect.tier, effect.keys)
        for link in list(self.links.values()):
            for group, hashes in _by_group(names, link):
                link.send(RemovedBlocks(tier=effect.tier, hashes=hashes, group=group))

    def _announce(self, tier: TierName, names: Sequence[BlockName], links: Sequence[EngineLink]) -> None:
        for link in links:
            for group, hashes in _by_group(names, link):
                link.send(StoredBlocks(tier=tier, hashes=hashes, group=group))

    async def _announce_all(self, link: EngineLink, stream: FrameStream) -> None:
        """Tell an engine that is new, or came back, of all blocks whose names are known, as fast as it reads."""
        entries = sorted(self.contents.named())
        for start in range(0, len(entries), NAMES_PER_FRAME):
            names: dict[TierName, list[BlockName]] = {}
            for tier, key in entries[start : start + NAMES_PER_FRAME]:
                name = self.contents.name_in(tier, key)
                if name is not None:
                    names.setdefault(tier, []).append(name)
            for tier, some in names.items():
                self._announce(tier, some, [link])
            await stream.drain()


def _describe_kv(hello: TierHello) -> str:
    """Describe the KV of an engine: what two engines that share tiers must have in common."""
    return (
        f"model {hello.model}, dtype {hello.dtype}, layout {hello.layout}, {hello.block_tokens} tokens and "
        f"{hello.row_bytes} bytes per block, hash {hello.hash_algorithm}"
    )


def _block_hints(hints: RequestHints) -> BlockHints:
    return BlockHints(priority=hints.priority, pin=hints.pin, deadline=hints.deadline)


def _rows(link: EngineLink, rows: Sequence[int]) -> list[int]:
    """Return the machine's numbers of an engine's rows."""
    base = link.number << ROW_BITS
    return [base | row for row in rows]


def _by_group(names: Sequence[BlockName], link: EngineLink) -> list[tuple[int, list[bytes]]]:
    """Return names as hashes of one attention group each, as many as one frame has, without those of other weights."""
    groups: dict[int, list[bytes]] = {}
    for name in names:
        if name.weights != link.hello.weights:
            continue
        groups.setdefault(name.group, []).append(name.hash)
    return [
        (group, hashes[start : start + NAMES_PER_FRAME])
        for group, hashes in groups.items()
        for start in range(0, len(hashes), NAMES_PER_FRAME)
    ]

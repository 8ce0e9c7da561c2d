"""`TierAdmin`: answers ``penstock cache``, from what the tiers announced and from what their stores say."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice

import msgspec

from penstock.kernel.errors import ConfigError
from penstock.kernel.machine import nanos
from penstock_kv.blocks.block_key import BlockKey, engine_keys
from penstock_kv.blocks.tiers.tier_events import BlocksPinned, TierCleared, TierName
from penstock_kv.inside.tier_protocol import RequestHints
from penstock_kv.tiers.engine_link import identity_of
from penstock_kv.tiers.tier_admin_protocol import (
    LIST_MAX,
    AdminAnswer,
    AdminAsk,
    AskMetrics,
    AskRefused,
    AskStat,
    BlockHashes,
    BlockList,
    BlocksCounted,
    CacheStat,
    ClearTiers,
    ListBlocks,
    ListedBlock,
    ListHashes,
    MetricsPage,
    PinBlocks,
    TierStat,
    TierVerified,
    VerifyTier,
)
from penstock_kv.tiers.tier_contents import TIERS, RecordPlace, TierBlock
from penstock_kv.tiers.tier_frames import FrameStream
from penstock_kv.tiers.tier_metrics import by_label
from penstock_kv.tiers.tier_node import OpenTiers, TierNode
from penstock_kv.transfer.storage.block_store import BlockIo, BlockResult
from penstock_kv.transfer.storage.disk_store import DiskStore
from penstock_kv.transfer.storage.slab_file import aligned

VERIFY_DEADLINE = 10.0
"""Seconds that one read of a verification may take."""
VERIFY_MAX = 1024

_decode = msgspec.msgpack.Decoder(AdminAsk).decode


class TierAdmin:
    """One tier process as its operator sees it."""

    def __init__(self, node: TierNode) -> None:
        self._node = node

    async def serve(self, ask: AdminAsk, stream: FrameStream) -> None:
        """Answer this ask and those that follow, until the connection ends."""
        while True:
            stream.send(await self.answer(ask))
            await stream.drain()
            raw = await stream.read()
            if raw is None:
                return
            ask = _decode(raw)

    async def answer(self, ask: AdminAsk) -> AdminAnswer:
        """Return the answer to one ask."""
        tiers = self._node.tiers
        if isinstance(ask, AskStat):
            return self._stat()
        if isinstance(ask, AskMetrics):
            return MetricsPage(text=self._node.render_metrics())
        if tiers is None:
            return AskRefused("no engine has connected yet, so no tier is open")
        try:
            if isinstance(ask, ListBlocks):
                return self._list(ask)
            if isinstance(ask, ListHashes):
                return self._hashes(ask)
            if isinstance(ask, PinBlocks):
                return self._pin(ask)
            if isinstance(ask, ClearTiers):
                return await self._clear(ask, tiers)
            return await self._verify(ask, tiers)
        except ConfigError as error:
            return AskRefused(str(error))

    def _stat(self) -> CacheStat:
        node = self._node
        hello, tiers, metrics = node.hello, node.tiers, node.metrics
        pinned = Counter(
            tier
            for block in node.contents.blocks.values()
            if block.pinned > time.monotonic_ns()
            for tier in block.tiers
        )
        stats = [
            TierStat(
                tier=tier,
                blocks=node.contents.counts[tier],
                capacity=capacity,
                pinned=pinned[tier],
                hits=int(metrics.hits.get(tier)),
                stored=int(metrics.stored.get(tier)),
                removed=int(metrics.removed.get(tier)),
                bytes_in=metrics.bytes_of(tier, into=True),
                bytes_out=metrics.bytes_of(tier, into=False),
                failures=metrics.failures(tier),
            )
            for tier, capacity in ({} if tiers is None else tiers.capacity).items()
        ]
        return CacheStat(
            model="" if hello is None else hello.model,
            block_tokens=0 if hello is None else hello.block_tokens,
            block_bytes=0 if hello is None else hello.row_bytes,
            hash_algorithm="" if hello is None else hello.hash_algorithm,
            engines=[link.name for link in node.links.values()],
            tiers=stats,
            misses=by_label(metrics.misses),
            open_jobs=len(node.jobs),
            open_moves=node.open_moves,
            refused=by_label(metrics.refused),
            seconds_per_token=0.0 if tiers is None else tiers.machine.state.seconds_per_token,
            leaks=self._leaks(),
        )

    def _leaks(self) -> list[str]:
        """Return what contradicts itself in the machine's books, as its own check says."""
        tiers = self._node.tiers
        if tiers is None:
            return []
        try:
            tiers.machine.check()
        except Exception as error:  # noqa: BLE001 - whatever the check raises is what the operator asked for
            return [str(error)]
        return []

    def _list(self, ask: ListBlocks) -> BlockList:
        tier = None if not ask.tier else self._tier(ask.tier)
        blocks = self._node.contents.blocks
        chosen = ((key, block) for key, block in reversed(blocks.items()) if tier is None or tier in block.tiers)
        limit = max(0, min(ask.limit, LIST_MAX))
        total = len(blocks) if tier is None else self._node.contents.counts[tier]
        return BlockList(blocks=[self._listed(key, block) for key, block in islice(chosen, limit)], total=total)

    def _listed(self, key: BlockKey, block: TierBlock) -> ListedBlock:
        hello, now = self._node.hello, time.monotonic_ns()
        return ListedBlock(
            key=key.hex(),
            tiers=[tier for tier in TIERS if tier in block.tiers],
            tokens=0 if hello is None else hello.block_tokens,
            age=(now - block.stored) / 1e9,
            pinned=max(0, block.pinned - now) / 1e9,
            hash="" if block.name is None else block.name.hash.hex(),
            group=0 if block.name is None else block.name.group,
        )

    def _hashes(self, ask: ListHashes) -> BlockHashes:
        tiers = set(ask.tiers)
        chosen = [block for block in self._node.contents.blocks.values() if not tiers.isdisjoint(block.tiers)]
        names = [block.name.hash[-8:] for block in chosen if block.name is not None]
        rows = {link.name: link.region.rows for link in self._node.links.values()}
        return BlockHashes(names=b"".join(names), unnamed=len(chosen) - len(names), rows=rows)

    def _pin(self, ask: PinBlocks) -> BlocksCounted:
        node = self._node
        keys = [self._key(text) for text in ask.keys]
        assert node.hello is not None
        hellos = [link.hello for link in node.links.values()] or [node.hello]
        for hello in {each.weights: each for each in hellos}.values() if ask.hashes else ():
            identity = identity_of(hello, RequestHints(tenant=ask.tenant))
            keys += engine_keys(ask.hashes, hello.hash_algorithm, identity)
        present = [key for key in keys if key in node.contents.blocks]
        until = nanos(ask.seconds)
        if present:
            node.post(BlocksPinned(keys=present, until=node.now + until if until > 0 else 0))
        for key in present:
            node.contents.blocks[key].pinned = time.monotonic_ns() + until if until > 0 else 0
        return BlocksCounted(blocks=len(present))

    async def _clear(self, ask: ClearTiers, tiers: OpenTiers) -> BlocksCounted:
        node = self._node
        tier = None if not ask.tier else self._tier(ask.tier)
        disk = tiers.lower.get("disk")
        if tier in (None, "disk") and isinstance(disk, DiskStore):
            await disk.void()  # a write under way would come back if this process died before it is forgotten
        before = sum(node.contents.counts.values())
        node.post(TierCleared(tier=tier))
        return BlocksCounted(blocks=before - sum(node.contents.counts.values()))

    async def _verify(self, ask: VerifyTier, tiers: OpenTiers) -> TierVerified:
        tier = self._tier(ask.tier)
        store = tiers.slab if tier == "host" else tiers.lower[tier]
        outcomes: Counter[str] = Counter()
        wrong: list[str] = []
        chosen = list(islice(self._placed(tier, ask.after), min(max(1, ask.limit), VERIFY_MAX)))
        buffer = aligned(store.block_bytes)
        for key, place in chosen:
            begun = time.monotonic()
            block = BlockIo(place.slot, key, place.generation, buffer)
            [result] = await store.read([block], VERIFY_DEADLINE)
            if result.outcome == "late":
                buffer = aligned(store.block_bytes)  # the old one belongs to the call that hangs
            outcome = self._judged(tier, key, place, result)
            outcomes[outcome] += 1
            if outcome in ("corrupt", "stale", "absent"):
                wrong.append(key.hex())
                store.forget([place.slot])
            await asyncio.sleep(max(0.0, store.block_bytes / ask.rate - (time.monotonic() - begun)))
        more = len(chosen) == ask.limit
        return TierVerified(outcomes=dict(outcomes), wrong=wrong, last=chosen[-1][0].hex() if more and chosen else "")

    def _placed(self, tier: TierName, after: str) -> Iterator[tuple[BlockKey, RecordPlace]]:
        """Yield where a tier has its blocks, in the order of the keys from ``after`` on."""
        blocks = self._node.contents.blocks
        for key in sorted(key for key, block in blocks.items() if tier in block.places and key.hex() > after):
            block = blocks.get(key)
            if block is not None and tier in block.places:
                yield key, block.places[tier]

    def _judged(self, tier: TierName, key: BlockKey, place: RecordPlace, result: BlockResult) -> str:
        """Return a read's outcome; a slot that got another block meanwhile says nothing."""
        block = self._node.contents.blocks.get(key)
        return result.outcome if block is not None and block.places.get(tier) == place else "moved"

    def _key(self, text: str) -> BlockKey:
        """Return the one key that begins with some hexadecimal digits.

        Raises:
            ConfigError: there is none, or more than one.
        """
        matches = [key for key in self._node.contents.blocks if key.hex().startswith(text.lower())]
        if len(matches) != 1:
            raise ConfigError(f"{len(matches)} blocks have a key that begins with {text!r}", hint="penstock cache ls")
        return matches[0]

    def _tier(self, name: str) -> TierName:
        tiers = self._node.tiers
        for tier in () if tiers is None else tiers.capacity:
            if tier == name:
                return tier
        raise ConfigError(f"there is no tier {name!r} here", hint="penstock cache stat shows which there are")

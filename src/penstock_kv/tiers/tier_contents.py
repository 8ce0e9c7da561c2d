"""`TierContents`: which tier has which block, as the tier machine announced it, with the engine's own hash.

The machine knows keys only. An engine's hash can't be computed from a key, so a block that outlived a restart is
announced to the engine once it asks for it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from penstock_kv.blocks.block_key import BlockKey
from penstock_kv.blocks.tiers.tier_events import TierName

TIERS: tuple[TierName, ...] = ("host", "disk", "object", "peer")
"""The fastest first."""

NAMES_MAX = 100_000
"""Names of blocks that no tier has: 15 MB. One that is forgotten is learned when the engine asks for the block."""


class BlockName(NamedTuple):
    """What an engine calls a block. ``weights``: of that engine; others mean another block by that name."""

    hash: bytes
    group: int
    weights: str = ""


class RecordPlace(NamedTuple):
    """Where a tier has a block."""

    slot: int
    generation: int


class TierBlock:
    """One block in any of the tiers."""

    __slots__ = ("name", "parent", "pinned", "places", "stored", "tiers")

    def __init__(self, parent: BlockKey | None, stored: int) -> None:
        self.name: BlockName | None = None
        self.parent = parent
        self.tiers: set[TierName] = set()
        self.places: dict[TierName, RecordPlace] = {}
        self.stored = stored
        """Monotonic nanoseconds of its first arrival in any tier."""
        self.pinned = 0
        """Until when, in nanoseconds; 0 is not."""

    @property
    def fastest(self) -> TierName:
        return next(tier for tier in TIERS if tier in self.tiers)


class TierContents:
    """Blocks by key, bounded by the tiers themselves."""

    def __init__(self) -> None:
        self.blocks: dict[BlockKey, TierBlock] = {}
        self.counts: dict[TierName, int] = dict.fromkeys(TIERS, 0)
        self._names: dict[BlockKey, BlockName] = {}
        """Of blocks that an engine spoke of and no tier has yet, the oldest first."""

    def stored(self, tier: TierName, keys: Sequence[BlockKey], parent: BlockKey | None, now: int) -> list[BlockName]:
        """Enter blocks that a tier has now; return the names of those that have one."""
        names = []
        for key in keys:
            block = self.blocks.get(key)
            if block is None:
                block = self.blocks[key] = TierBlock(parent, now)
                block.name = self._names.pop(key, None)
            if tier not in block.tiers:
                block.tiers.add(tier)
                self.counts[tier] += 1
            if block.name is not None:
                names.append(block.name)
            parent = key
        return names

    def removed(self, tier: TierName, keys: Sequence[BlockKey]) -> list[BlockName]:
        """Take out blocks that a tier has lost; return the names of those that have one."""
        names = []
        for key in keys:
            block = self.blocks.get(key)
            if block is None or tier not in block.tiers:
                continue
            block.tiers.discard(tier)
            block.places.pop(tier, None)
            self.counts[tier] -= 1
            if block.name is not None:
                names.append(block.name)
            if not block.tiers:
                del self.blocks[key]
        return names

    def placed(self, tier: TierName, keys: Sequence[BlockKey], places: Iterable[RecordPlace]) -> None:
        """Note where a tier has blocks; those that it does not announce are left out."""
        for key, place in zip(keys, places):
            block = self.blocks.get(key)
            if block is not None:
                block.places[tier] = place

    def learned(self, keys: Sequence[BlockKey], names: Sequence[BlockName]) -> dict[TierName, list[BlockName]]:
        """Note what an engine calls blocks; return, per tier, those whose names were unknown."""
        news: dict[TierName, list[BlockName]] = {}
        for key, name in zip(keys, names):
            block = self.blocks.get(key)
            if block is None:
                self._names[key] = name
            elif block.name is None:
                block.name = name
                for tier in block.tiers:
                    news.setdefault(tier, []).append(name)
        while len(self._names) > NAMES_MAX:
            del self._names[next(iter(self._names))]
        return news

    def named(self) -> list[tuple[TierName, BlockKey]]:
        """Return every block of every tier that has a name."""
        return [(tier, key) for key, block in self.blocks.items() if block.name is not None for tier in block.tiers]

    def name_in(self, tier: TierName, key: BlockKey) -> BlockName | None:
        """Return the name of a block that a tier still has."""
        block = self.blocks.get(key)
        return block.name if block is not None and tier in block.tiers else None

    def by_tier(self, keys: Sequence[BlockKey]) -> Mapping[TierName, int]:
        """Count blocks by the fastest tier that has them."""
        counts: dict[TierName, int] = {}
        for key in keys:
            block = self.blocks.get(key)
            if block is not None:
                counts[block.fastest] = counts.get(block.fastest, 0) + 1
        return counts

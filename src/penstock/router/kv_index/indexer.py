"""`Indexer`: the protocol of the KV indexes, exact and approximate, with its answers and its counters."""

from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import compress
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.kernel.machine import Nanos
from penstock.kernel.values import KvEvent, Target
from penstock.router.kv_index.worker_bitmap import GONE, bits

IndexName = Literal["exact", "approximate", "predicted", "none"]
Column = npt.NDArray[Any]
"""A number for each of many targets."""
SOURCES: tuple[IndexName, ...] = ("none", "exact", "approximate", "predicted")
"""Names of indexes by the numbers that columns have for them."""
Answer_co = TypeVar("Answer_co", covariant=True)


class Indexer(Protocol[Answer_co]):
    """Which targets hold which leading blocks of a prompt.

    An `EventIndexer` learns it from KV events and answers with `HeldBlocks`; a `HistoryIndexer` from our own decisions,
    and answers with a depth. There are two of each, one for every form of prompts.
    """

    def overlap(self, blocks: Any, now: Nanos = 0) -> Mapping[Target, Answer_co]:
        """Return what each target holds of a prompt's blocks; targets that hold nothing are absent.

        Args:
            blocks: in the form that this index takes (`penstock.router.kv_index.pool_index`).
        """
        ...

    def clear(self, target: Target) -> None:
        """A target's cache is empty, or not known any more."""
        ...

    def remove(self, target: Target) -> None:
        """A target is gone."""
        ...

    def __len__(self) -> int:
        """Return how many (target, block) pairs are held."""
        ...

    def snapshot(self) -> msgspec.Struct:
        """Return the state."""
        ...

    def restore(self, plain: Any) -> None:
        """Become the index of a state, or of one as plain data.

        Raises:
            msgspec.ValidationError: it is not the state of such an index.
        """
        ...

    def check(self) -> None:
        """Raise `InvariantError` where the state contradicts itself. Cost: walks everything."""
        ...


class HeldBlocks(NamedTuple):
    """What one target holds of a prompt, in blocks: leading ones, then what follows in each lower tier."""

    device: int = 0
    host: int = 0
    disk: int = 0
    source: IndexName = "exact"
    """Which index says so; none where none does."""
    costly: int = 0
    """Blocks of lower tiers, not among those above, that the target would rather compute than load."""

    @property
    def lower(self) -> int:
        return self.host + self.disk

    @property
    def total(self) -> int:
        return self.device + self.host + self.disk


NOTHING = HeldBlocks(source="none")
"""What a target holds that is known to hold nothing."""


class Stretch(NamedTuple):
    """Workers (``mask``) that hold the same of a prompt."""

    held: HeldBlocks
    mask: int


class EventIndexer(Indexer[HeldBlocks], Protocol):
    """An exact index: it hears every block that an engine stores and removes."""

    block_size: int
    counters: "IndexCounters"

    def columns(self, blocks: Any, place: Mapping[Target, int]) -> tuple[Column, Sequence[Column]]:
        """Return the same as `overlap` for many targets: the device blocks of each, and those of each lower tier.

        Args:
            place: target -> its place; the same object for the same targets.
        Returns: shape (targets,) each; no lower tiers where no target holds anything there.
        """
        ...

    def join(self, target: Target, *, native: bool, alike: str | None = None, copies: bool = False) -> None:
        """A target is there. See `penstock.router.kv_index.exact_index.ExactIndex.join`."""
        ...

    def apply(self, target: Target, event: KvEvent) -> None:
        """Take in one KV event of a target, in the order in which the engine sent them."""
        ...

    def resident(self, target: Target) -> int:
        """Return how many blocks a target holds in its engine's own memory. Constant time."""
        ...

    def windowed(self, target: Target | None = None) -> bool:
        """Tell whether some layers of a target, or of any, read a window of a prompt or one state."""
        ...

    def blocks_of(self, target: Target) -> set[int]:
        """Return every block that a target holds. Cost: walks everything."""
        ...


class HistoryIndexer(Indexer[int], Protocol):
    """An approximate index: it remembers for some time where prompts went."""

    def routed(self, target: Target, blocks: Any, now: Nanos) -> None:
        """Remember that a target is about to hold these blocks."""
        ...

    def column(self, blocks: Any, place: Mapping[Target, int], now: Nanos) -> Column | None:
        """Return the same as `overlap` for many targets, as `EventIndexer.columns` does; None where none holds any."""
        ...


def column_of(depths: Mapping[Target, int], place: Mapping[Target, int]) -> Column:
    """Return the numbers of targets in the order of their places; 0 for those that are absent."""
    known = [(at, depth) for target, depth in depths.items() if (at := place.get(target)) is not None]
    found = np.zeros(len(place), dtype=np.int64)
    if known:
        places, values = zip(*known, strict=True)
        found[list(places)] = values
    return found


_DIGITS = bytes(i - 48 if i in b"01" else 0 for i in range(256))


class Overlap(Mapping[Target, HeldBlocks]):
    """What every target holds of a prompt: target -> `HeldBlocks`; those that hold nothing are absent.

    Kept as a few masks until a caller asks by name: most of the cost at a thousand workers is writing their names.

    Args:
        ends: (device blocks, workers that hold just so many), rising.
        names: slot -> target.
        lower: the same with what follows in lower tiers, where there are any.
    """

    __slots__ = ("_held", "_names", "ends", "lower")

    def __init__(
        self, ends: list[tuple[int, int]], names: Sequence[Target], lower: list[Stretch] | None = None
    ) -> None:
        self.ends = ends
        self._names = names
        self.lower = lower
        self._held: dict[Target, HeldBlocks] | None = None

    @property
    def stretches(self) -> list[Stretch]:
        """The groups of targets that hold the same, as masks of slots."""
        return [Stretch(HeldBlocks(depth), mask) for depth, mask in self.ends] if self.lower is None else self.lower

    @property
    def by_target(self) -> dict[Target, HeldBlocks]:
        """The same as a plain dict, made at the first call."""
        if self._held is None:
            self._held = {}
            for held, mask in self.stretches:
                self._held.update(dict.fromkeys(named(mask, self._names), held))
            self._held.pop(GONE, None)  # one that left since
        return self._held

    def __getitem__(self, target: Target) -> HeldBlocks:
        return self.by_target[target]

    def __iter__(self) -> Iterator[Target]:
        return iter(self.by_target)

    def __len__(self) -> int:
        return sum(mask.bit_count() for _, mask in self.stretches)

    def items(self) -> ItemsView[Target, HeldBlocks]:
        """Return the pairs of (target, held)."""
        return self.by_target.items()

    def __repr__(self) -> str:
        return f"Overlap({self.by_target!r})"


def named(mask: int, names: Sequence[Target]) -> Iterable[Target]:
    """Return the targets whose slots are set in a mask, `GONE` for those that left since. Cost: 10 ns per slot."""
    if mask.bit_count() <= 4:
        return [names[slot] for slot in bits(mask)]
    return compress(names, bin(mask)[:1:-1].encode().translate(_DIGITS))


@dataclass(slots=True)
class IndexCounters:
    """What an index did and refused, since its start. Blocks, unless noted otherwise."""

    events_stored: int = 0
    """Events, as the next two."""
    events_removed: int = 0
    events_cleared: int = 0
    stored: int = 0
    """(worker, block) pairs that became held."""
    removed: int = 0
    duplicates: int = 0
    """Stored again though held."""
    copies_removed: int = 0
    """Removed while the target kept another copy."""
    removed_unknown: int = 0
    """Removed though not held: evicted by us before, or from before a clear."""
    holes: int = 0
    """Stretches removed while a block behind them stayed."""
    parents_unknown: int = 0
    """Events left out because their place in a chain is not known."""
    refused_block_size: int = 0
    """Events whose block size is not the pool's."""
    malformed: int = 0
    """Events whose tokens or extras do not fit their hashes."""
    unplaced: int = 0
    """Blocks without tokens whose engine hash we do not know."""
    collisions: int = 0
    """Blocks that agree with another in 60 bits of their hash; refused."""
    aliases: int = 0
    """Engine hashes that mean something else on one worker than on another."""
    evicted: int = 0
    """Pairs given up to stay within the bound."""
    finds: int = 0
    """Look-ups."""
    audits: int = 0
    """Look-ups that were repeated block by block."""
    audit_disagreements: int = 0

    def as_dict(self) -> dict[str, int]:
        """Return the counts by name."""
        return asdict(self)

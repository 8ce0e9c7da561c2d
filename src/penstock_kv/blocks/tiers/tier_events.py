"""Events and effects of the tier machine, which keeps an engine's KV blocks in tiers below its own memory.

Places: ``engine`` is memory that the engine lends (rows of a shared region); ``host`` is the tier process's own slab,
through which all bytes go; ``disk`` and ``object`` are below it; ``peer`` is the host tier of another worker. So there
are six kinds of move: engine to host, host to engine, host to disk or object, and disk, object or peer to host. Only
the first two touch the engine's memory, and they are copies within one host: nothing slow or far can ever write there.

An effect that expects an answer has an id; an answer with an unknown id is dropped and counted.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from penstock.kernel.machine import Effect, Event, Nanos
from penstock_kv.blocks.block_key import BlockKey

TierName = Literal["host", "disk", "object", "peer"]
Place = Literal["engine", "host", "disk", "object", "peer"]


class BlockHints(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a request says of its blocks.

    Args:
        priority: 0 is the lowest.
        pin: seconds during which they are not evicted; afterwards they have the lowest priority.
        deadline: seconds that a load may take; later it is a miss.
    """

    priority: int = 0
    pin: float = 0.0
    deadline: float | None = None


# --- what an engine wants ---------------------------------------------------------------------------------------------


class BlocksAsked(Event, frozen=True, kw_only=True):
    """How many leading blocks of a prompt could be loaded? Answered by `BlocksAnswered`.

    Args:
        tokens_before: tokens of the prompt that the engine has itself, for the cost of computing the rest.
    """

    query: int
    keys: Sequence[BlockKey]
    tokens_before: int = 0
    hints: BlockHints = BlockHints()


class BlocksOffered(Event, frozen=True, kw_only=True):
    """Blocks lie in rows of the engine's region and may be copied until the `JobEnded` of ``job``.

    Args:
        keys, rows: shape (n,) each, chained and in order.
        parent: key of the block before the first one.
    """

    job: int
    keys: Sequence[BlockKey]
    rows: Sequence[int]
    parent: BlockKey | None = None
    hints: BlockHints = BlockHints()


class BlocksWanted(Event, frozen=True, kw_only=True):
    """Copy blocks into rows of the engine's region. `JobEnded` says which ones are there; nothing is written after."""

    job: int
    keys: Sequence[BlockKey]
    rows: Sequence[int]
    hints: BlockHints = BlockHints()


class JobCancelled(Event, frozen=True, kw_only=True):
    """The engine no longer wants a job; its `JobEnded` still comes, once nothing touches its rows."""

    job: int


class BlocksUsed(Event, frozen=True, kw_only=True):
    """The engine has these in its own cache and used them: they count as used here, too."""

    keys: Sequence[BlockKey]


class PrefetchWanted(Event, frozen=True, kw_only=True):
    """Bring blocks up to the host tier: a request for them is likely."""

    keys: Sequence[BlockKey]
    hints: BlockHints = BlockHints()


class EngineSpeed(Event, frozen=True, kw_only=True):
    """Measured: seconds that the engine takes to compute one token of a prompt; onboarding must beat that."""

    seconds_per_token: float


# --- what an operator wants -------------------------------------------------------------------------------------------


class BlocksPinned(Event, frozen=True, kw_only=True):
    """Keep blocks until then (0: no longer), in every tier that has them."""

    keys: Sequence[BlockKey]
    until: Nanos


class PeersChanged(Event, frozen=True, kw_only=True):
    """These are the other workers' host tiers that can be asked from now on, the nearest first."""

    peers: Sequence[str]


class TierCleared(Event, frozen=True, kw_only=True):
    """Drop what a tier has; None is all tiers."""

    tier: TierName | None = None


# --- what a carrier answers -------------------------------------------------------------------------------------------


class MoveEnded(Event, frozen=True, kw_only=True):
    """A `Move` is over: nothing of it touches its slots any more.

    Args:
        done: per block, whether it arrived and its checksum, key and generation are right.
        corrupt: positions of blocks whose bytes at the source are wrong, absent or stale: they must never be read
            again. Every other block that is not done may be there at another time.
        seconds: from post to end; 0 is not measured.
    """

    id: int
    done: Sequence[bool]
    corrupt: Sequence[int] = ()
    seconds: float = 0.0


class PeerAnswered(Event, frozen=True, kw_only=True):
    """A peer says how many leading blocks of an `AskPeer` it has; 0 where it can't be reached."""

    id: int
    blocks: int


class EdgeMeasured(Event, frozen=True, kw_only=True):
    """Measured apart from any `Move`, such as by a read-back at the start: without it, an edge that is assumed to be
    slow would never be used, and so never be measured.

    Args:
        size: bytes that were moved at once.
    """

    source: Place
    target: Place
    size: int
    seconds: float
    peer: str = ""


class TierFound(Event, frozen=True, kw_only=True):
    """What a tier that survives a restart had when it was opened, or what others have put there since.

    Args:
        keys, slots, generations, parents: shape (n,) each, the longest unused first. A record can be read under its
            own generation only, and the next block of that slot needs a higher one.
    """

    tier: TierName
    keys: Sequence[BlockKey]
    slots: Sequence[int]
    generations: Sequence[int]
    parents: Sequence[BlockKey | None]


# --- effects ----------------------------------------------------------------------------------------------------------


class Move(Effect, frozen=True, kw_only=True):
    """Copy blocks between two places; answered by `MoveEnded`, at the latest after ``deadline``.

    A move whose deadline passes while a system call hangs is failed to whoever wanted it, but its slots stay busy
    until the call returns.

    Args:
        keys, source_slots, target_slots: shape (n,) each; slots are rows of the region for ``engine``, and -1 for
            ``peer``, which knows its blocks by their keys.
        generations: of the source slots for a read, of the target slots for a write (lower tiers check it).
        parents: key of the block before each; empty where nothing is written that survives a restart.
        peer: whose host tier, for a source ``peer``.
    """

    id: int
    source: Place
    target: Place
    keys: Sequence[BlockKey]
    source_slots: Sequence[int]
    target_slots: Sequence[int]
    generations: Sequence[int]
    deadline: Nanos
    peer: str = ""
    parents: Sequence[BlockKey | None] = ()


class CancelMove(Effect, frozen=True, kw_only=True):
    """Nobody wants a move any more; its `MoveEnded` comes nevertheless."""

    id: int


class AskPeer(Effect, frozen=True, kw_only=True):
    """Ask a peer how many leading blocks it has; answered by `PeerAnswered`."""

    id: int
    peer: str
    keys: Sequence[BlockKey]


class BlocksAnswered(Effect, frozen=True, kw_only=True):
    """How many leading blocks can be loaded at less cost than computing them.

    Args:
        blocks: how many.
        reason: why not more, for the log and the metrics: ``absent``, ``recompute is cheaper``, ...
    """

    query: int
    blocks: int
    reason: str = ""


class JobEnded(Effect, frozen=True, kw_only=True):
    """A job of the engine is over, and nothing touches its rows any more.

    Args:
        done: per block, whether it is in its row (a load: an unbroken prefix), or in a tier (a store).
    """

    job: int
    done: Sequence[bool]


class BlocksStored(Effect, frozen=True, kw_only=True):
    """A tier has new blocks, in order and chained: for the router's index."""

    tier: TierName
    keys: Sequence[BlockKey]
    parent: BlockKey | None = None


class BlocksRemoved(Effect, frozen=True, kw_only=True):
    """A tier has lost blocks."""

    tier: TierName
    keys: Sequence[BlockKey]


class ForgetRecords(Effect, frozen=True, kw_only=True):
    """Slots of a tier that survives restarts have no block any more: their records must not come back."""

    tier: TierName
    slots: Sequence[int]
    keys: Sequence[BlockKey]

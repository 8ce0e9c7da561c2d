"""`TierState`: all that the tier machine remembers besides its blocks: jobs, moves, edges, queues and counters."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from penstock.blocks.block_key import BlockKey
from penstock.blocks.block_manager import BlockColumns
from penstock.blocks.tiers.edge import Edge
from penstock.blocks.tiers.tier_counts import MachineCounts, TierCounts
from penstock.blocks.tiers.tier_events import BlockHints, BlocksAsked, Place, PrefetchWanted, TierName
from penstock.kernel.machine import Nanos

LowerTier = Literal["disk", "object"]
LOWER_TIERS: tuple[LowerTier, ...] = ("disk", "object")
"""The nearest first: a block that is in both is fetched from the first one."""


class LoadJob(msgspec.Struct, kw_only=True):
    """Blocks that an engine wants.

    Args:
        keys, rows, done: shape (n,).
        end: what is at this position or behind it is a miss, and ``reason`` says why.
        moves: ids of open moves into the engine's rows.
        fetches: ids of fetches that bring blocks of it.
    """

    keys: Sequence[BlockKey]
    rows: Sequence[int]
    done: list[bool]
    end: int
    deadline: Nanos
    hints: BlockHints
    reason: str = ""
    moves: list[int] = []
    fetches: list[int] = []
    cancelled: bool = False


class StoreMove(msgspec.Struct, kw_only=True, tag=True):
    """Engine to host: the one move of a store job.

    Args:
        positions: of the job's blocks that are moved; shape as ``blocks``.
        done: of all of the job's blocks.
        handle: of the host tier.
        void: what arrives must not be registered: the tier was cleared meanwhile.
    """

    edge: str
    job: int
    positions: list[int]
    blocks: BlockColumns
    done: list[bool]
    handle: int
    void: bool = False
    cancelled: bool = False


class LoadMove(msgspec.Struct, kw_only=True, tag=True):
    """Host to engine. ``origin``: which tier the blocks were in before the job."""

    edge: str
    job: int
    positions: list[int]
    blocks: BlockColumns
    handle: int
    origin: TierName
    cancelled: bool = False


class Fetch(msgspec.Struct, kw_only=True, tag=True):
    """Disk, object store or peer to host, for any number of jobs; queued as long as it has no host handle.

    Args:
        waiters: job -> (position in ``blocks``, position in the job).
        prefetch: somebody wants it besides the waiters.
        late: its deadline has passed, and nobody waits.
    """

    edge: str
    source: TierName
    peer: str
    blocks: BlockColumns
    source_handle: int
    handle: int = 0
    waiters: dict[int, list[tuple[int, int]]] = {}
    prefetch: bool = False
    late: bool = False
    void: bool = False
    cancelled: bool = False


class WriteMove(msgspec.Struct, kw_only=True, tag=True):
    """Host to disk or object store. ``host_handle`` is of registered blocks, or of evicted ones whose bytes stay."""

    edge: str
    target: LowerTier
    blocks: BlockColumns
    host_handle: int
    handle: int
    late: bool = False
    void: bool = False
    cancelled: bool = False


OpenMove = StoreMove | LoadMove | Fetch | WriteMove


class LowerQueue(msgspec.Struct):
    """Keys that wait to be written to one lower tier, the first one first, and those that are being written."""

    waiting: dict[BlockKey, None] = {}
    writing: dict[BlockKey, int] = {}


class PeerBlock(msgspec.Struct, frozen=True):
    """Which peer has a block, empty for none, and until when that counts."""

    peer: str
    until: Nanos


class PeerQuery(msgspec.Struct, kw_only=True):
    """An event that waits for peers' answers.

    Args:
        keys: those of the event that peers are to have.
        asks: id of each open question, and the peer.
        blocks, peer: the best answer so far.
    """

    event: BlocksAsked | PrefetchWanted
    keys: Sequence[BlockKey]
    deadline: Nanos
    asks: dict[int, str] = {}
    blocks: int = 0
    peer: str = ""


class TierState(msgspec.Struct, kw_only=True):
    """Everything but the blocks.

    Args:
        moves: those posted, and fetches that are queued.
        stores: id of each store job's move.
        incoming: key -> the move that brings it into the host tier.
        once: keys that policy ``second_hit`` has met once, the oldest first.
        peer_blocks: what peers answered lately, the oldest first.
        queries: those that wait for peers; ``peer_asks`` has the query of each open question.
        timers: a heap of when, what (``move``, ``load`` or ``query``) and its id.
        ahead: blocks of the host tier that were prefetched and not loaded yet.
        demoting: evicted blocks of the host tier whose bytes are being written, with write-back.
        seconds_per_token: of the engine's prefill; 0 is not measured yet.
    """

    next_id: int = 1
    loads: dict[int, LoadJob] = {}
    stores: dict[int, int] = {}
    moves: dict[int, OpenMove] = {}
    edges: dict[str, Edge] = {}
    incoming: dict[BlockKey, int] = {}
    lower: dict[LowerTier, LowerQueue] = {}
    ahead: dict[BlockKey, None] = {}
    demoting: int = 0
    once: dict[BlockKey, None] = {}
    peers: list[str] = []
    peer_blocks: dict[BlockKey, PeerBlock] = {}
    queries: dict[int, PeerQuery] = {}
    peer_asks: dict[int, int] = {}
    timers: list[tuple[Nanos, str, int]] = []
    wake_at: Nanos | None = None
    seconds_per_token: float = 0.0
    counts: MachineCounts = msgspec.field(default_factory=MachineCounts)
    tiers: dict[Place, TierCounts] = {}

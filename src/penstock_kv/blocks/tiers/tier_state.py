"""`TierState`: all that the tier machine remembers besides its blocks: jobs, moves, edges, queues and counters."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from penstock.kernel.machine import SECOND, Nanos
from penstock_kv.blocks.block_key import BlockKey
from penstock_kv.blocks.block_manager import BlockColumns
from penstock_kv.blocks.tiers.tier_events import BlockHints, BlocksAsked, Place, PrefetchWanted, TierName


class TierCounts(msgspec.Struct):
    """What one tier did since the start; blocks, unless a field says bytes.

    ``peer`` counts all peers together.
    """

    hits: int = 0
    """Blocks that were loaded into the engine from here."""
    stored: int = 0
    removed: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    skipped: dict[str, int] = {}
    """Not put here, by reason: ``full``, ``busy``, ``resting``, ``evicted``, ``present``, ``first use``, ..."""
    failed: int = 0
    """Did not arrive here or from here, for whatever reason."""
    corrupt: int = 0
    late: int = 0
    """Moves whose deadline passed."""
    hints_ignored: int = 0
    """Blocks whose pin or priority the eviction order can't honour."""
    lost: int = 0
    """Evicted before they could be written to any lower tier."""

    def skip(self, reason: str, blocks: int) -> None:
        if blocks:
            self.skipped[reason] = self.skipped.get(reason, 0) + blocks


class MachineCounts(msgspec.Struct):
    """What the machine did since the start."""

    queried: int = 0
    """Blocks that an engine asked for."""
    answered: int = 0
    """Of those, blocks that it was told to load."""
    not_answered: dict[str, int] = {}
    """Blocks that it was not told to load, by reason."""
    loaded: int = 0
    missed: dict[str, int] = {}
    """Blocks that it wanted and did not get, by the reason of the first of them."""
    prefetched: int = 0
    """Brought up before anybody asked for them..."""
    prefetch_hits: int = 0
    """... and loaded later, each counted once..."""
    prefetch_wasted: int = 0
    """... or evicted before."""
    unknown: int = 0
    """Answers and cancellations with an id that is not open."""

    def miss(self, reason: str, blocks: int) -> None:
        self.missed[reason] = self.missed.get(reason, 0) + blocks

    def refuse(self, reason: str, blocks: int) -> None:
        self.not_answered[reason] = self.not_answered.get(reason, 0) + blocks


FADE = 0.9
"""A measured move counts so much of the next one: the last ten decide."""
PRIOR_WEIGHT = 0.1
"""Of the prior's latency, where a measured move has 1. Most moves are of one size: then this point decides how much of
their time is latency, and the rest goes to the rate."""
INSTANT = 1e-9
"""Seconds that a move takes at the least."""
HALF_LIFE: Nanos = 60 * SECOND
"""In which half of what a move took longer than assumed is forgotten. A slow edge is used no more, so nothing would
measure that it is fast again: one stalled copy would have prompts computed for ever. A guess."""


class EdgeSpeed(msgspec.Struct, frozen=True):
    """What is assumed until it is measured."""

    latency: float
    """seconds"""
    rate: float
    """bytes per second"""


PRIORS = {
    "engine>host": EdgeSpeed(0.0001, 10e9),
    "host>engine": EdgeSpeed(0.0001, 10e9),
    "host>disk": EdgeSpeed(0.001, 1e9),
    "disk>host": EdgeSpeed(0.001, 1e9),
    "host>object": EdgeSpeed(0.03, 0.1e9),
    "object>host": EdgeSpeed(0.03, 0.1e9),
    "peer>host": EdgeSpeed(0.002, 1e9),
}
"""Of one core's memcpy, one virtual disk, an object store in the same region and a TCP connection of 10 Gbit/s."""


class Edge(msgspec.Struct, kw_only=True):
    """One direction between two places.

    Seconds of a move are a line over its bytes, fitted by least squares to the moves that came through whole: the
    older a move, the less it counts. The prior's latency is a point of the line, too; its rate counts until the first
    move. Where the fit makes no sense, such as longer moves that took less time, the line is one without latency.
    Slowness that is not measured again fades towards the prior.

    Args:
        peer: of which peer; empty for the others.
        queue, ahead: ids of fetches that wait, those that a load wants and those that are prefetched.
        rest_until: after a failure.
    """

    source: Place
    target: Place
    peer: str = ""
    in_flight: int = 0
    """bytes"""
    queue: list[int] = []
    ahead: list[int] = []
    queued: int = 0
    """bytes of ``queue``"""
    rest_until: Nanos = 0
    moves: int = 0
    measured_at: Nanos = 0
    sums: list[float] = msgspec.field(default_factory=lambda: [0.0] * 5)
    """Of weight, bytes, seconds, bytes squared and bytes times seconds."""

    @property
    def name(self) -> str:
        return f"{self.source}>{self.target}"

    def measured(self, now: Nanos, size: int, seconds: float) -> None:
        """Take note of a move of so many bytes that came through whole."""
        seconds = max(seconds, INSTANT)
        self.moves += 1
        self.measured_at = now
        for number, term in enumerate((1.0, size, seconds, size * size, size * seconds)):
            self.sums[number] = self.sums[number] * FADE + term

    def speed(self, now: Nanos) -> EdgeSpeed:
        """Return latency and rate as they are now."""
        prior = PRIORS[self.name]
        if not self.moves:
            return prior
        found, left = self._fitted(prior), 0.5 ** (max(0, now - self.measured_at) / HALF_LIFE)
        latency = found.latency - (1 - left) * max(0.0, found.latency - prior.latency)
        return EdgeSpeed(latency, 1 / (1 / found.rate - (1 - left) * max(0.0, 1 / found.rate - 1 / prior.rate)))

    def _fitted(self, prior: EdgeSpeed) -> EdgeSpeed:
        weight, x, y, xx, xy = self.sums
        weight += PRIOR_WEIGHT  # of a move without bytes
        y += PRIOR_WEIGHT * prior.latency
        slope = (weight * xy - x * y) / (weight * xx - x * x)
        latency = (y - slope * x) / weight
        if slope <= 0 or latency < 0:
            return EdgeSpeed(0.0, xx / xy)
        return EdgeSpeed(latency, 1 / slope)

    def seconds(self, now: Nanos, size: int) -> float:
        """Return how long a move of so many bytes would take, behind what is under way."""
        speed = self.speed(now)
        return speed.latency + (self.in_flight + self.queued + size) / speed.rate

    def rests(self, now: Nanos) -> bool:
        return now < self.rest_until


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

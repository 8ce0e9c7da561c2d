"""What ``penstock cache`` asks a tier process over its unix socket, and the answers.

The first frame of such a connection is one of the asks, instead of an engine's `TierHello`; each is answered by one
frame, or by `AskRefused`.
"""

import msgspec

LIST_MAX = 10_000
"""Blocks of one answer to `ListBlocks`."""


class AskStat(msgspec.Struct, frozen=True, tag="stat?", tag_field="t"):
    """How full are the tiers, and what did they do? `CacheStat`."""


class ListBlocks(msgspec.Struct, frozen=True, kw_only=True, tag="ls?", tag_field="t"):
    """Which blocks are there, the newest first? `BlockList`. ``tier``: only those; empty is all."""

    tier: str = ""
    limit: int = 50


class PinBlocks(msgspec.Struct, frozen=True, kw_only=True, tag="pin?", tag_field="t"):
    """Keep blocks for ``seconds`` from now; 0 ends it. `BlocksCounted`.

    Args:
        keys: our keys; the beginning of one, in hexadecimal, is enough where it is the only one.
        hashes: the engine's hashes, instead of keys.
    """

    keys: list[str] = []
    hashes: list[bytes] = []
    tenant: str = ""
    seconds: float


class ClearTiers(msgspec.Struct, frozen=True, kw_only=True, tag="clear?", tag_field="t"):
    """Drop the blocks of a tier, or of all where it is empty. `BlocksCounted`."""

    tier: str = ""


class VerifyTier(msgspec.Struct, frozen=True, kw_only=True, tag="verify?", tag_field="t"):
    """Read blocks of a tier again and check them. `TierVerified`.

    Args:
        after: key after which to go on, in hexadecimal; empty begins.
        limit: blocks of this answer.
        rate: bytes per second.
    """

    tier: str
    after: str = ""
    limit: int = 64
    rate: float


class ListHashes(msgspec.Struct, frozen=True, kw_only=True, tag="hashes?", tag_field="t"):
    """What do engines call the blocks in any of these tiers? `BlockHashes`."""

    tiers: list[str]


class AskMetrics(msgspec.Struct, frozen=True, tag="metrics?", tag_field="t"):
    """What would Prometheus read? `MetricsPage`."""


class TierStat(msgspec.Struct, frozen=True, kw_only=True):
    """One tier. Bytes and blocks came in and went out since the start of the process."""

    tier: str
    blocks: int
    capacity: int
    pinned: int
    hits: int
    stored: int
    removed: int
    bytes_in: int
    bytes_out: int
    failures: dict[str, int]
    """Blocks of moves to or from it that failed, by outcome."""


class CacheStat(msgspec.Struct, frozen=True, kw_only=True, tag="stat", tag_field="t"):
    """A tier process.

    Args:
        seconds_per_token: of the engine's prefill, by which loads are judged; 0 is unknown.
        leaks: what the machine's books say of slots that nobody has.
    """

    model: str = ""
    block_tokens: int = 0
    block_bytes: int = 0
    hash_algorithm: str = ""
    engines: list[str]
    tiers: list[TierStat]
    misses: dict[str, int]
    """Blocks that engines asked for and had to compute, by reason."""
    open_jobs: int
    open_moves: int
    refused: dict[str, int]
    seconds_per_token: float = 0.0
    leaks: list[str]


class ListedBlock(msgspec.Struct, frozen=True, kw_only=True):
    """One block. ``age``: seconds since it came; ``pinned``: seconds that it still stays at least; ``hash``: the
    engine's, in hexadecimal, where it is known."""

    key: str
    tiers: list[str]
    tokens: int
    age: float
    pinned: float
    hash: str
    group: int


class BlockList(msgspec.Struct, frozen=True, kw_only=True, tag="ls", tag_field="t"):
    """Blocks, and how many there are in all."""

    blocks: list[ListedBlock]
    total: int


class BlocksCounted(msgspec.Struct, frozen=True, kw_only=True, tag="counted", tag_field="t"):
    """So many blocks were there and were pinned, or dropped."""

    blocks: int


class MetricsPage(msgspec.Struct, frozen=True, kw_only=True, tag="metrics", tag_field="t"):
    """Metrics in Prometheus' text format."""

    text: str


class BlockHashes(msgspec.Struct, frozen=True, kw_only=True, tag="hashes", tag_field="t"):
    """What engines call blocks.

    Args:
        names: the last 8 bytes of each hash, one behind the other, as KV events have them.
        unnamed: blocks of an earlier run that no engine has asked for yet, so that nobody was told of them.
        rows: engine -> blocks of its own host memory beside the tiers, which it may announce as host memory as well.
    """

    names: bytes
    unnamed: int
    rows: dict[str, int]


class TierVerified(msgspec.Struct, frozen=True, kw_only=True, tag="verified", tag_field="t"):
    """What came of reading blocks again.

    Args:
        outcomes: blocks per outcome.
        wrong: keys of those that were not what they should be; they are never read again.
        last: key to go on after; empty where all are read.
    """

    outcomes: dict[str, int]
    wrong: list[str]
    last: str = ""


class AskRefused(msgspec.Struct, frozen=True, tag="refused", tag_field="t"):
    """Why there is no answer."""

    reason: str


AdminAsk = AskStat | ListBlocks | PinBlocks | ClearTiers | VerifyTier | ListHashes | AskMetrics
AdminAnswer = CacheStat | BlockList | BlocksCounted | TierVerified | BlockHashes | MetricsPage | AskRefused

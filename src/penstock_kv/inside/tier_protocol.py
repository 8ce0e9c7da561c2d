"""Wire protocol between an engine's plug-in and the tier process of its host, over a unix socket.

A frame is u32le length, then msgpack of one of the structs below (tagged by ``t``). The engine's KV rows lie in a file
of shared memory that both have mapped; frames carry keys and row numbers only. Whoever loses the connection takes
every job that is not ended as failed: for a load that is a miss, and the engine computes the blocks itself.

The tier process closes its side only when it touches no row any more. So an engine that reads the end of the stream
owns all its rows again, however that end came, kill -9 included. An engine that wants to end itself shuts its side
down for writing and reads on until that end; before it, the rows of open jobs are not its own.

Keys are the full hashes that the engine gives (`penstock_kv.blocks.block_key.engine_keys` makes ours of them in the
tier process), with the attention group.
"""

import hashlib

import msgspec

from penstock.kernel.tiers.load_worth import LoadCosts

READ_BACK = hashlib.sha256(b"penstock read-back").digest()
"""Hash of the block by which a start proves the way to the tiers and back: of no prompt, and never announced."""
VERSION = 1
FRAME_MAX = 16 << 20
"""Bytes of the longest frame that is read; a longer one ends the connection."""


SPEED_TOKENS = 256
"""A step with fewer prompt tokens says little of how long one takes."""
SPEED_PERIOD = 5.0
"""Seconds between two reports of that speed."""


class TierHello(msgspec.Struct, frozen=True, kw_only=True, tag="hello", tag_field="t"):
    """First frame of a plug-in: whose KV it has, and where.

    Args:
        worker: name of the engine; empty where it has none.
        region: path of the shared memory file.
        rows: of the region; ``row_bytes`` each, from ``offset`` on.
        block_tokens: tokens of one row.
        layout: digest or name of how the bytes of a row lie, parallelism included.
        weights: identity of what the engine has loaded.
        hash_algorithm: of the engine's block hashes.
        stats: endpoint of our statistics plug-in in this engine; empty where it is off, or the plug-in itself measures.
    """

    version: int = VERSION
    worker: str = ""
    model: str
    dtype: str
    layout: str
    weights: str = ""
    block_tokens: int
    hash_algorithm: str
    region: str
    offset: int = 0
    rows: int
    row_bytes: int
    stats: str = ""


class TierWelcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome", tag_field="t"):
    """Answer to `TierHello`. ``error``: why the tier process will not work for this engine; empty where it does."""

    version: int = VERSION
    error: str = ""
    tiers: list[str] = []


class RequestHints(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a request's ``kv_transfer_params`` say of its blocks (`penstock_kv.blocks.tiers.tier_events.BlockHints`)."""

    priority: int = 0
    pin: float = 0.0
    deadline: float | None = None
    lora: str = ""
    tenant: str = ""


class AskBlocks(msgspec.Struct, frozen=True, kw_only=True, tag="ask", tag_field="t"):
    """How many leading blocks can be loaded? ``AnswerBlocks``."""

    id: int
    hashes: list[bytes]
    group: int = 0
    tokens_before: int = 0
    hints: RequestHints = RequestHints()


class AnswerBlocks(msgspec.Struct, frozen=True, kw_only=True, tag="answer", tag_field="t"):
    """So many leading blocks. ``costs``: what loads cost now, and computing, which the engine reports to routers."""

    id: int
    blocks: int
    reason: str = ""
    costs: LoadCosts | None = None


class StoreBlocks(msgspec.Struct, frozen=True, kw_only=True, tag="store", tag_field="t"):
    """Take blocks out of these rows. ``JobDone``."""

    job: int
    hashes: list[bytes]
    rows: list[int]
    group: int = 0
    parent: bytes | None = None
    hints: RequestHints = RequestHints()


class LoadBlocks(msgspec.Struct, frozen=True, kw_only=True, tag="load", tag_field="t"):
    """Put blocks into these rows. ``JobDone``."""

    job: int
    hashes: list[bytes]
    rows: list[int]
    group: int = 0
    hints: RequestHints = RequestHints()


class CancelJob(msgspec.Struct, frozen=True, kw_only=True, tag="cancel", tag_field="t"):
    """A job is not wanted any more; its ``JobDone`` still comes."""

    job: int


class UsedBlocks(msgspec.Struct, frozen=True, kw_only=True, tag="used", tag_field="t"):
    """The engine used these blocks from its own cache."""

    hashes: list[bytes]
    group: int = 0
    hints: RequestHints = RequestHints()


class PrefetchBlocks(msgspec.Struct, frozen=True, kw_only=True, tag="prefetch", tag_field="t"):
    """A request for these blocks is likely: bring them up, ``after`` so many seconds."""

    hashes: list[bytes]
    group: int = 0
    hints: RequestHints = RequestHints()
    after: float = 0.0


class PrefillSpeed(msgspec.Struct, frozen=True, kw_only=True, tag="speed", tag_field="t"):
    """Measured seconds that the engine takes for one token of a prompt."""

    seconds_per_token: float


class JobDone(msgspec.Struct, frozen=True, kw_only=True, tag="done", tag_field="t"):
    """A job is over, and nobody but the engine touches its rows. ``done`` per block."""

    job: int
    done: list[bool]


class RemovedBlocks(msgspec.Struct, frozen=True, kw_only=True, tag="removed", tag_field="t"):
    """Blocks that a tier has no more, by the hashes that the engine gave them; another tier may still have them."""

    tier: str
    hashes: list[bytes]
    group: int = 0


class StoredBlocks(msgspec.Struct, frozen=True, kw_only=True, tag="stored", tag_field="t"):
    """Blocks that a tier has now."""

    tier: str
    hashes: list[bytes]
    group: int = 0


ToTiers = TierHello | AskBlocks | StoreBlocks | LoadBlocks | CancelJob | UsedBlocks | PrefetchBlocks | PrefillSpeed
FromTiers = TierWelcome | AnswerBlocks | JobDone | RemovedBlocks | StoredBlocks

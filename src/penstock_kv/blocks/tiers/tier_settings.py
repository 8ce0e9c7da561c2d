"""`TierSettings`: what decides how the tier machine works, and its constants with their reasons."""

from typing import Literal

import msgspec

from penstock.kernel.errors import ConfigError
from penstock.kernel.machine import MILLISECOND, SECOND, Nanos
from penstock_kv.blocks.block_manager import OrderName

OffloadPolicy = Literal["all", "presence", "second_hit"]
WritePolicy = Literal["through", "selective", "back"]

MOVE_BLOCKS = 64
"""Blocks of one move to or from a lower tier: enough to keep a device busy, few enough that the first ones of a long
prefix are in the engine while the others are read."""
MOVE_BYTES = 64 << 20
"""Bytes of one such move: 64 ms of a device with 1 GB/s."""
STORE_SHARE = 2
"""One part in so many of the host tier may be under way from the engine: what is offered beyond is skipped, rather
than the whole cache given up for blocks of which nobody knows whether they arrive."""
WATERMARK_SHARE = 8
"""With write-back, one part in so many of the host tier is kept empty by writing blocks down ahead of need: what
an engine offers at once must fit in, or it is skipped."""
LOAD_DEADLINE: Nanos = 10 * SECOND
"""Of a load without a deadline of its own: longer than any prefill that a user waits for."""
PREFETCH_DEADLINE: Nanos = 30 * SECOND
"""Nobody waits for a prefetch; after so long the request has probably come without it."""
COPY_DEADLINE: Nanos = 10 * SECOND
"""Of a copy within the host: 100 GB at 10 GB/s."""
WRITE_DEADLINE: Nanos = 30 * SECOND
"""Of a write to a lower tier: `MOVE_BYTES` at 2 MB/s."""
AHEAD_FETCHES = 64
"""Prefetches that wait at most; more are skipped, since each keeps its blocks below from being evicted."""
PEER_DEADLINE: Nanos = 20 * MILLISECOND
"""Of a peer's answer, which a request's placement waits for: a round trip and a busy event loop."""
PEERS_ASKED = 4
"""Peers that are asked for one prompt."""
PEER_QUERIES = 256
"""Queries that wait for peers at most; more are answered without them."""
PEER_MEMORY: Nanos = 2 * SECOND
"""A peer's answer counts for so long: engines ask again while a request waits, and peers evict."""
PEER_MEMORY_BLOCKS = 100_000
"""Answers that are remembered: 10 MB of keys."""
REST: Nanos = 10 * SECOND
"""A tier or peer whose move failed as a whole, or was late, is left alone for so long."""
ONCE_BLOCKS = 1_000_000
"""Keys that policy ``second_hit`` remembers at most: 100 MB; fewer where the tiers are small (4 per block)."""


class TierSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Tiers below one engine.

    Args:
        block_bytes, block_tokens: of every block.
        host_blocks, disk_blocks, object_blocks: of each tier; 0 is no such tier, and a host tier must be.
        order: which idle block a full tier evicts first; only ``priority`` honours pins and priorities.
        offload: which offered blocks are taken: ``all`` that the host tier lacks, those in no tier (``presence``), or
            those of them that are offered or used for the second time (``second_hit``).
        min_priority: blocks of a lower priority are not taken, nor any block after one that was not: a prefix has no
            hole. 0 takes all.
        write: when a block goes from the host tier to those below: at once (``through``), when it is used again
            (``selective``), or before the host tier evicts it (``back``).
        bytes_in_flight: of all moves between the host tier and one lower tier or peer, in one direction; the default
            is what a device of 7 GB/s moves in 37 ms.
    """

    block_bytes: int
    block_tokens: int
    host_blocks: int
    disk_blocks: int = 0
    object_blocks: int = 0
    order: OrderName = "priority"
    offload: OffloadPolicy = "all"
    min_priority: int = 0
    write: WritePolicy = "through"
    bytes_in_flight: int = 256 << 20

    def __post_init__(self) -> None:
        for name in ("block_bytes", "block_tokens", "host_blocks", "bytes_in_flight"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}", hint=f"give {name} at least 1")
        for name in ("disk_blocks", "object_blocks", "min_priority"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}", hint=f"give {name} 0 or more")

    @property
    def move_blocks(self) -> int:
        """Blocks of one move between the host tier and a lower one."""
        return max(1, min(MOVE_BLOCKS, MOVE_BYTES // self.block_bytes, self.host_blocks // 4))

    @property
    def store_bytes(self) -> int:
        """Bytes that may be under way from the engine."""
        return max(1, self.host_blocks // STORE_SHARE) * self.block_bytes

    @property
    def watermark(self) -> int:
        """Empty blocks that the host tier keeps with write-back; one fetch fits in."""
        return max(self.move_blocks, self.host_blocks // WATERMARK_SHARE)

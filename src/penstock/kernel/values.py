"""Which values do all rooms share? Ids, cards, statistics, service levels, KV events."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, NewType

import msgspec

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
BlockHash = NewType("BlockHash", int)
"""64-bit routing hash: chained, so it stands for a whole prefix (`penstock.kernel.hashing`)."""
EngineHash = NewType("EngineHash", int)
"""Opaque unsigned 64-bit hash as an engine announces it."""

Role = Literal["aggregated", "prefill", "decode", "encode"]
HandoffProtocol = Literal["completed", "push", "bootstrap"]
"""How KV goes from a prefill worker to a decode worker: see `penstock.router.flow`."""
Tier = Literal["device", "host", "disk"]
TIERS: tuple[Tier, ...] = ("device", "host", "disk")


class Target(NamedTuple):
    """What a request is routed to: one data-parallel rank of one worker."""

    worker: WorkerId
    rank: int = 0

    def __str__(self) -> str:
        return self.worker if self.rank == 0 else f"{self.worker}/{self.rank}"


class PoolKey(msgspec.Struct, frozen=True, order=True):
    """Which workers stand in for each other. Pools are a mapping from this, never fields."""

    model: str
    role: Role = "aggregated"
    variant: str = ""

    def __str__(self) -> str:
        return ":".join(part for part in (self.model, self.role, self.variant) if part)


class WorkerCard(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of itself. What is not known is None: unknown is not zero.

    Units: block_size tokens; kv_blocks blocks; max_len, max_batched_tokens tokens; epoch grows with each restart.
    """

    id: WorkerId
    epoch: int
    born: int | None = None
    """Epoch at which this engine joined, where it is the same one that goes on under a newer epoch."""
    model: str
    url: str
    role: Role = "aggregated"
    variant: str = ""
    engine: str = "openai"
    adapters: tuple[str, ...] = ()
    block_size: int | None = None
    kv_blocks: int | None = None
    max_seqs: int | None = None
    max_batched_tokens: int | None = None
    max_len: int | None = None
    ranks: int = 1
    tokenizer: str | None = None
    hash_scheme: str | None = None
    events: tuple[str, ...] = ()
    """KV event endpoint per rank (ZMQ); empty where the engine announces none."""
    replay: tuple[str, ...] = ()
    """Replay endpoint per rank, or empty."""
    events_security: str | None = None
    """``curve`` where both ask for the cluster's secret; None where they speak plain, as stock engines do."""
    topic: str = ""
    stats: str | None = None
    """Endpoint (ZMQ) at which the engine tells every forward pass; None where it tells none."""
    handoff: HandoffProtocol | None = None
    """How its KV can go to, or come from, another worker; None where it can't."""
    layout: str | None = None
    """Digest of all that must be alike for that, as far as it is known."""
    bootstrap: str | None = None
    """``host:port`` at which a prefill worker of protocol bootstrap, or push, meets the decode worker."""
    labels: dict[str, str] = {}
    pid: int | None = None

    @property
    def incarnation(self) -> int:
        """The epoch at which this engine joined: as long as it stays, its cache is what it was."""
        return self.epoch if self.born is None else self.born

    @property
    def pool(self) -> PoolKey:
        return PoolKey(self.model, self.role, self.variant)


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """What one window of an engine's forward passes did; sums, so that windows add up.

    A sum that the engine does not expose is None; one that we estimated stands in ``estimated``.
    Units: wall seconds; tokens; sequences; ``*_sq`` are sums of squares over passes. What is queued is summed over
    passes too, so that a mean is a sum divided by ``passes``.
    """

    passes: int
    wall: float | None
    prefill_tokens: int | None = None
    prefill_tokens_sq: int | None = None
    prefill_requests: int | None = None
    decode_seqs: int | None = None
    decode_seqs_sq: int | None = None
    decode_kv: int | None = None
    decode_kv_sq: int | None = None
    queued_requests: int | None = None
    queued_prefill_tokens: int | None = None
    queued_decode_kv: int | None = None
    preemptions: int | None = None
    estimated: tuple[str, ...] = ()

    def __add__(self, other: "StepStats") -> "StepStats":
        """Join two windows: sums add; a sum unknown in either is unknown in both."""
        added: dict[str, object] = {}
        for name in self.__struct_fields__:
            if name == "estimated":
                continue
            mine, theirs = getattr(self, name), getattr(other, name)
            added[name] = None if mine is None or theirs is None else mine + theirs
        names = tuple(sorted({*self.estimated, *other.estimated}))
        return msgspec.convert({**added, "estimated": names}, StepStats)


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """One class of service level; a cluster has a list of these, one entry by default. Seconds."""

    match: dict[str, str] = {}
    ttft: float | None = None
    itl: float | None = None
    tpot: float | None = None
    e2e: float | None = None
    percentile: float = 0.9
    weight: float = 1.0


class KvStored(msgspec.Struct, frozen=True, kw_only=True, tag="stored", tag_field="type"):
    """An engine holds new blocks, one after the other.

    ``hashes`` are the engine's own; they are our `BlockHash` where the card's ``hash_scheme`` is ours. ``tokens``
    (len(hashes) * block_size of them) serve to translate opaque ones and may be empty where none are needed; ``local``
    (`penstock.kernel.hashing.local_hashes` of tokens and extras, one per block) does the same and says no word.
    """

    hashes: Sequence[int]
    parent: int | None = None
    tokens: list[int] = []
    block_size: int = 0
    extras: list[bytes] | None = None
    tier: Tier = "device"
    local: list[int] | None = None


class KvRemoved(msgspec.Struct, frozen=True, kw_only=True, tag="removed", tag_field="type"):
    """An engine dropped blocks from one tier."""

    hashes: Sequence[int]
    tier: Tier = "device"


class KvCleared(msgspec.Struct, frozen=True, kw_only=True, tag="cleared", tag_field="type"):
    """An engine dropped everything."""


KvEvent = KvStored | KvRemoved | KvCleared

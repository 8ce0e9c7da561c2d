"""States of the KV indexes and of what they consist of: what a snapshot of the router has of each.

A module by itself, since one that defines a `msgspec.Struct` stays Python where the others are compiled.
"""

from typing import Any

import msgspec

from penstock.kernel.machine import Nanos
from penstock.kernel.tiers.load_worth import LoadCosts
from penstock.kernel.values import KvEvent, Target, Tier, WorkerId


class SlotsState(msgspec.Struct):
    """Of `WorkerBits`, with its ledger. ``count``: slots that were ever given out."""

    slot_of: dict[Target, int]
    count: int
    free: list[int]
    sweeping: list[int]
    waiting: list[int]
    swept: int
    pairs: list[int]


class CopiesState(msgspec.Struct):
    """Of `BlockRefcounts`. ``slots``: of workers that announce each copy; ``more``: slot -> block -> further copies."""

    slots: list[int]
    more: dict[int, dict[int, int]]


class SpanState(msgspec.Struct, array_like=True):
    """Of one `Span`: hashes as 64 bits each, in the machine's order; its mask as `mask_bytes` writes it."""

    hashes: bytes
    engine: bytes | None
    mask: bytes
    parent: int | None
    odd: bool
    filed: bool


class SpanTableState(msgspec.Struct):
    """Of one tier's `SpanTable`; by slots where that has bits."""

    spans: list[SpanState | None]
    by_engine: dict[int, int]
    aliases: dict[int, dict[int, int | None]]
    copies: CopiesState
    alive: bytes
    unfiled: dict[int, dict[int, None]]
    free: list[int]
    age: list[int]
    released: int
    cursor: int


class WindowState(msgspec.Struct):
    """Of one `AttentionWindow`."""

    tier: Tier
    blocks: int
    workers: bytes
    spans: SpanTableState


class ExactState(msgspec.Struct):
    """Of an `ExactIndex`. ``awaited``: slot -> engine hash -> our hash of what a worker's events are to name yet."""

    block_size: int
    slots: SlotsState
    tiers: dict[Tier, SpanTableState]
    windows: list[WindowState]
    windows_read: dict[Target, list[int]]
    native: dict[Target, bool]
    salts: dict[Target, int]
    copying: list[Target]
    awaited: dict[int, dict[int, int]]
    sweeping: int
    counters: dict[str, int]


class HistoryState(msgspec.Struct):
    """Of an `ApproximateIndex`; blocks as (end of their time, blocks), by slot; leftovers are of targets that left."""

    now: Nanos
    slots: SlotsState
    masks: dict[int, bytes]
    due: list[tuple[Nanos, int]]
    slot_blocks: dict[int, list[tuple[Nanos, list[int]]]]
    leftovers: list[tuple[int, list[tuple[Nanos, list[int]]]]]
    expired: int
    pruned: int


class EventStreamState(msgspec.Struct):
    """Of a `KvEventStream`. ``numbers``: its attributes that are one, by name."""

    numbers: dict[str, int | bool | None]
    waiting: dict[int, list[KvEvent]]
    repeated: list[KvEvent] | None


class PoolIndexState(msgspec.Struct):
    """Of a `PoolIndex`. An index's own state is None where none is kept; each form of prompts has its own."""

    block_size: int
    block_size_known: bool
    exact: Any
    history: Any
    predicted: Any
    streams: dict[Target, EventStreamState]
    tier_costs: dict[WorkerId, LoadCosts]

"""Caches cleared: the answer of POST /clear_kv_blocks."""

import msgspec


class WorkerCleared(msgspec.Struct, frozen=True, kw_only=True):
    """One engine. ``reason``: why it has not cleared its cache, or is late to say so."""

    worker: str
    model: str
    url: str
    cleared: bool
    reason: str | msgspec.UnsetType = msgspec.UNSET


class CachesCleared(msgspec.Struct, frozen=True, kw_only=True):
    """Every engine, and how many of them did and did not."""

    cleared: int
    failed: int
    workers: list[WorkerCleared]

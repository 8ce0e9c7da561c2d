"""Frontend counters for a planner: they only grow, so that no reader loses or doubles a count.

A reader takes the difference to its last reading. Readers are independent of each other, and a lost reading is in the
next one.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.kernel.latency_bins import Bins
from penstock.kernel.values import STEP_SUMS, UNKNOWN_LIMITS, EngineLimits, Role, StepStats, Traffic


class RankCounters(msgspec.Struct, frozen=True, kw_only=True):
    """The present load of one rank of an engine in one router, requests of the other frontends included."""

    running: int
    prefill_tokens: int
    blocks: int


class WorkerCounters(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as one frontend knows it.

    Args:
        ready: whether it gets requests now.
        flips: whether it can take another role.
        steps: its passes since this frontend began to follow it under ``epoch``; None where it reported none.
        window: its last window, and ``window_seconds``: how long that was.
        limits: of one rank.
    """

    worker: str
    epoch: int
    model: str
    role: Role
    ready: bool
    flips: bool = False
    ranks: tuple[RankCounters, ...] = ()
    block_size: int | None = None
    limits: EngineLimits[int | None] = UNKNOWN_LIMITS
    steps: StepStats | None = None
    window: StepStats | None = None


class ModelCounters(msgspec.Struct, frozen=True, kw_only=True):
    """One model's requests at one frontend since that frontend's start, and how many wait in its router now."""

    counts: Traffic
    queued: int = 0


class FrontendCounters(msgspec.Struct, frozen=True, kw_only=True):
    """One frontend process. ``name`` is never used again by another one."""

    version: int = 1
    name: str
    models: dict[str, ModelCounters]
    engines: tuple[WorkerCounters, ...] = ()


class ClusterCounters(msgspec.Struct, frozen=True, kw_only=True):
    """Every frontend process of a cluster. ``missing``: URLs of those that did not answer."""

    version: int = 1
    frontends: tuple[FrontendCounters, ...]
    missing: tuple[str, ...] = ()


def since(now: Traffic, before: Traffic | None) -> Traffic:
    """Return what happened between two readings of one frontend's counters."""
    if before is None:
        return now
    differences: dict[str, Any] = {}
    for name in now.__struct_fields__:
        mine, theirs = getattr(now, name), getattr(before, name)
        if name in ("accept_length", "at_end"):
            differences[name] = mine
        elif isinstance(mine, dict):
            differences[name] = _less(mine, theirs)
        else:
            differences[name] = mine - theirs
    return Traffic(**differences)


def steps_since(now: StepStats | None, before: StepStats | None) -> StepStats | None:
    """Return the passes between two readings; None where none were reported, or there were none."""
    if now is None:
        return None
    if before is None:
        return now
    differences: dict[str, Any] = {"estimated": now.estimated}
    for name in STEP_SUMS:
        mine, theirs = getattr(now, name), getattr(before, name)
        differences[name] = None if mine is None or theirs is None else mine - theirs
    return StepStats(**differences)


def _less(now: Mapping[int, int], before: Mapping[int, int]) -> Bins:
    """Return the counts since ``before``; empty bins are left out."""
    return {place: count - before.get(place, 0) for place, count in now.items() if count != before.get(place, 0)}

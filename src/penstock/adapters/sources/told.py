"""What does a frontend tell a planner? Counters that only grow, so that whoever reads them loses and doubles nothing.

A reader takes the difference to its last reading. Readers do not know of each other, and a reading that was lost on its
way is in the next one.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.kernel.bins import Bins
from penstock.kernel.values import Role, StepStats
from penstock.planner.seen import Traffic


class RankTold(msgspec.Struct, frozen=True, kw_only=True):
    """What one router has placed on one rank of an engine now, requests of the other frontends included."""

    running: int
    prefill_tokens: int
    blocks: int


class EngineTold(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as one frontend sees it.

    Args:
        ready: whether it gets requests now.
        flips: whether it can take another role.
        steps: its passes since this frontend began to follow it under ``epoch``; None where it told none.
        window: its last window, and ``window_seconds``: how long that was.
        kv_tokens: it has room for, in one rank.
    """

    worker: str
    epoch: int
    model: str
    role: Role
    ready: bool
    flips: bool = False
    ranks: tuple[RankTold, ...] = ()
    block_size: int | None = None
    kv_tokens: int | None = None
    max_seqs: int | None = None
    max_batched_tokens: int | None = None
    max_len: int | None = None
    steps: StepStats | None = None
    window: StepStats | None = None


class ModelTold(msgspec.Struct, frozen=True, kw_only=True):
    """One model's requests at one frontend since that frontend's start, and how many wait in its router now."""

    counts: Traffic
    queued: int = 0


class FrontendTold(msgspec.Struct, frozen=True, kw_only=True):
    """One frontend process. ``name`` is never used again by another one."""

    version: int = 1
    name: str
    models: dict[str, ModelTold]
    engines: tuple[EngineTold, ...] = ()


class ClusterTold(msgspec.Struct, frozen=True, kw_only=True):
    """Every frontend process of a cluster. ``missing``: URLs of those that did not answer the one that was asked."""

    version: int = 1
    frontends: tuple[FrontendTold, ...]
    missing: tuple[str, ...] = ()


def since(now: Traffic, before: Traffic | None) -> Traffic:
    """Return what happened between two tellings of one frontend's counters."""
    if before is None:
        return now
    found: dict[str, Any] = {}
    for name in now.__struct_fields__:
        mine, theirs = getattr(now, name), getattr(before, name)
        if name in ("accept_length", "at_end"):
            found[name] = mine
        elif isinstance(mine, dict):
            found[name] = _less(mine, theirs)
        else:
            found[name] = mine - theirs
    return Traffic(**found)


def steps_since(now: StepStats | None, before: StepStats | None) -> StepStats | None:
    """Return the passes between two tellings; None where nothing was told, or where there was none."""
    if now is None:
        return None
    if before is None:
        return now
    found: dict[str, Any] = {"estimated": now.estimated}
    for name in now.__struct_fields__:
        if name != "estimated":
            mine, theirs = getattr(now, name), getattr(before, name)
            found[name] = None if mine is None or theirs is None else mine - theirs
    return StepStats(**found)


def _less(now: Mapping[int, int], before: Mapping[int, int]) -> Bins:
    """Return what was counted since; bins in which nothing was are left out."""
    return {place: count - before.get(place, 0) for place, count in now.items() if count != before.get(place, 0)}

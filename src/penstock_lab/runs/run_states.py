"""States of the indexes of block runs: what a snapshot of the router has of each."""

import msgspec

from penstock.kernel.machine import Nanos
from penstock.kernel.values import Target


class ReachState(msgspec.Struct):
    """Of a `RunReach`: the targets in the order of their slots, and (target, run, blocks)."""

    targets: list[Target]
    runs: list[tuple[Target, int, int]]


class RunIndexState(msgspec.Struct):
    """Of a `RunIndex`."""

    block_size: int
    reach: ReachState
    counters: dict[str, int]


class RunHistoryState(msgspec.Struct):
    """Of a `RunHistory`; ``aged``: stretches as (run, from, to, stamp)."""

    now: Nanos
    aged: dict[Target, list[tuple[int, int, int, int]]]
    due: list[tuple[Nanos, Target]]
    expired: int
    pruned: int

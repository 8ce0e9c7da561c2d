"""What is kept of every tick? Inputs, what was predicted, who proposed what, what bound, what was chosen, and why."""

from typing import Any, Literal

import msgspec

from penstock.planner.proposals import Because, Flip

Outcome = Literal[
    "apply",  # something is to change, and was said to the connector
    "keep",  # all is as it should be
    "advise",  # something would change, but the planner only advises
    "veto",  # a plugin allows no change
    "hold",  # what was seen is not enough to act on
    "blind",  # nothing could be seen
    "timeout",  # the tick took too long, so nothing of it counts
]


class PluginSaid(msgspec.Struct, frozen=True, kw_only=True):
    """What one plugin answered. ``result``: accept, predicted, override, reject, held, error or timeout."""

    id: str
    stage: str
    result: str
    targets: dict[str, int] = {}
    because: tuple[Because, ...] = ()


class PoolTick(msgspec.Struct, frozen=True, kw_only=True):
    """One pool in one tick: how it was found, and what became of the proposals."""

    ready: int
    starting: int
    draining: int
    failed: int
    desired: int
    proposed: int
    target: int
    gpus: int
    given_up: int = 0
    model: str = ""
    role: str = ""


class ModelTick(msgspec.Struct, frozen=True, kw_only=True):
    """One model's traffic in one tick; seconds and requests per second. None is not known."""

    health: str
    rate: float | None = None
    isl: float | None = None
    osl: float | None = None
    hit_rate: float | None = None
    ttft: float | None = None
    itl: float | None = None
    judged: int = 0
    in_slo: int = 0
    queued: int | None = None
    predicted: dict[str, Any] = {}


class TickRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One tick. ``at``: seconds of the run.

    Args:
        policy: which policy was at work.
        said: of every plugin that took part.
        chosen: why it came out as it did, the most important first.
        bound: limits that changed what was proposed.
        evidence: by plugin, what it chose from.
        alternatives: proposals that lost, and to what.
        gpus: GPUs paid for now, those of starting and draining replicas included.
    """

    tick: int
    at: float
    policy: str
    outcome: Outcome
    models: dict[str, ModelTick] = {}
    pools: dict[str, PoolTick] = {}
    said: tuple[PluginSaid, ...] = ()
    chosen: tuple[Because, ...] = ()
    bound: tuple[Because, ...] = ()
    alternatives: tuple[Because, ...] = ()
    evidence: dict[str, Any] = {}
    flips: tuple[Flip, ...] = ()
    gpus: int = 0
    late: float = 0.0
    """Seconds after its time that the tick began."""

    @property
    def targets(self) -> dict[str, int]:
        return {name: pool.target for name, pool in self.pools.items()}

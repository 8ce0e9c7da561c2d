"""Record of a tick: observation, predictions, proposals, binding limits, choice, and reasons."""

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from penstock.kernel.values import UNKNOWN_SHAPE, RequestShape
from penstock.planner.plugins.proposals import Flip, Reason

Outcome = Literal[
    "apply",  # a change was ordered from the connector
    "keep",  # all is as desired
    "advise",  # something would change, but the planner only advises
    "veto",  # a plugin allows no change
    "hold",  # the observation is not enough to act on
    "blind",  # there was no observation
    "timeout",  # the tick took too long, so nothing of it counts
]


def reason_about(pool: str, reasons: Iterable[Reason]) -> str | None:
    """Return the first reason that is about a pool, else the first one about all; None where there is neither."""
    about, general = [], []
    for reason in reasons:
        if pool in reason.pools:
            about.append(reason.text)
        elif not reason.pools:
            general.append(reason.text)
    return next(iter([*about, *general]), None)


class PluginResult(msgspec.Struct, frozen=True, kw_only=True):
    """One plugin's answer. ``result``: accept, predicted, override, reject, held, error or timeout."""

    id: str
    stage: str
    result: str
    targets: dict[str, int] = {}
    reasons: tuple[Reason, ...] = ()


class PoolTick(msgspec.Struct, frozen=True, kw_only=True):
    """One pool in one tick: its observed state, and the fate of the proposals."""

    ready: int
    starting: int
    draining: int
    failed: int
    desired: int
    proposed: int
    target: int
    gpus: int
    given_up: int = 0
    asleep: int = 0
    host_memory: int | None = 0
    """Bytes that those take, in place of GPUs; None is unknown."""
    model: str = ""
    role: str = ""
    why: str = ""
    """The pool's own reason why ``target`` differs from ``desired``; empty where it does not."""


class ModelTick(msgspec.Struct, frozen=True, kw_only=True):
    """One model's traffic in one tick; seconds and requests per second. None is unknown.

    ``why``: why the traffic could not be read; empty where it could.
    """

    health: str
    why: str = ""
    rate: float | None = None
    shape: RequestShape[float | None] = UNKNOWN_SHAPE
    ttft: float | None = None
    itl: float | None = None
    judged: int = 0
    in_slo: int = 0
    queued: int | None = None
    predicted: dict[str, Any] = {}


class TickRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One tick. ``at``: seconds of the run.

    Args:
        policy: name of the deciding policy.
        plugin_results: of every plugin that took part.
        chosen: reasons of the outcome, the most important first.
        bound: limits that changed the proposals.
        evidence: by plugin, the basis of its choice.
        alternatives: proposals that lost, and to which.
        gpus: GPUs paid for now, those of starting and draining replicas included.
    """

    tick: int
    at: float
    policy: str
    outcome: Outcome
    models: dict[str, ModelTick] = {}
    pools: dict[str, PoolTick] = {}
    plugin_results: tuple[PluginResult, ...] = ()
    chosen: tuple[Reason, ...] = ()
    bound: tuple[Reason, ...] = ()
    alternatives: tuple[Reason, ...] = ()
    evidence: dict[str, Any] = {}
    flips: tuple[Flip, ...] = ()
    gpus: int = 0
    late: float = 0.0
    """Seconds between its due time and its start."""

    @property
    def why(self) -> str:
        """The changes, pool by pool with reasons; without changes, the reason of the outcome."""
        pools: dict[str, list[str]] = {}
        for name, pool in self.pools.items():
            if pool.target != pool.desired:
                change = f"{name} {pool.desired} -> {pool.target}"
                pools.setdefault(self.why_of(name).removeprefix(f"{change}: "), []).append(change)
        if pools:
            return "; ".join(", ".join(changes) + f", because {why}" for why, changes in pools.items())
        reasons = [*(b for b in self.chosen if b.code == "flip"), *self.chosen, *self.bound]
        return reasons[0].text if reasons else f"all is as it should be ({self.outcome})"

    def why_of(self, pool: str) -> str:
        """Return why a pool should change."""
        why = self.pools[pool].why or reason_about(pool, [*self.chosen, *self.bound])
        return why or "no reason was recorded"

    @property
    def targets(self) -> dict[str, int]:
        return {name: pool.target for name, pool in self.pools.items()}

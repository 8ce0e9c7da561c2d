"""Stage graph: the stages that a request can pass, as data, and whether its prefill is worth a worker of its own.

    encode ──► prefill ──► decode          the last stage of every way answers the client
        │          └─────► aggregated      (where such a worker can take KV over)
        └────────────────► aggregated

What one stage makes the next one fetches, by one of three protocols:

    completed   the next stage is chosen once this one is done, and gets what this one's engine reported of it
    push        both are asked at once; KV is written to the worker that goes on
    bootstrap   both are asked at once, under one number, and meet at an address of the prefill worker
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from penstock.kernel.plurals import counted
from penstock.kernel.values import NOTHING_PROMISED, HandoffProtocol, LatencyTargets, Role, WorkerCard
from penstock.router.settings import HandoffSettings

GRAPH: Mapping[Role, tuple[Role, ...]] = {
    "encode": ("prefill", "decode", "aggregated"),
    "prefill": ("decode", "aggregated"),
    "decode": (),
    "aggregated": (),
}
"""Role of a worker -> the roles that can go on with what it made."""

FINAL: frozenset[Role] = frozenset(role for role, following in GRAPH.items() if not following)
"""Roles whose workers answer the client."""
AT_ONCE: frozenset[HandoffProtocol] = frozenset({"push", "bootstrap"})
"""Protocols by which both workers are asked at the same time."""

NEW_SHARE_MAX = 0.7
"""A prompt of whose tokens this share or more is new is handed off; Dynamo's default."""


def does_all(card: WorkerCard) -> bool:
    """Tell whether a worker answers by itself: one that goes on with others' work does, unless its role is fixed."""
    return card.role in FINAL and not needs_pair(card)


def needs_pair(card: WorkerCard) -> bool:
    """Tell whether a worker takes only requests in which another one has a part."""
    return card.fixed_role and card.role != "aggregated"


def splits(roles: Collection[Role]) -> bool:
    """Tell whether a model with workers of these roles has requests that pass more than one stage."""
    return any(set(GRAPH[role]) & set(roles) for role in roles)


class StagePath(NamedTuple):
    """What one way to the first token takes. Tokens; requests; milliseconds.

    ``worker``: what would do the prefill; ``new``: prompt tokens that it has to compute; ``queued``: those before them;
    ``running``: requests that its prefill would slow down; ``ttft_ms``, ``stall_ms``, ``itl_ms``: predicted time to
    first token, time that each of ``running`` is held up for, and the gap between tokens that they then have.
    """

    worker: str
    new: int
    queued: int
    running: int
    ttft_ms: float
    stall_ms: float
    itl_ms: float


def remote_prefill(
    settings: HandoffSettings, targets: LatencyTargets, isl: int, remote: StagePath, local: StagePath
) -> tuple[bool, str]:
    """Decide whether a prefill goes to a worker of its own, where that depends on the request (`conditional`).

    Args:
        targets: of the request; without any, rule ``slo`` compares tokens as ``auto`` does.
        isl: prompt tokens.
        remote: on the best prefill worker, with the transfer in ``ttft_ms``.
        local: on the best of the workers that would answer.
    Returns: the decision, and a sentence with the numbers that made it.

    The length rule is Dynamo's (conditional disaggregation: both bounds strict). The load rule is ours: what a
    prefill costs where nothing decodes is its wait; where requests decode it is the delay of each of them as well.
    """
    share = local.new / isl if isl else 0.0
    if local.new < settings.new_tokens_max and share < NEW_SHARE_MAX:
        return False, (
            f"no remote prefill: {local.new} of {isl} tokens are new on {local.worker}, below "
            f"{settings.new_tokens_max} and {NEW_SHARE_MAX:g} of the prompt"
        )
    if settings.conditional == "thresholds":
        return True, f"remote prefill: {local.new} of {isl} tokens are new on {local.worker}"
    if settings.conditional == "slo" and targets != NOTHING_PROMISED:
        return _by_time(targets, remote, local)
    here = local.queued + local.new * (1 + local.running)
    there = remote.queued + remote.new
    told = (
        f"{there} tokens until it is done on {remote.worker}, {here} on {local.worker}, where {local.new} new ones "
        f"hold up {counted(local.running, 'running request')}"
    )
    return (False, f"no remote prefill: {told}") if there > here else (True, f"remote prefill: {told}")


def _by_time(targets: LatencyTargets, remote: StagePath, local: StagePath) -> tuple[bool, str]:
    """Compare the targets that would be missed, then the total wait of all requests."""

    def misses(way: StagePath) -> int:
        late = targets.ttft is not None and way.ttft_ms > 1e3 * targets.ttft
        slow = targets.itl is not None and way.running > 0 and way.itl_ms > 1e3 * targets.itl
        return late + slow

    here = (misses(local), local.ttft_ms + local.stall_ms * local.running)
    there = (misses(remote), remote.ttft_ms)
    told = (
        f"first token after {remote.ttft_ms:.0f} ms by {remote.worker}, {local.ttft_ms:.0f} ms by {local.worker}, "
        f"which holds up {counted(local.running, 'running request')} for {local.stall_ms:.0f} ms "
        f"(ITL {local.itl_ms:.1f} ms)"
    )
    if there[0] != here[0]:
        told += f"; {'the latter' if there[0] > here[0] else 'the former'} keeps more of the SLO"
    return (False, f"no remote prefill: {told}") if there > here else (True, f"remote prefill: {told}")

"""Is there room for one request more? Limits beyond which a new one is refused instead of making all late.

A request is refused only where every worker that could take it is beyond a limit. One that runs already is never
refused: a retry or a migration keeps its place.
"""

from collections.abc import Sequence

import msgspec

from penstock.kernel.machine import Nanos, seconds
from penstock.kernel.values import Target
from penstock.router.pool import Pool
from penstock.router.request import Request
from penstock.router.roster import Worker
from penstock.router.settings import OverloadSettings


class Refusal(msgspec.Struct, frozen=True):
    """Why a request is refused; ``retry_after`` in seconds."""

    reason: str
    retry_after: float


def refusal(
    settings: OverloadSettings, pool: Pool, request: Request, targets: Sequence[tuple[Target, Worker]], now: Nanos
) -> Refusal | None:
    """Look at every limit that is set; None where there is room."""
    waited = seconds(pool.queue.waited(request.event.preferences.strict, now))
    if settings.queue_time is not None and waited > settings.queue_time:
        text = f"requests have been waiting for {waited:.3g} s, the limit is {settings.queue_time:g} s"
        return Refusal(f"{text} (router.overload.queue_time)", waited)
    if settings.blocks is not None or settings.prefill_tokens is not None:
        busy = [_beyond(settings, pool, target, worker) for target, worker in targets]
        if all(busy):
            return Refusal(f"every worker of {pool.model} is busy: {busy[0]}", 1.0)
    if settings.ttft:
        predicted = predicted_ttft(pool, request, targets, now)
        if predicted is not None and predicted + waited > settings.ttft:
            text = f"the first token is expected after {predicted + waited:.3g} s, the limit is {settings.ttft:g} s"
            return Refusal(f"{text} (router.overload.ttft)", predicted + waited - settings.ttft)
    return None


def predicted_ttft(pool: Pool, request: Request, targets: Sequence[tuple[Target, Worker]], now: Nanos) -> float | None:
    """Return the seconds to the first token on the best worker, or None while too little was measured.

    From a line fitted to the streams of this model: TTFT over prefill tokens ahead on the worker, its own included.
    """
    line = pool.fit.line()
    if line is None:
        return None
    costs, _ = pool.costs(request, targets, now)
    ahead = min(cost.active_prefill_tokens + request.event.isl - cost.overlap_tokens for cost in costs)
    return line[0] + line[1] * ahead


def _beyond(settings: OverloadSettings, pool: Pool, target: Target, worker: Worker) -> str | None:
    """Say which limit a worker is beyond; one whose size is not known can't be beyond its share."""
    load, size = pool.active.load(target), worker.card.kv_blocks
    if settings.blocks is not None and size and load.blocks > settings.blocks * size:
        return f"{target} has {load.blocks} of {size} blocks in use (router.overload.blocks {settings.blocks:g})"
    most = settings.prefill_tokens
    if most is not None and load.prefill_tokens > most:
        return f"{target} has {load.prefill_tokens} tokens to prefill (router.overload.prefill_tokens {most})"
    return None

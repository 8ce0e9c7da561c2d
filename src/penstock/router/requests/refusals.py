"""Refusals: one word for each reason, since several share a status, and the limits of ``router.overload``.

Status 429 is a limit on how much may be asked at once, 503 is that nobody can answer now; both may be tried again.
Beyond a limit a new request is refused, instead of making all requests late: only where every worker that could take
it is beyond one. One that runs already is never refused: a retry or a migration keeps its place.
"""

from collections.abc import Sequence
from typing import NamedTuple

from penstock.kernel.machine import Nanos, seconds
from penstock.kernel.values import Target
from penstock.router.model_pool import ModelPool
from penstock.router.routed_request import RoutedRequest
from penstock.router.selection.select import costs_of
from penstock.router.settings import OverloadSettings
from penstock.router.workers.roster import RosterWorker

INFLIGHT_LIMIT = "inflight_limit"
"""429: as many requests run or wait as ``inflight_max`` allows."""
RATE_LIMIT = "rate_limit"
"""429: a key asks more often than it may."""
OVERLOADED = "overloaded"
"""503: every worker is beyond a limit of ``router.overload``."""
SHARE_FULL = "share_full"
"""429: as many requests of its tenant wait as its share of the queue has room for."""
QUEUE_FULL = "queue_full"
"""503: ``router.queue.length_max`` requests wait."""
QUEUE_TIMEOUT = "queue_timeout"
"""503: it waited for ``router.queue.wait_max``."""
NO_WORKER = "no_worker"
"""503: no worker is there, or none that is healthy."""
ENGINE_BUSY = "engine_busy"
"""The engine's own status, 429 or 503: it refused, and so did the others that were tried."""
TOKENIZER_BUSY = "tokenizer_busy"
"""503: too many prompts wait to be tokenised."""
DRAINING = "draining"
"""503: this frontend is ending."""
NOT_CACHED = "not_cached"
"""412: the caller wants an answer only where its prompt is cached, and it is not."""


class Refusal(NamedTuple):
    """Why a request is refused.

    ``limit``: the knob of ``router.overload`` that refuses; ``retry_after``: seconds until the same request could be
    taken, if no other came.
    """

    limit: str
    reason: str
    retry_after: float


def refusal(
    settings: OverloadSettings,
    pool: ModelPool,
    request: RoutedRequest,
    targets: Sequence[tuple[Target, RosterWorker]],
    now: Nanos,
) -> Refusal | None:
    """Check every limit that is set; None where there is room, or the request runs already."""
    if request.attempt:
        return None
    waited = seconds(pool.queue.waited(request.event.preferences.strict, now, request.event.tenant))
    if settings.queue_time is not None and waited > settings.queue_time:
        text = f"requests have been waiting for {waited:.3g} s, the limit is {settings.queue_time:g} s"
        return Refusal("queue_time", f"{text} (router.overload.queue_time)", waited)
    if settings.blocks is not None or settings.prefill_tokens is not None:
        busy = [_limit_passed(settings, pool, target, worker) for target, worker in targets]
        first = busy[0]
        if first is not None and all(busy):
            return Refusal(first[0], f"every worker of {pool.model} is busy: {first[1]}", 1.0)
    if settings.ttft:
        predicted = predicted_ttft(pool, request, targets, now)
        if predicted is not None:
            return _ttft_refusal(settings.ttft, predicted, waited)
    return None


class PredictedLatency(NamedTuple):
    """Seconds to the first token on the best worker as it is, and as the best would be with nothing else to do."""

    ttft: float
    idle: float


def predicted_ttft(
    pool: ModelPool, request: RoutedRequest, targets: Sequence[tuple[Target, RosterWorker]], now: Nanos
) -> PredictedLatency | None:
    """Return the expected TTFT, or None while too little was measured.

    From a line fitted to the streams of this model: TTFT over prefill tokens ahead on the worker, its own included.
    """
    line = pool.speeds.fit.line()
    if line is None:
        return None
    costs, _ = costs_of(pool, request, targets, now)
    new = [request.prompt.isl - cost.overlap_tokens for cost in costs]
    ahead = min(cost.active_prefill_tokens + own for cost, own in zip(costs, new, strict=True))
    return PredictedLatency(line[0] + line[1] * ahead, line[0] + line[1] * min(new))


def _ttft_refusal(limit: float, predicted: PredictedLatency, waited: float) -> Refusal | None:
    """Refuse what other requests make late, never what is long by itself: no later moment would be better for that.

    The limit bounds the whole TTFT where an idle worker could keep it, else the wait that the others cause. What is
    beyond it has to be prefilled before the request could be taken, and that takes as long.
    """
    within_reach = predicted.idle <= limit
    expected = predicted.ttft + waited
    beyond = expected - limit - (0.0 if within_reach else predicted.idle)
    if beyond <= 0.0:
        return None
    text = f"the first token is expected after {expected:.3g} s, "
    if not within_reach:
        text += f"of which an idle worker would take {predicted.idle:.3g} s, "
    return Refusal("ttft", f"{text}the limit is {limit:g} s (router.overload.ttft)", beyond)


def _limit_passed(
    settings: OverloadSettings, pool: ModelPool, target: Target, worker: RosterWorker
) -> tuple[str, str] | None:
    """Return which limit a worker is beyond, and how; one whose size is not known can't be beyond its share."""
    load, size = pool.active.load(target), worker.card.kv_blocks
    if settings.blocks is not None and size and load.blocks > settings.blocks * size:
        text = f"{target} has {load.blocks} of {size} blocks in use (router.overload.blocks {settings.blocks:g})"
        return "blocks", text
    most = settings.prefill_tokens
    if most is not None and load.prefill_tokens > most:
        text = f"{target} has {load.prefill_tokens} tokens to prefill (router.overload.prefill_tokens {most})"
        return "prefill_tokens", text
    return None

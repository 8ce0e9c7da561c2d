"""Hedging: sends a request whose first token is late to a second worker as well, and stops the slower attempt.

Only before its first token, once in a leg, and only for a bounded share of requests: a hedge doubles a prefill.
Source: tied requests as in Dean and Barroso, "The Tail at Scale" (2013).
"""

import msgspec

from penstock.kernel.machine import Nanos, nanos
from penstock.router.events import Abort, Failed
from penstock.router.model_pool import ModelPool
from penstock.router.requests.blame import blame
from penstock.router.requests.routed_request import HEDGE, RoutedRequest
from penstock.router.router_state import RouterState


def hedge_wanted(core: RouterState, request: RoutedRequest, pool: ModelPool, now: Nanos) -> bool:
    """Tell whether a request that has waited for its first token is to be sent to a second worker."""
    settings = core.settings.hedge
    return (
        settings.after is not None
        and request.phase == "prefill"
        and request.hedge is None
        and not request.handed  # what a worker holds for it can be fetched only once
        and now >= request.placed + nanos(settings.after)
        and request.event.preferences.worker is None
        and pool.counts.hedges + 1 <= settings.share * pool.counts.placements["aggregated"]
    )


def settle(core: RouterState, request: RoutedRequest, pool: ModelPool, attempt: int, now: Nanos) -> None:
    """One of two attempts has answered first: it is the request's, and the other one is stopped."""
    hedge = request.hedge
    assert hedge is not None and request.target is not None
    won = attempt == hedge.attempt
    number, target = (request.current, request.target) if won else (hedge.attempt, hedge.target)
    core.out.append(Abort(id=request.id, attempt=number, target=target, reason="another worker was faster"))
    loser = core.roster.get(target.worker)
    if loser is not None:
        loser.breaker.released()
    _leave(core, request, pool, won, "another worker was faster", now)


def failed(core: RouterState, request: RoutedRequest, pool: ModelPool, event: Failed, now: Nanos) -> None:
    """One of two attempts has failed: the other one goes on as if it had been the only one."""
    hedge = request.hedge
    assert hedge is not None and request.target is not None
    hedge_failed = event.attempt == hedge.attempt
    worker = (hedge.target if hedge_failed else request.target).worker
    blame(core, now, request, worker, hedge.placed if hedge_failed else request.placed, event)
    known = core.roster.get(worker)
    if known is not None:
        request.tried.append((worker, known.card.incarnation))
    request.note_failure(event)
    _leave(core, request, pool, not hedge_failed, event.reason, now)


def _leave(
    core: RouterState, request: RoutedRequest, pool: ModelPool, hedge_stays: bool, reason: str, now: Nanos
) -> None:
    """Let one attempt of two go. The one that stays has the last leg."""
    hedge = request.hedge
    assert hedge is not None and request.target is not None
    legs = request.legs
    if not hedge_stays:
        legs[-1], legs[-2] = legs[-2], legs[-1]
    legs[-2] = msgspec.structs.replace(legs[-2], last=now, failure=reason)
    pool.active.end(request.id, HEDGE)
    request.hedge = None
    if hedge_stays:
        core.publish(pool, request.id, "ended", request.target)
        request.target, request.current = hedge.target, hedge.attempt
        request.placed, request.prefill_ahead = hedge.placed, hedge.prefill_ahead
        request.expected_cached = hedge.cached
        core.load(request, pool, hedge.target, cached=hedge.cached, unhashed_blocks=hedge.unhashed_blocks, now=now)
    core.freed[pool.model] = None

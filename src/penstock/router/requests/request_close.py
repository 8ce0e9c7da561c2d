"""Closes a request: its load goes, KV that is held for it is released, and its one terminal effect leaves."""

from penstock.kernel.machine import SECOND, Nanos
from penstock.router.events import Closed, Fault, Outcome
from penstock.router.requests.blame import settle_blame
from penstock.router.requests.prefill_release import abandon
from penstock.router.requests.routed_request import RoutedRequest
from penstock.router.router_state import RouterState


def close(
    core: RouterState,
    now: Nanos,
    request: RoutedRequest,
    outcome: Outcome,
    fault: Fault,
    status: int,
    reason: str,
    *,
    retry_after: float | None = None,
    cached: int | None = None,
    code: str | None = None,
) -> None:
    """End a request: its load goes and its one terminal effect leaves.

    Args:
        code: one word for why it is refused.
    """
    event = request.event
    pool = core.pools.get(event.model)
    if pool is not None and request.counted:
        if request.remote is not None:
            abandon(core, request, pool, request.remote)
        core.release(request, pool)
        if request.phase == "queued":
            pool.queue.remove(event.id)
        if request.work and pool.fair is not None:
            pool.fair.end(pool.fair.name(event.tenant), request.work, event.prompt.isl, request.tokens)
            core.freed[pool.model] = None
        pool.counts.inflight -= 1
        pool.counts.outcomes[outcome] += 1
    core.waiting_for_worker.pop(event.id, None)
    if request.unproven is not None:
        settle_blame(core, now, request)
    request.leave_queue(now)
    if request.on_worker:
        core.mark(request, last=now)
    request.step("close")
    del core.requests[event.id]
    core.out.append(
        Closed(
            id=event.id,
            model=event.model,
            outcome=outcome,
            fault=fault,
            status=status,
            reason=reason,
            arrived=request.arrived,
            closed=now,
            isl=event.prompt.isl,
            osl=request.tokens,
            cached=cached,
            expected_cached=request.expected_cached,
            queued=request.queued / SECOND,
            first=request.first,
            attempts=request.attempt - request.staged,
            migrations=request.migrations,
            legs=list(request.legs),
            retry_after=retry_after,
            session=event.preferences.session,
            program=event.preferences.program,
            media=len(event.media),
            media_cached=request.media_cached,
            code=code,
        )
    )

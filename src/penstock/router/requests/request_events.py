"""Handlers of a request's milestones, from `Arrived` to its one `Closed`, and of those of a hedged one.

Hedging sends a request whose first token is late to a second worker as well, and stops the slower attempt: only before
its first token, once in a leg, and only for a bounded share of requests, since a hedge doubles a prefill.
Source: tied requests as in Dean and Barroso, "The Tail at Scale" (2013).
"""

import msgspec

from penstock.kernel.machine import SECOND, Nanos, nanos
from penstock.kernel.plurals import counted
from penstock.kernel.values import RequestId
from penstock.router.events import (
    Abort,
    Arrived,
    Cancelled,
    Failed,
    Finished,
    FirstToken,
    Grown,
    Staged,
    WorkerDraining,
)
from penstock.router.model_pool import ModelPool
from penstock.router.requests import handoff
from penstock.router.requests.refusals import ENGINE_BUSY, INFLIGHT_LIMIT, NO_WORKER, QUEUE_TIMEOUT
from penstock.router.requests.request_close import blame, close, let_go, works
from penstock.router.requests.scheduling import admit, follow, hedge
from penstock.router.routed_request import HEDGE, RoutedRequest
from penstock.router.router_state import RouterState
from penstock.router.selection.select import eligible
from penstock.router.workers.worker_events import compared, draining


def arrived(core: RouterState, now: Nanos, event: Arrived) -> None:
    if event.id in core.requests:
        core.dropped += 1
        core.note("duplicate_request", f"request id {event.id} is open already; the second one is ignored")
        return
    limit = now + round(core.settings.request_timeout * SECOND)
    deadline = limit if event.deadline is None else min(event.deadline, limit)
    request = core.requests[event.id] = RoutedRequest(event, arrived=now, deadline=deadline)
    pool = core.pools.get(event.model)
    if pool is None and core.settings.queue.start_wait:
        pool = core.make_pool(event.model)
    if pool is None:
        text = f"no worker serves {event.model} yet"
        close(core, now, request, "rejected", "overloaded", 503, text, retry_after=1.0, code=NO_WORKER)
        return
    request.counted = True
    pool.counts.inflight += 1
    if pool.counts.inflight > pool.roles.inflight_max:
        most = counted(pool.roles.inflight_max, "request")
        text = f"the limit is reached: {most} of {event.model} running or waiting"
        close(core, now, request, "rejected", "overloaded", 429, text, retry_after=1.0, code=INFLIGHT_LIMIT)
        return
    wish = event.preferences
    if wish.session is not None and core.settings.prefetch:
        pool.habits.returned(wish.session, wish.program or wish.session, now)
    core.timer(deadline, "deadline", event.id)
    admit(core, now, request, pool)


def first_token(core: RouterState, now: Nanos, event: FirstToken) -> None:
    request = _running_request(core, event.id, event.attempt, "prefill")
    if request is not None:
        pool = core.pools[request.event.model]
        if request.hedge is not None:
            hedge_settled(core, request, pool, event.attempt, now)
        took = (now - request.placed) / SECOND
        if request.adapter_cold:
            pass
        elif request.transfer_blocks is None:
            pool.speeds.fit.add(float(request.prefill_ahead), took)
        else:
            pool.speeds.bring.add(float(request.transfer_blocks), took)
        _answer_started(core, now, request)


def staged(core: RouterState, now: Nanos, event: Staged) -> None:
    request = core.requests.get(event.id)
    if request is None or not request.staging(event.attempt):
        core.dropped += 1
        return
    pool = core.pools[request.event.model]
    if handoff.done(core, now, request, pool, kv_retained=event.kv_retained, cached=event.cached):
        admit(core, now, request, pool)


def grown(core: RouterState, now: Nanos, event: Grown) -> None:
    request = _running_request(core, event.id, event.attempt, "streaming")
    if request is None or request.target is None:
        return
    request.tokens = event.tokens
    pool = core.pools[request.event.model]
    pool.active.grown(event.id, (event.tokens - request.resumed) // pool.index.block_size, now)
    core.publish(pool, event.id, "grown", request.target, tokens=event.tokens)


def finished(core: RouterState, now: Nanos, event: Finished) -> None:
    request = _running_request(core, event.id, event.attempt, "prefill", "streaming")
    if request is None:
        return
    if request.hedge is not None:
        hedge_settled(core, request, core.pools[request.event.model], event.attempt, now)
    if request.phase == "prefill":  # an unary answer has no earlier milestone: it proves the worker as well
        _answer_started(core, now, request)
    request.tokens = event.tokens or request.tokens
    # What a later leg took from a cache is partly output of the legs before: it says nothing about the prompt.
    cached = event.cached if request.remote_cached is None else request.remote_cached
    if request.migrations:
        cached = None
    if cached is not None and request.believed and request.target and request.remote_cached is None:
        isl = request.event.prompt.isl
        compared(core, core.pools[request.event.model], request.target, request.believed, cached, isl)
    if event.tokens is not None:
        pool, wish = core.pools[request.event.model], request.event.preferences
        pool.answered(request.event.prompt.isl, event.tokens, cached, wish, now)
        if request.prefetches and wish.session is not None and request.target is not None:
            pool.habits.awaits(wish.session, request.target.worker)
    close(core, now, request, "ok", "none", 200, "answered in full", cached=cached)


def failed(core: RouterState, now: Nanos, event: Failed) -> None:
    early = core.requests.get(event.id)
    if early is not None and early.staging(event.attempt):
        return _stage_failed(core, now, early, event)
    request = _running_request(core, event.id, event.attempt, "prefill", "streaming")
    if request is None or request.target is None:
        return
    if event.leaving:
        _drain_leaving(core, now, request, event)
    if request.hedge is not None:
        if event.retryable:
            return hedge_failed(core, request, core.pools[request.event.model], event, now)
        # The request itself is at fault, which another worker would find too.
        hedge_settled(core, request, core.pools[request.event.model], event.attempt, now)
    suspect = handoff.source_is_suspect(request, event)
    blame(
        core, now, request, request.target.worker, request.placed, event, at_fault=event.worker_at_fault and not suspect
    )
    core.mark(request, last=now, failure=event.reason)
    request.note_failure(event)
    pool = core.pools[request.event.model]
    why_not = None if event.served_by is not None else _why_not_on(core, request, event)
    if now < request.deadline and why_not is None:
        worker = core.roster.get(request.target.worker)
        core.release(request, pool)
        if worker is not None:
            request.tried.append((worker.card.id, worker.card.incarnation))
            if suspect and not eligible(core, request, pool, now).targets:
                request.tried.pop()  # by itself it may well answer, and nobody else is there
        if request.phase == "prefill":
            handoff.fetch_failed(core, request, pool, event, suspect=suspect)
            request.step("retry")
        else:
            assert event.resume is not None
            core.note(
                "migrated",
                f"request {request.id} goes on elsewhere after {counted(event.resume.tokens, 'token')}: {event.reason}",
                request=request.id,
                worker=request.target.worker,
            )
            request.step("migrate")
            request.tried = request.tried[-1:]
            request.resume(event.resume)
        request.target = None
        if event.served_by is None:
            admit(core, now, request, pool)
        else:
            request.pin(event.served_by)
            follow(core, now, request, pool)
    else:
        if request.handed:
            let_go(core, request, pool)
            core.unstage(request, pool)
        _end_broken(core, now, request, event, why_not or "")


def _stage_failed(core: RouterState, now: Nanos, request: RoutedRequest, event: Failed) -> None:
    """A stage before the last has failed: without it, on another worker, or not at all."""
    if event.leaving:
        _drain_leaving(core, now, request, event)
    pool = core.pools[request.event.model]
    if request.phase in ("streaming", "waiting_for_worker"):
        handoff.failed_aside(core, now, request, pool, event)
    elif handoff.failed(core, now, request, pool, event):
        admit(core, now, request, pool)
    else:
        _end_broken(core, now, request, event, request.at_fault)


def _end_broken(core: RouterState, now: Nanos, request: RoutedRequest, event: Failed, why_not_on: str) -> None:
    """End a request that broke; the outcome depends on the party at fault."""
    if event.worker_at_fault:
        reason = f"{event.reason}; {why_not_on}" if why_not_on else event.reason
        close(core, now, request, "failed", "engine", event.status or 502, reason)
    elif event.status is not None and 400 <= event.status < 500 and event.status != 429:
        close(core, now, request, "failed", "client", event.status, event.reason)
    else:
        status, wait = event.status or 503, event.retry_after or 1.0
        close(core, now, request, "failed", "overloaded", status, event.reason, retry_after=wait, code=ENGINE_BUSY)


def cancelled(core: RouterState, now: Nanos, event: Cancelled) -> None:
    request = core.requests.get(event.id)
    if request is None:
        core.dropped += 1
        return
    core.abort(request, "the client went away")
    close(core, now, request, "cancelled", "client", 499, "the client went away")


def late(core: RouterState, now: Nanos, key: RequestId) -> None:
    """A request may have waited for its first token for so long that a second worker is to have it too."""
    request = core.requests.get(key)
    if request is not None:
        pool = core.pools[request.event.model]
        if hedge_wanted(core, request, pool, now):
            hedge(core, now, request, pool)


def overdue(core: RouterState, now: Nanos, kind: str, key: RequestId) -> None:
    """A request's deadline or its limit of waiting may have passed."""
    request = core.requests.get(key)
    if request is None:
        return
    if kind == "wait":
        limit = core.settings.queue.wait_max
        adapter = request.phase == "waiting_for_worker" and request.awaits_adapter
        unstarted = request.phase == "waiting_for_worker" and not request.attempt and not adapter
        if unstarted:
            limit = core.settings.queue.start_wait
        if request.queued_since is None or now < request.queued_since + nanos(limit):
            return
        if adapter:
            text = f"waited {limit:g} s for room for adapter {request.event.adapter} on a worker"
            close(core, now, request, "rejected", "overloaded", 503, text, retry_after=1.0)
        elif unstarted:
            text = f"waited {limit:g} s for a worker of {request.event.model} to be started"
            close(core, now, request, "rejected", "overloaded", 503, text, retry_after=1.0, code=NO_WORKER)
        elif request.phase == "waiting_for_worker":
            text = f"no other worker could go on within {limit:g} s after: {request.last_failure}"
            close(core, now, request, "failed", "engine", request.last_status or 502, text)
        else:
            text = f"waited {limit:g} s for a worker of {request.event.model}"
            close(core, now, request, "rejected", "overloaded", 503, text, retry_after=1.0, code=QUEUE_TIMEOUT)
    elif now >= request.deadline:
        waited = (now - request.arrived) / SECOND
        core.abort(request, "its deadline has passed")
        close(core, now, request, "expired", "deadline", 504, f"not done within {waited:.3g} s")


def _drain_leaving(core: RouterState, now: Nanos, request: RoutedRequest, event: Failed) -> None:
    """A worker refuses work because it is ending: no other request is sent there, though its health is good."""
    hedge, remote = request.hedge, request.remote
    target = request.target
    if hedge is not None and hedge.attempt == event.attempt:
        target = hedge.target
    elif remote is not None and remote.attempt == event.attempt:
        target = remote.target
    worker = None if target is None else core.roster.get(target.worker)
    if worker is not None and worker.state == "ready":
        draining(core, now, WorkerDraining(worker=worker.card.id, epoch=worker.card.epoch))


def _why_not_on(core: RouterState, request: RoutedRequest, event: Failed) -> str | None:
    """Return why no other worker may try, or go on where this one stopped; None where one may.

    Empty where the failure's own reason says it.
    """
    if request.at_fault:
        return request.at_fault
    if request.phase == "prefill":
        if not event.retryable:
            return ""
        most = core.settings.attempts_max
        return None if request.tries < most else f"its attempts are used up (router.attempts_max {most})"
    if event.resume is None:
        return ""
    most = core.settings.migration.limit
    return None if request.migrations < most else f"its migrations are used up (router.migration.limit {most})"


def _answer_started(core: RouterState, now: Nanos, request: RoutedRequest) -> None:
    """The first token is here: the prefill is over, and the worker works."""
    assert request.target is not None
    request.step("first")
    if request.first is None:
        request.first = now
    core.mark(request, first=now)
    pool, id = core.pools[request.event.model], request.event.id
    pool.active.first_token(id, now)
    if core.shared:
        core.publish(pool, id, "first", request.target)
    core.freed[pool.model] = None
    worker = core.roster.workers.get(request.target.worker)
    if worker is not None:
        if worker.breaker.recent or request.unproven is not None:
            works(core, now, request, worker, request.placed)
        else:
            worker.breaker.answered = now
    if request.remote is not None and request.remote.done:
        handoff.arrived(core, request, pool)
    pool.counts.media["here"] += len(request.encode)
    request.encode = ()


def _running_request(core: RouterState, request: RequestId, attempt: int, *phases: str) -> RoutedRequest | None:
    """Return an open request in one of these phases and this attempt; else count the event as dropped."""
    found = core.requests.get(request)
    if found is not None and found.phase in phases:
        hedge = found.hedge
        if attempt == found.current or (hedge is not None and attempt == hedge.attempt):
            return found
    core.dropped += 1
    return None


# --- hedging ----------------------------------------------------------------------------------------------------------


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


def hedge_settled(core: RouterState, request: RoutedRequest, pool: ModelPool, attempt: int, now: Nanos) -> None:
    """One of two attempts has answered first: it is the request's, and the other one is stopped."""
    hedge = request.hedge
    assert hedge is not None and request.target is not None
    won = attempt == hedge.attempt
    number, target = (request.current, request.target) if won else (hedge.attempt, hedge.target)
    core.out.append(Abort(id=request.id, attempt=number, target=target, reason="another worker was faster"))
    loser = core.roster.get(target.worker)
    if loser is not None:
        loser.breaker.released()
    _hedge_left(core, request, pool, won, "another worker was faster", now)


def hedge_failed(core: RouterState, request: RoutedRequest, pool: ModelPool, event: Failed, now: Nanos) -> None:
    """One of two attempts has failed: the other one goes on as if it had been the only one."""
    hedge = request.hedge
    assert hedge is not None and request.target is not None
    is_hedge = event.attempt == hedge.attempt
    worker = (hedge.target if is_hedge else request.target).worker
    blame(core, now, request, worker, hedge.placed if is_hedge else request.placed, event)
    known = core.roster.get(worker)
    if known is not None:
        request.tried.append((worker, known.card.incarnation))
    request.note_failure(event)
    _hedge_left(core, request, pool, not is_hedge, event.reason, now)


def _hedge_left(
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

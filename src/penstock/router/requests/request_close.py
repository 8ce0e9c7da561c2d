"""Ends of attempts and of requests: whose fault one was, what KV it leaves on a worker, its one `Closed`, its record.

A failed attempt is blamed on the worker, or on the request itself where it fails alike on two workers. KV that no
decode worker will fetch is released.
"""

from collections.abc import Sequence

import msgspec

from penstock.kernel.machine import SECOND, Nanos, nanos, seconds
from penstock.kernel.request_record import BlockRange, EndedLeg, ItlSummary, RequestEnd, RequestLeg, RequestRecord
from penstock.kernel.values import Target, WorkerCard, WorkerId
from penstock.router.events import Abort, Closed, Failed, Fault, Outcome, Release
from penstock.router.model_pool import ModelPool
from penstock.router.routed_request import Remote, RoutedRequest, UnprovenFault
from penstock.router.router_state import RouterState
from penstock.router.stage_graph import AT_ONCE
from penstock.router.workers.roster import RosterWorker

NOBODY = WorkerId("")
"""In the place of a worker: such a failure is the request's."""


def blame(
    core: RouterState,
    now: Nanos,
    request: RoutedRequest,
    name: WorkerId,
    placed: Nanos,
    event: Failed,
    *,
    at_fault: bool | None = None,
) -> None:
    """An attempt has failed on a worker: count that, or wait for the request's next attempt to show whose fault it is.

    One prompt can break every engine that gets it, so a failure counts against its worker only once another worker has
    answered the same request, or none can try. Where two fail alike, the request is at fault, not they; where both
    answered with an error, it is tried no further.

    Args:
        placed: when the attempt was sent.
        at_fault: whether the worker may be, where the router knows that better than the event.
    """
    worker = core.roster.get(name)
    if worker is None:
        return
    if not (event.worker_at_fault if at_fault is None else at_fault):
        worker.breaker.released()
        return
    fault = UnprovenFault(name, worker.card.incarnation, placed, event.status, event.reason)
    fetches = request.phase == "prefill" and request.handed
    if not event.received or fetches or (event.status is None and request.phase == "streaming"):
        # No prompt did that: the engine never had it, or could not get its KV, or had answered until its end.
        return _count_fault(core, now, fault)
    earlier, request.unproven = request.unproven, fault
    if earlier is None:
        return
    if earlier.worker == name or earlier.status != event.status:
        return _count_fault(core, now, earlier)
    request.unproven = None
    if event.status is not None:
        request.at_fault = f"it failed alike on {earlier.worker}, so it is tried no further"
    else:  # engines that hang up may have been killed, one after the other: another may try, and counts against nobody
        request.unproven = msgspec.structs.replace(fault, worker=NOBODY)
    worker.breaker.released()
    # Two broken workers look the same as one such request, so the first one is counted where nobody proves it healthy.
    first = core.roster.get(earlier.worker)
    if first is not None:
        answered = first.breaker.answered
        healthy = answered is not None and now - answered <= nanos(core.settings.breaker.open_for)
        if healthy or first.breaker.until is not None:
            first.breaker.released()
        else:
            _count_fault(core, now, earlier)


def settle_blame(core: RouterState, now: Nanos, request: RoutedRequest) -> None:
    """The request was answered elsewhere, or has ended: a failure that was not proven yet is its worker's."""
    fault, request.unproven = request.unproven, None
    if fault is not None:
        _count_fault(core, now, fault)


def works(core: RouterState, now: Nanos, request: RoutedRequest, worker: RosterWorker, placed: Nanos) -> None:
    """A worker has answered a request: that is to its credit, and proves a failure before to be another's."""
    worker.breaker.answered = now
    if request.unproven is not None:
        settle_blame(core, now, request)
    if worker.breaker.recent and worker.breaker.succeeded(placed, core.settings.breaker):
        core.note("breaker_closed", f"worker {worker.card.id} answers again", worker=worker.card.id)


def _count_fault(core: RouterState, now: Nanos, fault: UnprovenFault) -> None:
    """Count a failure against its worker, and open its breaker where that was one too many."""
    worker = core.roster.get(fault.worker)
    if worker is None or worker.card.incarnation != fault.epoch:
        return
    worker.failures += 1
    worker.failed = (now, fault.reason)
    breaker = worker.breaker
    if breaker.failed(now, fault.placed, core.settings.breaker) and breaker.until is not None:
        core.roster.changed()
        core.note(
            "breaker_opened",
            f"worker {fault.worker} takes no requests for {seconds(breaker.until - now):.1f} s: "
            f"{breaker.failures} of its last {len(breaker.recent)} requests failed, the last: {fault.reason}",
            worker=fault.worker,
        )
        core.timer(breaker.until, "kick", worker.card.model)


# --- KV that is held --------------------------------------------------------------------------------------------------


OWED_MAX = 1024
"""Most held prefills that wait for a worker to fetch them; the oldest are left to their time-out."""


def source_of(core: RouterState, request: RoutedRequest) -> WorkerCard | None:
    """Return the worker that holds, or makes, a request's KV; None where that worker is gone."""
    remote = request.remote
    worker = None if remote is None else core.roster.get(remote.target.worker)
    return None if worker is None or remote is None or worker.card.incarnation != remote.epoch else worker.card


def let_go(core: RouterState, request: RoutedRequest, pool: ModelPool) -> None:
    """Release KV that a worker holds and that is not needed any more: another worker fetches it and drops it.

    Where no such worker is there, `settle_releases` does it once one comes; the engine's own time-out may be sooner.
    """
    remote, source = request.remote, source_of(core, request)
    if remote is None or source is None or remote.stage != "prefill" or remote.protocol in AT_ONCE:
        return
    last = request.target.worker if request.target is not None else None
    taker = _fetching_worker(core, pool, last)
    pool.counts.handoffs["released"] += 1
    core.out.append(Release(id=request.id, attempt=remote.attempt, source=source, target=taker))
    if taker is None:
        pool.roles.pending_releases.append((request.id, remote.attempt, source))
        del pool.roles.pending_releases[:-OWED_MAX]
        core.note(
            "kv_stranded",
            f"{source.id} holds KV of request {request.id}, which no request needs, and no worker can fetch it",
            request=request.id,
            worker=source.id,
        )


def settle_releases(core: RouterState, pool: ModelPool) -> None:
    """A worker has come: let it fetch the KV that waits for its release."""
    taker = _fetching_worker(core, pool, None) if pool.roles.pending_releases else None
    if taker is None:
        return
    owed, pool.roles.pending_releases = pool.roles.pending_releases, []
    for id, attempt, source in owed:
        holder = core.roster.get(source.id)
        if holder is not None and holder.card.incarnation == source.incarnation:
            core.out.append(Release(id=id, attempt=attempt, source=source, target=taker))


def _fetching_worker(core: RouterState, pool: ModelPool, last: WorkerId | None) -> WorkerCard | None:
    """Return a worker that can fetch KV, rather not the one that was ``last`` to try."""
    takers = [
        worker.card
        for worker in core.roster
        if worker.card.model == pool.model and worker.state == "ready" and pool.roles.speaks(worker.card)
    ]
    return min(takers, key=lambda card: (card.id == last, card.role != "decode"), default=None)


def abandon(core: RouterState, request: RoutedRequest, pool: ModelPool, remote: Remote) -> None:
    """A request ends while a worker holds or makes something for it: nothing is to stay held or running."""
    if remote.stage == "encode" or remote.protocol in AT_ONCE:
        abort_remote(core, request, "the request has ended")
    elif not request.on_worker:
        # A prefill that runs is not aborted: if it is done this very moment, the router would not know what it holds.
        let_go(core, request, pool)
    # Where a worker fetches it already, that is not cut before its first token (`Abort`), and then nothing is held.
    core.unstage(request, pool)


def abort_remote(core: RouterState, request: RoutedRequest, reason: str) -> None:
    """Stop a stage before the last."""
    remote = request.remote
    if remote is not None and not remote.done:
        abort(core, request, remote.attempt, remote.target, reason)


def abort(core: RouterState, request: RoutedRequest, attempt: int, target: Target, reason: str) -> None:
    core.out.append(Abort(id=request.id, attempt=attempt, target=target, reason=reason))
    worker = core.roster.get(target.worker)
    if worker is not None:
        worker.breaker.released()


# --- the end ----------------------------------------------------------------------------------------------------------


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
        if request.on_worker:
            core.release(request, pool)
            core.mark(request, last=now)
        elif request.phase == "queued":
            pool.queue.remove(event.id)
        if request.work and pool.fair is not None:
            pool.fair.end(pool.fair.name(event.tenant), request.work, event.prompt.isl, request.tokens)
            core.freed[pool.model] = None
        pool.counts.inflight -= 1
        pool.counts.outcomes[outcome] += 1
    core.waiting_for_worker.pop(event.id, None)
    if request.unproven is not None:
        settle_blame(core, now, request)
    if request.queued_since is not None:
        request.leave_queue(now)
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


def record_of(
    closed: Closed,
    *,
    offset: Nanos = 0,
    blocks: Sequence[int | BlockRange] | None,
    itl: ItlSummary | None,
    ttft: float | None,
    e2e: float | None,
    service_class: str | None,
    osl_requested: int | None = None,
    turn: int | None = None,
    cached_by_tier: dict[str, int] | None = None,
    ignored_hints: tuple[str, ...] = (),
    way: str = "",
    name: str | None = None,
    tenant: str | None = None,
    key: str | None = None,
    copy_of: str | None = None,
) -> RequestRecord:
    """Write one request down.

    Args:
        offset: nanoseconds from the start of the run to time 0 of this router.
        ttft, e2e: seconds after arrival, for a stream; an unary answer has no first token to observe.
        service_class: the request's context_type, the only class that a live request names.
    """
    return RequestRecord(
        id=closed.id,
        arrival=seconds(closed.arrived + offset),
        model=closed.model,
        outcome=closed.outcome,
        fault=closed.fault,
        service_class=service_class,
        isl=closed.isl,
        osl=closed.osl,
        osl_requested=osl_requested,
        cached=closed.cached,
        expected_cached=closed.expected_cached,
        cached_by_tier=cached_by_tier,
        blocks=blocks,
        legs=[
            RequestLeg(
                role=leg.role,
                worker=str(leg.target),
                dispatched=seconds(leg.dispatched + offset),
                first=None if leg.first is None else seconds(leg.first + offset),
                last=None if leg.last is None else seconds(leg.last + offset),
                failure=leg.failure,
            )
            for leg in closed.legs
        ],
        ttft=ttft,
        e2e=e2e,
        itl=itl,
        queued=closed.queued,
        status=closed.status,
        reason=closed.reason,
        attempts=closed.attempts,
        session=closed.session,
        turn=turn,
        program=closed.program,
        ignored_hints=ignored_hints,
        way=way,
        name=name,
        media=closed.media,
        media_cached=closed.media_cached,
        tenant=tenant,
        key=key,
        copy_of=copy_of,
    )


def closed_of(record: RequestRecord) -> RequestEnd:
    """Return a record as a running cluster reports an end: times in nanoseconds since the start of the run."""

    def after(seconds: float | None) -> int | None:
        return None if seconds is None else nanos(record.arrival + seconds)

    return RequestEnd(
        id=record.id,
        model=record.model,
        outcome=record.outcome,
        fault=record.fault,
        status=record.status,
        reason=record.reason,
        arrived=nanos(record.arrival),
        first=after(record.ttft),
        closed=after(record.e2e),
        isl=record.isl,
        osl=record.osl,
        cached=record.cached,
        expected_cached=record.expected_cached,
        queued=record.queued,
        attempts=record.attempts,
        legs=[
            EndedLeg(role=leg.role, target=leg.worker, dispatched=nanos(leg.dispatched), failure=leg.failure)
            for leg in record.legs
        ],
        session=record.session,
        program=record.program,
        ignored_hints=record.ignored_hints,
        way=record.way,
        name=record.name,
        copy_of=record.copy_of,
    )

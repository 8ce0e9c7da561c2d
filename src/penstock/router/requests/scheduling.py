"""Scheduling of requests: admits one, lets it wait in the queue, chooses its worker and dispatches it."""

from collections.abc import Sequence

import msgspec

from penstock.kernel.machine import SECOND, Nanos, nanos, seconds
from penstock.kernel.values import Role, Target
from penstock.router.events import Cost, Decision, Dispatch, Excluded, Handoff, StageLeg
from penstock.router.model_pool import ModelPool
from penstock.router.requests.eligibility import Eligible, eligible, pin_of
from penstock.router.requests.handoff import NextStage, next_stage
from penstock.router.requests.overload import refusal
from penstock.router.requests.request_close import close
from penstock.router.requests.request_queue import QueuedRequest
from penstock.router.requests.routed_request import HEDGE, STAGE, Hedge, Remote, RoutedRequest
from penstock.router.requests.stage_graph import AT_ONCE, FINAL
from penstock.router.router_state import RouterState
from penstock.router.selection.select import Selection, blind, discounted, pinned, select
from penstock.router.settings import Mode, OverloadSettings
from penstock.router.workers.roster import RosterWorker

NO_LIMITS = OverloadSettings()
BLIND = ("round_robin", "random")
"""Modes that need no cost."""

NEEDS_PIN = "mode direct needs a pinned worker: send x-penstock-worker or nvext.backend_instance_id"


def admit(core: RouterState, now: Nanos, request: RoutedRequest, pool: ModelPool) -> None:
    """Place a request at once, let it wait, or end it where neither can be."""
    step = next_stage(core, now, request, pool)
    targets = step.eligible.targets
    if not targets:
        _nowhere(core, now, request, pool, step)
    elif step.source is not None:
        _place(core, now, request, pool, step)  # another worker holds its KV: waiting here would block that one
    elif (limits := core.settings.overload) != NO_LIMITS and (full := refusal(limits, pool, request, targets, now)):
        pool.refuse(full.limit, now)
        close(core, now, request, "rejected", "overloaded", 503, full.reason, retry_after=full.retry_after)
    elif pool.queue.waiting or _all_busy(core, pool, targets):
        _enqueue(core, now, request, pool)
        core.freed[pool.model] = None
    else:
        _place(core, now, request, pool, step)


def pump(core: RouterState, now: Nanos, pool: ModelPool) -> None:
    """Place requests that lost their worker, then queued ones, best first, while a worker is not busy."""
    for id in list(core.waiting_for_worker):
        stranded = core.requests[id]
        if stranded.event.model == pool.model:
            step = next_stage(core, now, stranded, pool)
            if step.eligible.targets:
                del core.waiting_for_worker[id]
                _place(core, now, stranded, pool, step)
    while (waiting := pool.queue.peek(now)) is not None:
        request = core.requests[waiting.id]
        step = next_stage(core, now, request, pool)
        targets = step.eligible.targets
        if targets and _all_busy(core, pool, targets):
            return
        pool.queue.take(waiting)
        if targets:
            _place(core, now, request, pool, step)
        else:
            _nowhere(core, now, request, pool, step)


def _nowhere(core: RouterState, now: Nanos, request: RoutedRequest, pool: ModelPool, step: NextStage) -> None:
    """End a request that no worker can take; the outcome depends on the party at fault."""
    wish = request.event.preferences
    if request.resumed or step.source is not None:
        # Its client has part of an answer, or its prefill is done: a worker that comes back soon is better than an end.
        return _strand(core, now, request, core.settings.queue.wait_max)
    if request.attempt:
        close(core, now, request, "failed", "engine", request.last_status or 502, request.last_failure)
        return
    if wish.worker is not None and core.roster.get(wish.worker) is None:
        known = ", ".join(sorted(w.card.id for w in core.roster if w.card.model == pool.model)) or "none"
        text = f"pinned worker {wish.worker!r} does not serve {pool.model}; its workers: {known}"
        close(core, now, request, "rejected", "client", 400, text)
        return
    reasons = step.eligible.reasons or "none has joined"
    settings = core.settings.queue
    if step.eligible.by_preference:
        close(core, now, request, "rejected", "client", 400, f"no worker can take the request: {reasons}")
    elif settings.start_wait and wish.worker is None and len(core.waiting_for_worker) < settings.length_max:
        _strand(core, now, request, settings.start_wait)
    else:
        text = f"no worker of {pool.model} is available: {reasons}"
        wait = _next_chance(core, pool, now)
        close(core, now, request, "rejected", "overloaded", 503, text, retry_after=wait)


def _strand(core: RouterState, now: Nanos, request: RoutedRequest, limit: float) -> None:
    """Let a request wait for a worker that is not there, for at most so many seconds."""
    request.step("await_worker")
    request.leave_queue(now)
    request.queued_since = now
    core.waiting_for_worker[request.id] = None
    core.timer(now + nanos(limit), "wait", request.id)


def _next_chance(core: RouterState, pool: ModelPool, now: Nanos) -> float:
    """Seconds until a breaker lets one try, else one second: what Retry-After says."""
    waits = [
        seconds(worker.breaker.until - now)
        for worker in core.roster
        if worker.card.model == pool.model and worker.breaker.until is not None and worker.breaker.until > now
    ]
    return max(1.0, min(waits, default=1.0))


def _all_busy(core: RouterState, pool: ModelPool, targets: list[tuple[Target, RosterWorker]]) -> bool:
    share = core.settings.queue.threshold
    if share is None:
        return False
    for target, worker in targets:
        most = worker.card.max_num_batched_tokens
        # A worker that does not report its batch size can't be called busy by it.
        if most is None or pool.active.load(target).prefill_tokens <= share * most:
            return False
    return True


def _enqueue(core: RouterState, now: Nanos, request: RoutedRequest, pool: ModelPool) -> None:
    event, wish = request.event, request.event.preferences
    if pool.queue.full:
        text = f"{len(pool.queue)} requests of {pool.model} are waiting, which is the limit"
        close(core, now, request, "rejected", "overloaded", 503, text, retry_after=1.0)
        return
    held = pool.overlaps(request.prompt, now).values()
    best = max((overlap.device + overlap.host + overlap.disk for overlap in held), default=0)
    request.step("queue")
    request.queued_since = now
    pool.queue.add(
        QueuedRequest(
            id=event.id,
            arrived=request.arrived,
            priority=wish.priority,
            strict=wish.strict,
            deadline=request.deadline,
            new_tokens=max(0, request.prompt.isl - best * pool.block_size),
        )
    )
    core.timer(now + nanos(core.settings.queue.wait_max), "wait", event.id)


def _place(core: RouterState, now: Nanos, request: RoutedRequest, pool: ModelPool, step: NextStage) -> None:
    """Choose a target, count the load there, and send the request."""
    event, prompt, stage = request.event, request.prompt, step.stage
    choice, costs, unhashed_blocks = _decide(core, request, pool, step, now)
    if choice is None:
        close(core, now, request, "rejected", "client", 400, NEEDS_PIN)
        return
    cost = choice.cost
    request.leave_queue(now)
    session = event.preferences.session
    if session is not None and core.settings.affinity.mode != "off":
        pool.affinity.bind(_home(session, stage), cost.target, now)
    if stage not in FINAL:
        return _begin_stage(core, now, request, pool, step, choice, costs, unhashed_blocks)
    request.step("dispatch")
    request.tries += 1
    request.target, request.placed = cost.target, now
    remote, handoff = request.remote, None
    if step.source is not None and remote is not None:
        remote.fetches += 1
        handoff = msgspec.structs.replace(remote.handoff, source=step.source, source_attempt=remote.attempt)
        request.transfer_blocks = max(0, len(prompt.blocks) + unhashed_blocks - cost.overlap_blocks)
    else:
        request.transfer_blocks = None
        request.expected_cached = cost.overlap_tokens
        request.prefill_ahead = cost.active_prefill_tokens + prompt.isl - cost.overlap_tokens
    pool.placements[stage] += 1
    cached = cost.overlap_tokens if handoff is None else prompt.isl
    core.load(request, pool, cost.target, cached=cached, unhashed_blocks=unhashed_blocks, now=now)
    _send(core, now, request, pool, choice, costs, step, handoff)
    request.current = request.attempt
    if core.settings.hedge.after is not None:
        core.timer(now + nanos(core.settings.hedge.after), "hedge", event.id)


def _begin_stage(
    core: RouterState,
    now: Nanos,
    request: RoutedRequest,
    pool: ModelPool,
    step: NextStage,
    choice: Selection,
    costs: Sequence[Cost],
    unhashed_blocks: int,
) -> None:
    """Send a request to a stage before its last, and where the protocol asks both at once to the last one as well."""
    cost = choice.cost
    worker = core.roster.workers[cost.target.worker]
    protocol = worker.card.handoff or "completed"
    remote = request.remote = Remote(
        attempt=request.attempt + 1,
        stage=step.stage,
        target=cost.target,
        epoch=worker.card.incarnation,
        protocol=protocol,
        key=core.rng.getrandbits(63),
        placed=now,
        prefill_ahead=cost.active_prefill_tokens + request.prompt.isl - cost.overlap_tokens,
        leg=len(request.legs),
    )
    pool.placements[step.stage] += 1
    core.load(
        request, pool, cost.target, cached=cost.overlap_tokens, unhashed_blocks=unhashed_blocks, now=now, owner=STAGE
    )
    _send(core, now, request, pool, choice, costs, step, remote.handoff)
    if step.stage == "prefill":
        request.expected_cached = cost.overlap_tokens
        pool.handoffs["remote"] += 1
        pool.earn_fallback()
    if step.stage != "prefill" or protocol not in AT_ONCE:
        request.step("stage")
        return
    following = next_stage(core, now, request, pool)
    if following.eligible.targets:
        _place(core, now, request, pool, following)
    else:
        _nowhere(core, now, request, pool, following)


def _home(session: str, stage: Role) -> str:
    """Return the name under which a session's worker for a stage is remembered: it has one for each."""
    return session if stage in FINAL else f"{session}~{stage}"


def _mode(core: RouterState, stage: Role) -> Mode:
    """Return how a worker is chosen for a stage."""
    handoff = core.settings.handoff
    own = handoff.decode.mode if stage == "decode" else None if stage in FINAL else handoff.prefill.mode
    return core.settings.mode if own is None else own


def _decide(
    core: RouterState, request: RoutedRequest, pool: ModelPool, step: NextStage, now: Nanos
) -> tuple[Selection | None, Sequence[Cost], int]:
    """Choose a target; return the choice, what was priced for it, and the request's blocks without a hash."""
    mode, targets = _mode(core, step.stage), step.eligible.targets
    if mode in BLIND and not _directed(core, request):
        # No costs are compared: only what is chosen is priced, so that a decision costs the same over any fleet.
        place, because = blind(mode, len(targets), core.rng, pool.placements[step.stage])
        costs, unhashed_blocks = pool.costs(request, targets[place : place + 1], now, step.stage, step.source)
        return Selection(costs[0], because), costs, unhashed_blocks
    costs, unhashed_blocks = pool.costs(request, targets, now, step.stage, step.source)
    choice, costs = _choose(core, request, pool, costs, now, step.stage, mode)
    return choice, costs, unhashed_blocks


def preview(core: RouterState, request: RoutedRequest, was: Dispatch, now: Nanos) -> tuple[Selection, Cost] | None:
    """Return where a request would go for the stage of ``was``, and what it costs where that went, without placing it.

    None where nothing can be compared: no worker could take it, or that worker is no candidate here.
    """
    pool = core.pools[request.event.model]
    source = None if was.handoff is None else was.handoff.source
    step = NextStage(was.stage, eligible(core, request, pool, now, was.stage), source)
    mine = [pair for pair in step.eligible.targets if pair[0] == was.target]
    if not mine:
        return None
    choice, _, _ = _decide(core, request, pool, step, now)
    return None if choice is None else (choice, pool.costs(request, mine, now, step.stage, source)[0][0])


def _directed(core: RouterState, request: RoutedRequest) -> bool:
    """Whether a pin or a session's home may decide instead of the mode."""
    wish = request.event.preferences
    pins = wish.worker is not None or wish.prefill is not None
    return pins or (wish.session is not None and core.settings.affinity.mode != "off")


def hedge(core: RouterState, now: Nanos, request: RoutedRequest, pool: ModelPool) -> None:
    """Send a request to a second worker as well, where one can take it at once."""
    assert request.target is not None
    first = request.target
    candidates, excluded, by_wish = eligible(core, request, pool, now)
    targets = [pair for pair in candidates if pair[0].worker != first.worker]
    if not targets or _all_busy(core, pool, targets):
        return
    costs, unhashed_blocks = pool.costs(request, targets, now)
    choice, costs = _choose(core, request, pool, costs, now, "aggregated", core.settings.mode)
    if choice is None:
        return
    cost = choice.cost
    pool.hedges += 1
    core.load(
        request, pool, cost.target, cached=cost.overlap_tokens, unhashed_blocks=unhashed_blocks, now=now, owner=HEDGE
    )
    because = f"no first token from {first} after {seconds(now - request.placed):.3g} s: {choice.reason}"
    choice = Selection(cost, because)
    excluded = [*excluded, Excluded(target=first, reason="has the request already")]
    _send(core, now, request, pool, choice, costs, NextStage("aggregated", Eligible(targets, excluded, by_wish)), None)
    request.hedge = Hedge(
        attempt=request.attempt,
        target=cost.target,
        placed=now,
        prefill_ahead=cost.active_prefill_tokens + request.prompt.isl - cost.overlap_tokens,
        cached=cost.overlap_tokens,
        unhashed_blocks=unhashed_blocks,
    )


def _send(
    core: RouterState,
    now: Nanos,
    request: RoutedRequest,
    pool: ModelPool,
    choice: Selection,
    costs: Sequence[Cost],
    step: NextStage,
    handoff: Handoff | None,
) -> None:
    """Begin an attempt on the chosen target, and record why it is this one."""
    event, target, prompt = request.event, choice.cost.target, request.prompt
    worker = core.roster.workers[target.worker]
    request.attempt += 1
    request.legs.append(StageLeg(role=step.stage, target=target, dispatched=now))
    worker.requests += 1
    if worker.breaker.until is not None:
        worker.breaker.dispatched()
    pool.routed(target, prompt, now)
    decision = Decision(
        request=event.id,
        attempt=request.attempt,
        at=now,
        model=event.model,
        mode=_mode(core, step.stage),
        chosen=target,
        reason=choice.reason,
        isl=prompt.isl,
        blocks=len(prompt.blocks),
        queued=request.queued / SECOND,
        candidates=costs,
        excluded=step.eligible.excluded,
        expected_cached_tokens=choice.cost.overlap_tokens,
        resumed=request.resumed,
        temperature=_temperature(core, request),
        stage=step.stage,
        again=len(request.legs) > 1 and any(leg.failure is not None or leg.role in FINAL for leg in request.legs[:-1]),
        flow=request.flow,
    )
    core.out.append(
        Dispatch(
            id=event.id,
            attempt=request.attempt,
            target=target,
            card=worker.card,
            decision=decision,
            stage=step.stage,
            handoff=handoff,
        )
    )


def _choose(
    core: RouterState,
    request: RoutedRequest,
    pool: ModelPool,
    costs: Sequence[Cost],
    now: Nanos,
    stage: Role,
    mode: Mode,
) -> tuple[Selection | None, Sequence[Cost]]:
    """Take the pin, the session's home or the mode's choice, None where mode direct has no pin; with what all cost."""
    wish = request.event.preferences
    if pin_of(core, request, stage) is not None:
        best = min(costs, key=lambda cost: cost.total)
        return pinned(best, f"pinned to {best.target} by the request"), costs
    if mode == "direct":
        return None, costs
    affinity = core.settings.affinity
    if wish.session is not None and affinity.mode != "off":
        home = pool.affinity.target(_home(wish.session, stage), now)
        if affinity.mode == "soft":
            costs = discounted(costs, home)
        elif home is not None:
            for cost in costs:
                if cost.target == home:
                    return pinned(cost, f"session {wish.session} is at home on {home}"), costs
    turn = pool.placements[stage]
    return select(mode, costs, core.rng, temperature=_temperature(core, request), turn=turn), costs


def _temperature(core: RouterState, request: RoutedRequest) -> float:
    wished = request.event.preferences.temperature
    return core.settings.cost.temperature if wished is None else wished

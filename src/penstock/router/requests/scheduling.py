"""Scheduling of requests: admits one, lets it wait in the queue, chooses its worker and dispatches it.

On the way of most requests `admit` asks `next_stage` for the candidates (`penstock.router.selection.select.eligible`),
and `_place_request` has `_decide_target` price them (`costs_of`) and choose one (`select`), all in that one file.
"""

from collections.abc import Sequence

import msgspec
from xxhash import xxh3_64_intdigest

from penstock.kernel.machine import SECOND, Nanos, nanos, seconds
from penstock.kernel.plurals import counted
from penstock.kernel.values import TIERS_LABEL, Role, Target
from penstock.router.events import Cost, Decision, Dispatch, Excluded, Handoff, StageLeg
from penstock.router.fair_queue import KICK, FairQueue, fullness, has_room
from penstock.router.model_pool import ModelPool
from penstock.router.pool_tables import prefetch_after
from penstock.router.request_queue import QueuedRequest
from penstock.router.requests.handoff import NextStage, next_stage
from penstock.router.requests.refusals import (
    ENGINE_BUSY,
    NO_WORKER,
    NOT_CACHED,
    OVERLOADED,
    QUEUE_FULL,
    SHARE_FULL,
    refusal,
)
from penstock.router.requests.request_close import close
from penstock.router.routed_request import HEDGE, STAGE, Believed, Hedge, Remote, RoutedRequest
from penstock.router.router_state import RouterState
from penstock.router.selection.cost import candidates_of, cheapest_of, place_of, with_scores
from penstock.router.selection.select import (
    Eligible,
    Selection,
    blind,
    costs_of,
    discounted,
    eligible,
    pin_of,
    pinned,
    plugin_request,
    select,
)
from penstock.router.settings import Mode, OverloadSettings
from penstock.router.stage_graph import AT_ONCE, FINAL, NEW_SHARE_MAX
from penstock.router.workers.roster import RosterWorker

NO_LIMITS = OverloadSettings()
BLIND = ("round_robin", "random")
"""Modes that need no cost."""


def by_content(id: str, targets: Sequence[tuple[Target, RosterWorker]]) -> int:
    """Return the place of the target whose name, hashed with a content's, is the highest (rendezvous hashing)."""
    return max(range(len(targets)), key=lambda place: xxh3_64_intdigest(f"{id}@{targets[place][0]}".encode()))


NEEDS_PIN = "mode direct needs a pinned worker: send x-penstock-worker or nvext.backend_instance_id"


def admit(core: RouterState, now: Nanos, request: RoutedRequest, pool: ModelPool) -> None:
    """Place a request at once, let it wait, or end it where neither can be."""
    step = next_stage(core, now, request, pool)
    targets = step.eligible.targets
    if pool.fair is not None and not request.legs and targets:
        mean = sum(fullness(worker.card, pool.active.load(target)) for target, worker in targets) / len(targets)
        pool.fair.arrived(pool.fair.name(request.event.tenant), _work_tokens(request, pool, pool.fair), mean, now)
    if not targets:
        _end_unplaced(core, now, request, pool, step)
    elif step.source is not None:
        _place_request(core, now, request, pool, step)  # another worker holds its KV: waiting here would block that one
    elif (limits := core.settings.overload) != NO_LIMITS and (full := refusal(limits, pool, request, targets, now)):
        pool.counts.refuse(full.limit, now)
        wait = full.retry_after
        close(core, now, request, "rejected", "overloaded", 503, full.reason, retry_after=wait, code=OVERLOADED)
    elif request.event.preferences.if_cached and (text := _why_uncached(core, request, pool, step, now)):
        close(core, now, request, "rejected", "client", 412, text, code=NOT_CACHED)
    elif pool.queue.waiting or (
        _all_busy(core, pool, targets)
        if pool.fair is None
        else _must_wait(core, now, pool, pool.fair, request, targets)
    ):
        _enqueue_request(core, now, request, pool)
        core.freed[pool.model] = None
    else:
        _place_request(core, now, request, pool, step)


def follow(core: RouterState, now: Nanos, request: RoutedRequest, pool: ModelPool) -> None:
    """Place a request that its pinned worker has already: no queue and no limit can undo that."""
    step = next_stage(core, now, request, pool)
    (_place_request if step.eligible.targets else _end_unplaced)(core, now, request, pool, step)


def pump(core: RouterState, now: Nanos, pool: ModelPool) -> None:
    """Place requests that lost their worker, then queued ones, best first, while a worker is not busy."""
    room: bool | None = None
    """Whether any worker has room for an adapter; without it, a thousand that wait are not looked at for nothing."""
    for id in list(core.waiting_for_worker):
        stranded = core.requests[id]
        if stranded.event.model == pool.model:
            adapter = stranded.event.adapter
            if stranded.awaits_adapter and adapter is not None and not pool.adapters.holders(adapter):
                room = pool.adapters.any_room() if room is None else room
                if not room:
                    continue
            step = next_stage(core, now, stranded, pool)
            if step.eligible.targets:
                del core.waiting_for_worker[id]
                _place_request(core, now, stranded, pool, step)
                room = None
    if pool.fair is not None:
        return _pump_shares(core, now, pool, pool.fair)
    while (waiting := pool.queue.peek(now)) is not None:
        request = core.requests[waiting.id]
        step = next_stage(core, now, request, pool)
        targets = step.eligible.targets
        if targets and _all_busy(core, pool, targets):
            return
        pool.queue.take(waiting)
        if targets:
            _place_request(core, now, request, pool, step)
        else:
            _end_unplaced(core, now, request, pool, step)


def _pump_shares(core: RouterState, now: Nanos, pool: ModelPool, fair: FairQueue) -> None:
    """Place queued requests, by tenants' virtual time, while there is room for one of any tenant."""
    while (placed := _first_with_room(core, now, pool, fair)) is not None:
        waiting, request, step = placed
        fair.take(waiting)
        (_place_request if step.eligible.targets else _end_unplaced)(core, now, request, pool, step)
    if fair.waiting and not fair.kicked:
        fair.kicked = True  # a share that was used up comes back with time, without an event
        core.timer(now + nanos(KICK), "kick", pool.model)


def _first_with_room(
    core: RouterState, now: Nanos, pool: ModelPool, fair: FairQueue
) -> tuple[QueuedRequest, RoutedRequest, NextStage] | None:
    """Return the first of the tenants' next requests for which a worker has room, or that none can take."""
    for waiting in fair.heads(now):
        request = core.requests[waiting.id]
        step = next_stage(core, now, request, pool)
        if not step.eligible.targets or not _must_wait(core, now, pool, fair, request, step.eligible.targets):
            return waiting, request, step
    return None


def _must_wait(
    core: RouterState,
    now: Nanos,
    pool: ModelPool,
    fair: FairQueue,
    request: RoutedRequest,
    targets: list[tuple[Target, RosterWorker]],
) -> bool:
    """Whether a request has to wait: no worker has room, or its tenant has had too much of the fleet."""
    settings, tenant = core.settings.queue, fair.name(request.event.tenant)
    loads = [(worker.card, pool.active.load(target)) for target, worker in targets]
    if not request.work and (idle_only := fair.idle_only(tenant, now)) is not None:
        loads = idle_only.leaves(loads)
    return not any(has_room(settings, card, load) for card, load in loads)


def _work_tokens(request: RoutedRequest, pool: ModelPool, fair: FairQueue) -> int:
    """Return the tokens that a request is expected to take: its prompt and its output."""
    event, osl = request.event, request.event.preferences.osl
    return event.prompt.isl + (fair.output(fair.name(event.tenant), pool.counts.output_mean) if osl is None else osl)


def _end_unplaced(core: RouterState, now: Nanos, request: RoutedRequest, pool: ModelPool, step: NextStage) -> None:
    """End a request that no worker can take; the outcome depends on the party at fault."""
    wish = request.event.preferences
    if request.awaits_adapter and len(core.waiting_for_worker) < pool.roles.waiting_max:
        return _await_worker(core, now, request, core.settings.queue.wait_max)
    if request.resumed or step.source is not None:
        # Its client has part of an answer, or its prefill is done: a worker that comes back soon is better than an end.
        return _await_worker(core, now, request, core.settings.queue.wait_max)
    if request.attempt:
        status = request.last_status or 502
        code = ENGINE_BUSY if status in (429, 503) else None
        reason = f"{request.last_failure}; no other worker can take it: {step.eligible.reasons or 'none is there'}"
        wait = request.last_retry_after
        close(core, now, request, "failed", "engine", status, reason, retry_after=wait, code=code)
        return
    if wish.worker is not None and core.roster.get(wish.worker) is None:
        known = ", ".join(sorted(w.card.id for w in core.roster if w.card.model == pool.model)) or "none"
        text = f"pinned worker {wish.worker!r} does not serve {pool.model}; its workers: {known}"
        close(core, now, request, "rejected", "client", 400, text)
        return
    reasons = step.eligible.reasons or f"none {f'to {step.stage} ' if pool.roles.paired else ''}has joined"
    settings = core.settings.queue
    if step.eligible.by_preference:
        close(core, now, request, "rejected", "client", 400, f"no worker can take the request: {reasons}")
    elif settings.start_wait and wish.worker is None and len(core.waiting_for_worker) < pool.roles.waiting_max:
        _await_worker(core, now, request, settings.start_wait)
    else:
        text = f"no worker of {pool.model} is available: {reasons}"
        close(core, now, request, "rejected", "overloaded", 503, text, retry_after=1.0, code=NO_WORKER)


def _why_uncached(core: RouterState, request: RoutedRequest, pool: ModelPool, step: NextStage, now: Nanos) -> str:
    """Return why a request that is wanted only where its prompt is cached is not answered; nothing where it is."""
    if request.attempt:
        return ""  # it was promised an answer before
    if step.stage not in FINAL:
        return f"another worker would have to do its prefill: {request.flow}"
    costs, _ = costs_of(pool, request, step.eligible.targets, now, step.stage)
    most = max(costs, key=lambda cost: cost.overlap_tokens)
    new, limit = request.prompt.isl - most.overlap_tokens, core.settings.handoff.new_tokens_max
    if new < limit and new < NEW_SHARE_MAX * request.prompt.isl:
        return ""
    return f"{new:,} of {request.prompt.isl:,} prompt tokens would be new on {most.target}, which has the most of it"


def _await_worker(core: RouterState, now: Nanos, request: RoutedRequest, limit: float) -> None:
    """Let a request wait for a worker that is not there, for at most so many seconds."""
    request.step("await_worker")
    request.leave_queue(now)
    request.queued_since = now
    core.waiting_for_worker[request.id] = None
    core.timer(now + nanos(limit), "wait", request.id)


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


def _enqueue_request(core: RouterState, now: Nanos, request: RoutedRequest, pool: ModelPool) -> None:
    event, wish = request.event, request.event.preferences
    tenant, work = "", 0
    if pool.fair is not None:
        tenant, work = pool.fair.name(event.tenant), _work_tokens(request, pool, pool.fair)
        room = pool.fair.room(tenant, pool.roles.waiting_max)
        if pool.fair.waits(tenant) >= room:
            text = f"this tenant's share of the queue is full: {counted(room, 'request')} waiting"
            close(core, now, request, "rejected", "overloaded", 429, text, retry_after=1.0, code=SHARE_FULL)
            return
    if len(pool.queue) >= pool.roles.waiting_max:
        text = f"the queue of {pool.model} is full: {counted(len(pool.queue), 'request')} waiting"
        close(core, now, request, "rejected", "overloaded", 503, text, retry_after=1.0, code=QUEUE_FULL)
        return
    held = pool.index.overlaps(request.prompt, now).values()
    best = max((overlap.total for overlap in held), default=0)
    request.step("queue")
    request.queued_since = now
    if pool.fair is not None and (idle_only := pool.fair.idle_only(tenant, now)) is not None:
        request.waited_for = idle_only.reason
    pool.queue.add(
        QueuedRequest(
            id=event.id,
            arrived=request.arrived,
            priority=wish.priority,
            strict=wish.strict,
            deadline=request.deadline,
            new_tokens=max(0, request.prompt.isl - best * pool.index.block_size),
            tenant=tenant,
            work=work,
        )
    )
    core.timer(now + nanos(core.settings.queue.wait_max), "wait", event.id)


def _place_request(core: RouterState, now: Nanos, request: RoutedRequest, pool: ModelPool, step: NextStage) -> None:
    """Choose a target, count the load there, and send the request."""
    event, prompt, stage = request.event, request.prompt, step.stage
    choice, costs, unhashed_blocks = _decide_target(core, request, pool, step, now)
    if choice is None:
        close(core, now, request, "rejected", "client", 400, NEEDS_PIN)
        return
    cost = choice.cost
    if request.queued_since is not None:
        request.leave_queue(now)
    if pool.fair is not None and not request.work:
        request.work = max(1, _work_tokens(request, pool, pool.fair))
        pool.fair.begin(pool.fair.name(event.tenant), request.work, now)
    session = event.preferences.session
    if session is not None and core.settings.affinity.mode != "off":
        pool.affinity.bind(_session_name(session, stage), cost.target, now)
        program = event.preferences.program
        if program is not None and program != session:
            # Not where it was last: its sessions would draw each other along.
            shared = _session_name(f"{PROGRAM}{program}", stage)
            pool.affinity.bind(shared, pool.affinity.target(shared, now) or cost.target, now)
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
        request.believed = None
        stream = pool.index.streams.get(cost.target)
        if stream is not None and (cost.index == "exact" or (cost.index == "none" and stream.state != "exact")):
            tokens = min(cost.overlap_blocks * pool.index.block_size, cost.overlap_tokens)
            request.believed = Believed(tokens, stream.removed)
        request.prefill_ahead = cost.active_prefill_tokens + prompt.isl - cost.overlap_tokens
    pool.counts.placements[stage] += 1
    cached = cost.overlap_tokens if handoff is None else prompt.isl
    core.load(request, pool, cost.target, cached=cached, unhashed_blocks=unhashed_blocks, now=now)
    _send_attempt(core, now, request, pool, choice, costs, step, handoff)
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
        key=_handoff_key(core, worker.card.ranks, cost.target.rank),
        placed=now,
        prefill_ahead=cost.active_prefill_tokens + request.prompt.isl - cost.overlap_tokens,
        leg=len(request.legs),
    )
    pool.counts.placements[step.stage] += 1
    if step.stage == "encode":
        pool.counts.media["cached"] += request.media_cached or 0
        pool.encoding[request.id] = cost.target
    core.load(
        request, pool, cost.target, cached=cost.overlap_tokens, unhashed_blocks=unhashed_blocks, now=now, owner=STAGE
    )
    _send_attempt(core, now, request, pool, choice, costs, step, remote.handoff)
    if step.stage == "prefill":
        request.expected_cached = cost.overlap_tokens
        pool.counts.handoffs["remote"] += 1
        pool.roles.earn_fallback()
    if step.stage != "prefill" or protocol not in AT_ONCE:
        request.step("stage")
        return
    following = next_stage(core, now, request, pool)
    if following.eligible.targets:
        _place_request(core, now, request, pool, following)
    else:
        _end_unplaced(core, now, request, pool, following)


def _handoff_key(core: RouterState, ranks: int, rank: int) -> int:
    """Return a number for a hand-off; modulo the prefill engine's ranks it is the chosen one, as SGLang wants it."""
    key = core.rng.getrandbits(62)
    return key - key % ranks + rank


PROGRAM = "program\n"
"""Before a program's name among the sessions: no session of a header has a line break."""


def _session_name(session: str, stage: Role) -> str:
    """Return the name under which a session's worker for a stage is remembered: it has one for each."""
    return session if stage in FINAL else f"{session}~{stage}"


def _decide_target(
    core: RouterState, request: RoutedRequest, pool: ModelPool, step: NextStage, now: Nanos
) -> tuple[Selection | None, Sequence[Cost], int]:
    """Choose a target; return the choice, what was priced for it, and the request's blocks without a hash."""
    mode, targets = pool.stage_mode[step.stage], step.eligible.targets
    if step.stage == "encode":
        # Every router chooses the same worker for the same content: its own cache has it if it was asked just now.
        place = _encoder_place(core, request, pool, targets)
        costs, unhashed_blocks = costs_of(pool, request, targets[place : place + 1], now, step.stage, step.source)
        return (
            Selection(costs[0], f"of {len(targets)} encode workers, the one for this content"),
            costs,
            unhashed_blocks,
        )
    if mode in BLIND and not _is_directed(core, request):
        # No costs are compared: only what is chosen is priced, so that a decision costs the same over any fleet.
        place, because = blind(mode, len(targets), core.rng, pool.counts.placements[step.stage])
        costs, unhashed_blocks = costs_of(pool, request, targets[place : place + 1], now, step.stage, step.source)
        return Selection(costs[0], because), costs, unhashed_blocks
    costs, unhashed_blocks = costs_of(pool, request, targets, now, step.stage, step.source)
    choice, costs = _choose_target(core, request, pool, costs, now, step.stage, mode)
    return choice, costs, unhashed_blocks


def _encoder_place(
    core: RouterState, request: RoutedRequest, pool: ModelPool, targets: Sequence[tuple[Target, RosterWorker]]
) -> int:
    """Return the place of the target that encodes some of a request's media already, else of the one for the first."""
    media = request.event.media
    wanted = {media[place].id for place in request.encode} - {None}
    for id, target in pool.encoding.items():
        other = core.requests.get(id)
        if other is not None and any(other.event.media[place].id in wanted for place in other.encode):
            for place, (candidate, _) in enumerate(targets):
                if candidate == target:
                    return place
    return by_content(media[request.encode[0] if request.encode else 0].id or request.id, targets)


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
    choice, _, _ = _decide_target(core, request, pool, step, now)
    return None if choice is None else (choice, costs_of(pool, request, mine, now, step.stage, source)[0][0])


def _is_directed(core: RouterState, request: RoutedRequest) -> bool:
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
    adapter = request.event.adapter
    if adapter is not None:  # a second attempt is to be quick: nothing is loaded for it
        targets = [pair for pair in targets if not pool.adapters.seconds(pair[0].worker, adapter)]
    if not targets or _all_busy(core, pool, targets):
        return
    costs, unhashed_blocks = costs_of(pool, request, targets, now)
    choice, costs = _choose_target(core, request, pool, costs, now, "aggregated", core.settings.mode)
    if choice is None:
        return
    cost = choice.cost
    pool.counts.hedges += 1
    core.load(
        request, pool, cost.target, cached=cost.overlap_tokens, unhashed_blocks=unhashed_blocks, now=now, owner=HEDGE
    )
    because = f"no first token from {first} after {seconds(now - request.placed):.3g} s: {choice.reason}"
    choice = Selection(cost, because)
    excluded = [*excluded, Excluded(target=first, reason="has the request already")]
    _send_attempt(
        core, now, request, pool, choice, costs, NextStage("aggregated", Eligible(targets, excluded, by_wish)), None
    )
    request.hedge = Hedge(
        attempt=request.attempt,
        target=cost.target,
        placed=now,
        prefill_ahead=cost.active_prefill_tokens + request.prompt.isl - cost.overlap_tokens,
        cached=cost.overlap_tokens,
        unhashed_blocks=unhashed_blocks,
    )


def _send_attempt(
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
    if step.stage != "encode":  # it computes no KV
        pool.index.routed(target, prompt, now)
    expects = event.preferences.next_in is not None or core.settings.prefetch
    final, session = step.stage in FINAL, event.preferences.session
    pause = core.expected_pause(request, pool) if expects and final else None
    reason = choice.reason if pause is None else f"{choice.reason}; its next request is likely {pause:.3g} s after it"
    after = None if pause is None else prefetch_after(pause)
    request.prefetches = after is not None and TIERS_LABEL in worker.card.labels
    if worker.breaker.until is not None or worker.doubts:
        if (doubt := worker.why_not(now)) is not None:
            reason += f"; no other worker is left, although its {doubt}"
        if request.unproven is None:  # whose end would say nothing about the worker
            worker.breaker.dispatched(now)
    other = pool.habits.placed(session, target.worker) if final and session is not None else None
    if other is not None:
        reason += f"; {other} was asked to bring its session's blocks up, which nobody uses now"
    if (costly := choice.cost.costly_blocks) and handoff is None:
        reason += f"; {counted(costly, 'block')} of its lower tiers left out, slower to load than to compute"
    if request.waited_for and request.queued:
        reason += f"; it waited {seconds(request.queued):.2f} s: {request.waited_for}"
    decision = Decision(
        request=event.id,
        attempt=request.attempt,
        at=now,
        model=event.model,
        mode=pool.stage_mode[step.stage],
        chosen=target,
        reason=reason,
        isl=prompt.isl,
        blocks=len(prompt.blocks),
        queued=request.queued / SECOND,
        candidates=costs,
        excluded=step.eligible.excluded,
        expected_cached_tokens=choice.cost.overlap_tokens,
        resumed=request.resumed,
        temperature=_temperature_of(core, request),
        stage=step.stage,
        again=len(request.legs) > 1 and any(leg.failure is not None or leg.role in FINAL for leg in request.legs[:-1]),
        flow=request.flow,
        adapter=request.adapter_plan,
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
            encode=request.encode if step.stage == "encode" else (),
            prefetch_after=after,
        )
    )


def _choose_target(
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
        best = costs[int(cheapest_of(costs)[0])]
        return pinned(best, f"pinned to {best.target} by the request"), costs
    if mode == "direct":
        return None, costs
    if core.plugins is not None and core.plugins.scorers and mode == "kv":
        costs = _with_plugin_scores(core, request, costs, stage)
    affinity = core.settings.affinity
    if wish.session is not None and affinity.mode != "off":
        home = pool.affinity.target(_session_name(wish.session, stage), now)
        if home is None and wish.program is not None and wish.program != wish.session:
            # Only a discount, in either mode: a program may have more sub-agents than one worker can serve.
            costs = discounted(costs, pool.affinity.target(_session_name(f"{PROGRAM}{wish.program}", stage), now))
        elif affinity.mode == "soft":
            costs = discounted(costs, home)
        elif home is not None and (place := place_of(costs, home)) is not None:
            return pinned(costs[place], f"session {wish.session} is at home on {home}"), costs
    turn = pool.counts.placements[stage]
    return select(mode, costs, core.rng, temperature=_temperature_of(core, request), turn=turn), costs


def _with_plugin_scores(
    core: RouterState, request: RoutedRequest, costs: Sequence[Cost], stage: Role
) -> Sequence[Cost]:
    """Add to costs what the scorers of ``router.plugins`` say."""
    assert core.plugins is not None
    workers = core.roster.workers
    candidates = candidates_of(costs, lambda target: workers[target.worker].card)
    return with_scores(costs, core.plugins.added(plugin_request(request, stage), candidates))


def _temperature_of(core: RouterState, request: RoutedRequest) -> float:
    wished = request.event.preferences.temperature
    return core.settings.cost.temperature if wished is None else wished

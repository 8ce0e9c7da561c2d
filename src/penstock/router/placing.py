"""How does a request find its worker? Candidates and those excluded, waiting, choosing, sending."""

from penstock.kernel.machine import Nanos, nanos, seconds
from penstock.kernel.values import Target
from penstock.router.core import Core
from penstock.router.events import Cost, Decision, Dispatch, Excluded, Leg
from penstock.router.overload import Refusal, refusal
from penstock.router.pool import Pool
from penstock.router.queue import Waiting
from penstock.router.request import HEDGE, Hedge, Request
from penstock.router.roster import Worker
from penstock.router.select import Choice, blind, discounted, pinned, select

Eligible = tuple[list[tuple[Target, Worker]], list[Excluded], bool]
"""Candidates, those excluded with their reasons, and whether the request's own wishes excluded all of them."""

BLIND = ("round_robin", "random")
"""Modes that ask for no cost."""

NEEDS_PIN = "mode direct needs a pinned worker: send x-penstock-worker or nvext.backend_instance_id"


def admit(core: Core, now: Nanos, request: Request, pool: Pool) -> None:
    """Place a request at once, let it wait, or say why neither can be."""
    targets, excluded, by_wish = eligible(core, request, pool, now)
    if not targets:
        _nowhere(core, now, request, pool, excluded, by_wish)
    elif (full := _refusal(core, now, request, pool, targets)) is not None:
        core.close(now, request, "rejected", "overloaded", 503, full.reason, retry_after=full.retry_after)
    elif len(pool.queue) or _all_busy(core, pool, targets):
        _enqueue(core, now, request, pool)
        core.freed[pool.model] = None
    else:
        _place(core, now, request, pool, targets, excluded)


def _refusal(
    core: Core, now: Nanos, request: Request, pool: Pool, targets: list[tuple[Target, Worker]]
) -> Refusal | None:
    settings = core.settings.overload
    return refusal(settings, pool, request, targets, now) if settings.limits and not request.attempt else None


def pump(core: Core, now: Nanos, pool: Pool) -> None:
    """Place the stranded, then waiting requests, best first, while a worker is not busy."""
    for id in list(core.stranded):
        stranded = core.requests[id]
        if stranded.event.model == pool.model:
            targets, excluded, _ = eligible(core, stranded, pool, now)
            if targets:
                del core.stranded[id]
                _place(core, now, stranded, pool, targets, excluded)
    while (waiting := pool.queue.peek(now)) is not None:
        request = core.requests[waiting.id]
        targets, excluded, by_wish = eligible(core, request, pool, now)
        if targets and _all_busy(core, pool, targets):
            return
        pool.queue.remove(waiting.id)
        if targets:
            _place(core, now, request, pool, targets, excluded)
        else:
            _nowhere(core, now, request, pool, excluded, by_wish)


def eligible(core: Core, request: Request, pool: Pool, now: Nanos) -> Eligible:
    """Split the pool's targets into candidates and those excluded, each with its reason."""
    wish = request.event.preferences
    targets: list[tuple[Target, Worker]] = []
    excluded: list[Excluded] = []
    by_wish = True
    event, model = request.event, pool.model
    picky = wish.worker is not None or wish.allowed is not None or event.adapter is not None
    for worker, places in core.roster.places.values():
        card = worker.card
        if card.model != model:
            continue
        # All of the fleet passes here with every request: the usual answer takes no call.
        plain = worker.state == "ready" and not worker.cordons and worker.breaker.until is None
        reason = None if plain else worker.why_not(now)
        if reason is None and request.tried and (card.id, card.epoch) in request.tried:
            reason = "failed this request before"
        if reason is not None:
            by_wish = False
        elif picky or (card.max_len is not None and event.isl >= card.max_len):
            reason = _unwanted(request, worker)
        if reason is None and wish.rank is None:
            targets += places
            continue
        for target in worker.targets:
            why = reason
            if why is None and wish.rank is not None and target.rank != wish.rank:
                why = f"the request is pinned to rank {wish.rank}"
            if why is None:
                targets.append((target, worker))
            else:
                excluded.append(Excluded(target=target, reason=why))
    return targets, excluded, by_wish and bool(excluded)


def _unwanted(request: Request, worker: Worker) -> str | None:
    """Say what in the request itself excludes a worker."""
    event, card = request.event, worker.card
    wish = event.preferences
    if wish.worker is not None and card.id != wish.worker:
        return f"the request is pinned to {wish.worker}"
    if wish.allowed is not None and card.id not in wish.allowed:
        return "is not among the request's allowed workers"
    if event.adapter is not None and event.adapter not in card.adapters:
        return f"has no adapter {event.adapter}"
    if card.max_len is not None and event.isl >= card.max_len and not event.text:
        return f"takes at most {card.max_len} tokens, the prompt has {event.isl}"
    return None


def _nowhere(core: Core, now: Nanos, request: Request, pool: Pool, excluded: list[Excluded], by_wish: bool) -> None:
    """End a request that no worker can take, by whose fault that is."""
    wish = request.event.preferences
    if request.resumed:
        # Its client has part of an answer: a worker that comes back soon is better than an end in the middle.
        request.step("strand")
        request.leave_queue(now)
        request.queued_since = now
        core.stranded[request.id] = None
        core.timer(now + nanos(core.settings.queue.wait_max), "wait", request.id)
        return
    if request.attempt:
        core.close(now, request, "failed", "engine", request.last_status or 502, request.last_failure)
        return
    if wish.worker is not None and core.roster.get(wish.worker) is None:
        known = ", ".join(sorted(w.card.id for w in core.roster if w.card.model == pool.model)) or "none"
        text = f"pinned worker {wish.worker!r} does not serve {pool.model}; its workers: {known}"
        core.close(now, request, "rejected", "client", 400, text)
        return
    reasons = "; ".join(f"{e.target} {e.reason}" for e in excluded[:4]) or "none has joined"
    if by_wish:
        core.close(now, request, "rejected", "client", 400, f"no worker can take the request: {reasons}")
    else:
        text = f"no worker of {pool.model} is available: {reasons}"
        wait = _next_chance(core, pool, now)
        core.close(now, request, "rejected", "overloaded", 503, text, retry_after=wait)


def _next_chance(core: Core, pool: Pool, now: Nanos) -> float:
    """Seconds until a breaker lets one try, else one second: what Retry-After says."""
    waits = [
        seconds(worker.breaker.until - now)
        for worker in core.roster
        if worker.card.model == pool.model and worker.breaker.until is not None and worker.breaker.until > now
    ]
    return max(1.0, min(waits, default=1.0))


def _all_busy(core: Core, pool: Pool, targets: list[tuple[Target, Worker]]) -> bool:
    share = core.settings.queue.threshold
    if share is None:
        return False
    for target, worker in targets:
        most = worker.card.max_batched_tokens
        # A worker that does not tell its batch size can't be called busy by it.
        if most is None or pool.active.load(target).prefill_tokens <= share * most:
            return False
    return True


def _enqueue(core: Core, now: Nanos, request: Request, pool: Pool) -> None:
    event, wish = request.event, request.event.preferences
    if pool.queue.full:
        text = f"{len(pool.queue)} requests of {pool.model} are waiting, which is the limit"
        core.close(now, request, "rejected", "overloaded", 503, text, retry_after=1.0)
        return
    held = pool.overlaps(event.blocks, event.text, now).values()
    best = max((overlap.device + overlap.host + overlap.disk for overlap in held), default=0)
    request.step("queue")
    request.queued_since = now
    pool.queue.add(
        Waiting(
            id=event.id,
            arrived=request.arrived,
            priority=wish.priority,
            strict=wish.strict,
            deadline=request.deadline,
            new_tokens=max(0, event.isl - best * pool.block_size),
        )
    )
    core.timer(now + nanos(core.settings.queue.wait_max), "wait", event.id)


def _place(
    core: Core,
    now: Nanos,
    request: Request,
    pool: Pool,
    targets: list[tuple[Target, Worker]],
    excluded: list[Excluded],
) -> None:
    """Choose a target, count the load there, and send the request."""
    event = request.event
    choice, costs, loose = _decide(core, request, pool, targets, now)
    if choice is None:
        core.close(now, request, "rejected", "client", 400, NEEDS_PIN)
        return
    cost = choice.cost
    request.leave_queue(now)
    request.step("dispatch")
    request.tries += 1
    request.target, request.placed = cost.target, now
    request.expected_cached = cost.overlap_tokens
    request.prefill_ahead = cost.active_prefill_tokens + event.isl - cost.overlap_tokens
    pool.turn += 1
    session = event.preferences.session
    if session is not None and core.settings.affinity.mode != "off":
        pool.affinity.bind(session, cost.target, now)
    core.load(request, pool, cost.target, cached=cost.overlap_tokens, loose=loose, now=now)
    _send(core, now, request, pool, choice, costs, excluded)
    request.current = request.attempt
    if core.settings.hedge.after is not None:
        core.timer(now + nanos(core.settings.hedge.after), "hedge", event.id)


def _decide(
    core: Core, request: Request, pool: Pool, targets: list[tuple[Target, Worker]], now: Nanos
) -> tuple[Choice | None, list[Cost], int]:
    """Choose a target; return the choice, what was priced for it, and the request's blocks without a hash."""
    if core.settings.mode in BLIND and not _directed(core, request):
        # Nobody compares costs: only what is chosen is priced, so that a decision costs the same over any fleet.
        place, because = blind(core.settings.mode, len(targets), core.rng, pool.turn)
        costs, loose = pool.costs(request, targets[place : place + 1], now)
        return Choice(costs[0], because), costs, loose
    costs, loose = pool.costs(request, targets, now)
    return _choose(core, request, pool, costs, now), costs, loose


def preview(core: Core, request: Request, was: Target, now: Nanos) -> tuple[Choice, Cost] | None:
    """Return where a request would go, and what it costs on ``was``, without placing it.

    None where nothing can be compared: nobody could take it, or ``was`` is no candidate here.
    """
    pool = core.pools[request.event.model]
    targets, _, _ = eligible(core, request, pool, now)
    mine = [pair for pair in targets if pair[0] == was]
    if not mine:
        return None
    choice, _, _ = _decide(core, request, pool, targets, now)
    return None if choice is None else (choice, pool.costs(request, mine, now)[0][0])


def _directed(core: Core, request: Request) -> bool:
    """Whether a pin or a session's home may decide instead of the mode."""
    wish = request.event.preferences
    return wish.worker is not None or (wish.session is not None and core.settings.affinity.mode != "off")


def hedge(core: Core, now: Nanos, request: Request, pool: Pool) -> None:
    """Send a request to a second worker as well, where one can take it at once."""
    assert request.target is not None
    first = request.target
    candidates, excluded, _ = eligible(core, request, pool, now)
    targets = [pair for pair in candidates if pair[0].worker != first.worker]
    if not targets or _all_busy(core, pool, targets):
        return
    costs, loose = pool.costs(request, targets, now)
    choice = _choose(core, request, pool, costs, now)
    if choice is None:
        return
    cost = choice.cost
    pool.hedges += 1
    core.load(request, pool, cost.target, cached=cost.overlap_tokens, loose=loose, now=now, owner=HEDGE)
    because = f"no first token from {first} after {seconds(now - request.placed):.3g} s: {choice.because}"
    choice = Choice(cost, because)
    _send(
        core, now, request, pool, choice, costs, [*excluded, Excluded(target=first, reason="has the request already")]
    )
    request.hedge = Hedge(
        attempt=request.attempt,
        target=cost.target,
        placed=now,
        prefill_ahead=cost.active_prefill_tokens + request.event.isl - cost.overlap_tokens,
        cached=cost.overlap_tokens,
        loose=loose,
    )


def _send(
    core: Core,
    now: Nanos,
    request: Request,
    pool: Pool,
    choice: Choice,
    costs: list[Cost],
    excluded: list[Excluded],
) -> None:
    """Begin an attempt on the chosen target, and say why it is this one."""
    event, target = request.event, choice.cost.target
    worker = core.roster.workers[target.worker]
    request.attempt += 1
    request.legs.append(Leg(role=worker.card.role, target=target, dispatched=now))
    worker.requests += 1
    worker.breaker.dispatched(now)
    pool.routed(target, event.blocks, event.text, now)
    decision = Decision(
        request=event.id,
        attempt=request.attempt,
        at=now,
        model=event.model,
        mode=core.settings.mode,
        chosen=target,
        because=choice.because,
        isl=event.isl,
        blocks=len(event.blocks),
        queued=seconds(request.queued),
        candidates=costs,
        excluded=excluded,
        expected_cached_tokens=choice.cost.overlap_tokens,
        resumed=request.resumed,
        temperature=_temperature(core, request),
    )
    core.out.append(Dispatch(id=event.id, attempt=request.attempt, target=target, card=worker.card, decision=decision))


def _choose(core: Core, request: Request, pool: Pool, costs: list[Cost], now: Nanos) -> Choice | None:
    """Take the pin, the session's home or the mode's choice; None where mode direct has no pin."""
    wish, mode = request.event.preferences, core.settings.mode
    if wish.worker is not None:
        best = min(costs, key=lambda cost: cost.total)
        return pinned(best, f"pinned to {best.target} by the request")
    if mode == "direct":
        return None
    affinity = core.settings.affinity
    if wish.session is not None and affinity.mode != "off":
        home = pool.affinity.target(wish.session, now)
        if affinity.mode == "hard":
            for cost in costs:
                if cost.target == home:
                    return pinned(cost, f"session {wish.session} is at home on {home}")
        else:
            costs[:] = [discounted(cost, home, affinity.discount) for cost in costs]
    return select(mode, costs, core.rng, temperature=_temperature(core, request), turn=pool.turn)


def _temperature(core: Core, request: Request) -> float:
    wished = request.event.preferences.temperature
    return core.settings.cost.temperature if wished is None else wished

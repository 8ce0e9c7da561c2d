"""Stages of a request (encode, prefill, decode): chooses the next one, and handles the end or failure of one."""

from typing import NamedTuple

from penstock.kernel.machine import Nanos, seconds
from penstock.kernel.values import Role, WorkerCard, WorkerId
from penstock.router import stage_graph
from penstock.router.events import Cost, Excluded, Failed
from penstock.router.model_pool import LinkFault, ModelPool
from penstock.router.requests.request_close import abort, abort_remote, blame, let_go, source_of, works
from penstock.router.routed_request import STAGE, Remote, RoutedRequest
from penstock.router.router_state import RouterState
from penstock.router.selection.cost import cheapest_of
from penstock.router.selection.select import Eligible, available, costs_of, eligible
from penstock.router.stage_graph import AT_ONCE, StagePath
from penstock.router.workers.roster import RosterWorker

FETCHES_MAX = 2
"""Workers that are sent to fetch one held prefill: what two could not fetch is computed again."""


class NextStage(NamedTuple):
    """The stage that comes next, and the workers that could do it."""

    stage: Role
    eligible: Eligible
    source: WorkerCard | None = None
    """The worker that holds the prompt's KV, for stage ``decode``."""


def next_stage(core: RouterState, now: Nanos, request: RoutedRequest, pool: ModelPool) -> NextStage:
    """Return the stage that a request needs next; ``request.flow`` has the reason."""
    event, remote = request.event, request.remote
    if remote is not None and remote.stage == "prefill":
        source = source_of(core, request)
        if source is not None and pool.roles.answers:
            return NextStage(
                "decode", _with_sound_links(pool, source.id, available(core, request, pool, now, "decode")), source
            )
        if source is None:
            lose(core, request, pool, f"worker {remote.target.worker}, which held its KV, is gone", released=True)
        else:
            lose(core, request, pool, "no worker is there that could take it", released=False)
    final = eligible(core, request, pool, now)
    if pool.roles.plain and final.targets:
        return NextStage("aggregated", final)
    if not final.targets and pool.roles.paired:
        pair = _paired_stage(core, now, request, pool)
        final = Eligible([], [], False) if pair.eligible.targets else available(core, request, pool, now)
        return NextStage("aggregated", final) if final.targets else pair
    if not final.targets and pool.roles.has("prefill"):
        # Slower than it should be, but better than no answer.
        instead = eligible(core, request, pool, now, "prefill")
        if instead.targets:
            why = final.reasons or "there is none"
            request.flow = f"no worker whose role is to answer is available ({why}): a prefill worker does all of it"
            return NextStage("aggregated", instead)
    if not final.targets:
        final = available(core, request, pool, now)
    if not pool.roles.splits or event.whole:
        return NextStage("aggregated", final)
    encoding = ""
    if event.media and pool.roles.has("encode"):
        if not request.encoded:
            candidates = _encode_candidates(core, now, request, pool)
            if candidates is not None:
                return NextStage("encode", candidates)
        encoding = _encoding_text(request)
    prefilling, request.flow = _remote_candidates(core, now, request, pool, final)
    if encoding:
        request.flow = f"{encoding}; {request.flow}" if request.flow else encoding
    return NextStage("aggregated", final) if prefilling is None else NextStage("prefill", prefilling)


def _with_sound_links(pool: ModelPool, source: WorkerId, takers: Eligible) -> Eligible:
    """Return who can fetch a worker's KV without those whose link to it is broken, where any other is left."""
    broken = {other for (one, other), fault in pool.roles.links.items() if one == source and fault.broken}
    sound = [each for each in takers.targets if each[0].worker not in broken]
    if not broken or not sound:
        return takers
    reason = f"hand-offs from {source} to it fail"
    cut = [Excluded(target=target, reason=reason) for target, _ in takers.targets if target.worker in broken]
    return Eligible(sound, [*takers.excluded, *cut], False)


def _paired_stage(core: RouterState, now: Nanos, request: RoutedRequest, pool: ModelPool) -> NextStage:
    """Return the prefill of a request for workers that do nothing but their roles, whatever it costs.

    It has no candidates where one of the two workers is missing, or where they can't make the answer together.
    """
    takers = available(core, request, pool, now, "decode")
    if request.event.undivided:
        why = "goes on with one prefill each, which gives one answer to each prompt, and no logprobs of the prompt"
        return NextStage("decode", Eligible([], [Excluded(target=one, reason=why) for one, _ in takers.targets], True))
    if not takers.targets:
        return NextStage("decode", takers)
    request.flow = f"remote prefill: {takers.targets[0][0]} does not prefill"
    return NextStage("prefill", available(core, request, pool, now, "prefill"))


def _encode_candidates(core: RouterState, now: Nanos, request: RoutedRequest, pool: ModelPool) -> Eligible | None:
    """Return the candidates to encode a request's media; None where all are encoded, or nobody can do it."""
    media = request.event.media
    missing = pool.embeddings.missing(media)
    candidates = eligible(core, request, pool, now, "encode") if missing else None
    request.encode = tuple(missing)
    request.media_cached = len(media) - len(missing)
    if candidates is None or not candidates.targets:
        request.encoded = True
        pool.counts.media["cached"] += request.media_cached
        return None
    request.flow = f"{len(missing)} of {len(media)} images or the like are to be encoded first"
    return candidates


def _encoding_text(request: RoutedRequest) -> str:
    """Return in words what is encoded of a request's media."""
    media, cached = len(request.event.media), request.media_cached or 0
    if cached == media:
        return f"all {media} images or the like were encoded already"
    where = "by an encode worker" if request.encode_done else "by the worker that prefills"
    return f"{media - cached} of {media} images or the like are encoded {where}"


def _remote_candidates(
    core: RouterState, now: Nanos, request: RoutedRequest, pool: ModelPool, final: Eligible
) -> tuple[Eligible | None, str]:
    """Return the candidates for a remote prefill, or None where there is to be none; and why."""
    if request.local:
        return None, request.local
    if not pool.roles.has("prefill") or not final.targets:
        return None, "no remote prefill: there is no prefill worker" if final.targets else ""
    if not any(pool.roles.speaks(worker.card) for _, worker in final.targets):
        return None, f"no remote prefill: {final.targets[0][0]} can take no KV over"
    remote = eligible(core, request, pool, now, "prefill")
    if not remote.targets:
        return None, f"no remote prefill: no prefill worker is available: {remote.reasons}"
    settings = core.settings.handoff
    if settings.conditional == "off":
        return remote, "remote prefill: router.handoff.conditional is off"
    here, here_cost = _cheapest_candidate(request, pool, final, now, "aggregated")
    there, there_cost = _cheapest_candidate(request, pool, remote, now, "prefill")
    blocks = len(request.prompt.blocks) - here_cost.overlap_blocks
    far = _stage_path(request, pool, there, there_cost, transfer_ms=pool.speeds.ms_per_block * max(0, blocks))
    near = _stage_path(request, pool, here, here_cost, transfer_ms=0.0)
    targets = core.slo.of(request.event.preferences.service_class)
    worth, why = stage_graph.remote_prefill(settings, targets, request.prompt.isl, far, near)
    if not worth:
        pool.counts.handoffs["local"] += 1
    return (remote if worth else None), why


def _cheapest_candidate(
    request: RoutedRequest, pool: ModelPool, candidates: Eligible, now: Nanos, stage: Role
) -> tuple[RosterWorker, Cost]:
    costs, _ = costs_of(pool, request, candidates.targets, now, stage)
    place = int(cheapest_of(costs)[0])
    return candidates.targets[place][1], costs[place]


def _stage_path(
    request: RoutedRequest, pool: ModelPool, worker: RosterWorker, cost: Cost, *, transfer_ms: float
) -> StagePath:
    speed = pool.speeds.speed_of(worker)
    new = request.prompt.isl - cost.overlap_tokens
    stall = 1e3 * speed.prefill_slope * new
    step = 1e3 * ((worker.speed[2] if worker.speed else 0.0) + speed.decode_slope * cost.active_blocks)
    return StagePath(
        worker=str(cost.target),
        new=new,
        queued=cost.active_prefill_tokens,
        running=cost.active_requests,
        ttft_ms=1e3 * (speed.prefill_intercept + speed.prefill_slope * cost.active_prefill_tokens)
        + stall
        + transfer_ms,
        stall_ms=stall,
        itl_ms=step + stall / max(1.0, pool.counts.output_mean),
    )


# --- what comes of a stage ------------------------------------------------------------------------------------------


def done(
    core: RouterState, now: Nanos, request: RoutedRequest, pool: ModelPool, *, kv_retained: bool, cached: int | None
) -> bool:
    """A stage before the last is done; tell whether the next one is to be chosen now."""
    remote = request.remote
    assert remote is not None
    remote.done = True
    request.staged += 1
    core.mark_leg(request, remote.leg, last=now)
    pool.active.first_token(request.id, now, STAGE)
    core.publish(pool, core.leg_id(request.id), "first", remote.target)
    core.freed[pool.model] = None
    worker = core.roster.get(remote.target.worker)
    if worker is not None:
        works(core, now, request, worker, remote.placed)
    if remote.stage == "encode":
        request.encoded = request.encode_done = True
        items = [request.event.media[place] for place in request.encode]
        # What somebody else had it encode meanwhile, it took from its own cache.
        fresh = len(pool.embeddings.missing(items))
        pool.embeddings.add(items)
        pool.counts.media["encoded"] += fresh
        pool.counts.media["cached"] += len(items) - fresh
        request.encode = ()
        core.unstage(request, pool)
    else:
        pool.speeds.fit.add(float(remote.prefill_ahead), seconds(now - remote.placed))
        request.remote_cached = cached
        if remote.protocol in AT_ONCE:
            if request.phase == "streaming":
                arrived(core, request, pool)
            return False  # the worker that goes on has had the request all the time
        if not kv_retained:
            pool.counts.handoffs["empty"] += 1
            request.local = f"no hand-off: {remote.target} holds nothing of it"
            core.unstage(request, pool)
    request.step("staged")
    request.tries, request.tried = 0, []
    return True


def arrived(core: RouterState, request: RoutedRequest, pool: ModelPool) -> None:
    """The worker that answers has what another one made."""
    if request.remote is not None and request.target is not None:
        pool.roles.links.pop((request.remote.target.worker, request.target.worker), None)
    pool.counts.handoffs["done"] += 1
    core.unstage(request, pool)


def failed(core: RouterState, now: Nanos, request: RoutedRequest, pool: ModelPool, event: Failed) -> bool:
    """A stage before the last has failed; tell whether the request goes on, from where it was before it."""
    remote = request.remote
    assert remote is not None
    blame(core, now, request, remote.target.worker, remote.placed, event)
    core.mark_leg(request, remote.leg, last=now, failure=event.reason)
    request.note_failure(event)
    _link_failed(request, pool, event)
    goes_on = now < request.deadline and event.retryable and not request.at_fault
    if goes_on:
        goes_on = _other_way(core, now, request, pool, remote, event.reason)
    if request.on_worker:
        abort_final(core, request, "the prefill that it waited for has failed")
        if goes_on:
            core.release(request, pool)
            request.step("retry")
            request.target = None
    elif goes_on:
        request.step("retry")
    core.unstage(request, pool)
    return goes_on


def failed_aside(core: RouterState, now: Nanos, request: RoutedRequest, pool: ModelPool, event: Failed) -> None:
    """A stage failed whose KV was there before, or whose result is not needed yet: the request stays where it is."""
    remote = request.remote
    assert remote is not None
    blame(core, now, request, remote.target.worker, remote.placed, event)
    core.mark_leg(request, remote.leg, last=now, failure=event.reason)
    core.unstage(request, pool)


def _other_way(
    core: RouterState, now: Nanos, request: RoutedRequest, pool: ModelPool, remote: Remote, reason: str
) -> bool:
    """Choose what becomes of a request whose stage failed: without it, or on another worker."""
    if remote.stage == "encode":
        request.encoded = True
        pool.counts.media["failed"] += len(request.encode)
        request.encode = ()
        return True
    pool.counts.handoffs["failed"] += 1
    if pool.roles.fallback_tokens >= 1.0 and not pool.roles.paired:
        pool.roles.fallback_tokens -= 1.0
        pool.counts.handoffs["fallback"] += 1
        request.local = f"no remote prefill: it failed on {remote.target}"
        core.note(
            "prefill_fallback",
            f"request {request.id} is prefilled where it is decoded, since its prefill failed: {reason}",
            request=request.id,
            worker=remote.target.worker,
        )
        return True
    request.tried.append((remote.target.worker, remote.epoch))
    request.tries += 1
    return request.tries < core.settings.attempts_max


def _link_failed(request: RoutedRequest, pool: ModelPool, event: Failed) -> None:
    """Count a failure of one side, which answers, of a hand-off for which both were asked at once."""
    remote, target = request.remote, request.target
    if remote is None or target is None or remote.protocol not in AT_ONCE or not event.worker_at_fault:
        return
    if event.status is not None:
        fault = pool.roles.links.setdefault((remote.target.worker, target.worker), LinkFault())
        fault.count, fault.reason = fault.count + 1, event.reason


def source_is_suspect(request: RoutedRequest, event: Failed) -> bool:
    """Whether the one that holds a request's KV may have failed, and not the one that was to fetch it.

    That one is alive: it has answered, with an error and before its first token. vLLM says nothing else but
    "Internal server error" where NIXL lost the other side in the middle of a transfer.
    """
    return request.phase == "prefill" and request.handed and event.worker_at_fault and event.status is not None


def fetch_failed(core: RouterState, request: RoutedRequest, pool: ModelPool, event: Failed, *, suspect: bool) -> None:
    """The worker that was to go on has failed before its first token: decide from what it goes on.

    Args:
        suspect: see `source_is_suspect`; what such a worker holds is not fetched again.
    """
    remote = request.remote
    if remote is None:
        return
    if remote.protocol in AT_ONCE:
        _link_failed(request, pool, event)
        abort_remote(core, request, "the worker that was to go on has failed")
        core.unstage(request, pool)
    elif suspect or remote.fetches >= FETCHES_MAX:
        lose(core, request, pool, event.reason, released=False)


def lose(core: RouterState, request: RoutedRequest, pool: ModelPool, reason: str, *, released: bool) -> None:
    """Give up what is held for a request; it is computed again.

    Args:
        released: it is gone by itself, with its worker.
    """
    pool.counts.handoffs["lost"] += 1
    request.local = f"no remote prefill: its KV was lost ({reason})"
    if not released:
        let_go(core, request, pool)
    core.unstage(request, pool)


def abort_final(core: RouterState, request: RoutedRequest, reason: str) -> None:
    """Stop the worker that was to answer."""
    if request.target is not None:
        core.mark(request, failure=reason)
        abort(core, request, request.current, request.target, reason)

"""Handlers of what workers report: their lives, LoRA adapters and KV events; and of what other routers place on them.

KV events are applied to the index in order, and a replay of missing ones is requested. Requests that other router
replicas placed count as load, as ours do.
"""

from penstock.kernel.hashing import SCHEME
from penstock.kernel.machine import Nanos, nanos
from penstock.kernel.values import KvCleared, KvRemoved, Target, WorkerId
from penstock.router.events import (
    AdapterChange,
    AdapterDesired,
    AdapterDropped,
    AdapterFailed,
    AdapterLoaded,
    AdapterMissing,
    AdaptersListed,
    AdaptersWanted,
    KvObserved,
    KvSourceJoining,
    KvSourceLost,
    PeerGone,
    PeerUpdate,
    ReplayEnded,
    ReplayWanted,
    TiersMeasured,
    WorkerCordoned,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
    WorkerMeasured,
    WorkerReady,
)
from penstock.router.kv_index.kv_event_stream import ALL, KvEventStream, StreamOutcome
from penstock.router.model_pool import ModelPool
from penstock.router.requests.request_close import settle_releases
from penstock.router.routed_request import Believed
from penstock.router.router_state import RouterState
from penstock.router.workers.roster import RosterWorker


def joined(core: RouterState, now: Nanos, event: WorkerJoined) -> None:
    card = event.card
    pool = core.pools.get(card.model)
    if pool is None:
        pool = core.make_pool(card.model)
    refusal = pool.adopt(card)
    if refusal is not None:
        core.note("worker_refused", f"worker {card.id} is refused: {refusal}", worker=card.id)
        return
    known = core.roster.get(card.id)
    if known is not None and card.epoch > known.card.epoch and card.incarnation == known.card.incarnation:
        return _change_role(core, now, pool, known, event)
    if known is not None and card.epoch > known.card.epoch:
        _remove_worker(core, known, f"it came back with epoch {card.epoch}")
    core.freed[pool.model] = None
    worker = core.roster.join(card, event.ready, now)
    if worker is None:
        return
    pool.count(card, 1)
    pool.adapters.join(card.id, card.adapter_slots, card.adapters)
    if pool.index.exact is not None:
        native = card.hash_scheme == SCHEME
        for target in worker.targets[: len(card.events)]:
            pool.index.streams[target] = KvEventStream(kv_blocks=card.kv_blocks)
            pool.index.exact.join(
                target,
                native=native,
                alike=None if native else card.hash_scheme,
                # It computes the last block of a prompt that it holds in full once more, into a block of its own, as
                # it does for equal prompts that run at the same time; each of them is stored and removed by itself.
                copies=card.engine == "vllm",
            )
    settle_releases(core, pool)
    guessed = pool.index.indexed and not card.events
    core.note(
        "worker_joined",
        f"worker {card.id} serves {card.model} at {card.url}"
        + ("" if card.role == "aggregated" else f" as {card.role}")
        + ("; it announces no KV events, so its cache is guessed" if guessed else ""),
        worker=card.id,
    )


def _change_role(core: RouterState, now: Nanos, pool: ModelPool, known: RosterWorker, event: WorkerJoined) -> None:
    """A worker has another role from now on; it is the same engine, and its cache is what it was."""
    card, before = event.card, known.card
    core.roster.renew(card, event.ready, now)
    pool.count(before, -1)
    pool.count(card, 1)
    core.note("worker_changed", f"worker {card.id} is {card.role} now, and was {before.role}", worker=card.id)
    settle_releases(core, pool)
    core.freed[pool.model] = None


def ready(core: RouterState, now: Nanos, event: WorkerReady) -> None:
    if core.roster.move(event.worker, event.epoch, "ready", now):
        model = core.roster.workers[event.worker].card.model
        core.freed[model] = None
        settle_releases(core, core.pools[model])


def draining(core: RouterState, now: Nanos, event: WorkerDraining) -> None:
    if core.roster.move(event.worker, event.epoch, "drain", now):
        core.note("worker_draining", f"worker {event.worker} takes no new requests", worker=event.worker)
        # Requests that wait for it alone must be looked at now.
        core.freed[core.roster.workers[event.worker].card.model] = None


def left(core: RouterState, now: Nanos, event: WorkerLeft) -> None:
    worker = core.roster.get(event.worker)
    if worker is None or worker.card.epoch != event.epoch:
        core.roster.stale += 1
        return
    _remove_worker(core, worker, event.reason)


def cordoned(core: RouterState, now: Nanos, event: WorkerCordoned) -> None:
    worker = core.roster.get(event.worker)
    if worker is None:
        core.dropped += 1
        return
    reasons = worker.doubts if event.doubt else worker.cordons
    if event.on and event.reason not in reasons:
        reasons.append(event.reason)
        core.note("worker_cordoned", f"worker {event.worker}: {event.reason}", worker=event.worker)
    elif not event.on and event.reason in reasons:
        reasons.remove(event.reason)
    core.roster.changed()
    core.freed[worker.card.model] = None


def measured(core: RouterState, now: Nanos, event: WorkerMeasured) -> None:
    worker = core.roster.get(event.worker)
    if worker is None:
        core.dropped += 1
        return
    worker.speed = (event.prefill_intercept, event.prefill_slope, event.decode_base, event.decode_slope)


def tiers_measured(core: RouterState, now: Nanos, event: TiersMeasured) -> None:
    worker = core.roster.get(event.worker)
    if worker is None:
        core.dropped += 1
        return
    core.pools[worker.card.model].index.tier_costs.report(event.worker, event.costs)


def _remove_worker(core: RouterState, worker: RosterWorker, reason: str) -> None:
    card = worker.card
    core.roster.leave(card.id, card.epoch)
    core.pools[card.model].drop(worker)
    core.pools[card.model].count(card, -1)
    core.replays = {number: target for number, target in core.replays.items() if target.worker != card.id}
    core.note("worker_left", f"worker {card.id} is gone: {reason}", worker=card.id)
    core.freed[card.model] = None


# --- LoRA adapters ----------------------------------------------------------------------------------------------------


def adapters_listed(core: RouterState, now: Nanos, event: AdaptersListed) -> None:
    worker = _worker_of(core, event.worker, event.epoch)
    if worker is not None:
        pool = _pool_of(core, worker)
        pool.adapters.observed(event.worker, event.names, event.pinned)
        core.freed[pool.model] = None


def adapter_loaded(core: RouterState, now: Nanos, event: AdapterLoaded) -> None:
    worker = _worker_of(core, event.worker, event.epoch)
    if worker is not None:
        pool = _pool_of(core, worker)
        pool.adapters.loaded(event.worker, event.adapter, event.seconds)
        core.freed[pool.model] = None


def adapter_failed(core: RouterState, now: Nanos, event: AdapterFailed) -> None:
    worker = _worker_of(core, event.worker, event.epoch)
    if worker is None:
        return
    pool = _pool_of(core, worker)
    pool.adapters.failed(event.worker, event.adapter, event.reason, now)
    text = f"worker {event.worker} could not load adapter {event.adapter}: {event.reason}"
    core.note("adapter_failed", text, worker=event.worker, adapter=event.adapter)
    core.freed[pool.model] = None


def adapter_missing(core: RouterState, now: Nanos, event: AdapterMissing) -> None:
    """An engine answered that it does not hold an adapter: it is loaded again."""
    worker = _worker_of(core, event.worker, event.epoch)
    if worker is None:
        return
    plan = _pool_of(core, worker).adapters.missing(event.worker, event.adapter)
    if plan is not None:
        _change_adapters(core, worker, event.adapter, plan.unload)


def adapter_desired(core: RouterState, now: Nanos, event: AdapterDesired) -> None:
    """An operator wants an adapter in memory: it is loaded where that costs least, unless a worker holds it."""
    pool = core.pools.get(event.model)
    if pool is not None and not pool.adapters.holders(event.adapter):
        _place_adapter(core, now, pool, event.adapter, 1)


def adapters_wanted(core: RouterState, now: Nanos, event: AdaptersWanted) -> None:
    """Adapters are to be on so many workers: those that lack some are loaded, and no more than that are kept for it."""
    pool = core.pools.get(event.model)
    if pool is None:
        return
    fewer = pool.adapters.want(event.workers)
    if not event.decides:
        return
    for adapter, count in fewer.items():
        for worker in pool.adapters.idle_holders(adapter)[:count]:
            pool.adapters.forget(worker, adapter)
            _change_adapters(core, core.roster.workers[worker], None, (adapter,))
    for adapter, lacking in pool.adapters.lacking().items():
        _place_adapter(core, now, pool, adapter, lacking)
    core.freed[pool.model] = None


def adapter_dropped(core: RouterState, now: Nanos, event: AdapterDropped) -> None:
    """An operator wants an adapter out of every memory; requests that run with it are finished by their engines."""
    pool = core.pools.get(event.model)
    for worker in [] if pool is None else pool.adapters.holders(event.adapter):
        assert pool is not None
        pool.adapters.forget(worker, event.adapter)
        known = core.roster.get(worker)
        if known is not None and event.unload:
            _change_adapters(core, known, None, (event.adapter,))


def _change_adapters(core: RouterState, worker: RosterWorker, load: str | None, unload: tuple[str, ...]) -> None:
    """Have adapters of a worker unloaded, then one loaded."""
    core.out.append(AdapterChange(card=worker.card, load=load, unload=unload))


def _place_adapter(core: RouterState, now: Nanos, pool: ModelPool, adapter: str, count: int) -> None:
    """Have an adapter loaded on so many more workers, as far as they have room, where that costs least."""
    holders = pool.adapters.holders(adapter)
    loads = {
        one.card.id: sum(pool.active.load(target).requests for target in one.targets)
        for one in core.roster
        if one.card.model == pool.model and one.card.id not in holders and one.why_not(now) is None
    }
    for _ in range(count):
        worker = pool.adapters.roomiest(adapter, loads, now)
        if worker is None:
            return
        del loads[worker]
        plan = pool.adapters.prefetch(worker, adapter)
        _change_adapters(core, core.roster.workers[worker], adapter, plan.unload)


def _worker_of(core: RouterState, name: WorkerId, epoch: int) -> RosterWorker | None:
    """Return a worker whose engine is the one that an event means; else count the event as dropped."""
    worker = core.roster.get(name)
    if worker is None or worker.card.incarnation != epoch:
        core.dropped += 1
        return None
    return worker


def _pool_of(core: RouterState, worker: RosterWorker) -> ModelPool:
    return core.pools[worker.card.model]


# --- KV events --------------------------------------------------------------------------------------------------------


def observed(core: RouterState, now: Nanos, event: KvObserved) -> None:
    target = Target(event.worker, event.rank)
    stream, pool = _stream_of(core, target, event.epoch)
    if stream is not None and pool is not None:
        _apply_outcome(core, pool, target, stream.observe(event))


def replay_ended(core: RouterState, now: Nanos, event: ReplayEnded) -> None:
    target = core.replays.get(event.id) if event.more else core.replays.pop(event.id, None)
    stream, pool = (None, None) if target is None else _stream_of(core, target, None)
    if target is None or stream is None or pool is None:
        core.dropped += 1
        return
    _apply_outcome(core, pool, target, stream.replayed(event))


def source_joining(core: RouterState, now: Nanos, event: KvSourceJoining) -> None:
    stream, _ = _stream_of(core, Target(event.worker, event.rank), None)
    if stream is not None:
        stream.joining = event.on


def source_lost(core: RouterState, now: Nanos, event: KvSourceLost) -> None:
    target = Target(event.worker, event.rank)
    stream, pool = _stream_of(core, target, None)
    if stream is not None and pool is not None:
        _apply_outcome(core, pool, target, stream.lost(event.reason))


def compared(core: RouterState, pool: ModelPool, target: Target, believed: Believed, had: int, isl: int) -> None:
    """Compare what an answer took from a target's cache with what was believed to be there when it was chosen.

    What took the place of its own new blocks went after the engine had looked for the prompt; the rest may have gone
    before.
    """
    stream = pool.index.streams.get(target)
    if stream is not None:
        evicted = max(0, stream.removed - believed.removed - (isl - had) // pool.index.block_size)
        _apply_outcome(core, pool, target, stream.compared(believed.tokens, had, evicted, pool.index.block_size))


def _stream_of(core: RouterState, target: Target, epoch: int | None) -> tuple[KvEventStream | None, ModelPool | None]:
    """Return a target's event stream and its pool; count what comes from a worker or epoch that is not there."""
    worker = core.roster.get(target.worker)
    if worker is None or (epoch is not None and worker.card.incarnation != epoch):
        core.dropped += 1
        return None, None
    pool = core.pools[worker.card.model]
    return pool.index.streams.get(target), pool


def _apply_outcome(core: RouterState, pool: ModelPool, target: Target, outcome: StreamOutcome) -> None:
    """Carry a stream's verdict into the index, in order, and ask for what is missing."""
    assert pool.index.exact is not None
    stream = pool.index.streams[target]
    if outcome.clear:
        pool.index.exact.clear(target)
        stream.removed += ALL
    for event in outcome.events:
        pool.index.exact.apply(target, event)
        if isinstance(event, KvRemoved):
            stream.removed += ALL if event.window else len(event.hashes)  # one of a window may cost a whole prefix
        elif isinstance(event, KvCleared):
            stream.removed += ALL
    if outcome.replay_from is not None:
        core.replay_id += 1
        core.replays[core.replay_id] = target
        core.out.append(
            ReplayWanted(id=core.replay_id, worker=target.worker, rank=target.rank, first=outcome.replay_from)
        )
    if outcome.note is not None:
        core.note("kv_stream", f"worker {target}: {outcome.note}", worker=target.worker)


# --- other routers ----------------------------------------------------------------------------------------------------


STALE_AFTER = 300.0
"""Seconds of silence after which a request of another router counts as load no more: as Dynamo's router has it."""


def peer_update(core: RouterState, now: Nanos, event: PeerUpdate) -> None:
    placement = event.placement
    pool = core.pools.get(placement.model)
    if pool is None:
        core.dropped += 1
        return
    if placement.step == "placed":
        prompt = placement.prompt
        pool.active.place(
            placement.id,
            placement.target,
            prefill_tokens=prompt.isl - placement.cached,
            blocks=prompt.blocks,
            unhashed_blocks=max(0, -(-prompt.isl // pool.index.block_size) - len(prompt.blocks)),
            now=now,
            router=event.router,
            osl_blocks=-(-placement.osl // pool.index.block_size),
        )
        pool.index.routed(placement.target, prompt, now)
        if placement.adapter is not None:
            worker = placement.target.worker
            pool.adapters.heard(worker, placement.adapter, placement.unloaded, event.router, placement.id)
        if placement.work and pool.fair is not None:
            pool.fair.heard(pool.fair.name(placement.tenant), placement.work, now)
        if placement.session is not None and core.settings.affinity.mode != "off":
            pool.affinity.bind(placement.session, placement.target, now)
        if not pool.active.sweeping:
            # One sweep for silent requests is planned at a time: one per placement would be as many as there are
            # placements in minutes.
            pool.active.sweeping = True
            core.timer(now + nanos(STALE_AFTER), "sweep", placement.model)
    elif placement.step == "first":
        pool.active.first_token(placement.id, now, event.router)
    elif placement.step == "grown":
        pool.active.grown(placement.id, placement.tokens // pool.index.block_size, now, event.router)
    else:
        pool.active.end(placement.id, event.router)
    core.freed[pool.model] = None


def peer_left(core: RouterState, now: Nanos, event: PeerGone) -> None:
    for pool in core.pools.values():
        pool.active.drop_router(event.router)
        core.freed[pool.model] = None


def sweep(core: RouterState, now: Nanos, model: str) -> None:
    """Forget requests of other routers that have gone silent, and sweep again when the next may be due."""
    active, stale = core.pools[model].active, nanos(STALE_AFTER)
    active.expire(now - stale)
    longest = active.longest_silent()
    active.sweeping = longest is not None
    if longest is not None:
        core.timer(longest + stale + 1, "sweep", model)

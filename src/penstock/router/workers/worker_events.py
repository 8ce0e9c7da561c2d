"""Handlers of worker events: joined, ready, draining, left, cordoned, measured."""

from penstock.kernel.hashing import SCHEME
from penstock.kernel.machine import Nanos
from penstock.router.events import (
    TiersMeasured,
    WorkerCordoned,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
    WorkerMeasured,
    WorkerReady,
)
from penstock.router.kv_index.kv_event_stream import KvEventStream
from penstock.router.model_pool import ModelPool
from penstock.router.requests.prefill_release import settle
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
        return _changed(core, now, pool, known, event)
    if known is not None and card.epoch > known.card.epoch:
        _remove(core, known, f"it came back with epoch {card.epoch}")
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
    settle(core, pool)
    guessed = pool.index.indexed and not card.events
    core.note(
        "worker_joined",
        f"worker {card.id} serves {card.model} at {card.url}"
        + ("" if card.role == "aggregated" else f" as {card.role}")
        + ("; it announces no KV events, so its cache is guessed" if guessed else ""),
        worker=card.id,
    )


def _changed(core: RouterState, now: Nanos, pool: ModelPool, known: RosterWorker, event: WorkerJoined) -> None:
    """A worker has another role from now on; it is the same engine, and its cache is what it was."""
    card, before = event.card, known.card
    core.roster.renew(card, event.ready, now)
    pool.count(before, -1)
    pool.count(card, 1)
    core.note("worker_changed", f"worker {card.id} is {card.role} now, and was {before.role}", worker=card.id)
    settle(core, pool)
    core.freed[pool.model] = None


def ready(core: RouterState, now: Nanos, event: WorkerReady) -> None:
    if core.roster.move(event.worker, event.epoch, "ready", now):
        model = core.roster.workers[event.worker].card.model
        core.freed[model] = None
        settle(core, core.pools[model])


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
    _remove(core, worker, event.reason)


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


def _remove(core: RouterState, worker: RosterWorker, reason: str) -> None:
    card = worker.card
    core.roster.leave(card.id, card.epoch)
    core.pools[card.model].drop(worker)
    core.pools[card.model].count(card, -1)
    core.replays = {number: target for number, target in core.replays.items() if target.worker != card.id}
    core.note("worker_left", f"worker {card.id} is gone: {reason}", worker=card.id)
    core.freed[card.model] = None

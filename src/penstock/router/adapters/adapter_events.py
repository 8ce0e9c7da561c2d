"""Handlers of what became of LoRA adapters: loaded, failed, missing, listed, and an operator's wishes."""

from penstock.kernel.machine import Nanos
from penstock.kernel.values import WorkerId
from penstock.router.events import (
    AdapterChange,
    AdapterDesired,
    AdapterDropped,
    AdapterFailed,
    AdapterLoaded,
    AdapterMissing,
    AdaptersListed,
    AdaptersWanted,
)
from penstock.router.model_pool import ModelPool
from penstock.router.router_state import RouterState
from penstock.router.workers.roster import RosterWorker


def listed(core: RouterState, now: Nanos, event: AdaptersListed) -> None:
    worker = _known(core, event.worker, event.epoch)
    if worker is not None:
        pool = _pool(core, worker)
        pool.adapters.observed(event.worker, event.names, event.pinned)
        core.freed[pool.model] = None


def loaded(core: RouterState, now: Nanos, event: AdapterLoaded) -> None:
    worker = _known(core, event.worker, event.epoch)
    if worker is not None:
        pool = _pool(core, worker)
        pool.adapters.loaded(event.worker, event.adapter, event.seconds)
        core.freed[pool.model] = None


def failed(core: RouterState, now: Nanos, event: AdapterFailed) -> None:
    worker = _known(core, event.worker, event.epoch)
    if worker is None:
        return
    pool = _pool(core, worker)
    pool.adapters.failed(event.worker, event.adapter, event.reason, now)
    text = f"worker {event.worker} could not load adapter {event.adapter}: {event.reason}"
    core.note("adapter_failed", text, worker=event.worker, adapter=event.adapter)
    core.freed[pool.model] = None


def missing(core: RouterState, now: Nanos, event: AdapterMissing) -> None:
    """An engine answered that it does not hold an adapter: it is loaded again."""
    worker = _known(core, event.worker, event.epoch)
    if worker is None:
        return
    plan = _pool(core, worker).adapters.missing(event.worker, event.adapter)
    if plan is not None:
        change(core, worker, event.adapter, plan.unload)


def desired(core: RouterState, now: Nanos, event: AdapterDesired) -> None:
    """An operator wants an adapter in memory: it is loaded where that costs least, unless a worker holds it."""
    pool = core.pools.get(event.model)
    if pool is not None and not pool.adapters.holders(event.adapter):
        _place(core, now, pool, event.adapter, 1)


def wanted(core: RouterState, now: Nanos, event: AdaptersWanted) -> None:
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
            change(core, core.roster.workers[worker], None, (adapter,))
    for adapter, lacking in pool.adapters.lacking().items():
        _place(core, now, pool, adapter, lacking)
    core.freed[pool.model] = None


def dropped(core: RouterState, now: Nanos, event: AdapterDropped) -> None:
    """An operator wants an adapter out of every memory; requests that run with it are finished by their engines."""
    pool = core.pools.get(event.model)
    for worker in [] if pool is None else pool.adapters.holders(event.adapter):
        assert pool is not None
        pool.adapters.forget(worker, event.adapter)
        known = core.roster.get(worker)
        if known is not None and event.unload:
            change(core, known, None, (event.adapter,))


def change(core: RouterState, worker: RosterWorker, load: str | None, unload: tuple[str, ...]) -> None:
    """Have adapters of a worker unloaded, then one loaded."""
    core.out.append(AdapterChange(card=worker.card, load=load, unload=unload))


def _place(core: RouterState, now: Nanos, pool: ModelPool, adapter: str, count: int) -> None:
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
        change(core, core.roster.workers[worker], adapter, plan.unload)


def _known(core: RouterState, name: WorkerId, epoch: int) -> RosterWorker | None:
    """Return a worker whose engine is the one that an event means; else count the event as dropped."""
    worker = core.roster.get(name)
    if worker is None or worker.card.incarnation != epoch:
        core.dropped += 1
        return None
    return worker


def _pool(core: RouterState, worker: RosterWorker) -> ModelPool:
    return core.pools[worker.card.model]

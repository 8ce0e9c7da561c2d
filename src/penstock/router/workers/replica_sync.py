"""Replica sync: requests that other router replicas placed count as load, as ours do."""

from penstock.kernel.machine import Nanos, nanos
from penstock.router.events import PeerGone, PeerUpdate
from penstock.router.router_state import RouterState

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

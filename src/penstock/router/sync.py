"""What do other routers' placements mean? Load that they caused counts as ours does."""

from penstock.kernel.machine import Nanos, nanos
from penstock.router.core import Core
from penstock.router.events import PeerGone, PeerUpdate


def peer_update(core: Core, now: Nanos, event: PeerUpdate) -> None:
    placement = event.placement
    pool = core.pools.get(placement.model)
    if pool is None:
        core.dropped += 1
        return
    if placement.step == "placed":
        pool.active.place(
            placement.id,
            placement.target,
            prefill_tokens=placement.isl - placement.cached,
            blocks=placement.blocks,
            loose=max(0, -(-placement.isl // pool.block_size) - len(placement.blocks)),
            now=now,
            router=event.router,
        )
        pool.routed(placement.target, placement.blocks, False, now)
        if placement.session is not None and core.settings.affinity.mode != "off":
            pool.affinity.bind(placement.session, placement.target, now)
        if not pool.active.sweeping:
            # One look for the silent ones is planned at a time: one per placement would be as many as there are
            # placements in minutes.
            pool.active.sweeping = True
            core.timer(now + nanos(core.settings.stale_after), "sweep", placement.model)
    elif placement.step == "first":
        pool.active.first_token(placement.id, now, event.router)
    elif placement.step == "grown":
        pool.active.grown(placement.id, placement.tokens // pool.block_size, now, event.router)
    else:
        pool.active.end(placement.id, event.router)
    core.freed[pool.model] = None


def peer_gone(core: Core, now: Nanos, event: PeerGone) -> None:
    for pool in core.pools.values():
        pool.active.drop_router(event.router)
        core.freed[pool.model] = None


def sweep(core: Core, now: Nanos, model: str) -> None:
    """Forget what other routers placed and then said nothing of, and look again when the next may be due."""
    active, stale = core.pools[model].active, nanos(core.settings.stale_after)
    active.expire(now - stale)
    longest = active.longest_silent()
    active.sweeping = longest is not None
    if longest is not None:
        core.timer(longest + stale + 1, "sweep", model)

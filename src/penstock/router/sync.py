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

"""Tier plans: what a pool's ``cache`` settings mean for its simulated engines."""

from penstock_kv.cache_settings import CacheSettings
from penstock_lab.simulate.tiers.tier_plan import TierPlan


def tier_plan(cache: CacheSettings) -> TierPlan:
    """Return the tiers of each engine of a pool."""
    return TierPlan(
        host=cache.host,
        disk=cache.disk,
        store=cache.object_url is not None,
        peers=cache.peers,
        order=cache.order,
        offload=cache.offload,
        write=cache.write,
    )

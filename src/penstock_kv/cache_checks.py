"""Cache checks: what is wrong with the KV tiers of a config."""

from collections.abc import Iterator

from penstock.config.checks import NO_SLEEP
from penstock.config.reading.problems import Complaint, listed
from penstock.config.settings.cluster_settings import ClusterSettings

TIERED = ("sim", "vllm")
"""Kinds of engine whose KV goes to tiers."""


def cache_complaints(settings: ClusterSettings) -> Iterator[Complaint]:
    """Check that every tier of a pool has what it needs: an engine that uses it, host memory above it, and a place."""
    for model, entry in settings.models.items():
        for name, pool in entry.pools.items():
            pool_path, cache = ("models", model, "pools", name), pool.cache
            path = (*pool_path, "cache")
            if cache.host and (pool.attached or pool.engine not in TIERED):
                hint = f"only engines of kind {listed(TIERED)} that are started here have tiers"
                yield (*path, "host"), "these engines would have no tiers", hint
            if not cache.host and (cache.disk or cache.disk_dirs or cache.object_url or cache.peers):
                yield (*path, "host"), "is 0, and all blocks pass through host memory", "give it some, such as 8GiB"
            elif bool(cache.disk) != bool(cache.disk_dirs):
                yield (*path, "disk"), "and disk_dirs need each other: how much, and where", "set both, or neither"
            if cache.host and pool.sleeping and pool.engine == "vllm" and not pool.attached:
                yield (*pool_path, "sleeping"), *NO_SLEEP

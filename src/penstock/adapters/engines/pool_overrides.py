"""Pool overrides: the `WorkerCard` fields that come from a pool's settings, since its engines do not report them."""

from collections.abc import Iterable
from typing import Any

from penstock.adapters.engines.dialects.kv_transfer_protocol import TIERS
from penstock.config.settings.cluster_settings import PoolSettings

WITH_TIERS = ("vllm", "sim")
"""Kinds of engine that get KV tiers from us."""
GUESSED = ("sim", "openai")
"""Kinds that are no override where a pool of URLs names them: each server is asked for its kind."""


def overrides_of(pool: PoolSettings, url: str | None = None) -> dict[str, Any]:
    """Return the settings' fields for each engine of a pool, or for the engine at ``url``; the rest is absent."""
    overrides: dict[str, Any] = {
        "role": pool.role,
        "handoff": pool.handoff,
        "layout": pool.layout,
        "block_size": pool.block_size,
        "kv_blocks": pool.kv_blocks,
        "max_model_len": pool.max_model_len,
        "max_num_batched_tokens": pool.max_num_batched_tokens,
    }
    labels = {**pool.labels, **({"priority": "on"} if takes_priority(pool) else {})}
    if pool.cache.host and pool.engine in WITH_TIERS and not pool.urls:
        labels[TIERS] = pool.cache.order
    if labels:
        overrides["labels"] = labels
    if url is not None:
        overrides["engine"] = None if pool.engine in GUESSED else pool.engine
        overrides["topic"] = pool.topic
        events, replay = endpoints(pool.events, url), endpoints(pool.replay, url)
        overrides["events"], overrides["replay"] = events or None, replay or None
        overrides["ranks"] = len(events) or None
        overrides["stats"] = next(iter(endpoints(pool.stats, url)), None)
    return {name: value for name, value in overrides.items() if value is not None}


def takes_priority(pool: PoolSettings) -> bool:
    """Return whether a request's priority is sent to the pool's engines: an engine not scheduling by it refuses."""
    if pool.priority is not None:
        return pool.priority
    if pool.urls:
        return False  # the operator started them
    return pool.engine == "vllm" or (pool.engine == "sim" and pool.sim.scheduling_policy == "priority")


def endpoints(given: Iterable[str], url: str) -> tuple[str, ...]:
    """Return the endpoints of a server, one for each of its ranks.

    Args:
        given: ``ENDPOINT``, which is for every server, or ``URL=ENDPOINT``.
    """
    addresses = []
    for entry in given:
        server, equals, endpoint = entry.rpartition("=")
        if not equals or server.rstrip("/") == url.rstrip("/"):
            addresses.append(endpoint)
    return tuple(addresses)

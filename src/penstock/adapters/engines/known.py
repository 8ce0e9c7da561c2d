"""What do a pool's settings say of its engines that these do not tell themselves? Fields of the `WorkerCard`."""

from collections.abc import Iterable
from typing import Any

from penstock.config.cluster import PoolSettings

GUESSED = ("sim", "openai")
"""Kinds that a pool of URLs may name without meaning it: each server is asked of which kind it is."""


def known_of(pool: PoolSettings, url: str | None = None) -> dict[str, Any]:
    """Return what the settings say of each engine of a pool, or of the one that runs at ``url``; the rest is absent."""
    said: dict[str, Any] = {
        "role": pool.role,
        "handoff": pool.handoff,
        "layout": pool.layout,
        "block_size": pool.block_size,
        "kv_blocks": pool.kv_blocks,
        "max_len": pool.max_len,
        "max_batched_tokens": pool.max_batched_tokens,
    }
    labels = {**pool.labels, **({"priority": "on"} if takes_priority(pool) else {})}
    if labels:
        said["labels"] = labels
    if url is not None:
        said["engine"] = None if pool.engine in GUESSED else pool.engine
        said["topic"] = pool.topic
        events, replay = endpoints(pool.events, url), endpoints(pool.replay, url)
        said["events"], said["replay"] = events or None, replay or None
        said["ranks"] = len(events) or None
        said["stats"] = next(iter(endpoints(pool.stats, url)), None)
    return {name: value for name, value in said.items() if value is not None}


def takes_priority(pool: PoolSettings) -> bool:
    """Tell whether a request's priority is sent on to the pool's engines: one that does not schedule by it refuses."""
    if pool.priority is not None:
        return pool.priority
    if pool.urls:
        return False  # somebody else started them
    return pool.engine == "vllm" or (pool.engine == "sim" and pool.sim.scheduling == "priority")


def endpoints(given: Iterable[str], url: str) -> tuple[str, ...]:
    """Return the endpoints that are meant for a server, one for each of its ranks.

    Args:
        given: ``ENDPOINT``, which is meant for every server, or ``URL=ENDPOINT``.
    """
    found = []
    for entry in given:
        server, equals, endpoint = entry.rpartition("=")
        if not equals or server.rstrip("/") == url.rstrip("/"):
            found.append(endpoint)
    return tuple(found)

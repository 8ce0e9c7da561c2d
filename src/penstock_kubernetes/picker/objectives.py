"""Objectives: the priority of requests that name an InferenceObjective of a pool, followed from the API server."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

from penstock.adapters.seams import StoreUnavailable
from penstock.config.settings.cluster_settings import ClusterSettings

log = logging.getLogger("penstock.picker")

GROUPS = ("llm-d.ai", "inference.networking.x-k8s.io")
"""API groups of InferenceObjective, both with version v1alpha2: it moved from the second to the first in 2026."""

VERSION = "v1alpha2"
PAUSE = 30.0
"""Seconds between two tries to read a group's objectives: most clusters have the kind in one of the groups only."""


class Objectives:
    """Priorities by the name of the objective, of one pool."""

    def __init__(self, pool: str | None = None) -> None:
        self.pool = pool
        self._of: dict[tuple[str, str], int] = {}

    def priority(self, name: str | None) -> int:
        """Return an objective's priority; 0 where there is none of that name, as where it names none."""
        if name is None:
            return 0
        return next((self._of[group, name] for group in GROUPS if (group, name) in self._of), 0)

    def changed(self, group: str, name: str, resource: Mapping[str, Any] | None) -> None:
        """An objective was made, changed or deleted (None)."""
        spec = {} if resource is None else resource.get("spec") or {}
        pool = (spec.get("poolRef") or {}).get("name")
        if resource is None or (self.pool is not None and pool != self.pool):
            self._of.pop((group, name), None)
        else:
            self._of[group, name] = int(spec.get("priority") or 0)


def pool_of(settings: ClusterSettings) -> str | None:
    """Return the InferencePool whose pods are the workers; None where there is none."""
    prefix = "inferencepool/"
    selectors = [pool.selector for model in settings.models.values() for pool in model.pools.values()]
    named = [one.removeprefix(prefix) for one in selectors if one is not None and one.startswith(prefix)]
    return named[0] if named else None


async def follow_objectives(settings: ClusterSettings, objectives: Objectives, group: str) -> None:
    """Follow the objectives of one API group until cancelled; while they can't be read, those known stay."""
    from lightkube.generic_resource import create_namespaced_resource

    from penstock_kubernetes.api.api_client import open_client
    from penstock_kubernetes.api.resource_watch import follow

    kind = create_namespaced_resource(group, VERSION, "InferenceObjective", "inferenceobjectives")
    client = open_client(settings.discovery.kubernetes)
    try:
        while True:
            try:
                async with aclosing(follow(client, kind)) as changes:
                    async for batch in changes:
                        for change in batch:
                            spec = None if change.object is None else {"spec": change.object.spec or {}}
                            objectives.changed(group, change.name, spec)
            except StoreUnavailable as error:
                log.debug("objectives of %s can't be read: %s", group, error)
            await asyncio.sleep(PAUSE)
    finally:
        await client.close()

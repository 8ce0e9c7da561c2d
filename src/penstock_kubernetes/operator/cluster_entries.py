"""Entries of a cluster's store in Kubernetes: those without a lease are made to go with their PenstockCluster."""

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from penstock.adapters.seams import StoreUnavailable
from penstock.kernel.values import JsonObject
from penstock_kubernetes.api.api_client import ask, code_of
from penstock_kubernetes.api.discovery_resources import DISCOVERY_LABEL, entry_class, lease_class
from penstock_kubernetes.api.resource_watch import list_all
from penstock_kubernetes.operator import object_names as names

if TYPE_CHECKING:
    from lightkube import AsyncClient

log = logging.getLogger("penstock.operator")

PATIENCE = 120.0
"""Seconds that a deleted cluster's pods get, until their entries are deleted whether they have ended or not."""
LOOK_EVERY = 1.0


async def own_entries(client: "AsyncClient", cluster: JsonObject) -> None:
    """Let entries that no lease owns be owned by the cluster, so that nothing is left where no operator runs.

    Raises:
        StoreUnavailable: the API server can't be reached.
    """
    from lightkube import ApiError
    from lightkube.types import PatchType

    metadata = cluster["metadata"]
    entries, _ = await list_all(
        client, entry_class(), namespace=metadata["namespace"], labels={DISCOVERY_LABEL: metadata["name"]}
    )
    patch = {"metadata": {"ownerReferences": [names.owner_reference(cluster)]}}
    for entry in entries:
        if entry.metadata.ownerReferences:
            continue
        name = entry.metadata.name
        try:
            await ask(
                lambda name=name: client.patch(  # type: ignore[misc]
                    entry_class(), name, patch, namespace=metadata["namespace"], patch_type=PatchType.MERGE
                )
            )
        except ApiError as error:
            if code_of(error) != 404:
                log.warning("entry %s can't be changed: %s", name, error)


async def delete_entries(client: "AsyncClient", key: names.ClusterKey) -> None:
    """Delete what a deleted cluster's store has, once its pods have ended: they write until then."""
    from lightkube import ApiError
    from lightkube.resources.core_v1 import Pod

    end = time.monotonic() + PATIENCE
    labels = {DISCOVERY_LABEL: key.name}
    while True:
        try:
            pods, _ = await list_all(client, Pod, namespace=key.namespace, labels=names.selector(key.name))
            if not pods or time.monotonic() > end:
                for kind in (entry_class(), lease_class()):
                    left, _ = await list_all(client, kind, namespace=key.namespace, labels=labels)
                    for each in left:
                        await _delete(client, kind, key.namespace, each.metadata.name)
                log.info("cluster %s is gone, with its entries", key)
                return
        except (StoreUnavailable, ApiError) as error:
            log.warning("entries of %s can't be deleted yet: %s", key, error)
        await asyncio.sleep(LOOK_EVERY)


async def _delete(client: "AsyncClient", kind: Any, namespace: str, name: str) -> None:
    from lightkube import ApiError

    try:
        await ask(lambda: client.delete(kind, name, namespace=namespace))
    except ApiError as error:
        if code_of(error) != 404:
            raise

"""Controllers of a cluster, run one after the other whenever something changed."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from tests.doubles.kubernetes.cluster_script import ClusterScript
from tests.doubles.kubernetes.controllers.cluster_objects import ClusterObjects
from tests.doubles.kubernetes.controllers.deployments import reconcile_deployments, reconcile_replica_sets
from tests.doubles.kubernetes.controllers.leader_worker_sets import LEADER_WORKER_SET_CRD, reconcile_leader_worker_sets
from tests.doubles.kubernetes.controllers.pod_scheduler import NodeController, schedule_pods
from tests.doubles.kubernetes.controllers.small_controllers import collect_garbage, reconcile_endpoints

log = logging.getLogger(__name__)

GATHER_S = 0.01
"""Seconds in which more changes come together before the controllers look."""
LOOK_S = 0.5
"""Seconds after which the controllers look though nothing changed: some of what they do is due at a time."""

Reconcile = Callable[[ClusterObjects], Awaitable[None]]


async def run_controllers(objects: ClusterObjects, script: ClusterScript, more: Sequence[Reconcile] = ()) -> None:
    """Run all controllers, and more, until cancelled."""
    if await objects.create(LEADER_WORKER_SET_CRD) is not None:
        await objects.discover()
    controllers: list[Reconcile] = [
        reconcile_deployments,
        reconcile_replica_sets,
        reconcile_leader_worker_sets,
        schedule_pods,
        NodeController(script.speed).reconcile,
        reconcile_endpoints,
        collect_garbage,
        *more,
    ]
    definitions = 0
    while True:
        objects.changed.clear()
        if len(objects.all("CustomResourceDefinition")) != definitions:
            definitions = len(objects.all("CustomResourceDefinition"))
            await objects.discover()
        for reconcile in controllers:
            try:
                await reconcile(objects)
            except Exception:  # one controller's failure is tried again and stops no other
                log.exception("%s failed and is tried again", reconcile.__qualname__)
        await asyncio.sleep(GATHER_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await objects.changed.wait()

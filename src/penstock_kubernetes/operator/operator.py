"""Operator: follows the PenstockClusters while it leads, and cares for each of them."""

import asyncio
import logging
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiohttp import web

from penstock.adapters.background_tasks import BackgroundTasks
from penstock.adapters.seams import StoreUnavailable
from penstock.adapters.task_cancel import cancel_all
from penstock.config.settings.discovery_settings import KubernetesSettings
from penstock.runtime.cluster_state.store_watch import RETRY
from penstock_kubernetes.api.api_client import open_client
from penstock_kubernetes.api.resource_watch import follow
from penstock_kubernetes.operator.cluster_crd import cluster_resource
from penstock_kubernetes.operator.cluster_entries import delete_entries
from penstock_kubernetes.operator.leader_election import LeaderElection
from penstock_kubernetes.operator.managed_cluster import ManagedCluster, OperatorSettings
from penstock_kubernetes.operator.object_names import MANAGER, ClusterKey

if TYPE_CHECKING:
    from lightkube import AsyncClient

log = logging.getLogger("penstock.operator")

ALL = "*"
"""As a namespace: all of them."""


class ClusterOperator:
    """The operator of some namespaces or of all.

    Args:
        namespaces: whose PenstockClusters are cared for.
    """

    def __init__(
        self,
        client: "AsyncClient",
        election: LeaderElection,
        settings: OperatorSettings,
        namespaces: Sequence[str] = (ALL,),
    ) -> None:
        self.election = election
        self._client = client
        self._settings = settings
        self._namespaces = namespaces
        self._clusters: dict[ClusterKey, ManagedCluster] = {}
        self._tasks: dict[ClusterKey, asyncio.Task[None]] = {}
        self._leaving = BackgroundTasks()

    async def run(self) -> None:
        """Work until cancelled; pods stay as they are."""
        standing = asyncio.create_task(self.election.run(), name="election")
        try:
            while True:
                await self.election.leading.wait()
                working = asyncio.create_task(self._lead(), name="clusters")
                deposed = asyncio.create_task(self.election.following.wait())
                try:
                    await asyncio.wait({working, deposed, standing}, return_when=asyncio.FIRST_COMPLETED)
                    if standing.done():
                        standing.result()
                    if working.done():
                        working.result()
                finally:
                    for task in (working, deposed):
                        task.cancel()
                    await asyncio.gather(working, deposed, return_exceptions=True)
        finally:
            standing.cancel()
            await asyncio.gather(standing, return_exceptions=True)

    async def _lead(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for namespace in self._namespaces:
                    group.create_task(self._follow(namespace), name=f"clusters of {namespace}")
        finally:
            await cancel_all([*self._tasks.values(), *self._leaving])
            self._tasks.clear()
            self._clusters.clear()

    async def _follow(self, namespace: str) -> None:
        while True:
            try:
                async for changes in follow(self._client, cluster_resource(), namespace=namespace):
                    for change in changes:
                        key = ClusterKey((change.namespace, change.name))
                        await self._take(key, None if change.object is None else change.object.to_dict())
            except StoreUnavailable as error:
                log.warning("PenstockClusters can't be followed, and stay as they are: %s", error)
                await asyncio.sleep(RETRY)

    async def _take(self, key: ClusterKey, resource: dict[str, object] | None) -> None:
        managed = self._clusters.get(key)
        deleted = resource is None or resource["metadata"].get("deletionTimestamp") is not None  # type: ignore[attr-defined]
        anew = managed is not None and not deleted and _uid(resource) != _uid(managed.resource)
        if managed is not None and (deleted or anew):
            log.info("cluster %s is deleted; what it owns goes with it", key)
            task = self._tasks.pop(key)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            del self._clusters[key]
            managed = None
            if deleted:
                self._leaving.spawn(delete_entries(self._client, key))
        if deleted or resource is None:
            return
        if managed is not None:
            managed.use(resource)
            return
        log.info("cluster %s is cared for", key)
        managed = self._clusters[key] = ManagedCluster(self._client, resource, self._settings)
        self._tasks[key] = asyncio.create_task(managed.run(), name=f"cluster {key}")


async def operate(
    login: KubernetesSettings,
    settings: OperatorSettings,
    *,
    namespaces: Sequence[str],
    lease_namespace: str,
    identity: str,
    health_port: int | None = None,
) -> None:
    """Run an operator until SIGTERM or SIGINT.

    Args:
        health_port: where probes are answered as long as it works; None answers none.
    Raises:
        ConfigError: there is no login at an API server.
        OSError: the port is taken.
    """
    client = open_client(login, field_manager=MANAGER)
    election = LeaderElection(client, lease_namespace, MANAGER, identity)
    working = asyncio.ensure_future(ClusterOperator(client, election, settings, namespaces).run())
    probes = web.Application()
    probes.router.add_get("/health", _healthy)
    runner = web.AppRunner(probes, access_log=None)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, working.cancel)
    try:
        if health_port is not None:
            await runner.setup()
            await web.TCPSite(runner, None, health_port).start()
        await working
    except asyncio.CancelledError:
        log.info("the operator ends; engines and frontends go on")
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await runner.cleanup()
        await client.close()


async def _healthy(request: web.Request) -> web.Response:
    return web.Response(text="ok")


def _uid(resource: object) -> object:
    return resource["metadata"].get("uid") if isinstance(resource, dict) else None

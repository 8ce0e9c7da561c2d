"""Pod pool: the ready pods of a label selector or an InferencePool as the servers of a pool, while they come and go."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.adapters.connectors.engine_process import EngineProcess
from penstock.adapters.engines.pool_overrides import overrides_of
from penstock.adapters.seams import StoreUnavailable
from penstock.config.settings.cluster_settings import PoolSettings
from penstock.config.settings.discovery_settings import KubernetesSettings
from penstock.kernel.values import Pool
from penstock.runtime.cluster_state.store_watch import RETRY
from penstock.runtime.supervision.fleet_driver import FleetDriver
from penstock_kubernetes.api.api_client import open_client
from penstock_kubernetes.api.pod_servers import PodServer, servers_of
from penstock_kubernetes.api.resource_watch import follow, list_all

if TYPE_CHECKING:
    from lightkube import AsyncClient

log = logging.getLogger("penstock.fleet")

INFERENCE_POOL = "inferencepool/"


class PodSelection(NamedTuple):
    """Which pods: a selector as kubectl takes it, and their ports where those are known."""

    labels: str
    ports: tuple[int, ...] = ()


class PodPool:
    """Follows pods for one pool: `run` it as long as the pool should follow them.

    Args:
        client: of the API server, owned by the caller.
        name: of the pool, which its workers' ids begin with.
    """

    def __init__(
        self, client: "AsyncClient", driver: FleetDriver, name: str, settings: PoolSettings, configured: Pool
    ) -> None:
        assert settings.selector is not None
        self._client = client
        self._driver = driver
        self._name = name
        self._settings = settings
        self._selector = settings.selector
        self._numbers: dict[str, int] = {}
        """Server -> its number, until the fleet has forgotten it."""
        self._joined: dict[str, PodServer] = {}
        """Servers that should take requests."""
        self._pods: dict[str, list[PodServer]] = {}
        self._tried = asyncio.Event()
        """Set once the pods that there are were read, or could not be."""
        self._failure: StoreUnavailable | None = None
        driver.attach_changing(name, configured, self._forgotten, settings.health.limits)

    async def read(self) -> None:
        """Wait until the pods that there are were read.

        Raises:
            StoreUnavailable: they can't be.
        """
        await self._tried.wait()
        if self._failure is not None:
            raise self._failure

    async def run(self) -> None:
        """Follow until cancelled; while the API server can't be read, the servers stay as they are."""
        failing = False
        while True:
            try:
                await self._follow()
            except StoreUnavailable as error:
                if not failing:
                    log.warning("the pods of %s can't be read; its servers stay as they are: %s", self._name, error)
                failing, self._failure = True, error
                self._tried.set()
            except Exception:  # supervision boundary: the pool must not stay as it is for the rest of the run
                log.exception("the pods of %s could not be followed by a bug of ours; they are read again", self._name)
            await asyncio.sleep(RETRY)

    # --- internals ----------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        if not self._selector.startswith(INFERENCE_POOL):
            await self._follow_pods(PodSelection(self._selector))
            return
        following: asyncio.Task[None] | None = None
        selections = self._selections()
        coming = asyncio.ensure_future(anext(selections))
        try:
            while True:
                waiting: set[asyncio.Future[Any]] = {task for task in (coming, following) if task is not None}
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if following is not None and following.done():
                    following.result()  # raises what ended it
                if coming.done():
                    selection = coming.result()
                    coming = asyncio.ensure_future(anext(selections))
                    await _cancelled(following)
                    following = asyncio.create_task(self._follow_pods(selection))
        finally:
            await _cancelled(coming)
            await _cancelled(following)
            await selections.aclose()

    async def _selections(self) -> Any:
        """Yield what an InferencePool selects whenever that changes; one that is deleted selects what it did."""
        resource, last = inference_pool(), None
        name = self._selector.removeprefix(INFERENCE_POOL)
        async with aclosing(follow(self._client, resource, fields={"metadata.name": name})) as batches:
            async for batch in batches:
                for change in batch:
                    selection = None if change.object is None else selection_of(change.object)
                    if selection is None:
                        log.warning("InferencePool %s selects no pods; pool %s stays as it is", name, self._name)
                    elif selection != last:
                        last = selection
                        yield selection
                if last is None:
                    log.warning("there is no InferencePool %s yet; pool %s waits for it", name, self._name)
                    self._tried.set()

    async def _follow_pods(self, selection: PodSelection) -> None:
        from lightkube.resources.core_v1 import Pod

        first = True
        async with aclosing(follow(self._client, Pod, labels=selection.labels)) as batches:
            async for batch in batches:
                if first:
                    self._pods.clear()
                    first = False
                for change in batch:
                    if change.object is None:
                        self._pods.pop(change.name, None)
                    else:
                        self._pods[change.name] = servers_of(change.object, selection.ports)
                self._compare()
                self._failure = None
                self._tried.set()

    def _compare(self) -> None:
        """Tell the fleet what joined and what left."""
        servers = {server.id: server for pod in self._pods.values() for server in pod}
        for id_ in [id_ for id_ in self._numbers if id_ not in servers]:
            self._joined.pop(id_, None)
            self._driver.leave(self._worker(self._numbers[id_]), vanished=True)
        for id_, server in servers.items():
            if server.ready and id_ not in self._joined:
                self._joined[id_] = server
                self._join(server)
            elif not server.ready and self._joined.pop(id_, None) is not None:
                log.info("pod %s is not ready or ends: %s takes no new requests", server.pod, server.url)
                self._driver.leave(self._worker(self._numbers[id_]), vanished=False)

    def _join(self, server: PodServer) -> None:
        number = self._numbers.get(server.id)
        if number is None:
            number = next(n for n in range(len(self._numbers) + 1) if n not in self._numbers.values())
            self._numbers[server.id] = number
            log.info("pod %s is %s", server.pod, self._worker(number))
        card = {**overrides_of(self._settings, server.url), **server.card}
        self._driver.join(EngineProcess(self._worker(number), self._name, server.url, None, card), number)

    def _forgotten(self, number: int) -> None:
        """Free a number; a server that is ready again by now joins anew."""
        for id_ in [id_ for id_, given in self._numbers.items() if given == number]:
            server = self._joined.get(id_)
            if server is None:
                del self._numbers[id_]
            else:
                asyncio.get_running_loop().call_soon(self._join, server)

    def _worker(self, number: int) -> str:
        return f"{self._name}-{number}"


class PodSource:
    """The pods of one API server, as servers: an entry of the seam ``source``.

    Raises:
        ConfigError: there is no login at it.
    """

    def __init__(self, settings: KubernetesSettings) -> None:
        self._client = open_client(settings)

    def follow(self, driver: FleetDriver, name: str, settings: PoolSettings, configured: Pool) -> PodPool:
        """Return what keeps a pool at the pods that its selector names; the caller runs it."""
        return PodPool(self._client, driver, name, settings, configured)

    async def ready(self, selector: str) -> list[PodServer]:
        """Return the servers of the pods that are ready now.

        Raises:
            StoreUnavailable: the API server can't be read.
        """
        from lightkube.resources.core_v1 import Pod

        selection: PodSelection | None = PodSelection(selector)
        if selector.startswith(INFERENCE_POOL):
            name = {"metadata.name": selector.removeprefix(INFERENCE_POOL)}
            pools, _ = await list_all(self._client, inference_pool(), fields=name)
            selection = selection_of(pools[0]) if pools else None
        if selection is None:
            return []
        pods, _ = await list_all(self._client, Pod, labels=selection.labels)
        return [server for pod in pods for server in servers_of(pod, selection.ports) if server.ready]

    async def close(self) -> None:
        await self._client.close()


def inference_pool() -> Any:
    """Return lightkube's class for an InferencePool."""
    from lightkube.generic_resource import create_namespaced_resource

    return create_namespaced_resource("inference.networking.k8s.io", "v1", "InferencePool", "inferencepools")


def selection_of(pool: Any) -> PodSelection | None:
    """Return what an InferencePool selects; None where its selector is empty, which would be every pod."""
    spec = pool.spec or {}
    labels = (spec.get("selector") or {}).get("matchLabels") or {}
    ports: Sequence[object] = [port.get("number") for port in spec.get("targetPorts") or ()]
    if not labels:
        return None
    text = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
    return PodSelection(text, tuple(port for port in ports if isinstance(port, int)))


async def _cancelled(task: "asyncio.Task[Any] | asyncio.Future[Any] | None") -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

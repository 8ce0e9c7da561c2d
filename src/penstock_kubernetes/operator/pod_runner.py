"""Pod runner: starts or adopts engines as bare pods, probes and ends them; the Kubernetes side of `EngineRunner`.

It decides nothing: `penstock.fleet` does. What runs is known by labels, so that the next operator adopts it.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.adapters.connectors.engine_process import EngineProcess, EngineTemplate, LaunchSpec
from penstock.adapters.engines.launch import Launch
from penstock.adapters.seams import StoreUnavailable
from penstock.config.settings.cluster_settings import SuperviseSettings
from penstock.kernel.errors import ConfigError, EngineError
from penstock.kernel.values import JsonObject
from penstock.runtime.cluster_state.store_watch import RETRY
from penstock_kubernetes.api.api_client import ask, code_of
from penstock_kubernetes.api.resource_watch import follow, list_all
from penstock_kubernetes.operator import object_names as names
from penstock_kubernetes.operator.engine_group import group_of, group_resource
from penstock_kubernetes.operator.engine_pod import EnginePod, hopeless, lack_of, lost, seconds_of, unscheduled
from penstock_kubernetes.operator.manifest_parts import template_hash
from penstock_kubernetes.pod_launch import at_address

if TYPE_CHECKING:
    from lightkube import AsyncClient

log = logging.getLogger("penstock.operator")

LOOK_EVERY = 5.0
"""Seconds between two looks at a pod without news: only time shows that one is not ready for too long."""
OVERTIME = 15.0
"""Seconds beyond its grace after which a pod on a lost node is deleted without its kubelet's word."""


class PodPlan(NamedTuple):
    """How the pods of one pool are made: ``template`` is from a launch; its metadata has labels of the user's own.

    ``hosts``: over how many pods each engine, of the kind ``engine``, spreads.
    """

    gpus: int
    template: Callable[[LaunchSpec], JsonObject]
    engine: str = ""
    hosts: int = 1


class PodRunner:
    """The engine pods of one cluster: `open`, then as `penstock.runtime.supervision.fleet_driver.Runner`.

    Args:
        cluster: the PenstockCluster, which owns the pods.
        desired: pool -> replicas as they were desired last, which outlive an operator.
        grouped: whether engines of some pool spread over several pods.
    """

    def __init__(
        self,
        client: "AsyncClient",
        settings: SuperviseSettings,
        cluster: JsonObject,
        desired: Mapping[str, int],
        *,
        grouped: bool = False,
    ) -> None:
        self.settings = settings
        self.adopted: list[str] = []
        self.not_adopted: dict[str, str] = {}
        self.outdated: list[str] = []
        """Adopted workers whose pods would be made in another way now."""
        self.plans: dict[str, PodPlan] = {}
        """Component -> how its pods are made."""
        self._client = client
        self._cluster = cluster
        self._desired = desired
        self._grouped = grouped
        self._pods: dict[str, EnginePod] = {}
        """Name of the pod, or of the group of pods -> engine's pod."""
        self._ranks: dict[str, EnginePod] = {}
        """Pod's name -> the engine over several pods whose it is."""
        self._current: dict[str, EnginePod] = {}
        """Worker -> the pod that it has now."""
        self._launches: dict[str, LaunchSpec] = {}
        self._survivors: dict[str, EnginePod] = {}
        self._serials: dict[str, int] = {}
        self._tickets_given = 0
        self._fresh = False
        """Whether what is known of pods is not older than a moment: an absent API server ends nothing."""
        self._news = asyncio.Condition()
        self._listed = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    @property
    def oldest(self) -> float:
        """When the oldest adopted pod was made, in seconds since 1970 of the API server's clock; now without any."""
        made = [pod.object["metadata"].get("creationTimestamp") for pod in self._current.values() if pod.object]
        return min((seconds_of(text) for text in made if text), default=time.time())

    # --- pods of an earlier operator ----------------------------------------------------------------------------------

    async def open(self) -> None:
        """List the pods that are there, and follow them from now on.

        Raises:
            StoreUnavailable: the API server can't be read.
        """
        self._following = asyncio.create_task(self._follow(), name="engine pods")
        listed = asyncio.create_task(self._listed.wait())
        await asyncio.wait({listed, self._following}, return_when=asyncio.FIRST_COMPLETED)
        listed.cancel()
        if not self._listed.is_set():
            self._following.result()
        if self._grouped:
            await self._list_groups()
        for pod in self._pods.values():
            worker = _worker_of_pod(pod)
            if pod.object is None or worker is None:
                continue
            self._serials[worker] = max(self._serials.get(worker, 0), int(pod.labels.get(names.SERIAL, 0)))
            if pod.end() is None and _newer(pod, self._survivors.get(worker)):
                self._survivors[worker] = pod

    def adopt(self, template: EngineTemplate, configured: int) -> tuple[int, dict[int, tuple[int, ...]]]:
        """Adopt the pods of a pool; those of another template are outdated.

        The GPUs of pods are counted only: each takes the first free tickets.
        """
        replicas = self._desired.get(template.component, configured)
        adopted = {}
        for number in sorted(n for worker in self._survivors if (n := template.number(worker)) is not None):
            worker = template.worker(number)
            pod = self._current[worker] = self._survivors.pop(worker)
            self._launches[worker] = template.launch(worker, 0, range(template.gpus))
            if pod.labels.get(names.TEMPLATE) != self._digest(template, worker):
                self.outdated.append(worker)
            adopted[number] = self._tickets(template.gpus)
        return replicas, adopted

    def leftovers(self, known: Collection[str]) -> Mapping[str, dict[int, tuple[int, ...]]]:
        """Adopt the pods among ``known`` whose pools the spec has no more."""
        found: dict[str, dict[int, tuple[int, ...]]] = {}
        for worker in sorted(self._survivors.keys() & set(known)):
            component, _, number = worker.rpartition("-")
            if component not in self.plans and number.isdecimal():
                pod = self._current[worker] = self._survivors.pop(worker)
                found.setdefault(component, {})[int(number)] = self._tickets(pod.gpus)
        return found

    async def end_survivors(self, numbers: Mapping[str, Sequence[int]]) -> None:
        """End the pods that nobody adopted, finished ones among them."""
        adopted = {pod.name for pod in self._current.values()}
        others = [pod for pod in self._pods.values() if pod.name not in adopted and not pod.deleted]
        for pod in others:
            log.info("%s is not what is wanted now, and is deleted", pod.name)
        await asyncio.gather(*(self._delete(pod, self.settings.stop_grace) for pod in others))
        self._survivors.clear()

    # --- one engine ---------------------------------------------------------------------------------------------------

    async def start(self, pool: str, template: EngineTemplate, number: int, gpus: tuple[int, ...]) -> int | None:
        from lightkube import ApiError

        worker = template.worker(number)
        if worker in self._current:  # adopted
            self.adopted.append(worker)
            log.info("engine %s, pod %s, was taken over", worker, self._current[worker].name)
            return None
        launch = self._launches[worker] = template.launch(worker, 0, gpus)
        serial = self._serials[worker] = self._serials.get(worker, 0) + 1
        manifest = self._manifest(template, worker, number, serial)
        name = manifest["metadata"]["name"]
        pod = EnginePod(name, group=self.plans[template.component].hosts > 1)
        pod = self._current[worker] = self._pods.setdefault(name, pod)
        kind = _class_of_object(pod)
        try:
            made = await ask(lambda: self._client.create(kind.from_dict(manifest)))
            if not pod.group:
                pod.object = pod.object or made.to_dict()
        except ApiError as error:
            if code_of(error) == 409:  # another operator was faster, or our own request whose answer was lost
                log.info("pod %s is there already, and is taken", name)
                return None
            del self._current[worker]
            raise EngineError(f"pod {name} is refused: {error.status.message}") from error
        except StoreUnavailable as error:
            del self._current[worker]
            raise EngineError(f"pod {name} can't be made: {error}") from error
        log.info("pod %s was made for %s: %s", name, worker, launch.argv[0])
        return None

    async def probe(self, worker: str, missing: Callable[[str], Awaitable[str | None]]) -> str | None:
        pod, launch = self._current[worker], self._launches[worker]
        if pod.object is None and not pod.deleted:
            return "the API server has not told of its pod yet"
        if (end := pod.end()) is not None:
            raise EngineError(f"{worker} {end}")
        assert pod.object is not None
        lack = lack_of(pod.object)
        if lack is None or lack == "its pod is not ready":
            lack = await missing(self._url(worker)) or lack
        if lack is not None:
            timeout = self.settings.start_timeout or launch.start_timeout
            if hopeless(pod.object) or time.monotonic() - pod.begun > timeout:
                raise EngineError(f"{worker} did not come to serve within {timeout:g} s: {lack}")
        return lack

    def unplaced(self, worker: str) -> bool:
        pod = self._current.get(worker)
        return pod is not None and pod.object is not None and unscheduled(pod.object) is not None

    def phases(self, worker: str) -> dict[str, float | None]:
        """Return nothing: a pod's log is not read."""
        return {}

    def mark_asleep(self, worker: str, asleep: bool) -> None:
        """Refuse: a pod keeps its GPUs while its engine sleeps.

        Raises:
            EngineError: always.
        """
        raise EngineError(f"{worker} is a pod, which keeps its GPUs while its engine sleeps")

    def host_memory(self, worker: str) -> int | None:
        """Return that it is unknown."""
        return None

    def process(self, worker: str) -> EngineProcess:
        """Return an engine that serves; of one of a pool that is no more only its name is known."""
        pool = worker.rpartition("-")[0]
        if worker not in self._launches:
            return EngineProcess(worker, pool, "", None, {})
        return EngineProcess(worker, pool, self._url(worker), None, self._at_address(worker).card)

    async def ended(self, worker: str) -> str:
        pod = self._current[worker]
        while not pod.ending:
            if self._fresh and (end := pod.end() or pod.silence()) is not None:
                return end
            await self._wait()
        return "was deleted by the operator"

    async def stop(self, worker: str) -> None:
        """Delete a pod. One with GPUs is waited for, so that they are never given twice."""
        pod = self._current.pop(worker, None)
        if pod is None:
            return
        others = (pod.object or {}).get("metadata", {}).get("deletionTimestamp") is not None
        pod.ending = True
        await self._tell()
        # Who evicted it gave it the time that its requests may take.
        await self._delete(pod, None if others else self.settings.stop_grace)
        plan = self.plans.get(worker.rpartition("-")[0])
        if plan is not None and not plan.gpus:
            return
        if pod.group:
            await self._left(pod)
            return
        grace = self.settings.stop_grace + (self.settings.drain_timeout if others else 0)
        end = time.monotonic() + grace + OVERTIME
        while not pod.deleted:
            if time.monotonic() > end and pod.object is not None and lost(pod.object):
                log.warning("%s is on a node that does not answer, and is given up", pod.name)
                await self._delete(pod, 0)
                return
            await self._wait()

    def forget(self, component: str, number: int) -> None:
        """Nothing stays of a deleted pod but its serial: a name is used once."""

    def record_replicas(self, component: str, replicas: int, configured: int) -> None:
        """The store has it, and outlives this process."""

    async def close(self, grace: float) -> None:
        """Stop to follow; the pods stay, and go with their PenstockCluster."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)

    # --- internals ----------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        from lightkube.resources.core_v1 import Pod

        metadata = self._cluster["metadata"]
        labels = names.selector(metadata["name"], "engine")
        while True:
            try:
                async for changes in follow(self._client, Pod, namespace=metadata["namespace"], labels=labels):
                    for change in changes:
                        pod = self._take(change.name, None if change.object is None else change.object.to_dict())
                        if pod.deleted and not any(pod is current for current in self._current.values()):
                            self._pods.pop(pod.name, None)
                    self._fresh = True
                    self._listed.set()
                    await self._tell()
            except StoreUnavailable as error:
                if not self._listed.is_set():
                    raise
                self._fresh = False
                log.warning("pods can't be followed, so none is started or ended: %s", error)
                await asyncio.sleep(RETRY)

    def _take(self, name: str, object: JsonObject | None) -> EnginePod:
        """Take news of a pod; return whose it is."""
        group = None if object is None else (object["metadata"].get("labels") or {}).get(names.GROUP_LABEL)
        pod = self._ranks.get(name)
        if pod is None:
            pod = self._pods.setdefault(group or name, EnginePod(group or name, group=group is not None))
        if pod.group:
            self._ranks[name] = pod
            if object is None:
                del self._ranks[name]
        pod.take(name, object)
        return pod

    async def _list_groups(self) -> None:
        """Know the groups that have no pods yet: without it nobody would end them."""
        from lightkube import ApiError

        metadata = self._cluster["metadata"]
        labels = names.selector(metadata["name"], "engine")
        try:
            groups, _ = await list_all(self._client, group_resource(), namespace=metadata["namespace"], labels=labels)
        except ApiError as error:
            if code_of(error) == 404:
                raise ConfigError(
                    "engines can't spread over hosts: there is no such kind of resource as LeaderWorkerSet",
                    hint="install LeaderWorkerSet, or leave spec.kubernetes.hosts out",
                ) from error
            raise StoreUnavailable(f"LeaderWorkerSets can't be listed: {error.status.message}") from error
        for group in groups:
            name = str(group.metadata.name)
            self._pods.setdefault(name, EnginePod(name, group=True))
            worker = str((group.metadata.annotations or {}).get(names.WORKER))
            serial = int((group.metadata.labels or {}).get(names.SERIAL, 0))
            self._serials[worker] = max(self._serials.get(worker, 0), serial)

    async def _left(self, pod: EnginePod) -> None:
        """Wait until nothing is left of a group: it is deleted after its pods."""
        from lightkube import ApiError

        namespace = self._cluster["metadata"]["namespace"]
        while True:
            try:
                await ask(lambda: self._client.get(group_resource(), pod.name, namespace=namespace))
            except ApiError as error:
                if code_of(error) == 404:
                    return
                log.error("LeaderWorkerSet %s can't be read: %s", pod.name, error)
            except StoreUnavailable as error:
                log.warning("LeaderWorkerSet %s can't be read: %s", pod.name, error)
            await asyncio.sleep(RETRY)

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()

    async def _wait(self) -> None:
        """Wait for news of any pod, but not for long."""
        try:
            async with asyncio.timeout(LOOK_EVERY), self._news:
                await self._news.wait()
        except TimeoutError:
            pass

    async def _delete(self, pod: EnginePod, grace: float | None) -> None:
        """Ask for a pod's end, again until the API server has heard it."""
        from lightkube import ApiError
        from lightkube.types import CascadeType

        namespace = self._cluster["metadata"]["namespace"]
        # The pods of a group have the grace of their templates.
        period = None if grace is None or pod.group else max(0, round(grace))
        cascade = CascadeType.FOREGROUND if pod.group else None
        kind = _class_of_object(pod)
        while pod.group or not pod.deleted:
            try:
                await ask(
                    lambda: self._client.delete(
                        kind, pod.name, namespace=namespace, grace_period=period, cascade=cascade
                    )
                )
                return
            except ApiError as error:
                if code_of(error) == 404:
                    pod.object, pod.listed = None, True
                    return
                log.error("pod %s can't be deleted: %s", pod.name, error)
            except StoreUnavailable as error:
                log.warning("pod %s can't be deleted yet: %s", pod.name, error)
            await asyncio.sleep(RETRY)

    def _tickets(self, count: int) -> tuple[int, ...]:
        """Return tickets for an adopted pod's GPUs, which no other has."""
        first, self._tickets_given = self._tickets_given, self._tickets_given + count
        return tuple(range(first, first + count))

    def _template(self, template: EngineTemplate, worker: str) -> JsonObject:
        return self.plans[template.component].template(self._launches[worker])

    def _digest(self, template: EngineTemplate, worker: str) -> str:
        made, hosts = self._template(template, worker), self.plans[template.component].hosts
        return template_hash(made if hosts == 1 else {**made, "hosts": hosts})

    def _manifest(self, template: EngineTemplate, worker: str, number: int, serial: int) -> JsonObject:
        metadata = self._cluster["metadata"]
        made = self._template(template, worker)
        labels = {
            **(made["metadata"].get("labels") or {}),
            **names.selector(metadata["name"], "engine"),
            names.POOL: names.label_value(template.component),
            names.WORKER: names.label_value(worker),
            names.NUMBER: str(number),
            names.SERIAL: str(serial),
            names.TEMPLATE: self._digest(template, worker),
        }
        annotations = {**(made["metadata"].get("annotations") or {}), names.WORKER: worker}
        manifest: JsonObject = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": names.object_name(metadata["name"], worker) + f"-{serial}",
                "namespace": metadata["namespace"],
                "labels": labels,
                "annotations": annotations,
                "ownerReferences": [names.owner_reference(self._cluster)],
            },
            "spec": made["spec"],
        }
        plan = self.plans[template.component]
        return manifest if plan.hosts == 1 else group_of(manifest, plan.engine, plan.hosts)

    def _at_address(self, worker: str) -> Launch:
        pod, launch = self._current[worker], self._launches[worker]
        assert pod.object is not None and isinstance(launch, Launch)
        return at_address(launch, pod.object["status"]["podIP"])

    def _url(self, worker: str) -> str:
        url = self._at_address(worker).url
        assert url is not None
        return url


def _class_of_object(pod: EnginePod) -> Any:
    """Return the client's class for what runs an engine."""
    from lightkube.resources.core_v1 import Pod

    return group_resource() if pod.group else Pod


def _worker_of_pod(pod: EnginePod) -> str | None:
    annotations = (pod.object or {}).get("metadata", {}).get("annotations") or {}
    worker: str | None = annotations.get(names.WORKER)
    return worker


def _newer(pod: EnginePod, other: EnginePod | None) -> bool:
    return other is None or int(pod.labels.get(names.SERIAL, 0)) > int(other.labels.get(names.SERIAL, 0))

"""Frontend rollout: replaces the frontends of a cluster through their Deployment, and says what it has."""

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from penstock.kernel.errors import PenstockError
from penstock.kernel.values import JsonObject
from penstock_kubernetes.api.api_client import ask
from penstock_kubernetes.operator import object_names as names
from penstock_kubernetes.operator.owned_objects import RESTARTED

if TYPE_CHECKING:
    from lightkube import AsyncClient

log = logging.getLogger("penstock.operator")

LOOK_EVERY = 1.0


class FrontendRollout:
    """The frontends' Deployment of one cluster, to a fleet one frontend: Kubernetes replaces its pods one by one.

    Args:
        patience: seconds that a rollout may take.
    """

    def __init__(self, client: "AsyncClient", cluster: JsonObject, patience: float) -> None:
        self.patience = patience
        self._client = client
        self._namespace = cluster["metadata"]["namespace"]
        self._name = names.object_name(cluster["metadata"]["name"], "frontend")

    @property
    def indices(self) -> range:
        return range(1)

    async def ready(self) -> tuple[int, int]:
        """Return how many frontends there are, and how many of them take requests.

        Raises:
            StoreUnavailable: the API server can't be read.
        """
        status = (await self._deployment()).get("status") or {}
        return int(status.get("replicas") or 0), int(status.get("readyReplicas") or 0)

    async def park(self, index: int) -> bool:
        log.warning("single frontends are not drained in Kubernetes: scale spec.frontend.processes, or delete a pod")
        return True

    async def unpark(self, index: int) -> None:
        """No frontend was ever parked."""

    async def replace(self, index: int) -> None:
        from lightkube import ApiError
        from lightkube.resources.apps_v1 import Deployment
        from lightkube.types import PatchType

        patch = {"spec": {"template": {"metadata": {"annotations": {RESTARTED: f"{time.time():.0f}"}}}}}
        try:
            await ask(
                lambda: self._client.patch(
                    Deployment, self._name, patch, namespace=self._namespace, patch_type=PatchType.MERGE
                )
            )
            end = time.monotonic() + self.patience
            while not _rolled_out(made := await self._deployment()):
                if time.monotonic() > end:
                    status = made.get("status") or {}
                    raise PenstockError(
                        f"{status.get('updatedReplicas') or 0} of the frontends were replaced within "
                        f"{self.patience:.0f} s",
                        hint=f"kubectl rollout status deployment/{self._name} says what holds them",
                    )
                await asyncio.sleep(LOOK_EVERY)
        except ApiError as error:
            raise PenstockError(f"Deployment {self._name} can't be changed: {error.status.message}") from error

    async def _deployment(self) -> JsonObject:
        from lightkube import ApiError
        from lightkube.resources.apps_v1 import Deployment

        try:
            made = await ask(lambda: self._client.get(Deployment, self._name, namespace=self._namespace))
        except ApiError as error:
            raise PenstockError(f"Deployment {self._name} can't be read: {error.status.message}") from error
        as_object: JsonObject = made.to_dict()
        return as_object


def _rolled_out(deployment: JsonObject) -> bool:
    wanted, status = deployment["spec"].get("replicas", 1), deployment.get("status") or {}
    counts = [int(status.get(name) or 0) for name in ("updatedReplicas", "readyReplicas", "replicas")]
    observed = int(status.get("observedGeneration") or 0) >= int(deployment["metadata"].get("generation") or 0)
    return observed and counts == [wanted] * 3

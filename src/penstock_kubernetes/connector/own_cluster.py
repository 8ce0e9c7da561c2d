"""Own cluster: the pools of a PenstockCluster, scaled by server-side apply of their replicas alone."""

from collections.abc import Mapping
from typing import Any

from lightkube import AsyncClient
from lightkube.generic_resource import create_namespaced_resource
from lightkube.types import PatchType

from penstock.config.worker_names import pool_prefix
from penstock.kernel.errors import ConfigError
from penstock.kernel.values import JsonObject, Pool
from penstock_kubernetes.connector.api_access import call
from penstock_kubernetes.connector.scale_target import ApiRight, PoolReading

GROUP, VERSION = "penstock.io", "v1alpha1"
KIND, PLURAL = "PenstockCluster", "penstockclusters"
FIELD_MANAGER = "penstock-planner"
"""Who owns the replicas in the resource: whoever applies the rest of the spec leaves the numbers out."""


class OwnCluster:
    """A `penstock_kubernetes.connector.scale_target.ScaleTarget` over one PenstockCluster."""

    def __init__(self, client: AsyncClient, name: str) -> None:
        self._client = client
        self._name = name
        self._resource: Any = create_namespaced_resource(GROUP, VERSION, KIND, PLURAL)
        self._places: dict[str, tuple[str, str]] = {}
        """Pool -> its model and its name within the model, as last read."""

    @property
    def rights(self) -> tuple[ApiRight, ...]:
        return ApiRight("get", GROUP, PLURAL, self._name), ApiRight("patch", GROUP, PLURAL, self._name)

    async def read(self) -> Mapping[str, PoolReading]:
        words = f"read {self.describe()}"
        stored: JsonObject = (await call(words, lambda: self._client.get(self._resource, self._name))).to_dict()
        models = (stored.get("spec") or {}).get("models") or {}
        meta, status = stored["metadata"], stored.get("status") or {}
        readings: dict[str, PoolReading] = {}
        self._places = {}
        for model, entry in models.items():
            for place, fields in ((entry or {}).get("pools") or {}).items():
                if (fields or {}).get("urls"):
                    continue  # servers that others run
                name = pool_prefix(model, len(models)) + place
                self._places[name] = (model, place)
                generation = meta.get("generation")
                pool = Pool(
                    model=model,
                    role=fields.get("role", "aggregated"),
                    desired=int(fields.get("replicas", 1)),
                    gpus=max(1, int(fields.get("gpus") or 1)),
                    acknowledged=status.get("observedGeneration", generation) == generation,
                )
                labels = {"app.kubernetes.io/instance": self._name, "penstock.io/pool": name}
                readings[name] = PoolReading(pool, str(meta["resourceVersion"]), labels)
        if not readings:
            raise ConfigError(
                f"{self.describe()} has no pool that could be scaled", hint="name models and pools in its spec"
            )
        return readings

    async def write(self, pool: str, replicas: int, readings: Mapping[str, PoolReading]) -> None:
        # What an apply leaves out is given up by its manager, and would fall back to the default: so all of them.
        models: JsonObject = {}
        for name, (model, place) in self._places.items():
            count = replicas if name == pool else readings[name].pool.desired
            models.setdefault(model, {"pools": {}})["pools"][place] = {"replicas": count}
        body: JsonObject = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "metadata": {"name": self._name, "resourceVersion": readings[pool].version},
            "spec": {"models": models},
        }
        await call(
            f"apply {pool}={replicas} to {self.describe()}",
            lambda: self._client.patch(
                self._resource,
                self._name,
                body,
                patch_type=PatchType.APPLY,
                field_manager=FIELD_MANAGER,
                force=True,  # whoever names a planner gives it the numbers; the resourceVersion guards newer ones
            ),
        )

    def describe(self) -> str:
        return f"{KIND} {self._name}"

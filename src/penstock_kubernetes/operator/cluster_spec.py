"""Cluster spec: a PenstockCluster's spec as settings, as the config of its pods, and what only Kubernetes needs."""

from pathlib import Path
from typing import Any

import msgspec
import yaml

from penstock.config.live_knobs import live_values, with_values
from penstock.config.reading.load import load, resolved_yaml
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.config.worker_names import pool_prefix
from penstock.kernel.errors import ConfigError
from penstock.kernel.values import JsonObject
from penstock.runtime.records.pod_run_folder import POD_IP
from penstock.runtime.supervision.fleet_driver import Strategy
from penstock_kubernetes.operator.manifest_parts import RUNS
from penstock_kubernetes.operator.structural_schema import IN_PODS

PROCESSES_SHARED = 2


class KubernetesPart(msgspec.Struct, frozen=True, rename="camel"):
    """``spec.kubernetes``."""

    images: dict[str, str] = {}
    pod_templates: dict[str, JsonObject] = {}
    gpus: int | None = None
    hosts: dict[str, int] = {}
    scaled: str | None = None
    strategy: dict[str, Strategy] = {}
    secrets: str | None = None
    monitor: bool = False


class ClusterSpec(msgspec.Struct, frozen=True):
    """A spec that is right.

    Args:
        settings: for the operator's own part of the cluster.
        frontends: how many there should be.
        config: YAML for frontends and planner; ``$(POD_IP)`` stands for the pod's address.
        lasting: the part of it that their pods must be replaced for: no replicas, no live knobs.
    """

    settings: ClusterSettings
    frontends: int
    config: str
    lasting: str
    kubernetes: KubernetesPart
    scaled: str | None = None
    """Pool whose engines ``spec.replicas`` counts, by its name in the whole cluster."""


def read_spec(resource: JsonObject, folder: Path) -> ClusterSpec:
    """Read a PenstockCluster.

    Args:
        resource: as the API server gives it.
        folder: in which the spec is written down, so that a problem names a line of it.
    Raises:
        ConfigError: the spec contradicts itself in a way that no schema shows.
    """
    metadata, spec = resource["metadata"], dict(resource.get("spec") or {})
    try:
        kubernetes = msgspec.convert(spec.pop("kubernetes", {}), KubernetesPart)
    except msgspec.ValidationError as error:
        raise ConfigError(f"spec.kubernetes: {error}") from error
    for name, strategy in kubernetes.strategy.items():
        if (strategy.max_surge, strategy.max_unavailable) == (0, 0):
            raise ConfigError(
                f"spec.kubernetes.strategy.{name}: maxSurge and maxUnavailable are 0, so that no pod could be replaced",
                hint="set one of them to 1",
            )
    replicas = spec.pop("replicas", None)
    spec["name"] = metadata["name"]
    for path, value in IN_PODS.items():
        _fill(spec, path.split("."), value)
    _fill(spec, ["discovery", "kubernetes", "namespace"], metadata["namespace"])
    file = folder / "spec.yaml"
    file.write_text(yaml.safe_dump(spec, sort_keys=False))
    settings = load(file).settings
    there = {name for entry in settings.models.values() for name in entry.pools}
    for name in (*kubernetes.strategy, *kubernetes.hosts):
        if name not in there:
            raise ConfigError(
                f"spec.kubernetes names pool {name}, and there is none", hint=f"name one of {', '.join(sorted(there))}"
            )
    settings, scaled = _scaled(settings, kubernetes.scaled, replicas)
    frontend = settings.frontend
    # One or several: with any number of others a frontend does the same, so that an autoscaler restarts none.
    shared = msgspec.structs.replace(frontend, processes=min(PROCESSES_SHARED, frontend.processes))
    in_pods = msgspec.structs.replace(
        settings,
        frontend=shared,
        discovery=msgspec.structs.replace(settings.discovery, host=POD_IP),
        runs=msgspec.structs.replace(settings.runs, dir=RUNS),
    )
    lasting = resolved_yaml(_without_replicas(with_values(in_pods, live_values(ClusterSettings()))))
    return ClusterSpec(settings, frontend.processes, resolved_yaml(in_pods), lasting, kubernetes, scaled)


def engine_pools(settings: ClusterSettings) -> dict[str, tuple[str, str]]:
    """Return the pools whose engines are pods of ours: by their names in the whole cluster, model and own name."""
    models = settings.models
    return {
        pool_prefix(model, len(models)) + name: (model, name)
        for model, entry in models.items()
        for name, pool in entry.pools.items()
        if not pool.attached
    }


def _scaled(settings: ClusterSettings, named: str | None, replicas: int | None) -> tuple[ClusterSettings, str | None]:
    """Return settings with ``spec.replicas`` in the pool that it is of, and that pool's name."""
    models, pools = settings.models, engine_pools(settings)
    if named is not None and named not in pools:
        raise ConfigError(
            f"spec.kubernetes.scaled is {named!r}, and there is no such pool",
            hint=f"name one of {', '.join(sorted(pools)) or 'those that are not attached'}",
        )
    scaled = next(iter(pools)) if named is None and len(pools) == 1 else named
    if replicas is None:
        return settings, scaled
    if scaled is None:
        raise ConfigError(
            f"spec.replicas is {replicas}, and the pools are {', '.join(sorted(pools))}",
            hint="name the pool that it is of in spec.kubernetes.scaled",
        )
    model, name = pools[scaled]
    replace = msgspec.structs.replace
    entry = models[model]
    changed = replace(entry, pools={**entry.pools, name: replace(entry.pools[name], replicas=replicas)})
    return replace(settings, models={**models, model: changed}), scaled


def _without_replicas(settings: ClusterSettings) -> ClusterSettings:
    """Return settings with one replica in each pool: a planner that began anew would not see who changed them."""
    models = {
        model: msgspec.structs.replace(
            entry, pools={name: msgspec.structs.replace(pool, replicas=1) for name, pool in entry.pools.items()}
        )
        for model, entry in settings.models.items()
    }
    return msgspec.structs.replace(settings, models=models)


def merge(base: JsonObject, patch: JsonObject) -> JsonObject:
    """Merge a fragment of an object into one of ours: mappings by key, lists of named entries by name."""
    merged = dict(base)
    for key, value in patch.items():
        old = merged.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            merged[key] = merge(old, value)
        elif isinstance(value, list) and isinstance(old, list):
            merged[key] = _merge_lists(old, value)
        else:
            merged[key] = value
    return merged


def _merge_lists(base: list[Any], patch: list[Any]) -> list[Any]:
    named = {entry["name"]: entry for entry in base if isinstance(entry, dict) and "name" in entry}
    if len(named) != len(base):
        return [*base, *patch]
    others = []
    for entry in patch:
        name = entry.get("name") if isinstance(entry, dict) else None
        if name in named:
            named[name] = merge(named[name], entry)
        else:
            others.append(entry)
    return [*named.values(), *others]


def _fill(spec: JsonObject, path: list[str], value: object) -> None:
    """Set a value where the spec has none."""
    group = spec
    for name in path[:-1]:
        inner = group.get(name)
        group[name] = dict(inner) if isinstance(inner, dict) else {}
        group = group[name]
    group.setdefault(path[-1], value)

"""Kubernetes manifests: a config as plain objects, without helm and without the operator.

Each pool is a Deployment of stock engine pods that know nothing of us. One Deployment runs ``penstock up``: frontends
and planner, whose pools follow those pods by a label selector. The planner scales the pools' Deployments.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import yaml

from penstock.adapters.engines.launch import EVENTS_PORT, REPLAY_PORT
from penstock.config.reading.load import resolved_yaml
from penstock.config.settings.cluster_settings import ClusterSettings, ModelSettings, PoolSettings
from penstock.config.settings.planning_settings import KubernetesScaling
from penstock.config.worker_names import pool_prefix
from penstock.kernel.errors import ConfigError
from penstock.kernel.plurals import counted
from penstock.kernel.values import JsonObject
from penstock_kubernetes.operator.manifest_parts import (
    CONFIG_DIR,
    GPU,
    LOCKED,
    NO_LINKS,
    NOBODY,
    RUNS,
    Manifests,
    config_mounts,
    config_volumes,
    field_env,
    http_port,
    http_probe,
    plain_env,
    secret_env,
    with_shared_memory,
)
from penstock_kubernetes.operator.object_names import INSTANCE, POOL, label_value, object_name
from penstock_kubernetes.pod_launch import PORT, pod_launch
from penstock_lab.engine.settings import SimSettings
from penstock_lab.profiler.deployment_plan.compose_file import BlockDumper

KEYS = "penstock-keys"
"""Secret with the key of the API, which its user makes."""
IMAGES = {
    "sim": "penstock:latest",
    "vllm": "vllm/vllm-openai:latest",
    "sglang": "lmsysorg/sglang:latest",
    "trtllm": "nvcr.io/nvidia/tensorrt-llm/release:latest",
}


class PodPoolPlan(NamedTuple):
    """A pool as a Deployment."""

    model: str
    pool: str
    deployment: str
    settings: PoolSettings


def kubernetes_yaml(settings: ClusterSettings) -> str:
    """Return the manifests of a cluster, for `kubectl apply -f -`.

    Raises:
        ConfigError: a pool's engines can't be put into pods.
    """
    plans = list(_plans(settings))
    config = resolved_yaml(_attached(settings, plans))
    manifests = Manifests(settings.name)
    objects = [
        *manifests.rights("penstock", _planner_rules(settings, plans)),
        manifests.made("v1", "ConfigMap", "penstock", data={"penstock.yaml": config}),
        *(_engine_deployment(manifests, settings, plan) for plan in plans),
        _cluster_deployment(manifests, settings, config),
        manifests.service("penstock", PORT),
    ]
    gpus = sum(_gpus_of_pool(plan.settings) * plan.settings.replicas for plan in plans)
    head = (
        f"# {counted(len(plans), 'pool')} of engines, {counted(gpus, 'GPU')}. Make a key for the API, then apply it:\n"
        f"#   kubectl create secret generic {KEYS} --from-literal=api-key=$(openssl rand -hex 24)\n"
        "#   penstock render kubernetes CONFIG | kubectl apply -f -\n"
    )
    if settings.planner.enabled and plans:
        head += (
            "# Each pool begins with one engine; the planner scales it, and applying this again leaves that alone.\n"
        )
    return head + yaml.dump_all(objects, Dumper=BlockDumper, sort_keys=False, width=120, allow_unicode=True)


def _plans(settings: ClusterSettings) -> Iterator[PodPoolPlan]:
    """Yield the pools whose engines run in pods of ours; servers that run elsewhere stay where they are."""
    for model, entry in settings.models.items():
        for name, pool in entry.pools.items():
            if pool.attached:
                continue
            if pool.engine not in IMAGES or pool.handoff == "push":
                raise ConfigError(
                    f"pool {name} of {model} is {pool.engine}, handoff {pool.handoff}: no pods are made of that",
                    hint=f"engines may be {', '.join(IMAGES)} without push, or servers in urls or of a selector",
                )
            full = pool_prefix(model, len(settings.models)) + name
            yield PodPoolPlan(model, full, object_name(settings.name, full), pool)


def _gpus_of_pool(pool: PoolSettings) -> int:
    return 0 if pool.engine == "sim" else 1 if pool.gpus is None else pool.gpus


def _engine_deployment(manifests: Manifests, settings: ClusterSettings, plan: PodPoolPlan) -> JsonObject:
    pool, gpus = plan.settings, _gpus_of_pool(plan.settings)
    args = pool.args
    if pool.engine == "vllm" and not any(arg.startswith("--kv-events-config") for arg in args):
        events = {"enable_kv_cache_events": True, "publisher": "zmq"}
        ends = {"endpoint": f"tcp://*:{EVENTS_PORT}", "replay_endpoint": f"tcp://*:{REPLAY_PORT}"}
        args = (*args, "--kv-events-config", json.dumps(events | ends))
    launch = pod_launch(plan.pool, plan.model, msgspec.structs.replace(pool, args=args, command=None), gpus)
    argv = ["python", *launch.argv[1:]] if pool.engine == "sim" else list(launch.argv)
    container: JsonObject = {
        "name": "engine",
        "image": IMAGES[pool.engine],
        "command": argv[:1],
        "args": argv[1:],
        "env": [*field_env({"POD_IP": "status.podIP"}), *plain_env(launch.env)],
        **http_port(PORT),
        # A large checkpoint takes minutes to load, more to download.
        "startupProbe": http_probe(periodSeconds=5, failureThreshold=360),
        "readinessProbe": http_probe(periodSeconds=5),
        # New requests stop coming before the engine stops taking them.
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", "10"]}}},
    }
    pod: JsonObject = {"automountServiceAccountToken": False, **NO_LINKS, "containers": [container]}
    pod["terminationGracePeriodSeconds"] = round(settings.supervise.drain_timeout + settings.supervise.stop_grace)
    annotations: JsonObject = {}
    if gpus:
        container["resources"] = {"limits": {GPU: gpus}}
        pod = with_shared_memory(pod)
        annotations = {"penstock.io/kv-events": str(EVENTS_PORT), "penstock.io/kv-replay": str(REPLAY_PORT)}
    else:
        pod["securityContext"], container["securityContext"] = NOBODY, LOCKED
    how: JsonObject = {}
    if not settings.planner.enabled:  # where a planner scales, an apply would undo what it decided
        how["replicas"] = pool.replicas
    if gpus:  # one more would wait for GPUs that its predecessors have
        how["strategy"] = {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    template = {"metadata": {"labels": {}, "annotations": annotations}, "spec": pod}
    return manifests.deployment(plan.deployment, "engine", template, labels={POOL: plan.pool}, **how)


def _cluster_deployment(manifests: Manifests, settings: ClusterSettings, config: str) -> JsonObject:
    """Return the Deployment of ``penstock up``."""
    container: JsonObject = {
        "name": "penstock",
        "image": IMAGES["sim"],
        "command": ["penstock", "up", f"{CONFIG_DIR}/penstock.yaml"],
        "env": [
            secret_env("PENSTOCK_FRONTEND__SECURITY__API_KEYS", KEYS, "api-key"),
            *plain_env({"PENSTOCK_STATE_DIR": f"{RUNS}/state", "HOME": RUNS}),
        ],
        **http_port(PORT),
        "readinessProbe": http_probe(periodSeconds=5),
        "livenessProbe": http_probe("/live", periodSeconds=10, failureThreshold=6),
        "securityContext": LOCKED,
        "volumeMounts": config_mounts(run=RUNS, tmp="/tmp"),
    }
    pod: JsonObject = {
        "serviceAccountName": "penstock",
        **NO_LINKS,
        "securityContext": NOBODY,
        "terminationGracePeriodSeconds": round(settings.supervise.drain_timeout) + 30,
        "containers": [container],
        "volumes": config_volumes("penstock", "run", "tmp"),
    }
    # A pod keeps the config of its start: another config is another pod.
    digest = hashlib.sha256(config.encode()).hexdigest()[:12]
    template = {"metadata": {"labels": {}, "annotations": {"penstock.io/config": digest}}, "spec": pod}
    recreate = {"type": "Recreate"}  # two supervisors would be two clusters
    return manifests.deployment("penstock", "frontend", template, replicas=1, strategy=recreate)


def _planner_rules(settings: ClusterSettings, plans: Sequence[PodPoolPlan]) -> list[JsonObject]:
    names = [plan.deployment for plan in plans]
    rules: list[JsonObject] = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    if settings.planner.enabled and names:
        # Of these Deployments alone, and only their number.
        rules += [
            {"apiGroups": ["apps"], "resources": ["deployments"], "resourceNames": names, "verbs": ["get"]},
            {"apiGroups": ["apps"], "resources": ["deployments/scale"], "resourceNames": names, "verbs": ["patch"]},
        ]
    return rules


def _attached(settings: ClusterSettings, plans: Sequence[PodPoolPlan]) -> ClusterSettings:
    """Return the settings of ``penstock up``, whose engines are the pods of the Deployments."""
    replace = msgspec.structs.replace
    models: dict[str, ModelSettings] = {}
    by_pool = {plan.pool: plan for plan in plans}
    for model, entry in settings.models.items():
        pools = {}
        for name, pool in entry.pools.items():
            plan = by_pool.get(pool_prefix(model, len(settings.models)) + name)
            if plan is not None:
                selector = f"{INSTANCE}={label_value(settings.name)},{POOL}={plan.pool}"
                # What only a start reads stays out: the pods have it.
                pool = replace(pool, selector=selector, replicas=1, args=(), command=None, sim=SimSettings())
            pools[name] = pool
        models[model] = replace(entry, pools=pools)
    planner = settings.planner
    if planner.enabled and planner.connector == "process":
        scaling = KubernetesScaling(pools={plan.pool: f"Deployment/{plan.deployment}" for plan in plans})
        planner = replace(planner, connector="kubernetes", kubernetes=scaling)
    front = replace(settings.frontend, host="0.0.0.0", port=PORT)
    return replace(settings, models=models, planner=planner, frontend=front, runs=replace(settings.runs, dir=RUNS))

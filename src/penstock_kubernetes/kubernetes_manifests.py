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
from penstock_kubernetes.operator.object_names import COMPONENT, INSTANCE, NAME, POOL, object_name
from penstock_kubernetes.operator.pod_template import GPU, with_shared_memory
from penstock_kubernetes.pod_launch import PORT, pod_launch
from penstock_lab.engine.settings import SimSettings
from penstock_lab.profiler.deployment_plan.compose_file import BlockDumper

RUNS, CONFIG_DIR = "/run/penstock", "/etc/penstock"
KEYS = "penstock-keys"
"""Secret with the key of the API, which its user makes."""
IMAGES = {
    "sim": "penstock:latest",
    "vllm": "vllm/vllm-openai:latest",
    "sglang": "lmsysorg/sglang:latest",
    "trtllm": "nvcr.io/nvidia/tensorrt-llm/release:latest",
}
LOCKED: JsonObject = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
NO_LINKS: JsonObject = {"enableServiceLinks": False}
"""A Service named penstock would set PENSTOCK_PORT and the like, which are no settings of ours."""
NOBODY: JsonObject = {
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
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
    objects = [
        _made("v1", "ServiceAccount", "penstock", settings),
        _role(settings, plans),
        _made(
            "rbac.authorization.k8s.io/v1",
            "RoleBinding",
            "penstock",
            settings,
            roleRef={"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "penstock"},
            subjects=[{"kind": "ServiceAccount", "name": "penstock"}],
        ),
        _made("v1", "ConfigMap", "penstock", settings, data={"penstock.yaml": config}),
        *(_engines(settings, plan) for plan in plans),
        _cluster(settings, config),
        _service(settings),
    ]
    gpus = sum(_gpus(plan.settings) * plan.settings.replicas for plan in plans)
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


def _gpus(pool: PoolSettings) -> int:
    return 0 if pool.engine == "sim" else 1 if pool.gpus is None else pool.gpus


def _engines(settings: ClusterSettings, plan: PodPoolPlan) -> JsonObject:
    pool, gpus = plan.settings, _gpus(plan.settings)
    args = pool.args
    if pool.engine == "vllm" and not any(arg.startswith("--kv-events-config") for arg in args):
        events = {"enable_kv_cache_events": True, "publisher": "zmq"}
        ends = {"endpoint": f"tcp://*:{EVENTS_PORT}", "replay_endpoint": f"tcp://*:{REPLAY_PORT}"}
        args = (*args, "--kv-events-config", json.dumps(events | ends))
    launch = pod_launch(plan.pool, plan.model, msgspec.structs.replace(pool, args=args, command=None), gpus)
    argv = ["python", *launch.argv[1:]] if pool.engine == "sim" else list(launch.argv)
    env = [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    container: JsonObject = {
        "name": "engine",
        "image": IMAGES[pool.engine],
        "command": argv[:1],
        "args": argv[1:],
        "env": [*env, *({"name": key, "value": value} for key, value in launch.env.items())],
        "ports": [{"name": "http", "containerPort": PORT}],
        # A large checkpoint takes minutes to load, more to download.
        "startupProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 5, "failureThreshold": 360},
        "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 5},
        # New requests stop to come before the engine stops to take them.
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
    labels = {**_labels(settings, "engine"), POOL: plan.pool}
    made = _made("apps/v1", "Deployment", plan.deployment, settings, component="engine")
    made["spec"] = {
        # Where a planner scales, an apply would undo what it decided.
        **({} if settings.planner.enabled else {"replicas": pool.replicas}),
        # One more would wait for GPUs that its predecessors have.
        **({"strategy": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}} if gpus else {}),
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels, "annotations": annotations}, "spec": pod},
    }
    return made


def _cluster(settings: ClusterSettings, config: str) -> JsonObject:
    """Return the Deployment of ``penstock up``."""
    key = {"secretKeyRef": {"name": KEYS, "key": "api-key"}}
    container: JsonObject = {
        "name": "penstock",
        "image": IMAGES["sim"],
        "command": ["penstock", "up", f"{CONFIG_DIR}/penstock.yaml"],
        "env": [
            {"name": "PENSTOCK_FRONTEND__SECURITY__API_KEYS", "valueFrom": key},
            {"name": "PENSTOCK_STATE_DIR", "value": f"{RUNS}/state"},
            {"name": "HOME", "value": RUNS},
        ],
        "ports": [{"name": "http", "containerPort": PORT}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 5},
        "livenessProbe": {"httpGet": {"path": "/live", "port": "http"}, "periodSeconds": 10, "failureThreshold": 6},
        "securityContext": LOCKED,
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG_DIR, "readOnly": True},
            {"name": "run", "mountPath": RUNS},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    pod: JsonObject = {
        "serviceAccountName": "penstock",
        **NO_LINKS,
        "securityContext": NOBODY,
        "terminationGracePeriodSeconds": round(settings.supervise.drain_timeout) + 30,
        "containers": [container],
        "volumes": [
            {"name": "config", "configMap": {"name": "penstock"}},
            {"name": "run", "emptyDir": {}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }
    labels = _labels(settings, "frontend")
    # A pod keeps the config of its start: another config is another pod.
    digest = hashlib.sha256(config.encode()).hexdigest()[:12]
    made = _made("apps/v1", "Deployment", "penstock", settings, component="frontend")
    made["spec"] = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},  # two supervisors would be two clusters
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels, "annotations": {"penstock.io/config": digest}}, "spec": pod},
    }
    return made


def _service(settings: ClusterSettings) -> JsonObject:
    made = _made("v1", "Service", "penstock", settings, component="frontend")
    made["spec"] = {
        "selector": _labels(settings, "frontend"),
        "ports": [{"name": "http", "port": 8000, "targetPort": "http"}],
    }
    return made


def _role(settings: ClusterSettings, plans: Sequence[PodPoolPlan]) -> JsonObject:
    names = [plan.deployment for plan in plans]
    rules: list[JsonObject] = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    if settings.planner.enabled and names:
        # Of these Deployments alone, and only their number.
        rules += [
            {"apiGroups": ["apps"], "resources": ["deployments"], "resourceNames": names, "verbs": ["get"]},
            {"apiGroups": ["apps"], "resources": ["deployments/scale"], "resourceNames": names, "verbs": ["patch"]},
        ]
    return _made("rbac.authorization.k8s.io/v1", "Role", "penstock", settings, rules=rules)


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
                selector = f"{INSTANCE}={settings.name},{POOL}={plan.pool}"
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


def _labels(settings: ClusterSettings, component: str) -> dict[str, str]:
    return {NAME: "penstock", INSTANCE: settings.name, COMPONENT: component}


def _made(
    version: str, kind: str, name: str, settings: ClusterSettings, *, component: str = "cluster", **fields: object
) -> JsonObject:
    metadata = {"name": name, "labels": _labels(settings, component)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **fields}

"""CustomResourceDefinition of PenstockCluster, made from the knobs: ``penstock operator --crd`` prints it."""

from typing import TYPE_CHECKING, Any

import yaml

from penstock.config.derived.settings_schema import group_schema
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.kernel.values import JsonObject
from penstock_kubernetes.operator.structural_schema import StructuralSchema

if TYPE_CHECKING:
    from lightkube.generic_resource import GenericNamespacedResource

GROUP, VERSION, KIND, PLURAL = "penstock.io", "v1alpha1", "PenstockCluster", "penstockclusters"
HEAD = "# Made by `penstock operator --crd`; a test fails when it is stale.\n"

_TEXT: JsonObject = {"type": "string"}
_COUNT: JsonObject = {"type": "integer"}
_KUBERNETES: JsonObject = {
    "type": "object",
    "description": "What a config on one machine does not have.",
    "properties": {
        "images": {
            "type": "object",
            "additionalProperties": _TEXT,
            "description": "Container images by kind of engine (vllm, sglang, trtllm, llamacpp), and penstock for "
            "frontends, planner and simulated engines, which is the operator's own where it is not given.",
        },
        "podTemplates": {
            "type": "object",
            "description": "Pod templates (metadata and spec) that are merged into ours, by pool, frontend or planner: "
            "resources, node selectors, tolerations, volumes. Our container is named main.",
            "additionalProperties": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
        },
        "gpus": {
            "type": "integer",
            "minimum": 0,
            "description": "Most GPUs that all engines take together; unset is what the nodes have.",
        },
        "hosts": {
            "type": "object",
            "additionalProperties": {"type": "integer", "minimum": 1},
            "description": "Hosts by pool: each engine of it spreads over so many pods, with its gpus divided among "
            "them (vLLM and SGLang); needs LeaderWorkerSet.",
        },
        "scaled": {
            "type": "string",
            "description": "Pool whose engines spec.replicas counts; a cluster of one pool needs no word.",
        },
        "strategy": {
            "type": "object",
            "description": "How many pods of an older template are replaced at a time, by pool, as Deployments have it."
            " Unset is a twentieth of the pool, one at least: more than wanted where there is room, else less where "
            "several are wanted; both 0 is refused.",
            "additionalProperties": {
                "type": "object",
                "properties": {
                    "maxSurge": {
                        "type": "integer",
                        "minimum": 0,
                        "description": "Pods more than wanted while some are replaced.",
                    },
                    "maxUnavailable": {
                        "type": "integer",
                        "minimum": 0,
                        "description": "Pods less than wanted meanwhile, where no GPU is free for more. 1 lets a "
                        "pool's only engine go before its successor comes.",
                    },
                },
            },
        },
        "secrets": {
            "type": "string",
            "description": "Name of a Secret whose entries are environment of all pods, such as "
            "PENSTOCK_FRONTEND__SECURITY__API_KEYS, HF_TOKEN, or what access.api_key_env of a pool names.",
        },
        "monitor": {
            "type": "boolean",
            "default": False,
            "description": "Make a PodMonitor for the frontends; needs the Prometheus operator.",
        },
    },
}
_POOL: JsonObject = {
    "type": "object",
    "properties": {
        "name": _TEXT,
        "model": _TEXT,
        "role": _TEXT,
        "configured": {**_COUNT, "description": "Replicas that the spec said when it was read last."},
        "replicas": {**_COUNT, "description": "Replicas that it should have."},
        "ready": _COUNT,
        "reason": {**_TEXT, "description": "Why it has that many, or why replicas do not serve."},
    },
}
_CONDITION: JsonObject = {
    "type": "object",
    "required": ["type", "status", "lastTransitionTime", "reason", "message"],
    "properties": {
        "type": _TEXT,
        "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
        "observedGeneration": {"type": "integer", "format": "int64"},
        "lastTransitionTime": {"type": "string", "format": "date-time"},
        "reason": _TEXT,
        "message": _TEXT,
    },
}
_STATUS: JsonObject = {
    "type": "object",
    "properties": {
        "observedGeneration": {"type": "integer", "format": "int64"},
        "replicas": {**_COUNT, "description": "Engines that there should be, in all pools."},
        "ready": {**_COUNT, "description": "Engines that take requests."},
        "frontends": {**_COUNT, "description": "Frontends that there are."},
        "scaled": {**_COUNT, "description": "Engines that there are of the pool that spec.replicas is of."},
        "selector": {**_TEXT, "description": "Label selector of these engines, for an autoscaler."},
        "attainment": {**_TEXT, "description": "Share of requests within the SLO, in the planner's last tick."},
        "gpus": {**_COUNT, "description": "GPUs that the engines have: the cost."},
        "plan": {
            "type": "object",
            "x-kubernetes-preserve-unknown-fields": True,
            "description": "What spec.request came to: config has the models, SLO and planner that are in force.",
        },
        "pools": {
            "type": "array",
            "items": _POOL,
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["name"],
        },
        "conditions": {
            "type": "array",
            "items": _CONDITION,
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
        },
    },
}
_POOL["required"] = ["name"]
_COLUMNS = (
    ("Replicas", "integer", ".status.replicas", "Engines that there should be."),
    ("Ready", "integer", ".status.ready", "Engines that take requests."),
    ("Attainment", "string", ".status.attainment", "Share of requests within the SLO."),
    ("GPUs", "integer", ".status.gpus", "GPUs that the engines have: the cost."),
    ("Available", "string", '.status.conditions[?(@.type=="Available")].status', "Whether requests are answered."),
    ("Age", "date", ".metadata.creationTimestamp", ""),
)


def cluster_crd() -> JsonObject:
    """Return the definition. ``kubectl scale`` counts the engines of one pool."""
    spec = group_schema(StructuralSchema(), ClusterSettings)
    spec["properties"]["replicas"] = {
        "type": "integer",
        "minimum": 1,
        "description": "Engines of the pool that kubernetes.scaled names, or of the only one, in place of its own "
        "replicas: what kubectl scale and an autoscaler set.",
    }
    spec["properties"]["kubernetes"] = _KUBERNETES
    spec["properties"]["request"] = {
        "type": "object",
        "x-kubernetes-preserve-unknown-fields": True,
        "description": "What is wanted of a model, in place of its pools: what penstock plan reads (model, engine, "
        "hardware, slo, workload), or a whole DynamoGraphDeploymentRequest. The operator plans it once.",
    }
    spec["properties"].pop("name")  # the resource has a name itself
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.scaled",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, **({"description": text} if text else {})}
            for name, kind, path, text in _COLUMNS
        ],
        "schema": {
            "openAPIV3Schema": {
                "type": "object",
                "description": "A Penstock cluster: models, engines, frontends and planner.",
                "properties": {"spec": spec, "status": _STATUS},
            }
        },
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}", "labels": {"app.kubernetes.io/name": "penstock"}},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["penstock"],
            },
            "versions": [version],
        },
    }


class _Plain(yaml.SafeDumper):
    """Writes each part in full: an alias reads badly in a file that people apply."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def crd_text() -> str:
    """Return the definition as YAML."""
    return HEAD + yaml.dump(cluster_crd(), Dumper=_Plain, sort_keys=False, width=120, allow_unicode=True)


def cluster_resource() -> "type[GenericNamespacedResource]":
    """Return lightkube's class for PenstockClusters."""
    from lightkube.generic_resource import create_namespaced_resource

    return create_namespaced_resource(GROUP, VERSION, KIND, PLURAL)

"""A kind of our own that tests of the API server define: with a schema, defaults, columns, scale and two versions."""

from typing import Any

GROUP = "test.penstock.io"
NAME = f"widgets.{GROUP}"


def widget_definition() -> dict[str, Any]:
    """Return the CRD."""
    part = {
        "type": "object",
        "required": ["name"],
        "properties": {"name": {"type": "string"}, "count": {"type": "integer"}},
    }
    parts = {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"], "items": part}
    spec = {
        "type": "object",
        "required": ["size"],
        "properties": {
            "size": {"type": "integer", "minimum": 1, "maximum": 10, "description": "How large the widget is."},
            "colour": {"type": "string", "enum": ["red", "blue"], "default": "red"},
            "replicas": {"type": "integer", "default": 1},
            "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
            "limit": {"x-kubernetes-int-or-string": True},
            "parts": parts,
        },
    }
    texts = {name: {"type": "string"} for name in ("phase", "selector")}
    status = {"type": "object", "properties": {"replicas": {"type": "integer"}, **texts}}
    schema = {"type": "object", "description": "A widget of a test.", "properties": {"spec": spec, "status": status}}
    scale = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    columns = [
        {"name": "Size", "type": "integer", "jsonPath": ".spec.size"},
        {"name": "Colour", "type": "string", "jsonPath": ".spec.colour", "priority": 1},
        {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    ]
    own = {
        "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}, "scale": scale},
        "additionalPrinterColumns": columns,
    }
    free = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    names = {"plural": "widgets", "singular": "widget", "kind": "Widget", "shortNames": ["wd"]}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": NAME},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": names,
            "versions": [
                {"name": "v1", "served": True, "storage": True, **own},
                {"name": "v1alpha1", "served": True, "storage": False, "schema": free},
            ],
        },
    }


def widget(name: str, **spec: object) -> dict[str, Any]:
    """Return a widget."""
    return {"apiVersion": f"{GROUP}/v1", "kind": "Widget", "metadata": {"name": name}, "spec": {"size": 3, **spec}}


def deployment(name: str = "web", replicas: int | None = 2, image: str = "sim:1") -> dict[str, Any]:
    """Return a Deployment with one container."""
    labels = {"app": name}
    container = {
        "name": "engine",
        "image": image,
        "ports": [{"containerPort": 80}],
        "env": [{"name": "A", "value": "1"}],
    }
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    spec = {"selector": {"matchLabels": labels}, "template": template}
    spec |= {} if replicas is None else {"replicas": replicas}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}


def pod(name: str, **labels: str) -> dict[str, Any]:
    """Return a pod with one container."""
    spec = {"containers": [{"name": "engine", "image": "sim:1"}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}

"""Names and labels of a cluster's objects in Kubernetes."""

import hashlib
import re
from typing import TypeVar, cast

from penstock.kernel.values import JsonObject
from penstock_kubernetes.operator.cluster_crd import GROUP, KIND, VERSION

NAME, INSTANCE, COMPONENT = "app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/component"
POOL, WORKER = f"{GROUP}/pool", f"{GROUP}/worker"
GROUP_LABEL = f"{GROUP}/group"
"""Of the pods of an engine over several hosts: the name of their LeaderWorkerSet."""
NUMBER, SERIAL, TEMPLATE = f"{GROUP}/number", f"{GROUP}/serial", f"{GROUP}/template"
MANAGER = "penstock-operator"
"""Field manager of what the operator applies."""
CONTAINER = "main"
NAME_MAX = 50
"""Characters of a name before what we append: a pod's name is also its host name, which has 63 at most."""
T = TypeVar("T")
_UNSAFE = re.compile(r"[^a-z0-9-]+")


class ClusterKey(tuple[str, str]):
    """Namespace and name of a PenstockCluster."""

    __slots__ = ()

    @property
    def namespace(self) -> str:
        return self[0]

    @property
    def name(self) -> str:
        return self[1]

    def __str__(self) -> str:
        return f"{self[0]}/{self[1]}"


def model_of(kind: type[T], data: JsonObject) -> T:
    """Return plain data as one of lightkube's models, whose own method is typed as any of them."""
    return cast(T, kind.from_dict(data))  # type: ignore[attr-defined]


def object_name(*parts: str) -> str:
    """Join parts to a name that Kubernetes takes; where letters had to change, a hash keeps names apart."""
    text = "-".join(parts)
    name = _UNSAFE.sub("-", text.lower()).strip("-")
    if name == text and len(name) <= NAME_MAX:
        return name
    return f"{name[: NAME_MAX - 9].strip('-')}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def label_value(text: str) -> str:
    """Return a text as the value of a label: 63 characters at most, of letters, digits and a few signs."""
    fine = re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", text)
    return text if fine else object_name(text)


def selector(cluster: str, component: str | None = None) -> dict[str, str]:
    """Return labels that select a cluster's objects."""
    labels = {NAME: "penstock", INSTANCE: label_value(cluster)}
    return labels if component is None else {**labels, COMPONENT: component}


def owner_reference(cluster: JsonObject) -> JsonObject:
    """Return the reference by which an object goes with its PenstockCluster.

    It blocks no deletion: the garbage collector takes everything, whether an operator runs or not, so that no
    finalizer of ours can hang a namespace.
    """
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "name": cluster["metadata"]["name"],
        "uid": cluster["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": False,
    }

"""Tables of `kubectl get`: the columns of each kind, and an object's cells in them."""

from collections.abc import Callable, Iterable
from datetime import datetime

from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.kinds.resource_kinds import PrinterColumn, ResourceKind
from tests.doubles.kubernetes.objects.patches import first_at, values_at

TABLE = "as=Table"
Cell = Callable[[JsonObject, float], object]
"""Returns what a column shows of an object at a time."""


def age(timestamp: object, now: float) -> str:
    """Return how long ago a timestamp is, in one unit."""
    seconds = max(0, int(now - datetime.fromisoformat(str(timestamp)).timestamp()))
    for unit, length, most in (("s", 1, 120), ("m", 60, 180), ("h", 3600, 48)):
        if seconds < length * most:
            return f"{seconds // length}{unit}"
    return f"{seconds // 86400}d"


def _cell_at(path: str, kind: str = "string") -> Cell:
    """Return the cell of a JSONPath: one value, several with commas between them, or an age."""

    def cell(item: JsonObject, now: float) -> object:
        values = values_at(item, path)
        if not values:
            return None
        if kind == "date":
            return age(values[0], now)
        return values[0] if len(values) == 1 else ",".join(map(str, values))

    return cell


def _pod_ready(item: JsonObject, now: float) -> object:
    ready = values_at(item, ".status.containerStatuses[*].ready")
    return f"{sum(map(bool, ready))}/{len(item['spec'].get('containers') or [])}"


def _pod_status(item: JsonObject, now: float) -> object:
    if item["metadata"].get("deletionTimestamp"):
        return "Terminating"
    states = ".status.containerStatuses[*].state"
    paths = (f"{states}.waiting.reason", f"{states}.terminated.reason", ".status.reason", ".status.phase")
    return next((found for path in paths if (found := first_at(item, path))), "Unknown")


def _pod_restarts(item: JsonObject, now: float) -> object:
    counts = values_at(item, ".status.containerStatuses[*].restartCount")
    return sum(each for each in counts if isinstance(each, int))


def _deployment_ready(item: JsonObject, now: float) -> object:
    return f"{first_at(item, '.status.readyReplicas') or 0}/{first_at(item, '.spec.replicas') or 0}"


def _node_status(item: JsonObject, now: float) -> object:
    ready = first_at(item, '.status.conditions[?(@.type=="Ready")].status')
    text = {None: "Unknown", "True": "Ready"}.get(ready, "NotReady")  # type: ignore[call-overload]
    return f"{text},SchedulingDisabled" if item["spec"].get("unschedulable") else text


COLUMNS: dict[str, dict[str, Cell]] = {
    "pods": {"Ready": _pod_ready, "Status": _pod_status, "Restarts": _pod_restarts},
    "deployments.apps": {
        "Ready": _deployment_ready,
        "Up-to-date": lambda item, now: first_at(item, ".status.updatedReplicas") or 0,
        "Available": lambda item, now: first_at(item, ".status.availableReplicas") or 0,
    },
    "services": {"Type": _cell_at(".spec.type"), "Cluster-IP": _cell_at(".spec.clusterIP")},
    "nodes": {"Status": _node_status},
    "configmaps": {"Data": lambda item, now: len(item.get("data") or {})},
    "events": {
        "Type": _cell_at(".type"),
        "Reason": _cell_at(".reason"),
        "Object": _cell_at(".involvedObject.name"),
        "Message": _cell_at(".message"),
    },
}
"""Columns of built-in kinds between the name and the age; a kind without an entry has those two alone."""


def table(
    kind: ResourceKind, items: Iterable[JsonObject], now: float, include: str, metadata: JsonObject
) -> JsonObject:
    """Return objects as a table; each row has its object's metadata, the whole object, or neither."""
    columns = _columns(kind)
    rows = []
    for item in items:
        row: JsonObject = {"cells": [cell(item, now) for _, cell in columns]}
        if include == "Object":
            row["object"] = item
        elif include != "None":
            own = {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": item["metadata"]}
            row["object"] = own
        rows.append(row)
    definitions = [
        {
            "name": column.name,
            "type": column.type,
            "format": "name" if column.name == "Name" else "",
            "description": column.name,
            "priority": column.priority,
        }
        for column, _ in columns
    ]
    head = {"kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": metadata}
    return head | {"columnDefinitions": definitions, "rows": rows}


def _columns(kind: ResourceKind) -> list[tuple[PrinterColumn, Cell]]:
    cells = {name: (PrinterColumn(name), cell) for name, cell in COLUMNS.get(kind.resource, {}).items()}
    own = [*cells.values(), *((column, _cell_at(column.path, column.type)) for column in kind.columns)]
    return [(PrinterColumn("Name"), _cell_at(".metadata.name")), *own]

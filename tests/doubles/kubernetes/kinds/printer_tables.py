"""Tables of `kubectl get`: the columns of each kind, and an object's cells in them."""

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import NamedTuple

from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.kinds.resource_kinds import PrinterColumn, ResourceKind
from tests.doubles.kubernetes.objects.patches import first_at, values_at

TABLE = "as=Table"


class BuiltInColumn(NamedTuple):
    """A column of a built-in kind: its name, its cell from object and time, and whether only `-o wide` has it."""

    name: str
    cell: Callable[[JsonObject, float], object]
    wide: bool = False
    type: str = "string"


def _at(path: str, absent: object = "<none>") -> Callable[[JsonObject, float], object]:
    def cell(item: JsonObject, now: float) -> object:
        value = first_at(item, path)
        return absent if value in (None, "") else value

    return cell


def _count(path: str) -> Callable[[JsonObject, float], object]:
    return lambda item, now: len(first_at(item, path) or [])  # type: ignore[arg-type]


def age(timestamp: object, now: float) -> str:
    """Return how long ago a timestamp is, as kubectl writes it."""
    if not timestamp:
        return "<unknown>"
    then = datetime.fromisoformat(str(timestamp).replace("Z", "+00:00")).timestamp()
    seconds = max(0, int(now - then))
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if seconds < 120:
        return f"{seconds}s"
    if minutes < 10:
        return f"{minutes}m{seconds % 60}s" if seconds % 60 else f"{minutes}m"
    if minutes < 180:
        return f"{minutes}m"
    if hours < 8:
        return f"{hours}h{minutes % 60}m" if minutes % 60 else f"{hours}h"
    if hours < 48:
        return f"{hours}h"
    return f"{days}d" if days < 730 else f"{days // 365}y"


def _age_of(path: str) -> Callable[[JsonObject, float], object]:
    return lambda item, now: age(first_at(item, path), now)


def _ready_of(ready: str, wanted: str) -> Callable[[JsonObject, float], object]:
    return lambda item, now: f"{first_at(item, ready) or 0}/{first_at(item, wanted) or 0}"


def _selector(path: str) -> Callable[[JsonObject, float], object]:
    def cell(item: JsonObject, now: float) -> object:
        labels = first_at(item, path)
        labels = labels.get("matchLabels", labels) if isinstance(labels, dict) else {}
        return ",".join(f"{name}={value}" for name, value in labels.items()) or "<none>"

    return cell


def _joined(path: str) -> Callable[[JsonObject, float], object]:
    return lambda item, now: ",".join(map(str, values_at(item, path))) or "<none>"


def _pod_ready(item: JsonObject, now: float) -> object:
    statuses = first_at(item, ".status.containerStatuses") or []
    ready = sum(bool(each.get("ready")) for each in statuses)  # type: ignore[attr-defined]
    return f"{ready}/{len(item['spec'].get('containers') or [])}"


def _pod_status(item: JsonObject, now: float) -> object:
    status = item.get("status") or {}
    reason = status.get("reason") or status.get("phase") or "Unknown"
    for each in status.get("containerStatuses") or []:
        state = each.get("state") or {}
        if state.get("waiting", {}).get("reason"):
            reason = state["waiting"]["reason"]
        elif "terminated" in state:
            ended = state["terminated"]
            reason = ended.get("reason") or f"ExitCode:{ended.get('exitCode', 0)}"
    if item["metadata"].get("deletionTimestamp"):
        reason = "Unknown" if status.get("reason") == "NodeLost" else "Terminating"
    return reason


def _restarts(item: JsonObject, now: float) -> object:
    statuses = first_at(item, ".status.containerStatuses") or []
    count = sum(each.get("restartCount", 0) for each in statuses)  # type: ignore[attr-defined]
    ends = [first_at(each, ".lastState.terminated.finishedAt") for each in statuses]  # type: ignore[attr-defined]
    latest = max((str(end) for end in ends if end), default="")
    return f"{count} ({age(latest, now)} ago)" if count and latest else str(count)


def _ports(item: JsonObject, now: float) -> object:
    ports = first_at(item, ".spec.ports") or []
    texts = [
        f"{each['port']}{':' + str(each['nodePort']) if 'nodePort' in each else ''}/{each.get('protocol', 'TCP')}"
        for each in ports  # type: ignore[attr-defined]
    ]
    return ",".join(texts) or "<none>"


def _node_status(item: JsonObject, now: float) -> object:
    ready = first_at(item, '.status.conditions[?(@.type=="Ready")].status')
    words = {"True": "Ready", "False": "NotReady"}
    text = words.get(str(ready), "Unknown" if ready is None else "NotReady")
    return f"{text},SchedulingDisabled" if item["spec"].get("unschedulable") else text


def _job_status(item: JsonObject, now: float) -> object:
    done = values_at(item, '.status.conditions[?(@.status=="True")].type')
    return next((word for word in ("Complete", "Failed", "Suspended") if word in done), "Running")


def _involved(item: JsonObject, now: float) -> object:
    about = item.get("involvedObject") or item.get("regarding") or {}
    return f"{str(about.get('kind', '')).lower()}/{about.get('name', '')}"


NAME = BuiltInColumn("Name", _at(".metadata.name"))
AGE = BuiltInColumn("Age", _age_of(".metadata.creationTimestamp"))
_POD_PATH = ".spec.template.spec.containers[*]"
_IMAGES = [
    BuiltInColumn("Containers", _joined(f"{_POD_PATH}.name"), True),
    BuiltInColumn("Images", _joined(f"{_POD_PATH}.image"), True),
    BuiltInColumn("Selector", _selector(".spec.selector"), True),
]
COLUMNS: dict[str, list[BuiltInColumn]] = {
    "pods": [
        BuiltInColumn("Ready", _pod_ready),
        BuiltInColumn("Status", _pod_status),
        BuiltInColumn("Restarts", _restarts),
        AGE,
        BuiltInColumn("IP", _at(".status.podIP"), True),
        BuiltInColumn("Node", _at(".spec.nodeName"), True),
        BuiltInColumn("Nominated Node", _at(".status.nominatedNodeName"), True),
        BuiltInColumn("Readiness Gates", _at(".spec.readinessGates"), True),
    ],
    "deployments.apps": [
        BuiltInColumn("Ready", _ready_of(".status.readyReplicas", ".spec.replicas")),
        BuiltInColumn("Up-to-date", _at(".status.updatedReplicas", 0), type="integer"),
        BuiltInColumn("Available", _at(".status.availableReplicas", 0), type="integer"),
        AGE,
        *_IMAGES,
    ],
    "replicasets.apps": [
        BuiltInColumn("Desired", _at(".spec.replicas", 0), type="integer"),
        BuiltInColumn("Current", _at(".status.replicas", 0), type="integer"),
        BuiltInColumn("Ready", _at(".status.readyReplicas", 0), type="integer"),
        AGE,
        *_IMAGES,
    ],
    "statefulsets.apps": [
        BuiltInColumn("Ready", _ready_of(".status.readyReplicas", ".spec.replicas")),
        AGE,
        *_IMAGES[:2],
    ],
    "services": [
        BuiltInColumn("Type", _at(".spec.type")),
        BuiltInColumn("Cluster-IP", _at(".spec.clusterIP")),
        BuiltInColumn("External-IP", lambda item, now: first_at(item, ".spec.externalName") or "<none>"),
        BuiltInColumn("Port(s)", _ports),
        AGE,
        BuiltInColumn("Selector", _selector(".spec.selector"), True),
    ],
    "namespaces": [BuiltInColumn("Status", _at(".status.phase")), AGE],
    "nodes": [
        BuiltInColumn("Status", _node_status),
        BuiltInColumn("Roles", lambda item, now: "<none>"),
        AGE,
        BuiltInColumn("Version", _at(".status.nodeInfo.kubeletVersion", "")),
    ],
    "configmaps": [BuiltInColumn("Data", _count(".data"), type="integer"), AGE],
    "secrets": [BuiltInColumn("Type", _at(".type")), BuiltInColumn("Data", _count(".data"), type="integer"), AGE],
    "serviceaccounts": [AGE],
    "jobs.batch": [
        BuiltInColumn("Status", _job_status),
        BuiltInColumn("Completions", _ready_of(".status.succeeded", ".spec.completions")),
        BuiltInColumn("Duration", _age_of(".status.startTime")),
        AGE,
        *_IMAGES,
    ],
    "leases.coordination.k8s.io": [BuiltInColumn("Holder", _at(".spec.holderIdentity", "")), AGE],
    "events": [
        BuiltInColumn(
            "Last Seen", lambda item, now: age(item.get("lastTimestamp") or item.get("eventTime") or "", now)
        ),
        BuiltInColumn("Type", _at(".type", "")),
        BuiltInColumn("Reason", _at(".reason", "")),
        BuiltInColumn("Object", _involved),
        BuiltInColumn("Message", lambda item, now: item.get("message") or item.get("note") or ""),
    ],
    "poddisruptionbudgets.policy": [
        BuiltInColumn("Min Available", _at(".spec.minAvailable", "N/A")),
        BuiltInColumn("Max Unavailable", _at(".spec.maxUnavailable", "N/A")),
        BuiltInColumn("Allowed Disruptions", _at(".status.disruptionsAllowed", 0), type="integer"),
        AGE,
    ],
    "horizontalpodautoscalers.autoscaling": [
        BuiltInColumn("Reference", lambda item, now: "{kind}/{name}".format(**item["spec"]["scaleTargetRef"])),
        BuiltInColumn("Targets", lambda item, now: "<unknown>"),
        BuiltInColumn("MinPods", _at(".spec.minReplicas")),
        BuiltInColumn("MaxPods", _at(".spec.maxReplicas")),
        BuiltInColumn("Replicas", _at(".status.currentReplicas", 0), type="integer"),
        AGE,
    ],
    "endpointslices.discovery.k8s.io": [
        BuiltInColumn("AddressType", _at(".addressType")),
        BuiltInColumn("Ports", _joined(".ports[*].port")),
        BuiltInColumn("Endpoints", _joined(".endpoints[*].addresses[*]")),
        AGE,
    ],
    "rolebindings.rbac.authorization.k8s.io": [
        BuiltInColumn("Role", lambda item, now: "{kind}/{name}".format(**item["roleRef"])),
        AGE,
    ],
    "clusterrolebindings.rbac.authorization.k8s.io": [
        BuiltInColumn("Role", lambda item, now: "{kind}/{name}".format(**item["roleRef"])),
        AGE,
    ],
    "networkpolicies.networking.k8s.io": [BuiltInColumn("Pod-Selector", _selector(".spec.podSelector")), AGE],
    "customresourcedefinitions.apiextensions.k8s.io": [
        BuiltInColumn("Created At", _at(".metadata.creationTimestamp")),
    ],
}
"""Columns behind the name; a kind without an entry has its age alone."""


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
            "format": "name" if column.name == "Name" else column.format,
            "description": column.description or column.name,
            "priority": column.priority,
        }
        for column, _ in columns
    ]
    head = {"kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": metadata}
    return head | {"columnDefinitions": definitions, "rows": rows}


def _columns(kind: ResourceKind) -> list[tuple[PrinterColumn, Callable[[JsonObject, float], object]]]:
    if kind.custom:
        own = [(column, _custom_cell(column)) for column in kind.columns]
        return [(PrinterColumn("Name"), NAME.cell), *own]
    columns = [NAME, *COLUMNS.get(kind.table, [AGE])]
    if kind.table == "events":
        columns = columns[1:]
    return [(PrinterColumn(each.name, each.type, priority=int(each.wide)), each.cell) for each in columns]


def _custom_cell(column: PrinterColumn) -> Callable[[JsonObject, float], object]:
    def cell(item: JsonObject, now: float) -> object:
        values = values_at(item, column.path)
        if not values:
            return None
        if column.type == "date":
            return age(values[0], now)
        return values[0] if len(values) == 1 else ",".join(map(str, values))

    return cell

"""Servers in pods: which URLs a pod's containers serve at, and where they publish KV events and statistics.

Annotations of a pod: ``penstock.io/port`` (of the API, where no container port is named http and the first is another;
several for data-parallel ranks), ``penstock.io/kv-events``, ``penstock.io/kv-replay`` and ``penstock.io/stats`` (a port
or an endpoint, one for each rank).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

PORT, EVENTS, REPLAY, STATS = (f"penstock.io/{name}" for name in ("port", "kv-events", "kv-replay", "stats"))


class PodServer(NamedTuple):
    """One server of a pod.

    Args:
        id: of the pod and its address, the same while that is.
        ready: the pod's condition says so, and nobody deletes it.
        card: what its annotations say, as fields of a `WorkerCard`.
    """

    id: str
    pod: str
    url: str
    ready: bool
    card: dict[str, object]


def servers_of(pod: Any, ports: Sequence[int] = ()) -> list[PodServer]:
    """Return the servers of a pod; none before it has an address.

    Args:
        pod: lightkube's.
        ports: of each pod, where an InferencePool says them.
    """
    address = None if pod.status is None else pod.status.podIP
    if not address:
        return []
    host = f"[{address}]" if ":" in address else address
    annotations = pod.metadata.annotations or {}
    chosen = list(ports) or _port_numbers(annotations.get(PORT)) or _container_ports(pod)
    return [
        PodServer(
            id=f"{pod.metadata.uid} {host}:{port}",
            pod=pod.metadata.name,
            url=f"http://{host}:{port}",
            ready=_ready(pod),
            card=_card_of_pod(annotations, host, rank, len(chosen)),
        )
        for rank, port in enumerate(chosen)
    ]


def _ready(pod: Any) -> bool:
    if pod.metadata.deletionTimestamp is not None:
        return False
    return any(each.type == "Ready" and each.status == "True" for each in pod.status.conditions or ())


def _container_ports(pod: Any) -> list[int]:
    """Return the port that is named http, or else the first one."""
    ports = [port for container in pod.spec.containers for port in container.ports or ()]
    named = [port for port in ports if port.name == "http"]
    return [port.containerPort for port in (named or ports)[:1]]


def _card_of_pod(annotations: dict[str, str], host: str, rank: int, servers: int) -> dict[str, object]:
    card: dict[str, object] = {}
    for field, name in (("events", EVENTS), ("replay", REPLAY), ("stats", STATS)):
        given = [text.strip() for text in annotations.get(name, "").split(",") if text.strip()]
        if not given:
            continue
        if servers > 1:  # each server is one rank; vLLM counts its ports up by the rank
            given = [given[rank]] if len(given) == servers else [_address_of_rank(given[0], rank)]
        endpoints = tuple(_endpoint_at_host(text, host) for text in given)
        card[field] = endpoints[0] if field == "stats" else endpoints
    if "events" in card:
        card["ranks"] = len(card["events"])  # type: ignore[arg-type]
    return card


def _endpoint_at_host(text: str, host: str) -> str:
    """Return a ZMQ endpoint; a pod knows its ports and not its address."""
    if text.isdecimal():
        return f"tcp://{host}:{text}"
    return text.replace("://*:", f"://{host}:").replace("://0.0.0.0:", f"://{host}:")


def _address_of_rank(text: str, rank: int) -> str:
    before, colon, port = text.rpartition(":")
    return f"{before}{colon}{int(port) + rank}" if port.isdecimal() else text


def _port_numbers(text: str | None) -> list[int]:
    return [int(port) for port in (text or "").split(",") if port.strip().isdecimal()]

"""Status of a PenstockCluster: counts, conditions with reasons, and Events where something changed."""

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from penstock.kernel.plurals import counted
from penstock.kernel.values import JsonObject, Pool
from penstock_kubernetes.operator import object_names as names

MESSAGE_MAX = 1000
"""Characters of a message: an Event takes 1,024."""


class PoolView(NamedTuple):
    """A pool as status shows it. ``configured``: replicas in the spec; ``reason``: why it has the desired ones."""

    pool: Pool
    configured: int
    reason: str


class ClusterNotice(NamedTuple):
    """What an Event tells."""

    kind: str
    reason: str
    message: str


def status_of(
    resource: JsonObject,
    pools: Mapping[str, PoolView],
    *,
    frontends: tuple[int, int],
    attainment: float | None,
    generation: int | None = None,
    problem: str | None = None,
    scaled: str | None = None,
) -> JsonObject:
    """Return the whole status.

    Args:
        frontends: how many there are, and how many take requests.
        attainment: share of requests within the SLO; None is unknown.
        generation: of the spec that counts; None is the resource's own.
        problem: what keeps the operator from acting on the spec.
        scaled: the pool that an autoscaler counts; None is none.
    """
    metadata = resource["metadata"]
    observed = metadata.get("generation", 0) if generation is None else generation
    status: JsonObject = {
        "observedGeneration": observed,
        "replicas": sum(view.pool.desired for view in pools.values()),
        "ready": sum(view.pool.ready for view in pools.values()),
        "frontends": frontends[0],
        **_scale(metadata["name"], scaled, pools),
        "gpus": sum(len(replica.gpus) for view in pools.values() for replica in view.pool.replicas or ()),
        "pools": [_pool_row(name, view) for name, view in pools.items()],
    }
    if attainment is not None:
        status["attainment"] = f"{100 * attainment:.1f}%"
    before = (resource.get("status") or {}).get("conditions") or []
    status["conditions"] = _conditions(before, observed, _judged(pools, frontends[1], problem))
    return status


def events_of(before: JsonObject, after: JsonObject) -> list[ClusterNotice]:
    """Return what is worth an Event between two statuses: desired replicas with their reason, and conditions."""
    notices = []
    old = {row["name"]: row for row in before.get("pools") or []}
    for row in after["pools"]:
        was = old.get(row["name"])
        if was is not None and was.get("replicas") != row["replicas"]:
            why = f": {row['reason']}" if row.get("reason") else ""
            text = f"pool {row['name']}: {was.get('replicas')} -> {row['replicas']} replicas{why}"
            notices.append(ClusterNotice("Normal", "Scaled", text))
    states = {each["type"]: each for each in before.get("conditions") or []}
    for each in after["conditions"]:
        was = states.get(each["type"], {})
        if (was.get("status"), was.get("reason")) != (each["status"], each["reason"]):
            bad = (each["type"] == "Degraded") == (each["status"] == "True")
            kind = "Warning" if bad and each["type"] not in ("Progressing", "UpToDate") else "Normal"
            if was or bad:
                notices.append(ClusterNotice(kind, each["reason"], each["message"] or each["type"]))
    return notices


def event_object(resource: JsonObject, notice: ClusterNotice) -> JsonObject:
    """Return an Event about a PenstockCluster."""
    metadata, now = resource["metadata"], timestamp()
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{metadata['name'][:200]}.", "namespace": metadata["namespace"]},
        "involvedObject": {
            "apiVersion": resource.get("apiVersion"),
            "kind": resource.get("kind"),
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata.get("uid"),
        },
        "type": notice.kind,
        "reason": notice.reason,
        "message": notice.message[:MESSAGE_MAX],
        "source": {"component": names.MANAGER},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }


def timestamp() -> str:
    """Return the time as Kubernetes writes it."""
    return datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _judged(
    pools: Mapping[str, PoolView], frontends_ready: int, problem: str | None
) -> dict[str, tuple[str, str, str]]:
    """Return condition -> status, reason, message."""
    models = {view.pool.model for view in pools.values()}
    served = {view.pool.model for view in pools.values() if view.pool.ready}
    missing = sum(abs(view.pool.desired - view.pool.ready) for view in pools.values())
    bad = [
        f"{replica.id}: {replica.reason}"
        for view in pools.values()
        for replica in view.pool.replicas or ()
        if replica.state == "failed" and replica.reason
    ]
    bad += [f"pool {name}: {view.pool.problem}" for name, view in pools.items() if view.pool.problem]
    if not frontends_ready:
        available = ("False", "NoFrontend", "no frontend takes requests")
    elif models - served:
        available = ("False", "NoEngine", f"no engine serves {', '.join(sorted(models - served))}")
    else:
        available = ("True", "Serving", "requests are answered")
    waits = [
        f"{replica.id} {replica.state}" + (f" ({replica.reason})" if replica.reason else "")
        for view in pools.values()
        for replica in view.pool.replicas or ()
        if replica.state != "ready"
    ]
    progressing = ("False", "Settled", "every pool is as it should be")
    if missing or waits:
        text = "; ".join(waits) or counted(missing, "replica") + " to come or to go"
        progressing = ("True", "Changing", text)
    degraded = ("False", "AsDesired", "")
    if problem is not None:
        degraded = ("True", "SpecRefused", problem)
    elif bad:
        degraded = ("True", "EnginesFail", "; ".join(bad))
    return {"Available": available, "Progressing": progressing, "Degraded": degraded, "UpToDate": _up_to_date(pools)}


def _up_to_date(pools: Mapping[str, PoolView]) -> tuple[str, str, str]:
    replicas = [replica for view in pools.values() for replica in view.pool.replicas or ()]
    outdated = [f"{replica.id}: {replica.outdated}" for replica in replicas if replica.outdated]
    if not outdated:
        return "True", "AsSpec", "every engine is as the spec wants"
    share = f"{len(outdated)} of {counted(len(replicas), 'engine')} are not as the spec wants: "
    return "False", "Outdated", share + "; ".join(outdated)


def _scale(cluster: str, scaled: str | None, pools: Mapping[str, PoolView]) -> JsonObject:
    """Return what the scale sub-resource reads: replicas that there are, and the selector of their pods."""
    if scaled is None or scaled not in pools:
        return {}
    labels = {**names.selector(cluster, "engine"), names.POOL: names.label_value(scaled)}
    selector = ",".join(f"{key}={value}" for key, value in labels.items())
    return {"scaled": len(pools[scaled].pool.replicas or ()), "selector": selector}


def _conditions(
    before: Sequence[JsonObject], generation: int, judged: Mapping[str, tuple[str, str, str]]
) -> list[JsonObject]:
    known = {each["type"]: each for each in before}
    conditions = []
    for kind, (state, reason, message) in judged.items():
        was = known.get(kind, {})
        since = was["lastTransitionTime"] if was.get("status") == state else timestamp()
        conditions.append(
            {
                "type": kind,
                "status": state,
                "observedGeneration": generation,
                "lastTransitionTime": since,
                "reason": reason,
                "message": message[:MESSAGE_MAX],
            }
        )
    return conditions


def _pool_row(name: str, view: PoolView) -> JsonObject:
    pool = view.pool
    row: JsonObject = {
        "name": name,
        "model": pool.model,
        "role": pool.role,
        "configured": view.configured,
        "replicas": pool.desired,
        "ready": pool.ready,
    }
    return {**row, "reason": view.reason[:MESSAGE_MAX]} if view.reason else row

"""Resources of the discovery store in Kubernetes: a PenstockEntry for each key, a Lease for each process and ttl."""

import hashlib
import os
import re
import time
from base64 import b64decode, b64encode
from datetime import UTC, datetime
from typing import Any, NamedTuple

GROUP, VERSION = "penstock.io", "v1alpha1"
DISCOVERY_LABEL = "penstock.io/discovery"
"""On entries and leases of a store: the cluster's name."""
PREFIX_LABEL = "penstock.io/key-prefix"
"""On entries: what a key has before its first slash."""
NAME_PATTERN = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
"""What a label of Kubernetes takes, and so a cluster's name."""


class StoredEntry(NamedTuple):
    """An entry as it was read: `raw` is what the codec wrote."""

    key: str
    lease: str | None
    raw: bytes


def entry_class() -> Any:
    """Return lightkube's class for a PenstockEntry."""
    from lightkube.generic_resource import create_namespaced_resource

    return create_namespaced_resource(GROUP, VERSION, "PenstockEntry", "penstockentries")


def lease_class() -> Any:
    """Return lightkube's class for a Lease."""
    from lightkube.resources.coordination_v1 import Lease

    return Lease


def entry_name(cluster: str, key: str) -> str:
    """Return the name of a key's entry: a key is any text, a name is not."""
    return f"penstock-{hashlib.sha256(f'{cluster}/{key}'.encode()).hexdigest()[:40]}"


def entry_body(cluster: str, key: str, raw: bytes, lease: str | None, lease_uid: str | None) -> dict[str, object]:
    """Return the fields of an entry, all of those that a later put replaces."""
    owners = [] if lease is None else [_owner_reference("coordination.k8s.io/v1", "Lease", lease, str(lease_uid))]
    labels, prefix = _discovery_labels(cluster), key.partition("/")[0]
    if re.fullmatch(NAME_PATTERN, prefix):
        labels[PREFIX_LABEL] = prefix
    metadata = {"labels": labels, "ownerReferences": owners}
    # A null takes the field away where the body is a merge patch.
    return {"metadata": metadata, "spec": {"key": key, "entry": b64encode(raw).decode(), "lease": lease}}


def read_entry(entry: Any) -> StoredEntry:
    """Return what an entry says; one that somebody wrote by hand has an empty key."""
    spec = entry.spec or {}
    try:
        raw = b64decode(spec.get("entry") or "")
    except ValueError:
        raw = b""
    return StoredEntry(str(spec.get("key") or ""), spec.get("lease"), raw)


def lease_body(cluster: str, holder: str, ttl: int) -> dict[str, object]:
    """Return the fields of a new lease; in a pod, which POD_NAME and POD_UID name, it goes with the pod."""
    metadata: dict[str, object] = {"labels": _discovery_labels(cluster)}
    pod, uid = os.environ.get("POD_NAME"), os.environ.get("POD_UID")
    if pod and uid:
        metadata["ownerReferences"] = [_owner_reference("v1", "Pod", pod, uid)]
    now = wall_time()
    spec = {"holderIdentity": holder, "leaseDurationSeconds": ttl, "acquireTime": now, "renewTime": now}
    return {"metadata": metadata, "spec": spec}


def wall_time() -> str:
    """Return this machine's time as a Lease has it: for readers, no process of ours decides by it."""
    return datetime.fromtimestamp(time.time(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _discovery_labels(cluster: str) -> dict[str, str]:
    labels = {"app.kubernetes.io/name": "penstock", "app.kubernetes.io/instance": cluster}
    return {**labels, DISCOVERY_LABEL: cluster}


def _owner_reference(version: str, kind: str, name: str, uid: str) -> dict[str, str]:
    return {"apiVersion": version, "kind": kind, "name": name, "uid": uid}

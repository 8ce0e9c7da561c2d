"""Engine pod: what the API server told last of the pod of one engine, or of its pods on several hosts, in words."""

import time
from collections.abc import Mapping
from datetime import datetime

from penstock.kernel.values import JsonObject
from penstock_kubernetes.operator.manifest_parts import GPU

BROKEN = ("ErrImageNeverPull", "InvalidImageName", "CreateContainerConfigError", "CreateContainerError")
"""Reasons of a waiting container that no time heals."""


def lack_of(pod: JsonObject) -> str | None:
    """Return why a pod is not ready yet; None where it is."""
    status = pod.get("status") or {}
    if (waiting := waiting_of(pod)) is not None:
        return f"its container waits: {waiting}"
    if (why := unscheduled(pod)) is not None:
        return f"it is not scheduled: {why}"
    if status.get("phase") != "Running" or not status.get("podIP"):
        return f"its pod is {(status.get('phase') or 'not known to a node').lower()}"
    return None if condition(pod, "Ready").get("status") == "True" else "its pod is not ready"


def waiting_of(pod: JsonObject) -> str | None:
    """Return why a container of a pod does not start, where that is more than that it is being made."""
    for state in _container_states(pod):
        waiting = (state.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return _reason_text(waiting)
    return None


def unscheduled(pod: JsonObject) -> str | None:
    """Return why no node takes a pod; None where one does."""
    scheduled = condition(pod, "PodScheduled")
    return _reason_text(scheduled) if scheduled.get("status") == "False" else None


def hopeless(pod: JsonObject) -> bool:
    """Return whether a pod waits for something that will not come by itself."""
    reasons = [((state.get("state") or {}).get("waiting") or {}).get("reason") for state in _container_states(pod)]
    return any(reason in BROKEN for reason in reasons)


def end_of(pod: JsonObject | None) -> str | None:
    """Return how an engine's pod ended, as a verb and what follows; None while it lives.

    Args:
        pod: None where it was deleted.
    """
    if pod is None:
        return "was deleted, though nobody asked the operator for it"
    status = pod.get("status") or {}
    if status.get("phase") in ("Failed", "Succeeded"):
        reason = status.get("reason")
        if reason is not None:
            return f"was ended by Kubernetes: {_reason_text(status)}"
        return _exit(pod)
    disrupted = condition(pod, "DisruptionTarget")
    if pod["metadata"].get("deletionTimestamp") is not None:
        why = f" ({_reason_text(disrupted)})" if disrupted.get("status") == "True" else ""
        return f"is being deleted by somebody else{why}"
    ready = condition(pod, "Ready")
    if ready.get("reason") == "NodeStatusUnknown" or status.get("reason") == "NodeLost":
        return f"is on node {pod['spec'].get('nodeName')}, which does not answer"
    return None


def restarted(pod: JsonObject) -> str | None:
    """Return how a container ended that runs again, where a pod's rank in a group can't; None where none did."""
    for state in _container_states(pod):
        if state.get("restartCount"):
            ended = (state.get("lastState") or {}).get("terminated") or {}
            return f"ended with status {ended.get('exitCode')} and was restarted"
    return None


def unready(pod: JsonObject) -> str | None:
    """Return why a pod is not ready, as its kubelet says; None where it is."""
    ready = condition(pod, "Ready")
    return None if ready.get("status") != "False" else _reason_text(ready)


def lost(pod: JsonObject) -> bool:
    """Return whether nobody is there to end a pod: its node does not answer."""
    ready = condition(pod, "Ready")
    return ready.get("reason") == "NodeStatusUnknown" or (pod.get("status") or {}).get("reason") == "NodeLost"


def seconds_of(text: str) -> float:
    """Return a time as Kubernetes writes it in seconds since 1970."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def condition(thing: JsonObject, kind: str) -> JsonObject:
    """Return a condition of an object's status; empty where it has none of that type."""
    conditions = (thing.get("status") or {}).get("conditions") or []
    return next((dict(each) for each in conditions if each.get("type") == kind), {})


def _exit(pod: JsonObject) -> str:
    for state in _container_states(pod):
        ended = (state.get("state") or {}).get("terminated")
        if ended is not None:
            detail = f": {ended['message'].strip()}" if ended.get("message") else ""
            reason = ended.get("reason")
            why = f" ({reason})" if reason not in (None, "Error", "Completed") else ""
            return f"ended with status {ended.get('exitCode')}{why}{detail}"
    return "ended"


def _container_states(pod: JsonObject) -> list[JsonObject]:
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def _reason_text(thing: JsonObject) -> str:
    reason, message = thing.get("reason") or "no reason", (thing.get("message") or "").strip()
    return f"{reason}: {message}" if message else str(reason)


UNREADY_MAX = 60.0
"""Seconds for which an engine that served may be not ready before it is replaced; routers avoid it much sooner."""


class EnginePod:
    """One pod, or a group of them whose leader stands for it.

    Args:
        name: of the pod, or of the group's LeaderWorkerSet.
    """

    def __init__(self, name: str, *, group: bool = False) -> None:
        self.name = name
        self.group = group
        self.object: JsonObject | None = None
        """None where it is deleted, or not yet known."""
        self.listed = False
        self.ending = False
        """Whether we asked for its end."""
        self.begun = time.monotonic()
        self._others: dict[str, JsonObject] = {}
        """Of a group: the pods beside its leader."""
        self._broken: str | None = None
        self._unready_since: float | None = None

    @property
    def deleted(self) -> bool:
        return self.listed and self.object is None and not self._others

    @property
    def labels(self) -> Mapping[str, str]:
        return {} if self.object is None else self.object["metadata"].get("labels") or {}

    @property
    def gpus(self) -> int:
        """How many its containers take."""
        containers = (self.object or {}).get("spec", {}).get("containers") or []
        limits = [(container.get("resources") or {}).get("limits") or {} for container in containers]
        return sum(int(each.get(GPU, 0)) for each in limits)

    def take(self, name: str, object: JsonObject | None) -> None:
        """Take news of the pod, or of one of the group; None: it is deleted."""
        if not self.group or name == f"{self.name}-0":
            self.object, self.listed = object, True
        elif object is not None:
            self._others[name] = object
        elif self._others.pop(name, None) is not None:
            self._broken = f"lost its pod {name}, which was deleted"

    def end(self) -> str | None:
        """Return how the engine ended, as a verb and what follows; None while it lives, or is not yet known."""
        if not self.listed:
            return self._broken
        end = end_of(self.object)
        if end is not None or not self.group:
            return end
        assert self.object is not None
        if (again := restarted(self.object)) is not None:
            return again
        for name, other in self._others.items():
            if (why := end_of(other) or restarted(other)) is not None:
                return f"lost its pod {name}, which {why}"
        return self._broken

    def silence(self) -> str | None:
        """Return how long it has not been ready by our own clock, where that is too long."""
        why = None if self.object is None else unready(self.object)
        if why is None:
            self._unready_since = None
            return None
        now = time.monotonic()
        self._unready_since = since = self._unready_since or now
        return f"was not ready for {now - since:.0f} s: {why}" if now - since > UNREADY_MAX else None

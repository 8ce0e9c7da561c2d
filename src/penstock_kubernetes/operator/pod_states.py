"""States of a pod in the words that the fleet's reasons have: why it does not run, and how it ended."""

from datetime import datetime

from penstock.kernel.values import JsonObject

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
    for state in _containers(pod):
        waiting = (state.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return _words(waiting)
    return None


def unscheduled(pod: JsonObject) -> str | None:
    """Return why no node takes a pod; None where one does."""
    scheduled = condition(pod, "PodScheduled")
    return _words(scheduled) if scheduled.get("status") == "False" else None


def hopeless(pod: JsonObject) -> bool:
    """Return whether a pod waits for something that will not come by itself."""
    reasons = [((state.get("state") or {}).get("waiting") or {}).get("reason") for state in _containers(pod)]
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
            return f"was ended by Kubernetes: {_words(status)}"
        return _exit(pod)
    disrupted = condition(pod, "DisruptionTarget")
    if pod["metadata"].get("deletionTimestamp") is not None:
        why = f" ({_words(disrupted)})" if disrupted.get("status") == "True" else ""
        return f"is being deleted by somebody else{why}"
    ready = condition(pod, "Ready")
    if ready.get("reason") == "NodeStatusUnknown" or status.get("reason") == "NodeLost":
        return f"is on node {pod['spec'].get('nodeName')}, which does not answer"
    return None


def restarted(pod: JsonObject) -> str | None:
    """Return how a container ended that runs again, where a pod's rank in a group can't; None where none did."""
    for state in _containers(pod):
        if state.get("restartCount"):
            ended = (state.get("lastState") or {}).get("terminated") or {}
            return f"ended with status {ended.get('exitCode')} and was restarted"
    return None


def unready(pod: JsonObject) -> str | None:
    """Return why a pod is not ready, as its kubelet says; None where it is."""
    ready = condition(pod, "Ready")
    return None if ready.get("status") != "False" else _words(ready)


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
    for state in _containers(pod):
        ended = (state.get("state") or {}).get("terminated")
        if ended is not None:
            detail = f": {ended['message'].strip()}" if ended.get("message") else ""
            reason = ended.get("reason")
            why = f" ({reason})" if reason not in (None, "Error", "Completed") else ""
            return f"ended with status {ended.get('exitCode')}{why}{detail}"
    return "ended"


def _containers(pod: JsonObject) -> list[JsonObject]:
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def _words(thing: JsonObject) -> str:
    reason, message = thing.get("reason") or "no reason", (thing.get("message") or "").strip()
    return f"{reason}: {message}" if message else str(reason)

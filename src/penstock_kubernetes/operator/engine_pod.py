"""Engine pod: what the API server told last of the pod of one engine, or of its pods on several hosts."""

import time
from collections.abc import Mapping

from penstock.kernel.values import JsonObject
from penstock_kubernetes.operator.pod_states import end_of, restarted, unready
from penstock_kubernetes.operator.pod_template import GPU

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

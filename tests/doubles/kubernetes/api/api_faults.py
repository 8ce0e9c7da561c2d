"""Faults of the API server on demand: refused and lost answers, dropped watches, stale lists, outages, a wrong time."""

from collections.abc import Callable
from typing import Literal

import msgspec

from tests.doubles.kubernetes.api.api_requests import ApiPath
from tests.doubles.kubernetes.objects.api_failures import ApiFailure, too_many_requests, unauthorized

FaultKind = Literal[
    "too-many-requests",
    "error",
    "unauthorized",
    "lost-answer",
    "drop-watch",
    "stale-list",
    "clock-skew",
    "refuse",
    "forget-history",
]


class ApiFault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault, and which requests it meets; a list that is empty meets all.

    ``too-many-requests`` (Retry-After `seconds`), ``error`` and ``unauthorized`` answer in the place of the server.
    ``lost-answer`` carries a request out and breaks the connection. ``stale-list`` answers lists with what there was
    when the fault began. ``drop-watch`` ends open watches. ``clock-skew`` moves the server's clock. At once: ``refuse``
    closes the port and all connections for `seconds`, ``forget-history`` makes watches and lists at old versions 410.
    """

    kind: FaultKind
    seconds: float = 1.0
    times: int | None = None
    """How many requests it meets; None: until it is cleared."""
    verbs: tuple[str, ...] = ()
    resources: tuple[str, ...] = ()
    """Plurals, with ``/SUBRESOURCE`` where one is meant."""
    names: tuple[str, ...] = ()


class _ActiveFault:
    """A fault with what is left of it."""

    def __init__(self, fault: ApiFault, version: int) -> None:
        self.fault = fault
        self.left = fault.times
        self.version = version

    def meets(self, kind: str, verb: str, path: ApiPath) -> bool:
        fault = self.fault
        resource = f"{path.plural}/{path.subresource}" if path.subresource else path.plural
        return (
            fault.kind == kind
            and self.left != 0
            and verb in (fault.verbs or (verb,))
            and resource in (fault.resources or (resource,))
            and path.name in (fault.names or (path.name,))
        )


class ApiFaults:
    """The faults that are active now."""

    def __init__(self, version: Callable[[], int], act: Callable[[ApiFault], None]) -> None:
        self._version = version
        self._act = act
        self._active: list[_ActiveFault] = []
        self.skew_s = 0.0

    def add(self, fault: ApiFault) -> None:
        """Begin a fault."""
        if fault.kind == "clock-skew":
            self.skew_s = fault.seconds
            return
        if fault.kind not in ("refuse", "forget-history"):
            self._active.append(_ActiveFault(fault, self._version()))
        self._act(fault)

    def clear(self) -> None:
        """End all faults."""
        self._active.clear()
        self.skew_s = 0.0

    def take(self, kind: FaultKind, verb: str, path: ApiPath) -> ApiFault | None:
        """Return a fault of a kind that meets a request, and count it."""
        each = self._take(kind, verb, path)
        return each.fault if each else None

    def stale_version(self, path: ApiPath) -> int | None:
        """Return the version that lists are frozen at, or None."""
        each = self._take("stale-list", "list", path)
        return each.version if each else None

    def failure(self, verb: str, path: ApiPath) -> ApiFailure | None:
        """Return the failure that a fault puts in the place of an answer."""
        if self.take("unauthorized", verb, path):
            return unauthorized()
        if fault := self.take("too-many-requests", verb, path):
            return too_many_requests(max(1, int(fault.seconds)))
        if self.take("error", verb, path):
            return ApiFailure(500, "InternalError", "Internal error occurred: a fault that a test asked for")
        return None

    def _take(self, kind: FaultKind, verb: str, path: ApiPath) -> _ActiveFault | None:
        for each in self._active:
            if each.meets(kind, verb, path):
                if each.left is not None:
                    each.left -= 1
                return each
        return None

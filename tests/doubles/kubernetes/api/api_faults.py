"""Faults of the API server on demand: slow or refused answers, dropped watches, stale lists, outages, a wrong clock."""

from collections.abc import Callable
from typing import Literal

import msgspec

from tests.doubles.kubernetes.api.api_requests import ApiPath
from tests.doubles.kubernetes.objects.api_failures import ApiFailure, conflict, too_many_requests, unauthorized

FaultKind = Literal[
    "latency",
    "conflict",
    "too-many-requests",
    "error",
    "unauthorized",
    "lost-answer",
    "hang",
    "drop-watch",
    "stale-list",
    "clock-skew",
    "refuse",
    "forget-history",
    "expire-tokens",
]
WRITES = {"create", "update", "patch", "delete", "deletecollection"}


class ApiFault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault, and which requests it meets; a list that is empty meets all.

    ``latency`` waits `seconds` before the answer; ``hang`` never answers, and breaks the connection after `seconds`.
    ``conflict``, ``too-many-requests`` (Retry-After `seconds`), ``error`` and ``unauthorized`` answer in the place of
    the server. ``lost-answer`` carries a request out and breaks the connection. ``stale-list`` answers lists with what
    there was when the fault began. ``drop-watch`` ends open watches. ``clock-skew`` moves the server's clock.
    At once: ``refuse`` closes the port and all connections for `seconds`, ``forget-history`` makes watches and lists
    at old versions 410, ``expire-tokens`` makes tokens of service accounts invalid.
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
        if fault.kind not in ("refuse", "forget-history", "expire-tokens"):
            self._active.append(_ActiveFault(fault, self._version()))
        self._act(fault)

    def clear(self) -> None:
        """End all faults; requests that hang are dropped at the end of their seconds."""
        self._active.clear()
        self.skew_s = 0.0

    def active(self) -> list[ApiFault]:
        """Return the faults that still meet requests."""
        return [each.fault for each in self._active if each.left != 0]

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
            text = "the server has received too many requests and has asked us to try again later"
            return too_many_requests(text, max(1, int(fault.seconds)))
        if self.take("error", verb, path):
            return ApiFailure(500, "InternalError", "Internal error occurred: a fault that a test asked for")
        if verb in WRITES and self.take("conflict", verb, path):
            resource = f"{path.plural}.{path.group}" if path.group else path.plural
            return conflict(resource, path.name)
        return None

    def _take(self, kind: FaultKind, verb: str, path: ApiPath) -> _ActiveFault | None:
        for each in self._active:
            if each.meets(kind, verb, path):
                if each.left is not None:
                    each.left -= 1
                return each
        return None

"""Desired state of a running cluster and the status that it led to, as records in the store (spec and status).

A spec is a level, not a command: a supervisor works towards what it says, however often it reads it and whenever it
starts. Every writer of the store may set one; the admin routes of the frontends do. Supervisors and frontends write
statuses, under leases, so that they go when their writer does.
"""

import secrets
import time
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec

from penstock.adapters.seams import Store
from penstock.kernel.errors import InvariantError
from penstock.kernel.message_version import NewerVersion, VersionedDecoder
from penstock.kernel.values import Pool, Role

DESIRED = "desired/"
"""``desired/<pool>``: `PoolSpec`."""
DRAINS = "drains/"
"""``drains/<worker or frontend>``: `DrainSpec`."""
ROLES = "roles/"
"""``roles/<worker>``: `RoleSpec`."""
SETTINGS = "settings/"
"""``settings/<knob>``: `SettingSpec`."""
RESTART = "restart/wish"
"""`RestartSpec`."""
POOLS = "pools/"
"""``pools/<pool>``: `PoolStatus`."""
ADAPTERS = "adapters/"
"""``adapters/<adapter>``: `AdapterSpec`."""
ADAPTER_WORKERS = "adapter_workers/"
"""``adapter_workers/<adapter>``: `AdapterWorkersSpec`."""
DRAINED = "drained/"
"""``drained/<worker or frontend>``: `DrainStatus`."""
LEAVING = "leaving/"
"""``leaving/<worker>/<frontend>``: `DrainAck`."""
ACKS = "seen/"
"""``seen/<frontend>``: `MembershipAcks`."""
RESTARTED = "restart/report"
"""`RestartStatus`."""

PLANNER = "planner"
"""``by`` of a spec from the planner. Its number is of serving replicas: manually drained workers do not count."""

T = TypeVar("T")


def new_revision() -> str:
    """Return a mark by which a status names its spec."""
    return secrets.token_hex(6)


class DesiredRecord(msgspec.Struct, frozen=True, kw_only=True):
    """``by``: its writer; ``at``: seconds since 1970."""

    version: int = 1
    revision: str = msgspec.field(default_factory=new_revision)
    by: str = ""
    at: float = msgspec.field(default_factory=time.time)


class PoolSpec(DesiredRecord, frozen=True, kw_only=True):
    """A pool should have so many replicas. Drains of its workers that are older than this spec count no more.

    ``timeout``: seconds that removed workers get to finish; None leaves that to the settings.
    """

    replicas: int
    timeout: float | None = None


class DrainSpec(DesiredRecord, frozen=True, kw_only=True):
    """A worker or a frontend should finish its requests and take no new ones, for as long as this record exists.

    ``timeout``: seconds that it gets to finish; None leaves that to the settings.
    """

    timeout: float | None = None


class RoleSpec(DesiredRecord, frozen=True, kw_only=True):
    """A worker should have this role, whatever its pool's role is. Without this record it has its pool's role.

    ``timeout``: seconds that its requests get to finish before it changes; None leaves that to the settings.
    """

    role: Role
    timeout: float | None = None


class SettingSpec(DesiredRecord, frozen=True, kw_only=True):
    """A knob should have this value, as plain data."""

    value: Any


class RestartSpec(DesiredRecord, frozen=True, kw_only=True):
    """Every engine and every frontend should be replaced, some at a time.

    ``force``: also where that leaves a pool without any engine for a while.
    """

    force: bool = False


class AdapterSpec(DesiredRecord, frozen=True, kw_only=True):
    """Clients may name an adapter of a model; wins over the settings.

    ``path``: where the engines find it; None: nobody may name it.
    """

    model: str
    path: str | None


class AdapterWorkersSpec(DesiredRecord, frozen=True, kw_only=True):
    """An adapter should be in the memory of so many workers at any time; wins over the settings."""

    workers: int


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A pool's status by its supervisor. ``revision``: of the newest spec that was accepted."""

    version: int = 2
    pool: Pool
    kind: Literal["process", "urls"]
    revision: str | None = None


class DrainAck(msgspec.Struct, frozen=True, kw_only=True):
    """A frontend's requests that still run on a drained worker. From this report on it sends that worker no new ones.

    ``active``: its requests there now; ``begun``: those when it learned of the drain.
    """

    version: int = 1
    worker: str
    epoch: int
    active: int
    begun: int


class MembershipAcks(msgspec.Struct, frozen=True, kw_only=True):
    """The workers that a frontend knows: worker -> epoch."""

    version: int = 1
    workers: dict[str, int]


class DrainStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a drain. ``revision``: of the spec, where there was one.

    ``finished``: requests that ended by themselves; ``cut``: those that still ran at the deadline, and migrate where
    they can; ``active``: those that still run. Sums over all frontends; None where a frontend itself is drained.
    """

    version: int = 1
    name: str
    state: Literal["draining", "done"]
    finished: int | None = None
    active: int | None = None
    cut: int | None = None
    seconds: float = 0.0
    revision: str | None = None


class RestartStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a rolling restart. ``done``: names of replaced processes; ``problem``: why it stopped."""

    version: int = 1
    revision: str
    state: Literal["running", "done", "failed"]
    done: tuple[str, ...] = ()
    left: int = 0
    problem: str | None = None


_DECODERS: dict[Any, VersionedDecoder] = {
    kind: VersionedDecoder(kind, what)
    for kind, what in (
        (PoolSpec, "the desired state of a pool"),
        (DrainSpec, "the desired state of a drain"),
        (RoleSpec, "the desired role of a worker"),
        (SettingSpec, "the desired value of a setting"),
        (RestartSpec, "the desired state of a restart"),
        (AdapterSpec, "an adapter that an operator named"),
        (AdapterWorkersSpec, "the desired workers of an adapter"),
        (PoolStatus, "a pool's report"),
        (DrainAck, "a frontend's report of a drain"),
        (MembershipAcks, "a frontend's list of workers"),
        (DrainStatus, "a drain's report"),
        (RestartStatus, "a restart's report"),
    )
}


def decode(kind: type[T], raw: bytes) -> T | None:
    """Read a record; None where it can't be read, or is of a newer release.

    Raises:
        InvariantError: it is no kind of record.
    """
    decoder = _DECODERS.get(kind)
    if decoder is None:
        known = ", ".join(sorted(each.__name__ for each in _DECODERS))
        raise InvariantError(
            f"kind is {kind.__name__}, which is not a record of the store; known kinds are {known}",
            hint="add it to _DECODERS of runtime/cluster_state/desired_state.py",
        )
    try:
        record: T = decoder.decode(raw)
    except (msgspec.DecodeError, NewerVersion):
        return None
    return record


def decode_all(kind: type[T], raw: Mapping[str, bytes], prefix: str) -> dict[str, T]:
    """Read the records under a prefix, by the rest of their keys; unreadable ones are left out."""
    records = {key.removeprefix(prefix): decode(kind, value) for key, value in raw.items()}
    return {name: record for name, record in records.items() if record is not None}


async def put(store: Store, key: str, record: msgspec.Struct, *, ttl: float | None = None) -> None:
    """Write a record."""
    await store.put(key, msgspec.json.encode(record), ttl=ttl)

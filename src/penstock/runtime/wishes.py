"""What do operators want of a running cluster, and what came of it? Records in the store.

Wishes are levels, not commands: a supervisor works towards what stands here, however often it reads it and whenever it
starts. Whoever may write the store may wish; the admin routes of the frontends do. Reports are written by supervisors
and frontends, under leases, so that they go when their writer does.
"""

import secrets
import time
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec

from penstock.adapters.seams import ReplicaState, Store
from penstock.kernel.values import Role
from penstock.kernel.wire import NewerVersion, WireDecoder

DESIRED = "desired/"
"""``desired/<pool>``: `PoolWish`."""
DRAINS = "drains/"
"""``drains/<worker or frontend>``: `DrainWish`."""
ROLES = "roles/"
"""``roles/<worker>``: `RoleWish`."""
SETTINGS = "settings/"
"""``settings/<knob>``: `SettingWish`."""
RESTART = "restart/wish"
"""`RestartWish`."""
POOLS = "pools/"
"""``pools/<pool>``: `PoolReport`."""
DRAINED = "drained/"
"""``drained/<worker or frontend>``: `DrainReport`."""
LEAVING = "leaving/"
"""``leaving/<worker>/<frontend>``: `Leaving`."""
SEEN = "seen/"
"""``seen/<frontend>``: `Seen`."""
RESTARTED = "restart/report"
"""`RestartReport`."""

PLANNER = "planner"
"""Who wishes, where it is the planner. What it says is how many should serve: who is drained by hand does not count."""

T = TypeVar("T")


def new_revision() -> str:
    """Return a mark by which a report says which wish it answers."""
    return secrets.token_hex(6)


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """``by``: who wished it; ``at``: seconds since 1970."""

    version: int = 1
    revision: str = msgspec.field(default_factory=new_revision)
    by: str = ""
    at: float = msgspec.field(default_factory=time.time)


class PoolWish(Wish, frozen=True, kw_only=True):
    """A pool should have so many replicas. Drains of its workers that are older than this wish count no more.

    ``timeout``: seconds that those who go get to finish; None leaves that to the settings.
    """

    replicas: int
    timeout: float | None = None


class DrainWish(Wish, frozen=True, kw_only=True):
    """A worker or a frontend should finish what it has and take nothing new, for as long as this stands.

    ``timeout``: seconds that it gets to finish; None leaves that to the settings.
    """

    timeout: float | None = None


class RoleWish(Wish, frozen=True, kw_only=True):
    """A worker should do this for requests, whatever its pool is for. Without one it does what its pool is for.

    ``timeout``: seconds that its requests get to finish before it changes; None leaves that to the settings.
    """

    role: Role
    timeout: float | None = None


class SettingWish(Wish, frozen=True, kw_only=True):
    """A knob should have this value, as plain data."""

    value: Any


class RestartWish(Wish, frozen=True, kw_only=True):
    """Every engine and every frontend should be replaced, one after the other.

    ``force``: also where that leaves a pool without any engine for a while.
    """

    force: bool = False


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True):
    """One replica of a pool."""

    id: str
    state: ReplicaState
    reason: str | None = None
    pid: int | None = None
    gpus: tuple[int, ...] = ()
    role: Role | None = None
    """What it does for requests; None where it does not serve."""


class PoolReport(msgspec.Struct, frozen=True, kw_only=True):
    """A pool as its supervisor sees it. ``revision``: of the newest wish that was taken up.

    ``limit``: the most replicas that it can have; ``problem``: why the newest wish can't come true.
    """

    version: int = 1
    pool: str
    model: str
    kind: Literal["process", "urls"]
    role: Role = "aggregated"
    """What its replicas do where nobody gave them another role."""
    desired: int
    replicas: tuple[ReplicaReport, ...]
    limit: int | None = None
    revision: str | None = None
    problem: str | None = None

    @property
    def ready(self) -> int:
        return sum(replica.state == "ready" for replica in self.replicas)


class Leaving(msgspec.Struct, frozen=True, kw_only=True):
    """What one frontend still has running on a worker that is drained. From here on it gets no new request of it.

    ``active``: requests of its own there; ``begun``: those that there were when it heard of the drain.
    """

    version: int = 1
    worker: str
    epoch: int
    active: int
    begun: int


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """Whom a frontend knows: worker -> epoch."""

    version: int = 1
    workers: dict[str, int]


class DrainReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a drain goes. ``revision``: of the wish, where there was one.

    ``finished``: requests that ended by themselves; ``cut``: that still ran at the deadline, and go on elsewhere where
    they can; ``active``: that still run. Sums over all frontends; None where a frontend itself is drained.
    """

    version: int = 1
    name: str
    state: Literal["draining", "done"]
    finished: int | None = None
    active: int | None = None
    cut: int | None = None
    seconds: float = 0.0
    revision: str | None = None


class RestartReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a rolling restart goes. ``done``: names of what was replaced; ``problem``: why it stopped."""

    version: int = 1
    revision: str
    state: Literal["running", "done", "failed"]
    done: tuple[str, ...] = ()
    left: int = 0
    problem: str | None = None


_DECODERS: dict[Any, WireDecoder] = {
    kind: WireDecoder(kind, what)
    for kind, what in (
        (PoolWish, "a wish for a pool"),
        (DrainWish, "a wish for a drain"),
        (RoleWish, "a wish for a role"),
        (SettingWish, "a wish for a setting"),
        (RestartWish, "a wish for a restart"),
        (PoolReport, "a pool's report"),
        (Leaving, "a frontend's report of a drain"),
        (Seen, "a frontend's list of workers"),
        (DrainReport, "a drain's report"),
        (RestartReport, "a restart's report"),
    )
}


def decode(kind: type[T], raw: bytes) -> T | None:
    """Read a record; None where it is none, or of a newer release."""
    try:
        found: T = _DECODERS[kind].decode(raw)
    except (msgspec.DecodeError, NewerVersion):
        return None
    return found


def decode_all(kind: type[T], raw: Mapping[str, bytes], prefix: str) -> dict[str, T]:
    """Read what stands under a prefix, by what follows it; what can't be read is left out."""
    found = {key.removeprefix(prefix): decode(kind, value) for key, value in raw.items()}
    return {name: record for name, record in found.items() if record is not None}


async def put(store: Store, key: str, record: msgspec.Struct, *, ttl: float | None = None) -> None:
    """Write a record."""
    await store.put(key, msgspec.json.encode(record), ttl=ttl)

"""Events and effects of the fleet machine.

``serial`` ties an answer to the effect that it answers: an answer to an older effect changes nothing.
"""

from typing import Literal

from penstock.fleet.fleet_state import FleetTimes, HealthLimits
from penstock.kernel.machine import Effect, Event
from penstock.kernel.values import Pool, Role

# --- what is desired --------------------------------------------------------------------------------------------------


class PoolAdded(Event, frozen=True, kw_only=True):
    """There is a pool. Nothing of it is started before `Begun`.

    Args:
        gpus: that each replica takes of this machine's.
        adopted: engines of an earlier supervisor that run already, be they too many: their numbers and GPUs.
        outdated: those of them that would be started in another way now; they are replaced, some at a time.
        surge: replicas that a pool may have beyond the desired ones while some are replaced; None is a twentieth of
            these, one at least.
        unavailable: how many may lack meanwhile; None is as many, where several are desired.
        attached: its replicas are servers that others run, ``configured.desired`` of them.
        watched: its processes are asked for their health, as such servers are, and started again where they are stuck.
        sleeping: replicas that are put to sleep at most, in place of ending, where the pool shrinks.
    """

    pool: str
    configured: Pool
    gpus: int = 0
    adopted: dict[int, tuple[int, ...]] = {}
    outdated: frozenset[int] = frozenset()
    surge: int | None = None
    unavailable: int | None = None
    attached: bool = False
    health: HealthLimits = HealthLimits()
    watched: bool = False
    sleeping: int = 0


class Recalled(Event, frozen=True, kw_only=True):
    """Frontends know an adopted replica since before this fleet; ``role``: as what; ``draining``: give it nothing."""

    worker: str
    role: Role
    draining: bool = False


class Begun(Event, frozen=True, kw_only=True):
    """Start what is missing in every pool."""


class Desired(Event, frozen=True, kw_only=True):
    """A pool should have so many replicas.

    Args:
        replicas: None is as many as were configured.
        by_planner: they are serving replicas: drained ones never count.
        at: seconds since 1970; drains that are older count no more, unless a planner decides.
        timeout: seconds that removed replicas get to finish; None leaves that to `FleetTimes`.
        without: replicas that are drained in place of those drained so far; None leaves these.
    """

    pool: str
    replicas: int | None
    by_planner: bool = False
    at: float = 0.0
    timeout: float | None = None
    without: tuple[str, ...] | None = None


class DrainDesired(Event, frozen=True, kw_only=True):
    """A replica should finish its requests and take no new ones. ``revision``: of the record that says so."""

    worker: str
    at: float = 0.0
    timeout: float | None = None
    revision: str | None = None


class DrainDropped(Event, frozen=True, kw_only=True):
    """A replica should take requests again."""

    worker: str


class RoleDesired(Event, frozen=True, kw_only=True):
    """A replica should have this role; None is its pool's. ``timeout``: seconds that its requests get to finish."""

    worker: str
    role: Role | None
    timeout: float | None = None


class ServerJoined(Event, frozen=True, kw_only=True):
    """A server that others run came to an attached pool, or is wanted again; nothing where it is there already."""

    pool: str
    number: int


class ServerLeaving(Event, frozen=True, kw_only=True):
    """A server of an attached pool is to go: it finishes its requests. ``vanished``: it is no more, and can't."""

    worker: str
    vanished: bool = False


class RestartDesired(Event, frozen=True, kw_only=True):
    """Every engine, then every frontend should be replaced, some at a time.

    Args:
        force: also where that leaves a pool without any engine for a while.
        frontends: indices of the frontends.
    """

    revision: str
    force: bool = False
    frontends: tuple[int, ...] = ()


class TimesChanged(Event, frozen=True, kw_only=True):
    """Other times count from now on."""

    times: FleetTimes


# --- what happened ----------------------------------------------------------------------------------------------------


class Started(Event, frozen=True, kw_only=True):
    """The process of a replica runs; whether it serves is to be probed."""

    worker: str
    serial: int
    pid: int | None = None


class Probed(Event, frozen=True, kw_only=True):
    """What a replica lacks to serve; None where it serves. ``phases``: of its start, as `StartRecord` has them.

    ``silent``: it takes connections and does not answer in time, as an engine does that compiles kernels.
    ``unplaced``: no machine has room for it.
    """

    worker: str
    serial: int
    lack: str | None = None
    silent: bool = False
    unplaced: bool = False
    phases: dict[str, float | None] = {}


class Slept(Event, frozen=True, kw_only=True):
    """A replica sleeps: it has no GPU memory. ``host_memory``: bytes that it takes; None where that is unknown."""

    worker: str
    serial: int
    host_memory: int | None = None


class SleepFailed(Event, frozen=True, kw_only=True):
    """A replica could not be put to sleep."""

    worker: str
    serial: int
    reason: str


class Awoke(Event, frozen=True, kw_only=True):
    """A replica that slept has its weights on its GPUs again; whether it serves is to be probed."""

    worker: str
    serial: int


class Published(Event, frozen=True, kw_only=True):
    """Frontends can read of the replica now."""

    worker: str
    serial: int


class Acknowledged(Event, frozen=True, kw_only=True):
    """Every frontend knows what was published of a replica."""

    worker: str
    serial: int


class PublishFailed(Event, frozen=True, kw_only=True):
    """A replica can't be announced, such as since it serves another model."""

    worker: str
    serial: int
    reason: str


class RequestsLeft(Event, frozen=True, kw_only=True):
    """Requests on a draining replica: that still run, and that ended since the drain began.

    ``heard``: every frontend has counted; one that has not may still send some.
    """

    worker: str
    serial: int
    active: int
    finished: int = 0
    heard: bool = True


class Died(Event, frozen=True, kw_only=True):
    """A replica ended by itself, or could not be started.

    Args:
        reason: a verb and what follows.
        restart: seconds until it is started again; None is by the back-off, "never" gives it up.
    """

    worker: str
    serial: int
    reason: str
    restart: float | Literal["never"] | None = None


class Stopped(Event, frozen=True, kw_only=True):
    """Nothing of a replica's process is left."""

    worker: str
    serial: int


class FrontendReplaced(Event, frozen=True, kw_only=True):
    """A frontend was replaced, or could not be: ``problem``."""

    index: int
    problem: str | None = None


# --- what is to be done -----------------------------------------------------------------------------------------------


class Spawn(Effect, frozen=True, kw_only=True):
    """Start a replica's process: `Started` or `Died` follows."""

    worker: str
    serial: int
    pool: str
    number: int
    gpus: tuple[int, ...] = ()


class Probe(Effect, frozen=True, kw_only=True):
    """Look whether a replica serves: `Probed` follows, or `Died` where it is given up."""

    worker: str
    serial: int


class Sleep(Effect, frozen=True, kw_only=True):
    """Put an idle replica to sleep: `Slept` follows, or `SleepFailed`."""

    worker: str
    serial: int


class Rouse(Effect, frozen=True, kw_only=True):
    """Wake a replica that sleeps: `Awoke` follows, or `Died`."""

    worker: str
    serial: int
    pool: str


class PublishReplica(Effect, frozen=True, kw_only=True):
    """Announce a replica to the frontends: `Published` and `Acknowledged` follow, or `PublishFailed`.

    ``draining``: they should send it nothing new.
    """

    worker: str
    serial: int
    pool: str
    role: Role
    draining: bool = False


class MarkSilent(Effect, frozen=True, kw_only=True):
    """Let the frontends know that a published replica does not answer its health check, or that it does again."""

    worker: str
    silent: bool
    draining: bool


class CountRequests(Effect, frozen=True, kw_only=True):
    """Count the requests on a draining replica until it is withdrawn or published: `RequestsLeft` with each change."""

    worker: str
    serial: int


class Withdraw(Effect, frozen=True, kw_only=True):
    """Take a replica from the frontends."""

    worker: str
    reason: str


class Stop(Effect, frozen=True, kw_only=True):
    """End a replica's process with all that it started: `Stopped` follows."""

    worker: str
    serial: int
    reason: str


class Forget(Effect, frozen=True, kw_only=True):
    """A replica is gone for good."""

    worker: str
    pool: str
    number: int


class Crashed(Effect, frozen=True, kw_only=True):
    """Record that a desired replica ended, did not start or stopped to answer. ``wait``: seconds to its next start."""

    worker: str
    reason: str
    kind: Literal["engine", "server"] = "engine"
    wait: float = 0.0


DrainProgress = Literal["draining", "done"]


class DrainReported(Effect, frozen=True, kw_only=True):
    """Record the progress of a drain, in requests and seconds. ``cut``: requests that ran at the deadline."""

    worker: str
    state: DrainProgress
    active: int = 0
    finished: int = 0
    cut: int = 0
    seconds: float = 0.0
    revision: str | None = None


class DrainForgotten(Effect, frozen=True, kw_only=True):
    """Delete the record of a drain: the replica takes requests again."""

    worker: str


RestartProgress = Literal["running", "done", "failed"]


class ReplaceFrontend(Effect, frozen=True, kw_only=True):
    """Replace a frontend: `FrontendReplaced` follows."""

    index: int


class RestartReported(Effect, frozen=True, kw_only=True):
    """Record the progress of a rolling restart. ``done``: names of replaced processes; ``left``: how many remain."""

    revision: str
    state: RestartProgress
    done: tuple[str, ...] = ()
    left: int = 0
    problem: str | None = None

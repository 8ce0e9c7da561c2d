"""State of the fleet machine as one tree of structs: pools, lives of replicas, GPUs and the restart under way."""

from typing import Literal

import msgspec

from penstock.fleet.gpu_allocator import GpuAllocator
from penstock.kernel.machine import Nanos
from penstock.kernel.values import Pool, Replica, ReplicaState, Role, StartRecord

Phase = Literal[
    "planned",
    "queued",
    "starting",
    "probing",
    "publishing",
    "ready",
    "draining",
    "parked",
    "falling asleep",
    "asleep",
    "waking",
    "stopping",
    "failed",
    "given up",
    "away",
]
"""Phase of a replica: not begun; waits for GPUs; its process starts; does not serve yet; is announced; takes requests;
finishes them; a drained server of others; is put to sleep; sleeps, without GPUs; is woken; ends; waits for its next
start; is not started again; a server of others that does not answer."""


class FleetTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds: the first wait before a crashed engine is started again, and what a drained one gets to finish."""

    restart_backoff: float = 0.5
    drain_timeout: float = 60.0


class HealthLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Of the health checks of servers that others run: seconds between two, seconds that each may take, misses."""

    interval: float = 2.0
    timeout: float = 5.0
    misses: int = 2


class Drain(msgspec.Struct, frozen=True, kw_only=True):
    """A drain that an operator desires: `penstock.fleet.events.DrainDesired`."""

    at: float
    timeout: float | None = None
    revision: str | None = None


class FlippedRole(msgspec.Struct, frozen=True):
    """A replica's own role, and the seconds that its requests get to finish before it changes."""

    role: Role
    timeout: float | None = None


class Life(msgspec.Struct, kw_only=True):
    """One replica from the moment that it is desired to its end."""

    worker: str
    pool: str
    number: int
    created: Nanos
    phase: Phase
    wanted: bool = True
    """False once it should go."""
    gpus: tuple[int, ...] = ()
    pid: int | None = None
    reason: str | None = None
    """Why it does not serve."""
    failure: str | None = None
    """Why its first start failed; None once it served."""
    up: bool = False
    """Whether it took requests since its last start."""
    served: bool = False
    """Whether it ever took requests."""
    role: Role | None = None
    """As the frontends know it; None while they do not."""
    serial: int = 0
    """Of the `Spawn` or the probes under way."""
    publication: int = 0
    """Of its newest `PublishReplica`."""
    aside: bool = False
    """Whether that one, or what frontends knew before this fleet, says that it drains."""
    started: Nanos = 0
    adopted: bool = False
    """Whether it ran before this fleet did: how long its start took is unknown."""
    outdated: bool = False
    """Whether it would be started in another way now."""
    unplaced: bool = False
    """Whether no machine has room for it."""
    woken: bool = False
    """Whether its last start was out of sleep."""
    served_at: Nanos = 0
    """When a probe first found that it serves."""
    phases: dict[str, float | None] = {}
    """Of its last start, up to that moment."""
    start: StartRecord | None = None
    former_gpus: tuple[int, ...] = ()
    """Those that it had when it was put to sleep, and that it needs to wake."""
    host_memory: int | None = None
    due: Nanos | None = None
    """When its phase ends by itself, or the next probe is due."""
    backoff: float = 0.0
    """Seconds that the last crash had to wait by `crash_wait`; 0 before the first."""
    wait: float = 0.0
    """Seconds from its end to its next start."""
    given_up: bool = False
    misses: int = 0
    """Health checks in a row that failed."""
    silent_since: Nanos | None = None
    """Since when the frontends know that it does not answer its health check; None while it does."""
    drained: bool = False
    """Whether a record of a drain of it is kept."""
    drained_since: Nanos = 0
    overtime: bool = False
    """Whether its drain's time is over, and only the last count is waited for."""
    active: int = 0
    finished: int = 0
    """Requests that run on it, and that have ended, since its drain began."""

    @property
    def state(self) -> ReplicaState:
        """Its state as pools show it."""
        if self.phase == "publishing":
            return "draining" if self.up else "starting" if self.reason is None else "failed"
        if self.phase == "stopping":
            return "failed" if self.wanted else "stopping"
        return _SHOWN.get(self.phase, "starting")

    @property
    def replica(self) -> Replica:
        """The replica as pools show it."""
        return Replica(
            id=self.worker,
            state=self.state,
            reason=self.reason,
            pid=self.pid,
            gpus=self.gpus,
            role=self.role,
            start=self.start,
            asleep=self.phase == "asleep",
            host_memory=self.host_memory,
        )


_SHOWN: dict[Phase, ReplicaState] = {
    "ready": "ready",
    "draining": "draining",
    "parked": "draining",
    "falling asleep": "draining",
    "asleep": "draining",
    "failed": "failed",
    "given up": "failed",
    "away": "failed",
}


class FleetPool(msgspec.Struct, kw_only=True):
    """One pool: what is desired of it. Its replicas are in `FleetState.lives`."""

    name: str
    configured: Pool
    gpus: int = 0
    attached: bool = False
    health: HealthLimits = HealthLimits()
    watched: bool = False
    """Whether the health of its own processes is checked, too."""
    sleeping: int = 0
    """Replicas that sleep at most."""
    begun: bool = False
    goal: int = 0
    """Replicas that are worked towards, surge and drains included."""
    replicas: int | None = None
    """As last desired; None is as configured."""
    by_planner: bool = False
    desired_at: float = 0.0
    timeout: float | None = None
    drains: dict[str, Drain] = {}
    surge: int = 0
    """Replicas above the desired ones, while a restart replaces some."""
    max_surge: int | None = None
    max_unavailable: int | None = None
    """Of a restart: `penstock.fleet.events.PoolAdded` has them as ``surge`` and ``unavailable``."""
    retiring: set[str] = set()
    """Replicas that a restart takes out."""
    without: set[str] = set()
    """Replicas that the goal does not count."""
    recalled: set[int] = set()
    """Numbers that were left out and are no longer: a missing replica gets one of these first."""
    problem: str | None = None

    def worker(self, number: int) -> str:
        """Return the id of the replica with a number."""
        return f"{self.name}-{number}"

    def number(self, worker: str) -> int | None:
        """Return the number of the replica with an id; None where it is none of this pool."""
        base, _, number = worker.rpartition("-")
        return int(number) if base == self.name and number.isdecimal() else None


class RestartOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A rolling restart that is desired: `penstock.fleet.events.RestartDesired`."""

    revision: str
    force: bool
    frontends: tuple[int, ...]
    outdated: bool = False
    """Whether it is for outdated replicas only: such a restart is never over before they are replaced."""


class RestartState(msgspec.Struct, kw_only=True):
    """A rolling restart under way."""

    order: RestartOrder
    former: dict[str, list[str]]
    """Pool -> its replicas when the restart began."""
    engines: list[tuple[str, str]]
    """(pool, replica) to be replaced, those of a pool that are being replaced first..."""
    batch: int = 1
    """... and how many these are."""
    frontends: list[int]
    done: list[str] = []
    step: Literal["next", "surge", "retire", "refill", "frontend"] = "next"
    """What is waited for."""
    before: set[str] = set()
    """Replicas of the pool when its step began: a failure of another one ends the restart."""
    waits: dict[str, str] = {}
    """Pool -> why none of its replicas can be replaced yet."""
    renaming: bool = False
    """Whether all are replaced, and those with new names give way to former names."""


class FleetState(msgspec.Struct, kw_only=True):
    """The whole state."""

    times: FleetTimes
    gpus: GpuAllocator
    pools: dict[str, FleetPool] = {}
    lives: dict[str, Life] = {}
    roles: dict[str, FlippedRole] = {}
    """Replica -> its role, where that is not its pool's."""
    restart: RestartState | None = None
    next_restart: RestartOrder | None = None
    """What follows it."""
    serial: int = 0
    woken_at: Nanos | None = None
    """When the next `Woken` comes."""
    restarts: int = 0
    """Engines that served, crashed and were started again."""

    def of(self, pool: str) -> list[Life]:
        """Return the lives of a pool, by number."""
        return sorted((life for life in self.lives.values() if life.pool == pool), key=lambda life: life.number)

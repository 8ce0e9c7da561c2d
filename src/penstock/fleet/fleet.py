"""`Fleet`: the machine that starts, drains, flips, restarts and ends the engines of one supervisor.

It takes what is desired and what happened to each replica, and returns what is to be done. A live driver carries that
out with processes (`penstock.runtime.supervision.fleet_driver`), the simulator with virtual engines
(`penstock_lab.simulate.fleet_effects`).
"""

from collections.abc import Sequence

import msgspec

from penstock.fleet import events
from penstock.fleet.fleet_state import Drain, FleetPool, FleetState, FleetTimes, FlippedRole, Life, RestartOrder
from penstock.fleet.gpu_allocator import GpuAllocator
from penstock.fleet.pool_scaling import PoolScaling
from penstock.fleet.replica_lives import ReplicaLives
from penstock.fleet.rolling_restart import RollingRestart
from penstock.kernel.errors import InvariantError
from penstock.kernel.machine import Effect, Event, Nanos, Snapshot, Wake, Woken, read_snapshot, write_snapshot
from penstock.kernel.values import Pool

VERSION = 2
_OF_SPAWN = (
    *(events.Started, events.Probed, events.Died, events.Stopped),
    *(events.Slept, events.SleepFailed, events.Awoke),
)
_OF_PUBLICATION = (events.Published, events.Acknowledged, events.PublishFailed, events.RequestsLeft)


class Fleet:
    """The engines of one supervisor.

    Args:
        times: until others are given.
        gpus: of this machine; without any, replicas that take none are not limited.
    """

    def __init__(self, times: FleetTimes | None = None, gpus: GpuAllocator | None = None) -> None:
        self._assemble(FleetState(times=times or FleetTimes(), gpus=gpus or GpuAllocator()))

    def _assemble(self, state: FleetState) -> None:
        self.state = state
        self.revision = 0
        """Changes with whatever `pools` shows."""
        self._effects: list[Effect] = []
        self._lives = ReplicaLives(state, self._effects)
        self.scaling = PoolScaling(state, self._lives)
        self._restart = RollingRestart(state, self.scaling, self._effects)

    def handle(self, now: Nanos, event: Event) -> Sequence[Effect]:
        """Take one event; see `penstock.fleet.events`.

        Raises:
            KeyError: an event about a pool that was never added, or of a type that is none of the fleet's.
        """
        if isinstance(event, Woken):
            changed = self._due(now)
        elif isinstance(event, _OF_SPAWN + _OF_PUBLICATION):
            changed = self._happened(now, event)
        else:
            changed = True
            self._desired(now, event)
        changed |= bool(self._lives.vacated)
        self._refill(now)
        if changed:  # most events are of probes that find what the last ones did: readers of thousands are not told
            self._restart.advance(now)
            self._refill(now)
        effects = self._effects[:]
        self._effects.clear()
        self.revision += changed or not all(isinstance(effect, events.Probe) for effect in effects)
        due = self._next_due(event) if isinstance(event, events.Probed) and not changed else self._first_due()
        if due is not None and due != self.state.woken_at:
            self.state.woken_at = due
            effects.append(Wake(at=due))
        return effects

    def _first_due(self) -> Nanos | None:
        return min((life.due for life in self.state.lives.values() if life.due is not None), default=None)

    def _next_due(self, event: events.Probed) -> Nanos | None:
        """Return what `_first_due` does after a probe that changed nothing: no other life is looked at."""
        life, woken_at = self.state.lives.get(event.worker), self.state.woken_at
        if life is None or life.due is None or woken_at is None:
            return self._first_due()
        return min(woken_at, life.due)

    def pools(self) -> dict[str, Pool]:
        """Return every pool as it is now."""
        return {name: self._shown(pool) for name, pool in self.state.pools.items()}

    # --- events -------------------------------------------------------------------------------------------------------

    def _happened(self, now: Nanos, event: Event) -> bool:
        """Something happened to a replica; what an older effect led to is past. Return whether it may show."""
        life = self.state.lives.get(event.worker)  # type: ignore[attr-defined]
        if life is None:
            return False
        serial = life.serial if isinstance(event, _OF_SPAWN) else life.publication
        if event.serial != serial:  # type: ignore[attr-defined]
            return False
        lives, before = self._lives, (life.phase, life.reason, life.unplaced)
        match event:
            case events.Started():
                lives.started(life, event)
            case events.Probed():
                lives.probed(now, life, event)
            case events.Published():
                lives.published(now, life)
            case events.Acknowledged():
                lives.acknowledged(now, life)
            case events.PublishFailed():
                lives.publish_failed(now, life, event)
            case events.RequestsLeft():
                lives.requests_left(now, life, event)
            case events.Died():
                lives.died(now, life, event)
            case events.Stopped():
                lives.stopped(now, life)
            case events.Slept():
                lives.slept(now, life, event)
            case events.SleepFailed():
                lives.sleep_failed(life, event)
            case events.Awoke():
                lives.awoke(now, life)
        return not isinstance(event, events.Probed) or (life.phase, life.reason, life.unplaced) != before

    def _desired(self, now: Nanos, event: Event) -> None:
        state = self.state
        match event:
            case events.PoolAdded():
                self._added(now, event)
            case events.Recalled():
                self._lives.recalled(state.lives[event.worker], event)
            case events.Begun():
                for pool in state.pools.values():
                    self._begin(now, pool)
            case events.Desired():
                self._scaled(now, state.pools[event.pool], event)
            case events.DrainDesired():
                self._drain(now, event)
            case events.DrainDropped():
                self._undrain(now, event.worker)
            case events.RoleDesired():
                self._role(now, event)
            case events.ServerJoined():
                self._joined(now, event)
            case events.ServerLeaving():
                if (life := state.lives.get(event.worker)) is not None:
                    self._lives.leave(now, life, vanished=event.vanished)
            case events.RestartDesired():
                for life in list(state.lives.values()):
                    self._lives.dismiss(life, "a restart replaces every engine")
                order = RestartOrder(revision=event.revision, force=event.force, frontends=event.frontends)
                self._restart.desired(order)
            case events.FrontendReplaced():
                self._restart.replaced(now, event)
            case events.TimesChanged():
                state.times = event.times
            case _:
                raise KeyError(type(event))

    def _added(self, now: Nanos, event: events.PoolAdded) -> None:
        goal = event.configured.desired
        pool = FleetPool(
            name=event.pool,
            configured=event.configured,
            gpus=event.gpus,
            attached=event.attached,
            health=event.health,
            watched=event.watched,
            sleeping=event.sleeping,
            goal=goal,
            max_surge=event.surge,
            max_unavailable=event.unavailable,
        )
        self.state.pools[event.pool] = pool
        for number, gpus in event.adopted.items():
            self.state.gpus.claim(gpus)
            life = self._lives.create(now, pool, number, gpus)
            life.adopted, life.outdated = True, number in event.outdated
        if event.outdated:
            self._restart.look()
        for number in range(goal if event.attached else 0):
            self._lives.create(now, pool, number)
        if not event.attached:
            self.scaling.settle(now, pool)

    def _joined(self, now: Nanos, event: events.ServerJoined) -> None:
        """Add a server, or keep one that was to go; one that is ending joins once it is forgotten."""
        pool = self.state.pools[event.pool]
        life = self.state.lives.get(pool.worker(event.number))
        if life is None:
            life = self._lives.create(now, pool, event.number)
            if pool.begun:
                self._lives.begin(now, life)
        elif not life.wanted and self._lives.may_stay(life):
            self._lives.want(now, life, True)

    def _begin(self, now: Nanos, pool: FleetPool) -> None:
        if pool.begun:
            return
        pool.begun = True
        for life in self.state.of(pool.name):
            if life.phase == "planned":
                self._lives.begin(now, life)
        if pool.attached:
            return
        lives = self.state.of(pool.name)
        if any(life.outdated for life in lives):
            # Amid a restart there were more than are desired: which of them go is up to the restart that follows.
            room = self.scaling.limit(pool) - self.scaling.desired(pool)
            pool.surge = max(0, min(room, len(lives) - pool.goal))
        self.scaling.apply(now, pool)

    def _scaled(self, now: Nanos, pool: FleetPool, event: events.Desired) -> None:
        pool.replicas, pool.by_planner, pool.desired_at = event.replicas, event.by_planner, event.at
        pool.timeout = event.timeout
        if event.without is not None:
            pool.drains = {worker: pool.drains.get(worker, Drain(at=event.at)) for worker in event.without}
        for life in self.state.of(pool.name):
            if life.phase == "given up":
                self._lives.want(now, life, False)
        self.scaling.apply(now, pool)

    def _drain(self, now: Nanos, event: events.DrainDesired) -> None:
        pool, life = self._pool_of(event.worker), self.state.lives.get(event.worker)
        if pool is None or (life is None and event.worker not in pool.drains):
            return
        pool.drains[event.worker] = Drain(at=event.at, timeout=event.timeout, revision=event.revision)
        if pool.attached and life is not None:
            self._lives.park(now, life)
        self.scaling.apply(now, pool)

    def _undrain(self, now: Nanos, worker: str) -> None:
        pool = self._pool_of(worker)
        if pool is None or pool.drains.pop(worker, None) is None:
            return
        self._effects.append(events.DrainForgotten(worker=worker))
        life = self.state.lives.get(worker)
        if pool.attached and life is not None:
            self._lives.unpark(life)
        self.scaling.apply(now, pool)

    def _role(self, now: Nanos, event: events.RoleDesired) -> None:
        if self._pool_of(event.worker) is None:
            return
        if event.role is None:
            self.state.roles.pop(event.worker, None)
        else:
            self.state.roles[event.worker] = FlippedRole(event.role, event.timeout)
        life = self.state.lives.get(event.worker)
        if life is not None:
            self._lives.role_changed(now, life)

    def _due(self, now: Nanos) -> bool:
        """Let time pass; return whether that may show."""
        self.state.woken_at = None
        changed = False
        for life in list(self.state.lives.values()):
            if life.due is not None and life.due <= now:
                phase = life.phase
                self._lives.due(now, life)
                changed |= life.phase != phase
        return changed

    def _refill(self, now: Nanos) -> None:
        """Let pools that lost a replica for good have another one where they should."""
        while self._lives.vacated:
            self.scaling.settle(now, self.state.pools[self._lives.vacated.pop()])

    def _pool_of(self, worker: str) -> FleetPool | None:
        pool = self.state.pools.get(worker.rpartition("-")[0])
        return pool if pool is not None and pool.number(worker) is not None else None

    def _shown(self, pool: FleetPool) -> Pool:
        replicas = tuple(self._restart.shown(life) for life in self.state.of(pool.name))
        if pool.attached:
            desired = sum(life.wanted for life in self.state.of(pool.name))
            return msgspec.structs.replace(pool.configured, desired=desired, replicas=replicas)
        return msgspec.structs.replace(
            pool.configured,
            desired=pool.goal,
            problem=pool.problem,
            limit=self.scaling.limit(pool),
            replicas=replicas,
        )

    # --- state --------------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Return the whole state as plain data."""
        return write_snapshot(self.state, VERSION)

    def restore(self, snapshot: Snapshot) -> None:
        """Become the fleet that wrote a snapshot.

        Raises:
            ValueError: it is of another version.
        """
        self._assemble(read_snapshot(snapshot, FleetState, VERSION, "a fleet"))

    def check(self) -> None:
        """Raise where two engines have one GPU, or a replica waits for nothing or for a time at which nobody looks."""
        state = self.state
        if (due := self._first_due()) is not None and (state.woken_at is None or state.woken_at > due):
            raise InvariantError(f"it is woken at {state.woken_at}, and something is due at {due}")
        taken = sorted(gpu for life in state.lives.values() for gpu in life.gpus if gpu in state.gpus.all)
        if sorted([*taken, *state.gpus.left]) != sorted(state.gpus.all):
            raise InvariantError(f"GPUs {state.gpus.all}: taken are {taken}, free are {state.gpus.left}")
        for life in state.lives.values():
            self._check(life)

    def _check(self, life: Life) -> None:
        known = life.phase in ("publishing", "ready", "draining", "parked")
        recalled = life.adopted and life.phase in ("planned", "queued", "starting", "probing")
        if known != (life.role is not None) and life.phase != "stopping" and not recalled:
            raise InvariantError(f"{life.worker} is {life.phase}, and frontends know it as {life.role}")
        if life.phase == "asleep" and (life.wanted or life.gpus):
            raise InvariantError(f"{life.worker} is asleep with GPUs {life.gpus}, wanted: {life.wanted}")
        if life.phase in ("failed", "away") and life.due is None:
            raise InvariantError(f"{life.worker} is {life.phase} for ever")
        if not life.wanted and life.phase not in ("draining", "falling asleep", "asleep", "stopping"):
            raise InvariantError(f"{life.worker} is not wanted, and stays {life.phase}")

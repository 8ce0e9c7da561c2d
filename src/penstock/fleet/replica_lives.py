"""Replica lives: start, probes, announcement, drain, change of role, crash, back-off and end of each replica."""

from penstock.fleet import events
from penstock.fleet.crash_backoff import crash_wait
from penstock.fleet.fleet_state import FleetPool, FleetState, Life
from penstock.kernel.machine import Effect, Nanos, nanos, seconds
from penstock.kernel.values import Role, StartRecord

PROBE_EVERY = nanos(0.2)
"""Between two probes of an engine that starts."""
ACKNOWLEDGED_AFTER = nanos(3.0)
"""After which a replica counts as known to all: a dead frontend may remain in the store for a while."""

LAST_COUNT = nanos(0.5)
"""Longest wait for the count of the requests that are cut off when a drain's time is over."""

STUCK_AFTER = nanos(60.0)
"""After which an engine of ours that answers no health check is started again: none that has served is busy so long."""

CHECKS_MAX = 25.0
"""Health checks of servers that are well, a second: one takes up to 1 ms of CPU here, with its connection. Each of 500
is asked every 20 s so; other routers ask every 60 s. Frontends that send requests to a server know at once that it is
gone."""
GOLDEN = 0.6180339887498949
"""Fractions of its multiples lie evenly between 0 and 1."""

NOT_WANTED = "it is not wanted any more"


class ReplicaLives:
    """The lives of all replicas.

    Args:
        state: of the machine.
        effects: takes what is to be done.
    """

    def __init__(self, state: FleetState, effects: list[Effect]) -> None:
        self.state = state
        self.vacated: set[str] = set()
        """Pools that lost a replica for good: they may lack one now."""
        self._effects = effects

    # --- what is decided ----------------------------------------------------------------------------------------------

    def create(self, now: Nanos, pool: FleetPool, number: int, gpus: tuple[int, ...] = ()) -> Life:
        """Add a replica; `begin` starts it."""
        life = Life(worker=pool.worker(number), pool=pool.name, number=number, created=now, phase="planned", gpus=gpus)
        self.state.lives[life.worker] = life
        return life

    def begin(self, now: Nanos, life: Life) -> None:
        """Start a planned replica once it has its GPUs; try to reach a server that others run."""
        if self.state.pools[life.pool].attached:
            self._publish(life)
        else:
            life.phase = "queued"
            self._assign_gpus(now)

    def want(self, now: Nanos, life: Life, wanted: bool) -> None:
        """Let a replica go, or keep one that was to go and `may_stay`."""
        if life.wanted == wanted:
            return
        life.wanted = wanted
        if wanted and life.phase == "asleep":
            self._rouse(now, life)
        elif life.phase == "falling asleep":
            return  # what it becomes is decided once it sleeps
        elif wanted:
            self._publish(life)
        elif life.phase in ("planned", "queued", "failed", "given up", "away"):
            self._remove(now, life)
        elif life.phase == "ready" or self._reached(life):
            self._drain(now, life)
        elif life.phase == "draining":
            life.reason = None  # it was to change its role, and goes instead
        elif life.phase in ("starting", "probing", "publishing", "parked", "waking"):
            self._withdraw(life, NOT_WANTED)
            self._stop(life, NOT_WANTED)

    def may_stay(self, life: Life) -> bool:
        """Return whether a replica that is to go can still be kept, or one that sleeps be woken."""
        if life.phase == "asleep":
            return set(life.former_gpus) <= set(self.state.gpus.left)
        return life.phase in ("draining", "falling asleep")

    def dismiss(self, life: Life, reason: str) -> None:
        """End a replica that sleeps."""
        if life.phase == "asleep":
            self._stop(life, reason)

    def role_changed(self, now: Nanos, life: Life) -> None:
        """Give a replica the role that it should have, once it is idle; where it drains, the end of that counts."""
        if life.phase == "ready" and life.role != self.desired_role(life):
            self._drain(now, life)

    def park(self, now: Nanos, life: Life) -> None:
        """Drain a server that others run; it runs on by itself."""
        if life.phase == "ready":
            self._drain(now, life)
        elif life.phase == "away":
            life.drained_since = now
            self._report(now, life, "done")

    def leave(self, now: Nanos, life: Life, *, vanished: bool) -> None:
        """Let a server that others run go, at once where it is no more."""
        if not vanished:
            self.want(now, life, False)
            return
        reason = "it no longer exists"
        if life.phase == "draining":
            self._report(now, life, "done", cut=life.active)
        self._withdraw(life, reason)
        self._remove(now, life)

    def unpark(self, life: Life) -> None:
        """Let a server that others run take requests again."""
        if life.phase in ("draining", "parked"):
            self._publish(life)

    def desired_role(self, life: Life) -> Role:
        """Return the role that a replica should have."""
        own = self.state.roles.get(life.worker)
        return self.state.pools[life.pool].configured.role if own is None else own.role

    def recalled(self, life: Life, event: events.Recalled) -> None:
        """Frontends know a replica since before."""
        if life.adopted and life.phase == "planned":
            life.role, life.aside = event.role, event.draining

    # --- what happened ------------------------------------------------------------------------------------------------

    def started(self, life: Life, event: events.Started) -> None:
        if life.phase == "starting":
            life.pid, life.phase = event.pid, "probing"
            self._probe(life)

    def probed(self, now: Nanos, life: Life, event: events.Probed) -> None:
        if life.phase == "probing":
            life.reason, life.unplaced = event.lack, event.unplaced
            if event.lack is None:
                life.served_at = now
                if not life.woken:
                    life.phases = event.phases
                self._publish(life)
            else:
                life.due = now + PROBE_EVERY
        elif life.phase in ("ready", "parked"):
            limits = self.state.pools[life.pool].health
            life.misses = 0 if event.lack is None else life.misses + 1
            life.due = now + self._health_interval(life)
            missed = life.misses >= limits.misses
            attached, since = self.state.pools[life.pool].attached, life.silent_since
            if missed and not attached and since is not None and now - since > STUCK_AFTER:
                self._crashed(now, life, f"was stuck: {event.lack} for {seconds(now - since):.0f} s")
            elif missed and attached and not event.silent:
                reason = f"stopped serving: {event.lack}"
                self._effects.append(events.Crashed(worker=life.worker, reason=reason, kind="server"))
                self._away(now, life, event.lack or "")
            elif missed or (since is not None and event.lack is None):
                # Busy is not dead: the frontends know of the bytes that still come from it, and it keeps its requests.
                life.silent_since, life.reason = (since or now) if missed else None, event.lack
                effect = events.MarkSilent(worker=life.worker, silent=missed, draining=life.aside)
                self._effects.append(effect)

    def published(self, now: Nanos, life: Life) -> None:
        if life.phase == "publishing":
            life.due = now + ACKNOWLEDGED_AFTER

    def acknowledged(self, now: Nanos, life: Life) -> None:
        if life.phase == "publishing":
            self._ready(now, life)
        elif life.phase == "draining":
            self._effects.append(events.CountRequests(worker=life.worker, serial=life.publication))

    def publish_failed(self, now: Nanos, life: Life, event: events.PublishFailed) -> None:
        if life.phase == "draining":
            return self._drained(now, life, cut=life.active)  # nobody was ever told of it
        if life.phase != "publishing":
            return
        if not self.state.pools[life.pool].attached:
            self._crashed(now, life, event.reason)
            return
        if not life.served and life.failure is None:
            life.failure = event.reason
        self._away(now, life, event.reason)

    def requests_left(self, now: Nanos, life: Life, event: events.RequestsLeft) -> None:
        if life.phase != "draining":
            return
        changed = (event.active, event.finished) != (life.active, life.finished)
        life.active, life.finished = event.active, event.finished
        if life.overtime or (event.heard and not event.active):
            self._drained(now, life, cut=event.active)
        elif changed:
            self._report(now, life, "draining")

    def died(self, now: Nanos, life: Life, event: events.Died) -> None:
        if life.phase not in (
            *("starting", "probing", "publishing", "ready", "draining"),
            *("falling asleep", "asleep", "waking"),
        ):
            return
        if life.phase == "draining":
            self._report(now, life, "done", cut=life.active)
        life.given_up = event.restart == "never"
        if life.wanted:
            self._crashed(now, life, event.reason, None if event.restart == "never" else event.restart)
        else:
            self._withdraw(life, event.reason)
            self._stop(life, event.reason)

    def stopped(self, now: Nanos, life: Life) -> None:
        if life.phase != "stopping":
            return
        self._withdraw(life, life.reason or NOT_WANTED)  # where requests were cut off, their ends came first
        life.pid, life.host_memory, life.adopted, life.outdated, life.unplaced = None, None, False, False, False
        if not life.wanted:
            self._remove(now, life)
        elif life.given_up:
            life.phase = "given up"
            self._free(now, life)
        else:
            life.phase, life.due = "failed", now + nanos(life.wait)

    def slept(self, now: Nanos, life: Life, event: events.Slept) -> None:
        if life.phase != "falling asleep":
            return
        life.phase, life.host_memory = "asleep", event.host_memory
        life.reason = "it sleeps until the pool grows"
        life.former_gpus = life.gpus
        wanted, life.wanted = life.wanted, False
        self._free(now, life)
        if life.worker in self.state.pools[life.pool].without:
            self._stop(life, "it was drained")
        elif wanted and self.may_stay(life):
            self.want(now, life, True)
        elif wanted:
            life.wanted = True
            self._stop(life, "another replica has its GPUs")

    def sleep_failed(self, life: Life, event: events.SleepFailed) -> None:
        if life.phase == "falling asleep":
            self._stop(life, f"it could not be put to sleep: {event.reason}")

    def awoke(self, now: Nanos, life: Life) -> None:
        if life.phase == "waking":
            life.phase, life.phases = "probing", {"wake": seconds(now - life.started)}
            self._probe(life)

    def due(self, now: Nanos, life: Life) -> None:
        """Do what the time has come for."""
        life.due = None
        if life.phase == "failed":
            life.phase = "queued"
            self._assign_gpus(now)
        elif life.phase == "draining" and not life.overtime:
            life.overtime, life.due = True, now + LAST_COUNT
            self._effects.append(events.CountRequests(worker=life.worker, serial=life.publication))
        elif life.phase == "draining":
            self._drained(now, life, cut=life.active)
        elif life.phase == "publishing":
            self._ready(now, life)
        elif life.phase == "away":
            self._publish(life)
        else:
            self._probe(life)

    # --- steps --------------------------------------------------------------------------------------------------------

    def _assign_gpus(self, now: Nanos) -> None:
        """Start the replicas that wait for GPUs, the longest waiting first, as far as GPUs are free."""
        gpus = self.state.gpus
        queued = [life for life in self.state.lives.values() if life.phase == "queued"]
        for life in sorted(queued, key=lambda life: (life.created, life.pool, life.number)):
            count = self.state.pools[life.pool].gpus
            if len(life.gpus) != count:
                taken = gpus.take(count)
                if taken is None:
                    life.reason = f"waits for {count} GPUs; {gpus.free} are free"
                    continue
                life.gpus = taken
            life.phase, life.started, life.serial = "starting", now, self._next_serial()
            life.phases, life.start, life.woken = {}, None, False
            spawn = events.Spawn(
                worker=life.worker, serial=life.serial, pool=life.pool, number=life.number, gpus=life.gpus
            )
            self._effects.append(spawn)

    def _rouse(self, now: Nanos, life: Life) -> None:
        """Wake a replica on the GPUs that it had."""
        self.state.gpus.claim(life.former_gpus)
        life.gpus, life.former_gpus = life.former_gpus, ()
        life.phase, life.started, life.serial = "waking", now, self._next_serial()
        life.phases, life.start, life.woken, life.adopted = {}, None, True, False
        life.host_memory = life.reason = None
        self._effects.append(events.Rouse(worker=life.worker, serial=life.serial, pool=life.pool))

    def _sleeps(self, life: Life) -> bool:
        """Return whether a drained replica of a pool that shrinks is put to sleep in place of ending."""
        pool = self.state.pools[life.pool]
        # Once its time is over, a frontend that has not counted may still have requests on it.
        if life.overtime or life.worker in pool.without or life.worker in pool.retiring:
            return False
        there = (other for other in self.state.lives.values() if other.pool == life.pool)
        return sum(other.phase in ("falling asleep", "asleep") for other in there) < pool.sleeping

    def _probe(self, life: Life) -> None:
        self._effects.append(events.Probe(worker=life.worker, serial=life.serial))

    def _publish(self, life: Life) -> None:
        """Announce a replica that should take requests, or a drained server of others that came back."""
        life.phase, life.due, life.role = "publishing", None, self.desired_role(life)
        self._announce(life, draining=self._parked(life))

    def _announce(self, life: Life, *, draining: bool) -> None:
        assert life.role is not None
        life.publication, life.aside = self._next_serial(), draining
        effect = events.PublishReplica(
            worker=life.worker, serial=life.publication, pool=life.pool, role=life.role, draining=draining
        )
        self._effects.append(effect)

    def _ready(self, now: Nanos, life: Life) -> None:
        attached = self.state.pools[life.pool].attached
        life.phase = "parked" if life.aside else "ready"
        if not (life.up or attached or life.adopted):
            life.start = StartRecord(
                seconds=seconds(now - life.started),
                phases={**life.phases, "announce": seconds(now - life.served_at)},
                woken=life.woken,
            )
        life.up = life.served = True
        life.reason = life.failure = None
        life.misses, life.silent_since = 0, None
        watched = attached or self.state.pools[life.pool].watched
        life.due = now + self._health_interval(life) if watched else None
        if attached:
            life.serial = self._next_serial()
        if life.aside and not self._parked(life):
            self._publish(life)  # its drain was undone meanwhile
        elif self._parked(life) and not life.aside:
            self._drain(now, life)  # it was drained meanwhile
        elif not life.aside:
            if life.drained:
                life.drained = False
                self._effects.append(events.DrainForgotten(worker=life.worker))
            self.role_changed(now, life)

    def _drain(self, now: Nanos, life: Life) -> None:
        """Let a replica finish its requests: then it goes, or changes its role, or stays aside."""
        pool, times = self.state.pools[life.pool], self.state.times
        drain, own = pool.drains.get(life.worker), self.state.roles.get(life.worker)
        timeout = pool.timeout if drain is None else drain.timeout
        if life.wanted and not self._parked(life):
            life.reason = f"becomes {self.desired_role(life)} once it is idle"
            timeout = pool.timeout if own is None or own.timeout is None else own.timeout
        life.phase, life.drained, life.drained_since = "draining", True, now
        life.active = life.finished = 0
        life.overtime = False
        life.due = now + nanos(times.drain_timeout if timeout is None else timeout)
        self._announce(life, draining=True)

    def _drained(self, now: Nanos, life: Life, *, cut: int) -> None:
        self._report(now, life, "done", cut=cut)
        if life.wanted:
            if self._parked(life):
                life.phase, life.due, life.serial = "parked", now + self._health_interval(life), self._next_serial()
            else:
                self._publish(life)
            return
        life.reason = "it was drained" if not cut else "it was drained, with requests that had not ended in time"
        if not cut:
            # The frontends drop it first; where requests are cut off they end first, and go on elsewhere.
            self._withdraw(life, life.reason)
            if self._sleeps(life):
                life.phase, life.up, life.due = "falling asleep", False, None
                self._effects.append(events.Sleep(worker=life.worker, serial=life.serial))
                return
        self._stop(life, life.reason)

    @staticmethod
    def _reached(life: Life) -> bool:
        """Return whether frontends may have sent it requests before it was `ready`."""
        if life.phase == "publishing":
            return life.up or life.adopted or life.due is not None
        return life.role is not None and life.phase in ("starting", "probing")

    def _parked(self, life: Life) -> bool:
        pool = self.state.pools[life.pool]
        return pool.attached and life.worker in pool.drains

    def _crashed(self, now: Nanos, life: Life, reason: str, wait: float | None = None) -> None:
        """Take a replica that should serve out, and start it again after a while."""
        ran = seconds(now - life.started) if life.up else 0.0
        life.backoff = crash_wait(life.backoff, ran, self.state.times.restart_backoff)
        life.wait = life.backoff if wait is None else wait
        life.reason = reason
        if life.up:
            self.state.restarts += 1
        elif not life.served and life.failure is None:
            life.failure = reason
        text = reason if life.up else f"could not be started ({reason})"
        self._effects.append(events.Crashed(worker=life.worker, reason=text, wait=life.wait))
        self._withdraw(life, reason)
        self._stop(life, reason)

    def _away(self, now: Nanos, life: Life, reason: str) -> None:
        """A server that others run does not answer."""
        self._withdraw(life, reason)
        life.phase, life.up, life.reason, life.due = "away", False, reason, now + self._health_interval(life)

    def _health_interval(self, life: Life) -> Nanos:
        """Return the time to the next health check of a server, or to the next try to reach one that is away.

        Servers of a large fleet that are well are asked less often, each at a distance of its own.
        """
        interval = self.state.pools[life.pool].health.interval
        rare = len(self.state.lives) / CHECKS_MAX - interval
        if rare > 0 and life.phase in ("ready", "parked") and not life.misses:
            interval += rare * (0.5 + life.number * GOLDEN % 1)
        return nanos(interval)

    def _withdraw(self, life: Life, reason: str) -> None:
        if life.role is not None:
            life.role = None
            self._effects.append(events.Withdraw(worker=life.worker, reason=reason))

    def _stop(self, life: Life, reason: str) -> None:
        life.phase, life.up, life.due = "stopping", False, None
        self._effects.append(events.Stop(worker=life.worker, serial=life.serial, reason=reason))

    def _remove(self, now: Nanos, life: Life) -> None:
        del self.state.lives[life.worker]
        self.vacated.add(life.pool)
        self._effects.append(events.Forget(worker=life.worker, pool=life.pool, number=life.number))
        self._free(now, life)

    def _free(self, now: Nanos, life: Life) -> None:
        if life.gpus:
            self.state.gpus.give(life.gpus)
            life.gpus = ()
            self._assign_gpus(now)

    def _report(self, now: Nanos, life: Life, state: events.DrainProgress, *, cut: int = 0) -> None:
        drain = self.state.pools[life.pool].drains.get(life.worker)
        self._effects.append(
            events.DrainReported(
                worker=life.worker,
                state=state,
                active=0 if state == "done" else life.active,
                finished=life.finished,
                cut=cut,
                seconds=seconds(now - life.drained_since),
                revision=None if drain is None else drain.revision,
            )
        )

    def _next_serial(self) -> int:
        self.state.serial += 1
        return self.state.serial

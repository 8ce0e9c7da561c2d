"""A world of random delays, crashes and wishes around a fleet, which notes every harm done to a process or request."""

import random
from collections.abc import Callable, Iterable
from typing import Any

from penstock.fleet import events
from penstock.fleet.fleet import Fleet
from penstock.fleet.fleet_state import FleetTimes
from penstock.fleet.gpu_allocator import GpuAllocator
from penstock.fleet.replica_lives import NOT_WANTED
from penstock.fleet.rolling_restart import OUTDATED
from penstock.kernel.machine import Effect, Event, Nanos, nanos
from penstock.kernel.simulation import Answer, Simulation
from penstock.kernel.values import Pool

NAME = "fleet"
TROUBLE = 120.0
"""Seconds in which anything may happen."""
CALM = 900.0
"""Seconds until everything must be as desired: longer than all drains, back-offs and a whole restart."""
STAYS = 30.0
"""Seconds for which it has to stay so: what comes after them are probes."""

Past = list[tuple[Nanos, Event, list[Effect]]]


class FleetWorld:
    """Carries out the effects of one fleet."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        gpus = dice.choice((0, 4, 6))
        self.gpus = gpus
        self.fleet = made(seed, gpus)
        self.given = 0
        """GPUs that engines of an earlier supervisor have."""
        self.past: Past = []
        self.processes: dict[str, int] = {}
        """Worker -> serial of the process that runs."""
        self.entries: dict[str, bool] = {}
        """Worker -> whether it drains, as the frontends read it."""
        self.requests: dict[str, int] = {}
        self.counted: dict[str, int] = {}
        """Worker -> serial under which its requests are counted."""
        self.due: dict[str, Nanos] = {}
        """Worker -> when its drain may cut requests off."""
        self.heard: set[str] = set()
        """Workers of which every frontend has counted the requests."""
        self.away: set[str] = set()
        """Servers that do not answer."""
        self.asleep: set[str] = set()
        """Workers that are put to sleep, or sleep."""
        self.restarts: dict[str, str] = {}
        self.kinds: set[type] = set()
        self.troubled = True
        self.simulation = Simulation({NAME: self.fleet}, self.carry, checked=True, watch=self.watch)

    # --- what happens -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        dice = self.dice
        self.pools = {f"p{n}": dice.randint(1, 3) for n in range(dice.randint(1, 2))}
        for name, replicas in self.pools.items():
            each = int(sum(self.pools.values()) <= self.gpus and dice.random() < 0.7)
            sleeping = dice.choice((0, 0, 1, 2))
            self.add(name, replicas, each, sleeping)
        self.servers = dice.randint(0, 2)
        if self.servers:
            configured = Pool(model="m", role="decode", desired=self.servers)
            self.post(events.PoolAdded(pool="urls", configured=configured, attached=True))
        self.post(events.PoolAdded(pool="pods", configured=Pool(model="m", desired=0), attached=True))
        self.post(events.Begun())
        at = 0.0
        while at < TROUBLE:
            at += dice.expovariate(1 / 3)
            self.simulation.run(until=nanos(at))
            self.trouble(at)
        self.troubled = False
        self.away.clear()
        for name in (*self.pools, "urls", "pods"):
            for worker in [worker for worker in self.requests if worker.startswith(name)]:
                self.leave_requests(worker, 0)

    def add(self, name: str, replicas: int, gpus: int, sleeping: int) -> None:
        """Add a pool, in half of all worlds with engines of an earlier supervisor."""
        dice, left = self.dice, range(self.gpus)[self.given :]
        there = dice.sample(range(4), dice.choice((0, 0, 1, replicas, min(4, replicas + 1))))
        adopted = {n: tuple(left[i * gpus : (i + 1) * gpus]) for i, n in enumerate(sorted(there))}
        adopted = {n: taken for n, taken in adopted.items() if len(taken) == gpus}
        added = events.PoolAdded(
            pool=name,
            configured=Pool(model="m", desired=replicas),
            gpus=gpus,
            sleeping=sleeping,
            adopted=adopted,
            outdated=frozenset(n for n in adopted if dice.random() < 0.5),
            unavailable=dice.choice((None, None, 0, 1)),
        )
        self.given += gpus * len(adopted)
        self.post(added)
        for worker in [f"{name}-{n}" for n in adopted]:
            self.processes[worker] = 0
            if dice.random() < 0.7:
                self.entries[worker], self.requests[worker] = dice.random() < 0.3, dice.randrange(3)
                draining = self.entries[worker]
                self.post(events.Recalled(worker=worker, role="aggregated", draining=draining))

    def settle(self, wrong: Callable[[], str | None], *, whole: bool) -> str | None:
        """Run until all is as desired and stays so, or through the ``whole`` calm; return what is wrong in the end."""
        at = TROUBLE
        found: str | None = "in trouble until now"
        while at < TROUBLE + CALM:
            at += STAYS
            self.simulation.run(until=nanos(at))
            before, found = found, wrong()
            if before is found is None and not whole:
                break
        return found

    def trouble(self, at: float) -> None:
        dice = self.dice
        name = dice.choice(list(self.pools))
        worker = f"{name}-{dice.randrange(4)}"
        if self.servers and dice.random() < 0.2:
            worker = f"urls-{dice.randrange(self.servers)}"
        kind = dice.randrange(10)
        if kind == 0:
            self.post(events.Desired(pool=name, replicas=dice.randrange(5), by_planner=dice.random() < 0.5, at=at))
        elif kind == 1:
            timeout = dice.choice((None, 0.5, 30.0))
            self.post(events.DrainDesired(worker=worker, at=at, timeout=timeout, revision=f"d{at}"))
        elif kind == 2:
            self.post(events.DrainDropped(worker=worker))
        elif kind == 3:
            role = dice.choice((None, "prefill", "decode"))
            self.post(events.RoleDesired(worker=worker, role=role, timeout=dice.choice((None, 2.0))))
        elif kind == 4 and dice.random() < 0.3:
            frontends = tuple(range(dice.randrange(3)))
            self.post(events.RestartDesired(revision=f"r{at}", force=dice.random() < 0.5, frontends=frontends))
        elif kind == 5 and worker in self.processes:
            serial = self.processes.pop(worker)
            self.asleep.discard(worker)
            self.requests.pop(worker, None)
            self.post(events.Died(worker=worker, serial=serial, reason="was killed"))
        elif kind == 9:
            self.change_pods()
        elif kind == 6:
            (self.away.discard if worker in self.away else self.away.add)(worker)
        else:
            for there in [there for there, draining in self.entries.items() if not draining]:
                self.requests[there] = dice.randrange(4)
            for there in [there for there, draining in self.entries.items() if draining]:
                self.leave_requests(there, max(0, self.requests.get(there, 0) - 1))

    def change_pods(self) -> None:
        """A pod comes, is to end, or vanishes."""
        number, change = self.dice.randrange(3), self.dice.randrange(4)
        if change < 2:
            self.post(events.ServerJoined(pool="pods", number=number))
        else:
            self.post(events.ServerLeaving(worker=f"pods-{number}", vanished=change == 3))

    def leave_requests(self, worker: str, active: int) -> None:
        before, self.requests[worker] = self.requests.get(worker, 0), active
        if worker in self.counted and active != before:
            self.heard.add(worker)
            self.post(events.RequestsLeft(worker=worker, serial=self.counted[worker], active=active, finished=1))

    def post(self, event: Event) -> None:
        self.simulation.post(self.simulation.now, NAME, event)

    def watch(self, now: Nanos, name: str, event: Event, effects: Any) -> None:
        self.past.append((now, event, list(effects)))
        self.kinds |= {type(event), *(type(effect) for effect in effects)}

    # --- what is done -------------------------------------------------------------------------------------------------

    def carry(self, now: Nanos, sender: str, effect: Effect) -> Iterable[Answer]:
        later = now + nanos(self.dice.choice((0.0, 0.01, 0.3, 2.0)))
        made: Event | None = getattr(self, f"do_{type(effect).__name__}")(now, effect)
        return () if made is None else ((later, NAME, made),)

    def do_Spawn(self, now: Nanos, effect: events.Spawn) -> Event:
        adopted = self.fleet.state.lives[effect.worker].adopted
        assert adopted or effect.worker not in self.processes, f"{effect.worker} is started twice"
        assert adopted or effect.worker not in self.entries, f"frontends know a former life of {effect.worker}"
        if adopted and effect.worker in self.processes:
            self.processes[effect.worker] = effect.serial
            return events.Started(worker=effect.worker, serial=effect.serial)
        if self.troubled and self.dice.random() < 0.15:
            return events.Died(worker=effect.worker, serial=effect.serial, reason="ended with status 1")
        self.processes[effect.worker] = effect.serial
        return events.Started(worker=effect.worker, serial=effect.serial, pid=effect.serial)

    def do_Sleep(self, now: Nanos, effect: events.Sleep) -> Event:
        worker = effect.worker
        assert worker in self.processes and worker not in self.entries, f"{worker} falls asleep while it serves"
        assert not self.requests.get(worker), f"{worker} falls asleep with requests"
        if self.troubled and self.dice.random() < 0.2:
            return events.SleepFailed(worker=worker, serial=effect.serial, reason="too little memory is left")
        self.asleep.add(worker)
        return events.Slept(worker=worker, serial=effect.serial, host_memory=1)

    def do_Rouse(self, now: Nanos, effect: events.Rouse) -> Event:
        worker = effect.worker
        assert worker not in self.entries
        if worker not in self.processes or (self.troubled and self.dice.random() < 0.3):
            return events.Died(worker=worker, serial=effect.serial, reason="could not be woken", restart=0.0)
        self.asleep.discard(worker)
        self.processes[worker] = effect.serial
        return events.Awoke(worker=worker, serial=effect.serial)

    def do_Probe(self, now: Nanos, effect: events.Probe) -> Event:
        lack = "nobody listens" if effect.worker in self.away or self.dice.random() < 0.2 * self.troubled else None
        unplaced = self.troubled and lack is not None and effect.serial % 3 == 0
        silent = lack is not None and effect.worker not in self.away and effect.serial % 2 == 0
        return events.Probed(worker=effect.worker, serial=effect.serial, lack=lack, silent=silent, unplaced=unplaced)

    def do_MarkSilent(self, now: Nanos, effect: events.MarkSilent) -> None:
        assert self.entries.get(effect.worker) == effect.draining, (
            f"{effect.worker} is marked and not as it was published"
        )
        assert effect.silent == (self.fleet.state.lives[effect.worker].silent_since is not None)

    def do_PublishReplica(self, now: Nanos, effect: events.PublishReplica) -> Event | None:
        worker = effect.worker
        attached = effect.pool in ("urls", "pods")
        assert attached or worker in self.processes or effect.draining, f"{worker} is published without a process"
        assert worker not in self.asleep, f"{worker} is published and sleeps"
        if not effect.draining:
            self.due.pop(worker, None)
        if not effect.draining and (worker in self.away or (self.troubled and self.dice.random() < 0.1)):
            return events.PublishFailed(worker=worker, serial=effect.serial, reason="it is unfit")
        self.counted.pop(worker, None)
        if effect.draining and not self.entries.get(worker, True):
            life = self.fleet.state.lives[worker]
            self.due[worker] = life.due if life.due is not None else now
        self.entries[worker] = effect.draining
        if self.troubled and self.dice.random() < 0.1:
            return events.Published(worker=worker, serial=effect.serial)  # a frontend never acknowledges it
        return events.Acknowledged(worker=worker, serial=effect.serial)

    def do_CountRequests(self, now: Nanos, effect: events.CountRequests) -> Event:
        self.counted[effect.worker] = effect.serial
        active = self.requests.get(effect.worker, 0)
        heard = not self.troubled or self.dice.random() < 0.8  # else a frontend never says what it has
        (self.heard.add if heard else self.heard.discard)(effect.worker)
        return events.RequestsLeft(worker=effect.worker, serial=effect.serial, active=active, heard=heard)

    def do_Withdraw(self, now: Nanos, effect: events.Withdraw) -> None:
        life = self.fleet.state.lives.get(effect.worker)
        if life is not None and life.adopted and effect.reason == NOT_WANTED:
            assert self.entries.get(effect.worker) is not False, f"{effect.worker} serves and is not drained"
        self.entries.pop(effect.worker, None)
        self.counted.pop(effect.worker, None)

    def do_Stop(self, now: Nanos, effect: events.Stop) -> Event:
        worker = effect.worker
        if worker in self.processes and now < self.due.get(worker, 0):
            assert not self.requests.get(worker) and worker in self.heard, f"{worker} is cut off too soon"
        self.processes.pop(worker, None)
        self.asleep.discard(worker)
        self.requests.pop(worker, None)
        self.due.pop(worker, None)
        return events.Stopped(worker=worker, serial=effect.serial)

    def do_Forget(self, now: Nanos, effect: events.Forget) -> None:
        assert effect.worker not in self.processes and effect.worker not in self.entries

    def do_Crashed(self, now: Nanos, effect: events.Crashed) -> None:
        assert effect.wait <= 30.0

    def do_DrainReported(self, now: Nanos, effect: events.DrainReported) -> None:
        assert effect.state == "done" or not effect.cut

    def do_DrainForgotten(self, now: Nanos, effect: events.DrainForgotten) -> None:
        pass

    def do_ReplaceFrontend(self, now: Nanos, effect: events.ReplaceFrontend) -> Event:
        problem = "no more processes" if self.dice.random() < 0.1 else None
        return events.FrontendReplaced(index=effect.index, problem=problem)

    def do_RestartReported(self, now: Nanos, effect: events.RestartReported) -> None:
        again = effect.revision == OUTDATED.revision
        assert again or self.restarts.get(effect.revision, "running") == "running", "it ended before"
        self.restarts[effect.revision] = effect.state


def made(seed: int, gpus: int) -> Fleet:
    times = FleetTimes(drain_timeout=random.Random(seed).choice((1.0, 20.0)))
    return Fleet(times, GpuAllocator.over(range(gpus), "the test"))

"""Fleet effects of a simulation: carried out with virtual engines, their start-up times, and the router in one step."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from penstock.fleet import events
from penstock.kernel.machine import Effect, Nanos, seconds
from penstock.kernel.simulation import Answer, Simulation
from penstock.kernel.values import WorkerCard, WorkerId
from penstock.router import events as routing
from penstock_lab.engine.network_links import NetworkLinks
from penstock_lab.engine.self_benchmark import perf_metrics
from penstock_lab.simulate.effect_handlers import FLEET, ROUTER, EffectHandlers, idle
from penstock_lab.simulate.simulated_fleet import SimulatedFleet, SimulatedWorker


class FleetEffects:
    """Carries out what a `penstock.fleet.fleet.Fleet` wants; `fail` kills one of its workers.

    Args:
        world: knows the requests that break off with a worker.
        refused: takes what could not be done, with the reason.
    """

    def __init__(
        self,
        fleet: SimulatedFleet,
        world: EffectHandlers,
        simulation: Simulation,
        links: NetworkLinks,
        refused: Callable[[str], object],
    ) -> None:
        self._fleet = fleet
        self._world = world
        self._simulation = simulation
        self._links = links
        self._refused = refused
        self._cards: dict[WorkerId, WorkerCard] = {}
        """Workers that the router knows, by its last card of each."""
        self._speeds: dict[str, dict[str, float]] = {}
        carriers: dict[type[Effect], Callable[[Nanos, Any], Iterable[Answer]]] = {
            events.Spawn: self._spawn,
            events.Probe: self._probe,
            events.Sleep: self._sleep,
            events.Rouse: self._rouse,
            events.PublishReplica: self._publish,
            events.CountRequests: self._count,
            events.Withdraw: lambda now, effect: self._left(now, WorkerId(effect.worker), effect.reason),
            events.Stop: self._stop,
            events.RestartReported: self._restart_reported,
            events.Forget: _drop_effect,
            events.Crashed: _drop_effect,
            events.DrainReported: _drop_effect,
            events.DrainForgotten: _drop_effect,
        }
        for kind, carrier in carriers.items():
            world.carry(kind, partial(_without_sender, carrier))

    def fail(self, now: Nanos, worker: SimulatedWorker, event: events.Died) -> None:
        """End a worker at once: its streams break, then it leaves."""
        answers = [
            *self._broken(now, worker, "the connection broke: it was killed"),
            *self._left(now, worker.id, event.reason),
        ]
        self._end(now, worker, event.reason)
        for at, machine, answer in (*answers, (now, FLEET, event)):
            self._simulation.post(at, machine, answer)

    def _spawn(self, now: Nanos, effect: events.Spawn) -> Iterable[Answer]:
        made = self._begin(effect.pool, now, effect.worker, effect.serial)
        return (
            (now, ROUTER, routing.WorkerJoined(card=made.card, ready=made.ready_at <= now)),
            (now, FLEET, events.Started(worker=effect.worker, serial=effect.serial)),
        )

    def _rouse(self, now: Nanos, effect: events.Rouse) -> Iterable[Answer]:
        self._fleet.sleep_ended(WorkerId(effect.worker), now)
        made = self._begin(effect.pool, now, effect.worker, effect.serial, woken=True)
        return (
            (now, ROUTER, routing.WorkerJoined(card=made.card, ready=False)),
            (made.ready_at, FLEET, events.Awoke(worker=effect.worker, serial=effect.serial)),
        )

    def _sleep(self, now: Nanos, effect: events.Sleep) -> Iterable[Answer]:
        worker = self._fleet.workers[WorkerId(effect.worker)]
        self._simulation.remove(worker.id)
        asleep_at = self._fleet.sleep(worker, now)
        yield asleep_at, FLEET, events.Slept(worker=effect.worker, serial=effect.serial)

    def _begin(self, pool: str, now: Nanos, worker: str, serial: int, *, woken: bool = False) -> SimulatedWorker:
        made = self._fleet.start(pool, now, WorkerId(worker), serial, woken=woken)
        self._simulation.machines[made.id] = made.engine
        bandwidth = self._fleet.plan.pools[pool].sim.transfer.bandwidth
        if bandwidth != self._links.bandwidth(made.id):
            self._links.set(made.id, bandwidth)
        self._cards[made.id] = made.card
        return made

    def _probe(self, now: Nanos, effect: events.Probe) -> Iterable[Answer]:
        worker = self._fleet.workers[WorkerId(effect.worker)]
        return ((worker.ready_at, FLEET, events.Probed(worker=effect.worker, serial=effect.serial)),)

    def _publish(self, now: Nanos, effect: events.PublishReplica) -> Iterable[Answer]:
        worker = self._fleet.workers.get(WorkerId(effect.worker))
        if worker is None:
            return  # it was killed at this moment
        if effect.draining:
            worker.state = "draining"
            yield now, ROUTER, routing.WorkerDraining(worker=worker.id, epoch=worker.card.epoch)
        elif worker.state == "starting" and worker.card.role == effect.role:
            worker.state = "ready"
            worker.life.ready = now
            yield now, ROUTER, routing.WorkerReady(worker=worker.id, epoch=worker.card.epoch)
            if self._fleet.plan.router.cost.kind == "latency":
                yield now, ROUTER, routing.WorkerMeasured(worker=worker.id, **self._speed(worker.pool))
        else:
            worker.life.ready = now if worker.life.ready is None else worker.life.ready
            card = self._cards[worker.id] = self._fleet.publish_anew(worker, effect.role)
            yield now, ROUTER, routing.WorkerJoined(card=card)
        yield now, FLEET, events.Acknowledged(worker=effect.worker, serial=effect.serial)

    def _count(self, now: Nanos, effect: events.CountRequests) -> Iterable[Answer]:
        worker = self._fleet.workers.get(WorkerId(effect.worker))
        if worker is None:
            return ()
        worker.counted = effect.serial
        left = idle(worker)
        if not worker.idle:
            active = len(worker.running) + len(worker.kv_retained)
            left = events.RequestsLeft(worker=worker.id, serial=effect.serial, active=active)
        return ((now, FLEET, left),)

    def _stop(self, now: Nanos, effect: events.Stop) -> Iterable[Answer]:
        worker = self._fleet.workers.get(WorkerId(effect.worker))
        if worker is not None and worker.serial == effect.serial:
            if not worker.idle:
                yield from self._broken(now, worker, "it was drained, and its time is over")
            yield from self._left(now, worker.id, effect.reason)
            self._end(now, worker, effect.reason)
        self._fleet.sleep_ended(WorkerId(effect.worker), now)
        yield now, FLEET, events.Stopped(worker=effect.worker, serial=effect.serial)

    def _restart_reported(self, now: Nanos, effect: events.RestartReported) -> Iterable[Answer]:
        if effect.problem is not None:
            self._refused(f"restart, stopped at {seconds(now):g} s: {effect.problem}")
        return ()

    def _broken(self, now: Nanos, worker: SimulatedWorker, why: str) -> list[Answer]:
        """Everything that a worker runs breaks off."""
        cut = self._world.cut_off(worker, now)
        return [*cut, *((now, ROUTER, event) for event in self._world.broken(worker, now, why))]

    def _left(self, now: Nanos, worker: WorkerId, why: str) -> list[Answer]:
        """The router drops a worker, where it knows it."""
        card = self._cards.pop(worker, None)
        return [] if card is None else [(now, ROUTER, routing.WorkerLeft(worker=worker, epoch=card.epoch, reason=why))]

    def _end(self, now: Nanos, worker: SimulatedWorker, why: str) -> None:
        self._fleet.end(worker, now, why)
        self._simulation.remove(worker.id)

    def _speed(self, pool: str) -> dict[str, float]:
        if pool not in self._speeds:
            kind = self._fleet.plan.pools[pool]
            self._speeds[pool] = perf_metrics(kind.sim, kind.table)["fit"]
        return self._speeds[pool]


def _without_sender(
    carrier: Callable[[Nanos, Any], Iterable[Answer]], now: Nanos, sender: str, effect: Effect
) -> Iterable[Answer]:
    return carrier(now, effect)


def _drop_effect(now: Nanos, effect: Effect) -> Iterable[Answer]:
    return ()

"""Fleet driver: runs the fleet machine in real time, and carries out its effects with processes or pods.

What an effect needs is done by one task after another for each replica, so that a replica is never withdrawn after it
was published anew. A newer effect ends a wait that it makes useless.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple, Protocol

import msgspec

from penstock.adapters.background_tasks import BackgroundTasks
from penstock.adapters.connectors.engine_process import EngineProcess, EngineTemplate, LaunchSpec
from penstock.adapters.engines.describe import ServerHealth
from penstock.adapters.seams import ConnectorError
from penstock.adapters.task_cancel import end
from penstock.config.settings.cluster_settings import SuperviseSettings
from penstock.fleet import events
from penstock.fleet.fleet import Fleet
from penstock.fleet.fleet_state import FleetTimes, HealthLimits
from penstock.fleet.gpu_allocator import GpuAllocator
from penstock.kernel.errors import ConfigError, EngineError, InvariantError, PenstockError
from penstock.kernel.machine import Effect, Event, Nanos
from penstock.kernel.values import Pool, Role, WorkerCard
from penstock.runtime.live_driver import LiveDriver

log = logging.getLogger("penstock.fleet")

FLEET = "fleet"
CANCELLED_AGAIN = 0.1
"""Seconds until work that still runs is cancelled again: before Python 3.12 `asyncio.wait_for` may lose a cancel."""


class Strategy(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """How outdated replicas of a pool are replaced, as `penstock.fleet.events.PoolAdded` says it."""

    max_surge: Annotated[int, msgspec.Meta(ge=0)] | None = None
    max_unavailable: Annotated[int, msgspec.Meta(ge=0)] | None = None


class RequestCount(NamedTuple):
    """Requests on a draining replica, as `penstock.fleet.events.RequestsLeft` has them."""

    active: int
    finished: int
    heard: bool


class FleetHooks(Protocol):
    """What the rest of a supervisor does for a fleet."""

    async def missing(self, pool: str, url: str) -> str | None:
        """Return what a server that is starting still lacks, or None once it serves."""
        ...

    async def health(self, engine: EngineProcess, timeout: float, model: str) -> ServerHealth:
        """Ask a server that others run whether it serves a model, for at most so many seconds."""
        ...

    async def mark_silent(self, worker: str, *, silent: bool, draining: bool) -> None:
        """Announce that a replica does not answer its health check, or that it does again."""
        ...

    async def sleep(self, engine: EngineProcess) -> None:
        """Put an idle replica to sleep.

        Raises:
            PenstockError: it can't be.
        """
        ...

    async def wake(self, engine: EngineProcess) -> None:
        """Wake a replica.

        Raises:
            PenstockError: it can't be woken.
        """
        ...

    async def publish(self, engine: EngineProcess, role: Role, *, draining: bool) -> None:
        """Announce a replica to the frontends.

        Raises:
            PenstockError: it is not what it should be, or can't be announced.
        """
        ...

    async def acknowledged(self, worker: str) -> None:
        """Return when every frontend knows a replica."""
        ...

    def requests_left(self, worker: str) -> AsyncIterator[RequestCount]:
        """Yield the requests on a draining replica, whenever they change."""
        ...

    async def withdraw(self, worker: str) -> None:
        """Take a replica from the frontends."""
        ...

    async def replace_frontend(self, index: int) -> None:
        """Replace a frontend.

        Raises:
            PenstockError | OSError: its successor does not come up.
        """
        ...

    def crashed(self, crash: events.Crashed) -> None:
        """Record a crash."""
        ...

    def report(self, report: events.DrainReported | events.DrainForgotten | events.RestartReported) -> None:
        """Record the progress of a drain or a restart."""
        ...


class Runner(Protocol):
    """Starts, adopts, probes and ends engines: processes of this machine (`EngineRunner`) or pods (`PodRunner`)."""

    settings: SuperviseSettings
    adopted: list[str]
    """Workers that were adopted from an earlier supervisor."""
    outdated: list[str]
    """Adopted workers that would be started in another way now."""
    not_adopted: dict[str, str]
    """Its other workers, and sizes, each with why it was not."""

    async def open(self) -> None:
        """Find the engines that an earlier supervisor left running."""
        ...

    def adopt(self, template: EngineTemplate, configured: int) -> tuple[int, dict[int, tuple[int, ...]]]:
        """Adopt a pool's engines, also those that are too many.

        Returns: the replicas that it should have; number -> GPUs of those that were adopted.
        """
        ...

    def leftovers(self, known: Collection[str]) -> Mapping[str, dict[int, tuple[int, ...]]]:
        """Adopt those of the workers ``known`` whose pools are no more; return component -> number -> GPUs."""
        ...

    async def end_survivors(self, numbers: Mapping[str, Sequence[int]]) -> None:
        """End the engines that nobody adopted. ``numbers``: component -> numbers of its engines."""
        ...

    async def start(self, pool: str, template: EngineTemplate, number: int, gpus: tuple[int, ...]) -> int | None:
        """Start an engine, or take over the adopted one with its name; return its pid.

        Raises:
            EngineError: it can't be started.
        """
        ...

    async def probe(self, worker: str, missing: Callable[[str], Awaitable[str | None]]) -> str | None:
        """Return what an engine lacks to serve; None once it serves.

        Raises:
            EngineError: it ended, or its time is over.
        """
        ...

    def unplaced(self, worker: str) -> bool:
        """Return whether no machine has room for an engine."""
        ...

    def phases(self, worker: str) -> dict[str, float | None]:
        """Return the phases of the start of an engine that serves, in seconds, as far as they are known."""
        ...

    def mark_asleep(self, worker: str, asleep: bool) -> None:
        """Record that an engine sleeps from now on, or that it is woken."""
        ...

    def host_memory(self, worker: str) -> int | None:
        """Return the bytes of host memory that an engine takes; None where that is unknown.

        Raises:
            EngineError: it leaves its machine too little.
        """
        ...

    def process(self, worker: str) -> EngineProcess:
        """Return an engine that serves."""
        ...

    async def ended(self, worker: str) -> str:
        """Wait for the end of an engine, and return how it ended: a verb and what follows."""
        ...

    async def stop(self, worker: str) -> None:
        """End an engine; one that never ran is no error."""
        ...

    def forget(self, component: str, number: int) -> None:
        """An engine is gone for good."""
        ...

    def record_replicas(self, component: str, replicas: int, configured: int) -> None:
        """Record how many replicas a pool should have now, and how many its config says."""
        ...

    async def close(self, grace: float) -> None:
        """End all engines within ``grace`` seconds."""
        ...


class _Work(NamedTuple):
    do: Callable[[], Coroutine[Any, Any, None]]
    waits: bool
    """Whether a newer effect makes it useless."""


class _Lane:
    """The work for one replica: one after another."""

    def __init__(self) -> None:
        self.queue: deque[_Work] = deque()
        self.running: asyncio.Task[None] | None = None
        self.waits = False
        """Whether what runs is ended by newer work."""

    def add(self, work: _Work) -> None:
        self.queue = deque(other for other in self.queue if not other.waits)
        self.queue.append(work)
        if self.running is not None and self.waits:
            self.running.cancel()

    async def run(self) -> None:
        while self.queue:
            work = self.queue.popleft()
            self.waits = work.waits
            self.running = asyncio.create_task(work.do())
            try:
                await asyncio.wait({self.running})
            except asyncio.CancelledError:
                while not self.running.done():  # an engine that starts is waited for, however often this is cancelled
                    self.running.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait({self.running}, timeout=CANCELLED_AGAIN)
                raise
            if not self.running.cancelled() and (error := self.running.exception()) is not None:
                log.error("an effect of the fleet was not carried out by a bug of ours", exc_info=error)
            self.running = None


class FleetDriver:
    """The fleet of one supervisor, and a `Connector` over its pools: `open`, then add every pool, then `start`.

    Args:
        runner: starts and ends the engines.
        gpus: that may be given to them.
    """

    def __init__(self, settings: SuperviseSettings, runner: Runner, hooks: FleetHooks, *, gpus: GpuAllocator) -> None:
        self.fleet = Fleet(_fleet_times(settings), gpus)
        self.runner = runner
        self._hooks = hooks
        self.watched: Callable[[Nanos, str, Event, Sequence[Effect]], None] = lambda now, name, event, effects: None
        """Called after each event, such as to write a journal."""
        self._live = LiveDriver({FLEET: self.fleet}, watch=self._handled)
        self._templates: dict[str, EngineTemplate] = {}
        self._configured: dict[str, int] = {}
        self._urls: dict[str, EngineProcess] = {}
        """Servers that others run."""
        self._changing: dict[str, Callable[[int], None]] = {}
        """Pools whose servers come and go -> what is called with the number of one that is forgotten."""
        self.leftovers: set[str] = set()
        """Pools that are no more, whose last engines finish their requests."""
        self._recorded: dict[str, int] = {}
        """Pool -> replicas that the state file says it should have."""
        self._lanes: dict[str, _Lane] = {}
        """Replica -> its work under way."""
        self._tasks = BackgroundTasks()
        self._watchers: set[asyncio.Event] = set()
        self._revision = 0
        """Revision of the fleet that watchers know of."""
        self._closing = False
        carriers: dict[type[Effect], Callable[[Any], object]] = {
            events.Spawn: lambda e: self._queue_work(e.worker, partial(self._spawn, e), waits=True),
            events.Probe: lambda e: self._queue_work(e.worker, partial(self._probe, e), waits=True),
            events.Sleep: lambda e: self._queue_work(e.worker, partial(self._sleep, e), waits=True),
            events.Rouse: lambda e: self._queue_work(e.worker, partial(self._rouse, e), waits=True),
            events.PublishReplica: lambda e: self._queue_work(e.worker, partial(self._publish, e), waits=True),
            events.CountRequests: lambda e: self._queue_work(e.worker, partial(self._count, e), waits=True),
            events.MarkSilent: lambda e: self._queue_work(e.worker, partial(self._mark_silent, e), waits=False),
            events.Withdraw: lambda e: self._queue_work(e.worker, partial(self._withdraw, e), waits=False),
            events.Stop: lambda e: self._queue_work(e.worker, partial(self._stop, e), waits=False),
            events.Forget: self._forget,
            events.ReplaceFrontend: lambda e: self._tasks.spawn(
                self._replace_frontend(e), f"replace-frontend-{e.index}"
            ),
            events.Crashed: self._crashed,
            events.DrainReported: self._report,
            events.DrainForgotten: self._report,
            events.RestartReported: self._report,
        }
        for kind, carrier in carriers.items():
            self._live.on(kind, lambda now, sender, effect, carrier=carrier: carrier(effect))  # type: ignore[misc]

    @property
    def restarts(self) -> int:
        """Engines that crashed and were started again."""
        return self.fleet.state.restarts

    @property
    def adopted(self) -> list[str]:
        """Workers that were adopted from a supervisor that was killed."""
        return self.runner.adopted

    def use(self, settings: SuperviseSettings) -> None:
        """Use these settings from now on."""
        self.runner.settings = settings
        self.post(events.TimesChanged(times=_fleet_times(settings)))

    def post(self, event: Event) -> None:
        """Tell the fleet what is desired, or what happened."""
        self._live.post(FLEET, event)

    # --- before start -------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Find the engines that an earlier supervisor left running."""
        await self.runner.open()

    def add(
        self,
        name: str,
        template: EngineTemplate,
        configured: Pool,
        *,
        sleeping: int = 0,
        health: HealthLimits | None = None,
        strategy: Strategy = Strategy(),
    ) -> list[str]:
        """Add a pool of processes; return the ids of the engines that it then has.

        Args:
            sleeping: replicas that are put to sleep at most where it shrinks.
            strategy: by which those that are outdated are replaced.
            health: of checks of engines that serve; None makes none.

        Raises:
            ConfigError: the machine has too few GPUs.
        """
        replicas, adopted = self.runner.adopt(template, configured.desired)
        gpus = self.fleet.state.gpus
        for number, taken in adopted.items():
            if not set(taken) <= set(gpus.left):
                log.warning("%s has GPUs that are not ours to give: %s", template.worker(number), taken)
        others = sum(pool.goal * pool.gpus for pool in self.fleet.state.pools.values())
        needed = others + replicas * template.gpus
        if needed > len(gpus.all):
            raise ConfigError(
                f"pool {name} takes {replicas} x {template.gpus} GPUs, all together {needed}; there are: {gpus}",
                hint="set fewer replicas or fewer gpus per replica, or say with supervise.gpus which there are",
            )
        self._templates[name], self._configured[name] = template, configured.desired
        desired = msgspec.structs.replace(configured, desired=replicas)
        self.post(
            events.PoolAdded(
                pool=name,
                configured=desired,
                gpus=template.gpus,
                adopted=adopted,
                outdated=frozenset(n for n in adopted if template.worker(n) in self.runner.outdated),
                surge=strategy.max_surge,
                unavailable=strategy.max_unavailable,
                sleeping=sleeping,
                health=health or HealthLimits(),
                watched=health is not None,
            )
        )
        return [life.worker for life in self.fleet.state.of(name)]

    def add_leftovers(self, cards: Sequence[WorkerCard]) -> None:
        """Let the engines of pools that are no more finish their requests; ``cards``: of all that frontends know."""
        known = {str(card.id): card for card in cards}
        for name, adopted in self.runner.leftovers(known).items():
            card = known[f"{name}-{next(iter(adopted))}"]
            self.leftovers.add(name)
            configured = Pool(model=card.model, role=card.role, desired=0)
            gpus = len(next(iter(adopted.values())))
            self._templates[name], self._configured[name] = EngineTemplate(name, _never, gpus), 0
            self.post(events.PoolAdded(pool=name, configured=configured, gpus=gpus, adopted=adopted))

    def attach(
        self, name: str, configured: Pool, servers: Sequence[EngineProcess], health: HealthLimits = HealthLimits()
    ) -> list[str]:
        """Add a pool of servers that others run; return their ids."""
        self._urls |= {server.worker: server for server in servers}
        self.post(events.PoolAdded(pool=name, configured=configured, health=health, attached=True))
        return [server.worker for server in servers]

    def attach_changing(
        self, name: str, configured: Pool, forgotten: Callable[[int], None], health: HealthLimits = HealthLimits()
    ) -> None:
        """Add a pool of servers that `join` and `leave`; ``forgotten`` gets the number of each that is forgotten."""
        self._changing[name] = forgotten
        self.post(events.PoolAdded(pool=name, configured=configured, health=health, attached=True))

    def join(self, server: EngineProcess, number: int) -> None:
        """Add a server to a pool of `attach_changing`."""
        self._urls[server.worker] = server
        self.post(events.ServerJoined(pool=server.pool, number=number))

    def leave(self, worker: str, *, vanished: bool) -> None:
        """Let a server go; it is taken from the frontends at once where it ``vanished``."""
        self.post(events.ServerLeaving(worker=worker, vanished=vanished))

    async def start(self) -> None:
        """End the survivors that no pool wants, then start what is missing."""
        state = self.fleet.state
        numbers = {t.component: [life.number for life in state.of(name)] for name, t in self._templates.items()}
        await self.runner.end_survivors(numbers)
        self.post(events.Begun())

    async def ready(self) -> Mapping[str, str]:
        """Wait until every replica served for the first time, or failed to; return who is away of others' servers.

        They join when they answer: worker -> why it does not.

        Raises:
            EngineError: one could not be started, or nobody serves; the message says which and why.
        """
        away: dict[str, str] = {}
        waiting = {worker for worker, life in self.fleet.state.lives.items() if life.wanted}
        async for _ in self.changes():
            lives = self.fleet.state.lives
            waiting = {worker for worker in waiting if worker in lives and not lives[worker].served}
            for worker in waiting:
                failure, pool = lives[worker].failure, lives[worker].pool
                if failure is not None and pool not in self._changing:
                    if not self.fleet.state.pools[pool].attached:
                        raise EngineError(failure)
                    away[worker] = failure
            waiting = {worker for worker in waiting if lives[worker].failure is None}
            if not waiting:
                break
        away = {worker: failure for worker, failure in away.items() if not self.fleet.state.lives[worker].served}
        if away and not self.runner.settings.wait and not any(life.served for life in self.fleet.state.lives.values()):
            hint = "--wait starts without them, and takes them in when they come"
            raise EngineError("no server answers: " + "; ".join(list(away.values())[:4]), hint=hint)
        return away

    # --- the Connector seam -------------------------------------------------------------------------------------------

    async def pools(self) -> Mapping[str, Pool]:
        """Return the pools of processes, not those of servers that others run."""
        return {name: pool for name, pool in self.fleet.pools().items() if name in self._templates}

    async def scale(self, pool: str, replicas: int, *, without: Collection[str] = ()) -> None:
        state = self.fleet.state.pools.get(pool)
        if state is None or state.attached:
            known = ", ".join(sorted(self._templates)) or "none"
            raise ConnectorError(f"there is no pool {pool!r} of processes here; there is {known}")
        if (refusal := self.fleet.scaling.refusal(state, replicas)) is not None:
            raise ConnectorError(refusal)
        self.post(events.Desired(pool=pool, replicas=replicas, by_planner=True, without=tuple(without)))

    async def watch(self) -> AsyncIterator[Mapping[str, Pool]]:
        async with contextlib.aclosing(self.changes()) as changes:
            async for _ in changes:
                yield await self.pools()

    async def changes(self) -> AsyncGenerator[None]:
        """Yield at once, and whenever `pools` may have become others: to show thousands of replicas takes its time."""
        event = asyncio.Event()
        self._watchers.add(event)
        try:
            while not self._closing:
                event.clear()
                yield
                await event.wait()
        finally:
            self._watchers.discard(event)

    async def close(self, *, at_once: bool = False) -> None:
        """End every engine without a drain; scale a pool to 0 first to drain it.

        Args:
            at_once: give the engines no time to end by themselves.
        """
        await self.freeze()
        await self.runner.close(0.0 if at_once else self.runner.settings.stop_grace)
        self._news()

    async def freeze(self) -> None:
        """Change nothing from now on: what is under way for a replica ends where it is."""
        self._closing = True
        self._live.close()
        await end(self._tasks)

    # --- effects ------------------------------------------------------------------------------------------------------

    async def _spawn(self, effect: events.Spawn) -> None:
        template = self._templates[effect.pool]
        try:
            pid = await self.runner.start(effect.pool, template, effect.number, effect.gpus)
        except Exception as error:  # noqa: BLE001  # supervision boundary: a start never fails unseen
            self._died(effect, error)
        else:
            self.post(events.Started(worker=effect.worker, serial=effect.serial, pid=pid))

    async def _probe(self, effect: events.Probe) -> None:
        server, silent = self._urls.get(effect.worker), False
        life = self.fleet.state.lives.get(effect.worker)
        if server is None and life is not None and life.phase == "ready":
            server = self.runner.process(effect.worker)
        try:
            if server is not None:
                pool = self.fleet.state.pools[server.pool]
                limit, model = pool.health.timeout, pool.configured.model
                lack, silent = await self._hooks.health(server, limit, model)
            else:
                missing = partial(self._hooks.missing, effect.worker.rpartition("-")[0])
                lack = await self.runner.probe(effect.worker, missing)
        except Exception as error:  # noqa: BLE001  # supervision boundary, as above
            self._died(effect, error)
            return
        phases: dict[str, float | None] = {}
        if server is None and lack is None:
            self._tasks.spawn(self._follow(effect.worker, effect.serial), f"end-of-{effect.worker}")
            phases = self.runner.phases(effect.worker)
        unplaced = server is None and lack is not None and self.runner.unplaced(effect.worker)
        probed = events.Probed(
            worker=effect.worker, serial=effect.serial, lack=lack, silent=silent, unplaced=unplaced, phases=phases
        )
        self.post(probed)

    async def _sleep(self, effect: events.Sleep) -> None:
        worker = effect.worker
        try:
            self.runner.mark_asleep(worker, True)
            await self._hooks.sleep(self.runner.process(worker))
            memory = self.runner.host_memory(worker)
        except Exception as error:  # noqa: BLE001  # supervision boundary, as above
            reason = _failure_text(worker, error)
            log.warning("%s could not be put to sleep, so it is ended: %s", worker, reason)
            self.post(events.SleepFailed(worker=worker, serial=effect.serial, reason=reason))
        else:
            self.post(events.Slept(worker=worker, serial=effect.serial, host_memory=memory))

    async def _rouse(self, effect: events.Rouse) -> None:
        worker = effect.worker
        try:
            await self._hooks.wake(self.runner.process(worker))
            self.runner.mark_asleep(worker, False)
        except Exception as error:  # noqa: BLE001  # supervision boundary, as above
            reason = f"could not be woken: {_failure_text(worker, error)}"
            self.post(events.Died(worker=worker, serial=effect.serial, reason=reason, restart=0.0))
        else:
            self.post(events.Awoke(worker=worker, serial=effect.serial))

    async def _follow(self, worker: str, serial: int) -> None:
        reason = await self.runner.ended(worker)
        self.post(events.Died(worker=worker, serial=serial, reason=reason))

    async def _publish(self, effect: events.PublishReplica) -> None:
        worker, serial = effect.worker, effect.serial
        try:
            engine = self._urls[worker] if worker in self._urls else self.runner.process(worker)
            await self._hooks.publish(engine, effect.role, draining=effect.draining)
        except Exception as error:  # noqa: BLE001  # supervision boundary, as above
            self.post(events.PublishFailed(worker=worker, serial=serial, reason=_failure_text(worker, error)))
            return
        if not effect.draining:
            self.post(events.Published(worker=worker, serial=serial))
            await self._hooks.acknowledged(worker)
        self.post(events.Acknowledged(worker=worker, serial=serial))

    async def _count(self, effect: events.CountRequests) -> None:
        async for count in self._hooks.requests_left(effect.worker):
            self.post(events.RequestsLeft(worker=effect.worker, serial=effect.serial, **count._asdict()))

    async def _mark_silent(self, effect: events.MarkSilent) -> None:
        await self._hooks.mark_silent(effect.worker, silent=effect.silent, draining=effect.draining)

    async def _withdraw(self, effect: events.Withdraw) -> None:
        await self._hooks.withdraw(effect.worker)

    async def _stop(self, effect: events.Stop) -> None:
        if effect.worker not in self._urls:  # others end theirs
            await self.runner.stop(effect.worker)
        self.post(events.Stopped(worker=effect.worker, serial=effect.serial))

    async def _replace_frontend(self, effect: events.ReplaceFrontend) -> None:
        problem = None
        try:
            await self._hooks.replace_frontend(effect.index)
        except Exception as error:  # noqa: BLE001  # supervision boundary: the next restart must still be followed
            problem = _failure_text(f"frontend-{effect.index}", error)
        self.post(events.FrontendReplaced(index=effect.index, problem=problem))

    def _forget(self, effect: events.Forget) -> None:
        if (forgotten := self._changing.get(effect.pool)) is not None:
            forgotten(effect.number)
        else:
            self.runner.forget(effect.pool, effect.number)

    def _crashed(self, effect: events.Crashed) -> None:
        if effect.kind == "engine":
            log.info("engine %s %s; it is started again in %.1f s", effect.worker, effect.reason, effect.wait)
        else:
            log.info("server %s %s; it is taken out", effect.worker, effect.reason)
        self._hooks.crashed(effect)

    def _report(self, effect: events.DrainReported | events.DrainForgotten | events.RestartReported) -> None:
        self._hooks.report(effect)

    def _died(self, effect: events.Spawn | events.Probe, error: Exception) -> None:
        reason = _failure_text(effect.worker, error)
        self.post(events.Died(worker=effect.worker, serial=effect.serial, reason=reason))

    # --- internals ----------------------------------------------------------------------------------------------------

    def _queue_work(self, worker: str, do: Callable[[], Coroutine[Any, Any, None]], *, waits: bool) -> None:
        lane = self._lanes.get(worker)
        if lane is not None:
            lane.add(_Work(do, waits))
            return
        lane = self._lanes[worker] = _Lane()
        lane.add(_Work(do, waits))
        self._tasks.spawn(self._run(worker, lane), f"replica-{worker}")

    async def _run(self, worker: str, lane: _Lane) -> None:
        try:
            await lane.run()
        finally:
            del self._lanes[worker]

    def _handled(self, now: Nanos, machine: str, event: Event, effects: Sequence[Effect]) -> None:
        self.watched(now, machine, event, effects)
        for name, template in self._templates.items():
            goal = self.fleet.state.pools[name].goal
            if self.fleet.state.pools[name].begun and self._recorded.get(name) != goal:
                self._recorded[name] = goal
                self.runner.record_replicas(template.component, goal, self._configured[name])
        if self._revision != self.fleet.revision:
            self._revision = self.fleet.revision
            self._news()

    def _news(self) -> None:
        for event in self._watchers:
            event.set()


def _never(worker: str, port: int, gpus: Sequence[int]) -> LaunchSpec:
    raise InvariantError(f"{worker} is of a pool that no longer exists")


def _fleet_times(settings: SuperviseSettings) -> FleetTimes:
    return FleetTimes(restart_backoff=settings.restart_backoff, drain_timeout=settings.drain_timeout)


def _failure_text(name: str, error: Exception) -> str:
    if not isinstance(error, PenstockError | OSError):
        log.exception("%s failed by a bug of ours", name)
    return str(error)

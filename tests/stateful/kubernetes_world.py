"""A planner that scales through its Kubernetes connector, on an API server in memory that is slow, fails, and answers
too late; pods that need their time; and somebody who scales by hand."""

import asyncio
import random
from collections.abc import Collection, Iterator, Mapping, Sequence

from penstock.kernel.errors import PenstockError
from penstock.kernel.machine import Event, Wake, Woken, nanos, seconds
from penstock.kernel.values import Pool, Replica, Traffic
from penstock.planner import events as planning
from penstock.planner.observation import ModelState, Observation
from penstock.planner.planner import Planner
from penstock.planner.settings import BudgetSettings, PlannerSettings
from penstock.runtime.planning.live_observer import PoolObserver
from penstock_kubernetes.connector.kubernetes_connector import FENCE, KubernetesConnector
from penstock_kubernetes.connector.scale_target import (
    ApiRight,
    OutcomeUnknown,
    PoolReading,
    TargetError,
    WriteConflict,
)
from tests.stateful.jumping_loop import run
from tests.stateful.planner_world import BASE, POOLS, Wanderer

CEILING = 14
TICKS = 12


class Objects:
    """What the API server stores: pool -> replicas; one object for all pools, or one for each."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.counts = {"p": dice.randrange(1, 4), "d": dice.randrange(1, 5)}
        self.shared = dice.random() < 0.4
        self.versions = dict.fromkeys(self.counts, 1)
        self.away_until = 0.0
        self.by_hand = 0
        """GPUs that were added by hand so far."""
        self.grown = self.late = self.refused = 0
        self.broken: list[str] = []
        self.started: dict[str, list[float]] = {name: [] for name in self.counts}

    def version(self, pool: str) -> int:
        return sum(self.versions.values()) if self.shared else self.versions[pool]

    def gpus(self) -> int:
        return sum(POOLS[name][1] * count for name, count in self.counts.items())

    def set(self, pool: str, count: int, now: float) -> None:
        self.versions[pool] += 1
        self.started[pool] = (self.started[pool] + [now] * max(0, count - self.counts[pool]))[-count:] if count else []
        self.counts[pool] = count


class MemoryTarget:
    """A `ScaleTarget` over these pools of the objects."""

    def __init__(self, objects: Objects, names: Sequence[str]) -> None:
        self.objects, self.names, self.rights = objects, names, (ApiRight("patch", "apps", "deployments/scale"),)
        self.began = 0
        """GPUs added by hand when the decision began."""

    async def read(self) -> Mapping[str, PoolReading]:
        await self._wait()
        return {
            name: PoolReading(
                Pool(model="m", role=POOLS[name][0], gpus=POOLS[name][1], desired=self.objects.counts[name]),
                str(self.objects.version(name)),
                {"pool": name},
            )
            for name in self.names
        }

    async def write(self, pool: str, replicas: int, readings: Mapping[str, PoolReading]) -> None:
        await self._wait()
        dice, loop, began = self.objects.dice, asyncio.get_running_loop(), self.began
        version = int(readings[pool].version)
        if dice.random() < 0.15:
            if dice.random() < 0.7:
                loop.call_later(dice.uniform(0, FENCE - 1), self._late, pool, replicas, version, began)
            raise OutcomeUnknown("no answer")
        self._apply(pool, replicas, version, began)
        if dice.random() < 0.05:
            raise OutcomeUnknown("it was done, and the answer was lost")

    def describe(self) -> str:
        return "/".join(self.names)

    def _late(self, pool: str, replicas: int, version: int, began: int) -> None:
        try:
            self._apply(pool, replicas, version, began)
            self.objects.late += 1
        except WriteConflict:
            self.objects.refused += 1

    def _apply(self, pool: str, replicas: int, version: int, began: int) -> None:
        objects = self.objects
        if version != objects.version(pool) or objects.dice.random() < 0.05:
            raise WriteConflict("the object has been modified")
        grows = replicas > objects.counts[pool]
        objects.set(pool, replicas, asyncio.get_running_loop().time())
        objects.grown += grows
        # Nobody can guard two objects at once: what is added by hand during a decision comes on top of it.
        allowed = CEILING + objects.by_hand - began
        if grows and objects.gpus() > allowed:
            objects.broken.append(f"{objects.counts} are {objects.gpus()} GPUs of {allowed}")

    async def _wait(self) -> None:
        dice, loop = self.objects.dice, asyncio.get_running_loop()
        await asyncio.sleep(dice.choice((0.001, 0.02, 0.5, 4.0)))
        if loop.time() < self.objects.away_until or dice.random() < 0.03:
            raise TargetError("the API server can't be reached")


class MemoryAccess:
    """Pods that begin to serve after 20 s; all rights but sometimes."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects

    async def replicas(self, labels: Mapping[str, str]) -> tuple[Replica, ...]:
        await asyncio.sleep(0.01)
        name, now = labels["pool"], asyncio.get_running_loop().time()
        young = [since for since in self.objects.started[name] if now - since < 20.0]
        ready = max(0, self.objects.counts[name] - len(young))
        states = ["ready"] * ready + ["starting"] * len(young)
        return tuple(Replica(id=f"{name}-{n}", state=state) for n, state in enumerate(states))  # type: ignore[arg-type]

    async def mark_victims(self, labels: Mapping[str, str], workers: Collection[str]) -> None:
        raise AssertionError("nobody named a victim")

    async def missing(self, rights: Sequence[ApiRight]) -> Sequence[ApiRight]:
        return [right for right in rights if right.verb == "patch" and self.objects.dice.random() < 0.1]

    async def close(self) -> None: ...


class KubernetesWorld:
    """One planner of plugins that want anything, and what befalls it."""

    def __init__(self, seed: int) -> None:
        dice = self.dice = random.Random(seed)
        settings = PlannerSettings(tick=BASE, manual_hold=0.0, budget=BudgetSettings(max_gpus=CEILING))
        self.planner = Planner(settings, [Wanderer(seed * 2 + 1), Wanderer(seed * 2 + 2, priority=20)], strict=True)
        self.objects = Objects(dice)
        names = [["p", "d"]] if self.objects.shared else [["p"], ["d"]]
        self.targets = [MemoryTarget(self.objects, each) for each in names]
        self.observer = PoolObserver()
        self.hands = dice.random() < 0.5
        self.ticks = self.scaled = 0

    def play(self) -> None:
        """Run until so many ticks have ended."""
        run(self._play())

    async def _play(self) -> None:
        loop = asyncio.get_running_loop()
        access = MemoryAccess(self.objects)
        wait = self.dice.random() < 0.3
        connector = KubernetesConnector(self.targets, access, namespace="test", wait=wait, clock=loop.time)
        events: asyncio.Queue[Event] = asyncio.Queue()
        tasks = set[asyncio.Task[None]]()

        def begin(work: asyncio.Task[None]) -> None:
            tasks.add(work)

        events.put_nowait(Woken())
        if self.hands:
            begin(loop.create_task(self._meddle()))
        while self.ticks < TICKS:
            event = await events.get()
            for effect in self.planner.handle(nanos(loop.time()), event):
                match effect:
                    case Wake():
                        loop.call_at(max(loop.time(), seconds(effect.at)), events.put_nowait, Woken())
                    case planning.Observe():
                        begin(loop.create_task(self._look(connector, effect.id, events)))
                    case planning.Scale():
                        begin(loop.create_task(self._scale(connector, effect, events)))
                    case planning.Ticked():
                        self.ticks += 1
            for task in [task for task in tasks if task.done()]:
                tasks.discard(task)
                task.result()
        await asyncio.sleep(FENCE)
        assert not self.objects.broken, self.objects.broken

    async def _look(self, connector: KubernetesConnector, id: int, events: "asyncio.Queue[Event]") -> None:
        now = asyncio.get_running_loop().time()
        try:
            pools = await connector.look()
        except PenstockError as error:
            events.put_nowait(planning.ObserveFailed(id=id, why=str(error)))
            return
        states = self.observer.look(now, pools, None)
        traffic = Traffic(seconds=BASE, arrived=5, prompt_tokens=10_000)
        models = {model: ModelState(traffic=traffic, pools=each) for model, each in states.items()}
        events.put_nowait(planning.Observed(id=id, observation=Observation(at=now, window=BASE, models=models)))

    async def _scale(
        self, connector: KubernetesConnector, scale: planning.Scale, events: "asyncio.Queue[Event]"
    ) -> None:
        for target in self.targets:
            target.began = self.objects.by_hand
        self.scaled += 1
        problems = await connector.scale(scale.targets, scale.flips, scale.reasons)
        events.put_nowait(planning.Scaled(id=scale.id, problems=problems))

    async def _meddle(self) -> None:
        """Scale by hand, and take the API server away, at random."""
        loop = asyncio.get_running_loop()
        for pause in self._pauses():
            await asyncio.sleep(pause)
            if self.dice.random() < 0.3:
                self.objects.away_until = loop.time() + self.dice.uniform(1, 120)
                continue
            pool = self.dice.choice(list(POOLS))
            count = self.dice.randrange(8)
            before = self.objects.gpus()
            self.objects.set(pool, count, loop.time())
            self.objects.by_hand += max(0, self.objects.gpus() - before)

    def _pauses(self) -> Iterator[float]:
        while True:
            yield self.dice.uniform(1, 40)

"""A rolling restart of a large pool: how long, how many writes to the store, what CPU, and which requests it loses.

The supervisor is real but for its engines, which start in a moment and exist as flags in memory that the frontend can
read: a request that is sent to an engine that is not there, or whose engine ends before it does, is lost. Called by
membership.py.
"""

import asyncio
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from penstock.adapters.connectors.engine_process import EngineProcess, EngineTemplate
from penstock.adapters.seams import Store
from penstock.adapters.stores.sqlite_store import SqliteStore
from penstock.adapters.task_cancel import cancel_all
from penstock.config.settings.cluster_settings import PoolSettings, SuperviseSettings
from penstock.fleet.gpu_allocator import GpuAllocator
from penstock.kernel.values import RequestId, Role, WorkerCard, WorkerId
from penstock.router.events import Closed, Dispatch, Finished, FirstToken, OperatorNote, Publish, ReplayWanted
from penstock.router.router import Router
from penstock.router.settings import RouterSettings
from penstock.runtime.cluster_state.desired_state import RESTART, RESTARTED, RestartSpec, RestartStatus, decode, put
from penstock.runtime.cluster_state.membership import Membership
from penstock.runtime.cluster_state.membership_ack import DrainProgress, MembershipAck
from penstock.runtime.cluster_state.placement_sync import FRONTENDS
from penstock.runtime.live_driver import LiveDriver
from penstock.runtime.supervision.engine_fleet import EngineFleet, EngineHost
from penstock.runtime.supervision.fleet_driver import Strategy
from penstock.runtime.supervision.reconciler import Reconciler
from penstock.testing.router_world import arrived

TTL = 10.0
START = 0.5
"""Seconds until an engine that is started serves."""
REQUESTS = 50.0
"""Requests per second, of which each takes `TAKES` seconds."""
TAKES = 0.3
NUMBERS = 4096


class Rollout(NamedTuple):
    """What one restart cost; CPU in seconds, writes and kB of the supervisor and of the frontend."""

    replicas: int
    at_once: int
    seconds: float
    supervisor: float
    frontend: float
    writes: int
    kilobytes: float
    requests: int
    lost: int


# --- the supervisor ---------------------------------------------------------------------------------------------------


class FlagRunner:
    """Engines that are flags: a `Runner`."""

    def __init__(self, alive: Any) -> None:
        self.settings = SuperviseSettings()
        self.adopted: list[str] = []
        self.outdated: list[str] = []
        self.not_adopted: dict[str, str] = {}
        self._alive = alive
        self._due: dict[str, float] = {}

    async def open(self) -> None:
        pass

    def adopt(self, template: EngineTemplate, configured: int) -> tuple[int, dict[int, tuple[int, ...]]]:
        return configured, {}

    def leftovers(self, known: Collection[str]) -> Mapping[str, dict[int, tuple[int, ...]]]:
        return {}

    async def end_survivors(self, numbers: Mapping[str, Sequence[int]]) -> None:
        pass

    async def start(self, pool: str, template: EngineTemplate, number: int, gpus: tuple[int, ...]) -> int | None:
        self._due[f"{pool}-{number}"] = time.monotonic() + START
        return None

    async def probe(self, worker: str, missing: Callable[[str], Awaitable[str | None]]) -> str | None:
        if time.monotonic() < self._due[worker]:
            return "it starts"
        self._alive[_number(worker)] = 1
        return None

    def unplaced(self, worker: str) -> bool:
        return False

    def phases(self, worker: str) -> dict[str, float | None]:
        return {}

    def mark_asleep(self, worker: str, asleep: bool) -> None:
        pass

    def host_memory(self, worker: str) -> int | None:
        return None

    def process(self, worker: str) -> EngineProcess:
        return EngineProcess(worker, worker.rpartition("-")[0], f"http://10.0.0.1:{_number(worker)}", None, {})

    async def ended(self, worker: str) -> str:
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    async def stop(self, worker: str) -> None:
        self._alive[_number(worker)] = 0

    def forget(self, component: str, number: int) -> None:
        self._due.pop(f"{component}-{number}", None)

    def record_replicas(self, component: str, replicas: int, configured: int) -> None:
        pass

    async def close(self, grace: float) -> None:
        pass


class FlagFleet(EngineFleet):
    """A fleet that knows what its engines are without asking them."""

    async def _describe(self, engine: EngineProcess, role: Role) -> WorkerCard:
        return WorkerCard(
            id=WorkerId(engine.worker), url=engine.url, model="m", block_size=16, epoch=self._newer_epoch()
        )


class NoFrontends:
    """Frontends that a restart replaces: none."""

    indices = range(0)

    async def park(self, index: int) -> bool:
        raise AssertionError

    async def unpark(self, index: int) -> None:
        raise AssertionError

    async def replace(self, index: int) -> None:
        raise AssertionError


def supervise(folder: Path, replicas: int, at_once: int, alive: Any, parent: Connection) -> None:
    """Run a fleet and its reconciler; answer with what was written so far."""

    async def run() -> None:
        store = SqliteStore(folder)
        written = count_writes(store)
        host = EngineHost(
            runner=FlagRunner(alive),
            gpus=GpuAllocator(),
            launcher=lambda model, name, pool: _never,
            strategies={"main": Strategy(max_surge=at_once)},
        )
        fleet = FlagFleet(store, SuperviseSettings(), None, logs=folder, ttl=TTL, elsewhere=host)
        fleet.add_pool("m", "main", PoolSettings(engine="sim", replicas=replicas))
        await fleet.open()
        await fleet.start()
        await fleet.ready()
        following = asyncio.create_task(Reconciler(store, fleet, ttl=TTL, frontends=NoFrontends()).run())
        parent.send(None)
        while await asyncio.to_thread(parent.recv) != "end":
            parent.send(dict(written))
        await cancel_all([following])
        await fleet.leave()

    asyncio.run(run())


def count_writes(store: Store) -> Counter[str]:
    """Count from now on what is put into a store: writes by the first word of their key, and ``bytes`` in all."""
    written: Counter[str] = Counter()
    put_one = store.put

    async def counted(key: str, value: bytes, *, ttl: float | None = None) -> None:
        written[key.partition("/")[0]] += 1
        written["bytes"] += len(value)
        await put_one(key, value, ttl=ttl)

    store.put = counted  # type: ignore[method-assign]
    return written


def _never(worker: str, port: int, gpus: Sequence[int]) -> Any:
    raise AssertionError(worker)


def _number(worker: str) -> int:
    return int(worker.rpartition("-")[2])


# --- the frontend -----------------------------------------------------------------------------------------------------


class Load:
    """Sends requests to a router's workers, and counts those whose engine was not there."""

    def __init__(self, live: LiveDriver, alive: Any) -> None:
        self.requests = 0
        self.lost = 0
        self._live = live
        self._alive = alive
        live.on(Dispatch, lambda now, sender, effect: self._sent(effect))

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            self.requests += 1
            self._live.post("router", arrived(f"{self.requests:016x}", 1_000))
            await asyncio.sleep(1 / REQUESTS)

    def _sent(self, dispatch: Dispatch) -> None:
        number = _number(dispatch.target.worker)
        if not self._alive[number]:
            self.lost += 1
        self._live.post("router", FirstToken(id=dispatch.id, attempt=dispatch.attempt))
        asyncio.get_running_loop().call_later(TAKES, self._ended, dispatch.id, dispatch.attempt, number)

    def _ended(self, request: RequestId, attempt: int, number: int) -> None:
        if not self._alive[number]:
            self.lost += 1
        self._live.post("router", Finished(id=request, attempt=attempt, tokens=100))


async def restarted(folder: Path, replicas: int, at_once: int, cpu: Callable[[int | None], float | None]) -> Rollout:
    """Restart a pool once. ``cpu``: tells the seconds of CPU of a process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    alive = context.Array("b", NUMBERS, lock=False)
    store = SqliteStore(folder)
    written = count_writes(store)
    router = Router(RouterSettings(), name="f0", seed=1)
    live = LiveDriver({"router": router})
    for kind in (Closed, OperatorNote, Publish, ReplayWanted):
        live.on(kind, lambda now, sender, effect: None)
    drains = DrainProgress(store, router, "f0", TTL)
    ack = MembershipAck(store, "f0", lambda: membership.cards, TTL)
    membership = Membership(
        store, live, started=lambda card: None, stopped=drains.ended, leaving=drains.began, heard=ack.changed
    )
    await store.put(FRONTENDS + "f0", b"{}", ttl=TTL)
    load = Load(live, alive)
    tasks = [asyncio.create_task(membership.run()), asyncio.create_task(ack.run())]
    supervisor = context.Process(target=supervise, args=(folder, replicas, at_once, alive, theirs), daemon=True)
    supervisor.start()
    await asyncio.to_thread(ours.recv)
    tasks.append(asyncio.create_task(load.run()))

    async def writes() -> Counter[str]:
        ours.send("writes")
        return Counter(await asyncio.to_thread(ours.recv)) + written

    before, cpu_before, began = await writes(), (cpu(supervisor.pid) or 0, cpu(os.getpid()) or 0), time.monotonic()
    await put(store, RESTART, RestartSpec(at=time.time(), revision="bench", by="bench"))
    status: RestartStatus | None = None
    while status is None or status.state == "running":
        await asyncio.sleep(0.1)
        raw = (await store.list(RESTARTED)).get(RESTARTED)
        status = None if raw is None else decode(RestartStatus, raw)
    assert status.state == "done" and len(status.done) == replicas, status
    seconds, after = time.monotonic() - began, await writes()
    spent = (cpu(supervisor.pid) or 0) - cpu_before[0], (cpu(os.getpid()) or 0) - cpu_before[1]
    ours.send("end")
    await cancel_all(tasks)
    await drains.close()
    await asyncio.to_thread(supervisor.join, 10)
    await store.close()
    live.close()
    done = after - before
    kilobytes = done.pop("bytes") / 1e3
    print(f"{replicas} replicas, {at_once} at once: {seconds:.1f} s, {dict(done)}", flush=True)
    return Rollout(replicas, at_once, seconds, *spent, done.total(), kilobytes, load.requests, load.lost)

"""Engine runner: starts or adopts the engine processes of this machine, each below a shim, probes and ends them.

It decides nothing: `penstock.fleet` does. What runs stands in the state file, so that the next supervisor adopts it.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.adapters.connectors.engine_process import EngineProcess, EngineTemplate, LaunchSpec, StartReader
from penstock.adapters.connectors.shim_client import ShimClient, ending, tail
from penstock.adapters.connectors.state_file import Resources, StateEntry, StateFile, living
from penstock.adapters.listen_address import free_port
from penstock.config.settings.cluster_settings import SuperviseSettings
from penstock.fleet.pool_scaling import REPLICAS_MAX
from penstock.kernel.errors import EngineError
from penstock.kernel.plurals import counted

log = logging.getLogger("penstock.connector")

READ_MAX = 1 << 20
"""Bytes of an engine's log that are read at one probe."""
NAMED = 4
"""Changed flags that are named."""
PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")
LEFT_LEAST = 0.1
"""Part of a machine's memory that stays free: what sleeps must not make a machine swap."""


class SurvivingEngine(NamedTuple):
    """An engine of a supervisor that was killed."""

    entry: StateEntry
    shim: ShimClient

    @property
    def resources(self) -> Resources:
        return self.entry.resources or Resources()


class RunningEngine:
    """An engine that was started or adopted. ``key``: component and number of its record in the state file."""

    def __init__(
        self, pool: str, shim: ShimClient, launch: LaunchSpec, entry: StateEntry, key: tuple[str, int]
    ) -> None:
        self.pool = pool
        self.shim = shim
        self.launch = launch
        self.entry = entry
        self.key = key
        self.begun = time.monotonic()
        self.phases: dict[str, float | None] = {}
        """Seconds of the phases of its start, once it serves."""
        self.watch: StartWatch | None = None
        """Until then."""


class StartWatch:
    """Follows the log of one start. Times are of CLOCK_BOOTTIME, as the kernel tells when a process began.

    Args:
        spawned: when the start was decided.
        offset: where the log of this start begins.
    """

    def __init__(self, reader: StartReader, path: Path, offset: int, spawned: float) -> None:
        self._reader = reader
        self._path = path
        self._offset = offset
        self._spawned = spawned
        self._rest = b""
        self.born: float | None = None

    def read(self) -> None:
        """Read what was printed since; a log that can't be read tells nothing."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(READ_MAX)
        except OSError:
            return
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        now = _boottime()
        for line in lines:
            self._reader.read(line.decode("utf-8", "replace"), now)

    def phases(self) -> dict[str, float | None]:
        """Return the phases of a start whose engine serves now."""
        self.read()
        spawn = None if self.born is None else max(0.0, self.born - self._spawned)
        born = self._spawned if self.born is None else self.born
        return {"spawn": spawn, **self._reader.phases(born, _boottime())}


class EngineRunner:
    """The engines of one state file.

    Args:
        logs: folder for the engines' logs.
        env: of the engines, before what their launch adds.
        grace: seconds that they outlive this process where it is killed.
        end: seconds that they then get to end by themselves.
    """

    def __init__(
        self,
        settings: SuperviseSettings,
        state: StateFile,
        *,
        logs: Path,
        env: Mapping[str, str],
        grace: float,
        end: float,
    ) -> None:
        self.settings = settings
        self.state = state
        self.adopted: list[str] = []
        """Workers that were adopted from a supervisor that was killed."""
        self.outdated: list[str] = []
        """None of them: one that would be started in another way now is ended."""
        self.not_adopted: dict[str, str] = {}
        """Its other engines, and sizes of its pools, each with why it was not."""
        self._logs = logs
        self._env = env
        self._grace = grace
        self._end = end
        self._survivors: dict[str, SurvivingEngine] = {}
        self._adopting: dict[str, SurvivingEngine] = {}
        self._engines: dict[str, RunningEngine] = {}

    # --- engines of an earlier supervisor -----------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect to the engines that a killed supervisor left running, before they end by themselves."""
        for name, entry in list(living(self.state.entries)):
            assert entry.lease is not None
            log_path = Path(entry.log) if entry.log else self._logs / f"{name}.log"
            shim = await ShimClient.adopt(entry.worker or name, entry.lease, log_path)
            if shim is not None:
                self._survivors[name] = SurvivingEngine(entry, shim)

    def adopt(self, template: EngineTemplate, configured: int) -> tuple[int, dict[int, tuple[int, ...]]]:
        """Adopt those engines that we would start now in the same way, and the size to which the pool was scaled.

        Args:
            configured: replicas that the config wants.
        Returns: the replicas that the pool should have, as many as it was scaled to before; number -> GPUs of those
            that are adopted, which may be more.
        """
        state = self.state
        same: dict[int, str] = {}
        there = False
        for number in range(REPLICAS_MAX):
            name = state.name(template.component, number)
            if name not in self._survivors:
                continue
            there = True
            if (why := _survivor_mismatch(self._survivors[name], template, number)) is None:
                same[number] = name
            else:
                self.not_adopted[template.worker(number)] = why
        known = state.entries.get(state.name(template.component, 0))
        if there and known is not None and known.replicas is not None:
            if known.configured == configured:
                configured = known.replicas
            elif known.replicas != configured:
                why = f"the config said {known.configured} replicas then, and says {configured} now"
                self.not_adopted[f"the size {known.replicas} of {template.component}"] = why
        adopted = {}
        for number in sorted(same):
            survivor = self._adopting[template.worker(number)] = self._survivors.pop(same[number])
            adopted[number] = survivor.resources.gpus
        return configured, adopted

    def leftovers(self, known: Collection[str]) -> Mapping[str, dict[int, tuple[int, ...]]]:
        """Adopt none: `end_survivors` ends engines of pools that are no more."""
        return {}

    async def end_survivors(self, numbers: Mapping[str, Sequence[int]]) -> None:
        """End the engines that nobody adopted, and drop the records of other pools.

        Args:
            numbers: component -> numbers of its engines.
        """
        unwanted, self._survivors = self._survivors, {}
        await asyncio.gather(*(survivor.shim.stop(self.settings.stop_grace) for survivor in unwanted.values()))
        for name in unwanted:
            worker = unwanted[name].entry.worker or name
            known = worker.rpartition("-")[0] in numbers
            text = "its pool is smaller now" if known else "the config does not have its pool any more"
            why = self.not_adopted.setdefault(worker, text)
            log.info("%s of an earlier run is not what is wanted now, and was ended: %s", name, why)
        state = self.state
        mine = {state.name(component, n) for component, own in numbers.items() for n in (0, *own)}
        state.entries = {
            name: _earlier_entry(entry, unwanted, name) for name, entry in state.entries.items() if name in mine
        }

    # --- one engine ---------------------------------------------------------------------------------------------------

    async def start(self, pool: str, template: EngineTemplate, number: int, gpus: tuple[int, ...]) -> int:
        """Start an engine, or take over the adopted one with its name; return its pid.

        Raises:
            EngineError: it can't be started.
        """
        worker = template.worker(number)
        survivor = self._adopting.pop(worker, None)
        if survivor is not None:
            launch = template.launch(worker, survivor.resources.port, survivor.resources.gpus)
            engine = RunningEngine(pool, survivor.shim, launch, survivor.entry, (template.component, number))
            self._engines[worker] = engine
            self.adopted.append(worker)
            log.info("engine %s with process %d was taken over", worker, survivor.shim.pid)
            return survivor.shim.pid
        resources = Resources(gpus=gpus, port=free_port())
        launch = template.launch(worker, resources.port, gpus)
        log_path = self._logs / f"{worker}.log"
        env = dict(self._env)
        if gpus:
            env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as nvidia-smi numbers them

        offset = log_path.stat().st_size if log_path.exists() else 0
        watch = StartWatch(launch.start_log(), log_path, offset, _boottime())

        async def started() -> RunningEngine:
            shim = await ShimClient.start(worker, launch, log_path=log_path, grace=self._grace, end=self._end, env=env)
            entry = StateEntry(
                command=list(launch.argv),
                lease=shim.lease,
                pid=shim.pid,
                resources=resources,
                worker=worker,
                card=launch.card,
                log=str(log_path),
            )
            engine = self._engines[worker] = RunningEngine(pool, shim, launch, entry, (template.component, number))
            watch.born = born_at(shim.pid)
            engine.watch = watch
            self.state.put(template.component, number, entry)
            return engine

        starting = asyncio.ensure_future(started())
        try:
            return (await asyncio.shield(starting)).shim.pid
        except asyncio.CancelledError:
            while not starting.done():  # else its process would have no owner, however often this is cancelled
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({starting})
            starting.exception()
            raise

    async def probe(self, worker: str, missing: Callable[[str], Awaitable[str | None]]) -> str | None:
        """Return what an engine lacks to serve; None once it serves.

        An engine that reports its own address is waited for.

        Args:
            missing: asks a URL.
        Raises:
            EngineError: it ended, or its time is over; the message has the end of its log.
        """
        engine = self._engines[worker]
        shim, entry = engine.shim, engine.entry
        url = entry.url
        if url is None:
            timeout = self.settings.start_timeout or engine.launch.start_timeout
            if engine.watch is not None:
                engine.watch.read()
            url = engine.launch.url
            if url is None:
                report = await shim.first_line(timeout)
                if not isinstance(report.get("url"), str):
                    raise EngineError(f"{worker} did not say where it listens", hint=tail(shim.log_path))
                url = str(report["url"])
            elif (lack := await missing(url)) is not None:
                if shim.ended:
                    reason = f"{worker} {ending(await shim.wait())} at its start"
                    raise EngineError(reason, hint=tail(shim.log_path))
                if time.monotonic() - engine.begun > timeout:
                    raise EngineError(f"{worker} was not ready within {timeout:g} s: {lack}", hint=tail(shim.log_path))
                return lack
            engine.entry = msgspec.structs.replace(entry, url=url)
            self.state.put(*engine.key, engine.entry)
            if engine.watch is not None:
                engine.phases, engine.watch = engine.watch.phases(), None
        return None

    def phases(self, worker: str) -> dict[str, float | None]:
        """Return the phases of an engine's start, in seconds; nothing where it was adopted."""
        return self._engines[worker].phases

    def mark_asleep(self, worker: str, asleep: bool) -> None:
        """Record that an engine sleeps from now on, or that it is woken."""
        engine = self._engines[worker]
        engine.entry = msgspec.structs.replace(engine.entry, asleep=asleep)
        self.state.put(*engine.key, engine.entry)

    def host_memory(self, worker: str) -> int | None:
        """Return the bytes of this machine's memory that an engine takes, or None where it ended.

        Raises:
            EngineError: it leaves the machine too little.
        """
        left = memory_left()
        if left < LEFT_LEAST:
            raise EngineError(f"it leaves {left:.0%} of the machine's memory free, less than {LEFT_LEAST:.0%}")
        return session_memory(self._engines[worker].shim.pid)

    def process(self, worker: str) -> EngineProcess:
        """Return an engine that serves."""
        engine = self._engines[worker]
        assert engine.entry.url is not None
        return EngineProcess(worker, engine.pool, engine.entry.url, engine.shim.pid, engine.entry.card)

    async def ended(self, worker: str) -> str:
        """Wait for the end of an engine, and return how it ended."""
        return ending(await self._engines[worker].shim.wait())

    async def stop(self, worker: str) -> None:
        """End an engine and all that it started; one that never ran is no error."""
        engine = self._engines.get(worker) or self._adopting.pop(worker, None)
        if engine is not None:
            await engine.shim.stop(self.settings.stop_grace)
            self._engines.pop(worker, None)

    def unplaced(self, worker: str) -> bool:
        """Return False: this machine is where it runs."""
        return False

    def forget(self, component: str, number: int) -> None:
        """An engine is gone for good."""
        self.state.remove(component, number)

    def record_replicas(self, component: str, replicas: int, configured: int) -> None:
        """Record how many replicas a pool should have, for the next supervisor."""
        self.state.record_replicas(component, replicas, configured)

    async def close(self, grace: float) -> None:
        """End all engines within ``grace`` seconds."""
        shims = [engine.shim for engine in self._engines.values()]
        shims += [survivor.shim for survivor in (*self._survivors.values(), *self._adopting.values())]
        await asyncio.gather(*(shim.stop(grace) for shim in shims))
        self._engines.clear()
        self.state.entries.clear()


def _boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _survivor_mismatch(survivor: SurvivingEngine, template: EngineTemplate, number: int) -> str | None:
    """Return why a survivor is not what we would start now under its number; None where it is."""
    resources = survivor.resources
    if survivor.entry.asleep:
        return "it is asleep"
    if len(resources.gpus) != template.gpus:
        return f"it has {counted(len(resources.gpus), 'GPU')}, and {template.gpus} are wanted now"
    launch = template.launch(template.worker(number), resources.port, resources.gpus)
    changed = launch.differences(survivor.entry.command)
    return f"it was started with other values of {', '.join(changed[:NAMED])}" if changed else None


def _earlier_entry(entry: StateEntry, unwanted: Mapping[str, SurvivingEngine], name: str) -> StateEntry:
    """Return an entry of an earlier run, without its engine where that engine was ended."""
    if entry.lease is None or name in unwanted:
        return StateEntry(command=entry.command, replicas=entry.replicas, configured=entry.configured)
    return msgspec.structs.replace(entry)


def session_memory(pid: int) -> int | None:
    """Return the resident bytes of all processes of the session that a process leads; None where it is gone.

    Pages that several of them share are counted for each.
    """
    total, seen = 0, False
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == pid:
                total += int((folder / "statm").read_text().split()[1]) * PAGE
                seen = True
        except (OSError, ValueError, IndexError):
            continue  # it ended meanwhile
    return total if seen else None


def memory_left() -> float:
    """Return the part of this machine's memory that is available, 0..1."""
    values = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line)
    return int(values["MemAvailable"].split()[0]) / int(values["MemTotal"].split()[0])


def born_at(pid: int) -> float | None:
    """Return when a process began, in seconds of CLOCK_BOOTTIME, to a hundredth; None where it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]) / TICKS
    except (OSError, ValueError, IndexError):
        return None

"""Planner node: one planner process from start to end, with its source, connector, records and metrics.

`serve` is beside a cluster of `penstock up`; `plan` is ``penstock planner``, over a URL, or a Prometheus and an etcd.
"""

import asyncio
import json
import logging
import os
import ssl
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import aiohttp
import msgspec
from aiohttp import web
from yarl import URL

from penstock import extension
from penstock.adapters.connectors.scale_connector import ChecksTargets, ScaleConnector
from penstock.adapters.engines.describe import self_benchmark
from penstock.adapters.engines.http.engine_access import EngineAccesses, engine_session
from penstock.adapters.seams import Store, StoreUnavailable
from penstock.adapters.sources.frontend_source import FrontendSource
from penstock.adapters.sources.traffic_source import TrafficSource
from penstock.adapters.task_cancel import cancel_all
from penstock.adapters.telemetry.planner_metrics import PlannerMetrics
from penstock.adapters.telemetry.prometheus_text import CONTENT_TYPE
from penstock.config.cluster_secret_file import secret_of_process
from penstock.config.live_knobs import SettingChange
from penstock.config.reading.load import resolved_yaml
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.config.settings.planning_settings import PlanningSettings
from penstock.kernel.errors import ConfigError, bind_hint
from penstock.kernel.values import Role, Slo, WorkerCard
from penstock.planner.events import Benchmarked, LimitsChanged
from penstock.planner.journal import planner_book
from penstock.planner.planner import Planner
from penstock.planner.policies import PolicyInputs
from penstock.planner.settings import BudgetSettings
from penstock.planner.tick_record import TickRecord
from penstock.runtime.backends import open_store
from penstock.runtime.cluster_state.current_settings import CurrentSettings
from penstock.runtime.cluster_state.membership import WORKERS, entry_of
from penstock.runtime.planning.desired_state_connector import AdminApiConnector
from penstock.runtime.planning.live_observer import LiveObserver
from penstock.runtime.planning.planner_assembly import build_connector, build_planner, build_source, inputs_of
from penstock.runtime.planning.planner_driver import PlannerDriver
from penstock.runtime.planning.planner_report import RECORDS, STATE, PlannerReport
from penstock.runtime.planning.tick_log import Listener, TickLog
from penstock.runtime.records.journal_writer import JournalWriter
from penstock.runtime.records.run_folder import Cap, LineWriter, RunFolder
from penstock.runtime.supervision.terminal import Say, on_signals, this_command

log = logging.getLogger("penstock.planner")
BENCHMARKS_EVERY = 5.0
"""Seconds between two reads of the present workers."""
BENCHMARK_TRIES = 3
"""Times that workers of a model and role are queried before they count as having no benchmark."""


class PlannerNode:
    """A planner and everything around it: `start`, then `close`.

    Args:
        run: folder for its records and its successor's state; None keeps none.
        store: of the cluster; None where there is none, such as with a Prometheus and an outside orchestrator's etcd.
        source, connector: of traffic and for scaling, where the settings do not name them.
        started: the settings of the cluster's start, where operators have changed them to ``settings`` since: this one
            takes over from a planner with other settings.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        run: Path | None,
        store: Store | None,
        *,
        source: TrafficSource | None = None,
        connector: ScaleConnector | None = None,
        started: ClusterSettings | None = None,
        listeners: Sequence[Listener] = (),
    ) -> None:
        planning = settings.planner
        self.settings = settings
        self.outdated = asyncio.Event()
        """Set once operators change the settings of planning: another planner should take over."""
        self.metrics_url: str | None = None
        self._store = store
        secret = None if run is None or store is None else secret_of_process(settings, run)
        source = source or build_source(settings, store, secret)
        connector = connector or build_connector(settings, store)
        description = {
            "advisory": planning.advisory,
            "source": source.describe(),
            "connector": connector.describe(),
            "every": planning.base,
        }
        inputs = inputs_of(settings)
        planner = build_planner(settings, inputs)
        keeping = TickLog(
            description,
            journal=None if run is None or not settings.runs.journal else _journal(run, settings, planner, inputs),
            metrics=PlannerMetrics(slo=settings.slo, watts=planning.budget.watts),
            records=None if run is None else LineWriter(run / RECORDS, cap=Cap.of(settings.runs)),
            store=store,
            ttl=max(settings.discovery.ttl, 3 * planning.base),
        )
        keeping.listeners += listeners
        self._keda = None
        if planning.external_scaler_port:
            self._keda = extension.entry("listener", "keda", "planner.external_scaler_port")(interval=planning.base)
            keeping.recommended = self._keda.recommend
        self._connector = connector
        self.driver = PlannerDriver(
            planning,
            planner,
            LiveObserver(source, connector, window=planning.base),
            connector,
            keeping,
            start=None if run is None else start_of(run),
            state=None if run is None else run / STATE,
            renewed=started is not None,
        )
        self._tuning = None if store is None else CurrentSettings(store, started or settings, self._tuned)
        self._tasks: list[asyncio.Task[None]] = []
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Begin to plan.

        Raises:
            ConfigError: an address can't be bound, or what should be scaled is not as the settings say.
        """
        if isinstance(self._connector, ChecksTargets):
            await self._connector.validate()
        if self._tuning is not None:
            self._tasks.append(asyncio.create_task(self._tuning.run(), name="tuning"))
        if self._store is not None:
            benchmarks = EngineBenchmarks(self._store, EngineAccesses(self.settings.models), self.driver.post)
            self._tasks.append(asyncio.create_task(benchmarks.run(), name="benchmarks"))
        if self._keda is not None:
            await self._keda.start(f"{self.settings.discovery.host}:{self.settings.planner.external_scaler_port}")
        if self.settings.planner.metrics_port:
            self.metrics_url = await self._show(self.settings.discovery.host, self.settings.planner.metrics_port)
        await self.driver.start()

    async def close(self) -> None:
        """End; the desired state stays as it is."""
        await cancel_all(self._tasks)
        await self.driver.close()
        if self._keda is not None:
            await self._keda.close()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._store is not None:
            await self._store.close()

    def _tuned(self, settings: ClusterSettings, changes: Sequence[SettingChange], by: str) -> None:
        before, self.settings = self.settings, settings
        if settings.planner.budget != before.planner.budget:
            self.driver.post(LimitsChanged(budget=msgspec.to_builtins(settings.planner.budget)))
        if _others(settings) != _others(before):
            log.info("another planner takes over, since %s changed its settings", by)
            self.outdated.set()

    async def _show(self, host: str, port: int) -> str:
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/live", self._live)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            raise ConfigError(
                f"planner.metrics_port {port} on {host} can't be bound: {error.strerror or error}",
                hint=bind_hint(error, "choose one that is free, or 0 for none"),
            ) from error
        return f"http://{host}:{port}/metrics"

    async def _metrics(self, request: web.Request) -> web.Response:
        text = self.driver.tick_log.metrics.render()
        return web.Response(body=text.encode(), headers={"content-type": CONTENT_TYPE})

    async def _live(self, request: web.Request) -> web.Response:
        report = self.driver.tick_log.last
        return web.json_response({"pid": os.getpid(), "tick": None if report is None else report.tick})


def _others(settings: ClusterSettings) -> tuple[PlanningSettings, Slo]:
    """Return the settings of planning without the budget, which a running planner receives."""
    return msgspec.structs.replace(settings.planner, budget=BudgetSettings()), settings.slo


async def serve(
    settings: ClusterSettings,
    run: Path,
    stopping: asyncio.Event,
    ready: Callable[[PlannerNode], None],
    *,
    listeners: Sequence[Listener] = (),
) -> None:
    """Plan for a cluster over its run folder and its store until stopped.

    Args:
        ready: called once it plans.
        listeners: called after every tick.
    Raises:
        ConfigError: a part of the settings can't be built.
    """
    current, started = settings, None
    while not stopping.is_set():
        store = open_store(settings, run, secret_of_process(settings, run))
        node = PlannerNode(current, run, store, started=started, listeners=listeners)
        await until_stopped(node, stopping, partial(ready, node) if started is None else lambda: None)
        current, started = node.settings, settings


def start_of(run: Path) -> int | None:
    """Return the monotonic nanoseconds of the start of a run, so that all its processes count the same seconds."""
    try:
        return int(json.loads((run / "run.json").read_text())["clock_anchor"]["monotonic_ns"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("run.json has no clock anchor, so the planner counts from its own start: %s", error)
        return None


async def until_stopped(node: PlannerNode, stopping: asyncio.Event, ready: Callable[[], None]) -> None:
    """Plan until stopped, or until operators change the settings of planning."""
    waits = [asyncio.create_task(event.wait()) for event in (stopping, node.outdated)]
    try:
        await node.start()
        ready()
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await node.close()


def _journal(run: Path, settings: ClusterSettings, planner: Planner, inputs: PolicyInputs) -> JournalWriter:
    start = start_of(run)
    return JournalWriter(
        run / "journal" / f"planner-{os.getpid()}",
        planner_book(planner, inputs),
        wall_ns=time.time_ns() - (0 if start is None else time.monotonic_ns() - start),
    )


class EngineBenchmarks:
    """Query workers, until all kinds have reported or have no benchmark.

    Args:
        store: of the cluster, with the workers' cards.
        accesses: what the engines ask for.
        report: called with each benchmark.
    """

    def __init__(self, store: Store, accesses: EngineAccesses, report: Callable[[Benchmarked], object]) -> None:
        self._store = store
        self._accesses = accesses
        self._report = report
        self._left: dict[tuple[str, Role], int] = {}

    async def run(self) -> None:
        """Query until cancelled."""
        async with engine_session(self._accesses.at) as http:
            while True:
                try:
                    cards = await self._store.list(WORKERS)
                except StoreUnavailable:
                    cards = {}  # it is read again; membership logs that it can't be read
                for raw in cards.values():
                    entry = entry_of(raw)
                    if entry is not None:
                        await self._ask(http, entry.card)
                await asyncio.sleep(BENCHMARKS_EVERY)

    async def _ask(self, http: aiohttp.ClientSession, card: WorkerCard) -> None:
        kind = (card.model, card.role)
        left = self._left.setdefault(kind, BENCHMARK_TRIES)
        if left <= 0:
            return
        self._left[kind] = left - 1
        try:
            self._accesses.enter_card(card)
        except ConfigError as error:
            log.warning("%s is not asked how fast it is: %s", card.id, error)
            return
        metrics = await self_benchmark(http, card.url)
        if metrics is not None:
            log.info("%s, a %s worker of %s, tells how fast it is", card.id, card.role, card.model)
            self._left[kind] = 0
            self._report(Benchmarked(model=card.model, role=card.role, metrics=metrics))


class StandalonePlanner(Protocol):
    """Further listeners of every tick, such as a report; `close` once the planner has ended."""

    @property
    def watchers(self) -> Sequence[Listener]: ...

    async def close(self) -> None: ...


def plan(
    settings: ClusterSettings,
    *,
    url: str | None,
    key: str | None,
    tls: ssl.SSLContext | None = None,
    say: Say = print,
    watch: Callable[[Path], StandalonePlanner] | None = None,
) -> int:
    """Plan until Ctrl-C, and print each decision with its reason.

    Args:
        url: of a running cluster, whose frontends are read and whose admin routes scale; None takes the settings'
            source and connector.
        key: of an administrator of that cluster; ``tls``: of its https, None trusts the system's certificates.
        watch: makes the listeners of every tick, from the run folder.
    Raises:
        ConfigError: a part of the settings can't be built.
    """
    folder = RunFolder.create(settings.runs.dir, "planner", config=resolved_yaml(settings))
    watching = None if watch is None else watch(folder.path)
    return asyncio.run(_plan(settings, folder.path, partial(parts_of, settings, url, key, tls), say, watching))


async def _plan(
    settings: ClusterSettings,
    run: Path,
    parts: Callable[[], tuple[TrafficSource, ScaleConnector]],
    say: Say,
    watching: StandalonePlanner | None,
) -> int:
    stopping, hurry = asyncio.Event(), asyncio.Event()
    on_signals(stopping, hurry)
    source, connector = parts()
    listeners: list[Listener] = [partial(print_tick, say)]
    if watching is not None:
        listeners += watching.watchers
    node = PlannerNode(settings, run, None, source=source, connector=connector, listeners=listeners)
    does = "advises, and touches nothing" if settings.planner.advisory else f"scales by {connector.describe()}"
    planning = settings.planner
    say(
        f"Planning by policy {planning.policy} every {planning.base:g} s from {source.describe()}; it {does}.\n"
        f"Records: {run / 'planner.jsonl'} ({this_command()} explain scale --run {run}). Ctrl-C ends it; what is "
        "wanted stays."
    )
    try:
        await until_stopped(node, stopping, lambda: None)
    finally:
        if watching is not None:
            await watching.close()
    say("Stopped; replica counts stay as they are.")
    return 0


def parts_of(
    settings: ClusterSettings, url: str | None, key: str | None, tls: ssl.SSLContext | None = None
) -> tuple[TrafficSource, ScaleConnector]:
    """Return the traffic source and the connector.

    Raises:
        ConfigError: neither the URL nor the settings name a cluster.
    """
    if url is None:
        return build_source(settings, None, None), build_connector(settings, None)
    planning = settings.planner
    base = url.rstrip("/").removesuffix("/v1")

    async def urls() -> list[str]:
        return [base]

    def headers(_: URL) -> dict[str, str]:
        return {} if key is None else {"authorization": f"Bearer {key}"}

    source: TrafficSource
    if planning.source == "streams":
        source = FrontendSource(urls, headers, description=f"the frontends at {base}", tls=tls)
    else:
        source = build_source(settings, None, None)
    connector = (
        AdminApiConnector(base, key, tls) if planning.connector == "process" else build_connector(settings, None)
    )
    return source, connector


def print_tick(say: Say, record: TickRecord, report: PlannerReport) -> None:
    """Print what a tick changed, where it changed anything."""
    if record.outcome in ("apply", "advise"):
        say(f"second {record.at:.0f}: {'advice: ' if record.outcome == 'advise' else ''}{record.why}")
    elif record.outcome in ("blind", "timeout"):
        say(f"second {record.at:.0f}: {record.outcome}: {record.why}")

"""What is one planner process, from start to end? Planner, source and connector of a cluster, and its metrics."""

import asyncio
import json
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
from aiohttp import web

from penstock.adapters.connectors.scaling_seam import ScaleConnector
from penstock.adapters.seams import Store
from penstock.adapters.sources.reading import Source
from penstock.adapters.telemetry.exposition import CONTENT_TYPE
from penstock.adapters.telemetry.planner_metrics import PlannerMetrics
from penstock.config.cluster import ClusterSettings
from penstock.config.live import Change
from penstock.config.planner import PlanningSettings
from penstock.config.secret import secret_of_process
from penstock.kernel.errors import ConfigError
from penstock.planner.events import LimitsChanged
from penstock.planner.settings import BudgetSettings
from penstock.runtime.opening import open_store
from penstock.runtime.planner import PlannerDriver
from penstock.runtime.planning.benchmarks import Benchmarks
from penstock.runtime.planning.building import build_connector, build_planner, build_source
from penstock.runtime.planning.keeping import Keeping, Listener
from penstock.runtime.planning.observing import Observing
from penstock.runtime.planning.report import RECORDS, STATE
from penstock.runtime.run_folder import LineWriter
from penstock.runtime.tuning import Tuning

log = logging.getLogger("penstock.planner")


class PlannerNode:
    """A planner and everything around it: `start`, then `close`.

    Args:
        run: folder for its records and for what a successor needs; None keeps none.
        store: of the cluster; None where there is none, such as before a Prometheus and somebody else's etcd.
        source, connector: where to look and whom to tell, where the settings do not say it.
        started: the settings of the cluster's start, where ``settings`` are what operators made of them since: this one
            takes over from one that planned by others.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        run: Path | None,
        store: Store | None,
        *,
        source: Source | None = None,
        connector: ScaleConnector | None = None,
        started: ClusterSettings | None = None,
        listeners: Sequence[Listener] = (),
    ) -> None:
        planning = settings.planning
        self.settings = settings
        self.outdated = asyncio.Event()
        """Set once operators want it to plan by other settings: another one should take over."""
        self.metrics_url: str | None = None
        self._store = store
        secret = None if run is None or store is None else secret_of_process(settings, run)
        source = source or build_source(settings, store, secret)
        connector = connector or build_connector(settings, store)
        said = {
            "advisory": planning.advisory,
            "source": source.describe(),
            "connector": connector.describe(),
            "every": planning.base,
        }
        keeping = Keeping(
            said,
            metrics=PlannerMetrics(slo_ttft=planning.slo.ttft, slo_itl=planning.slo.itl, watts=planning.budget.watts),
            records=None if run is None else LineWriter(run / RECORDS, bytes_max=planning.records_max),
            store=store,
            ttl=max(settings.discovery.ttl, 3 * planning.base),
        )
        keeping.listeners += listeners
        self.driver = PlannerDriver(
            planning,
            build_planner(settings),
            Observing(source, connector, window=planning.base),
            connector,
            keeping,
            start=None if run is None else start_of(run),
            state=None if run is None else run / STATE,
            renewed=started is not None,
        )
        self._tuning = None if store is None else Tuning(store, started or settings, self._tuned)
        self._tasks: list[asyncio.Task[None]] = []
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Begin to plan.

        Raises:
            ConfigError: an address can't be had.
        """
        if self._tuning is not None:
            self._tasks.append(asyncio.create_task(self._tuning.run(), name="tuning"))
        if self._store is not None:
            benchmarks = Benchmarks(self._store, self.driver.post)
            self._tasks.append(asyncio.create_task(benchmarks.run(), name="benchmarks"))
        if self.settings.planner.metrics_port:
            self.metrics_url = await self._show(self.settings.planner.metrics_host, self.settings.planner.metrics_port)
        await self.driver.start()

    async def close(self) -> None:
        """End, and leave everything as it is wanted."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.driver.close()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._store is not None:
            await self._store.close()

    def _tuned(self, settings: ClusterSettings, changes: Sequence[Change], by: str) -> None:
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
                hint="another server has it; choose one that is free, or 0 for none",
            ) from error
        return f"http://{host}:{port}/metrics"

    async def _metrics(self, request: web.Request) -> web.Response:
        text = self.driver.keeping.metrics.render()
        return web.Response(body=text.encode(), headers={"content-type": CONTENT_TYPE})

    async def _live(self, request: web.Request) -> web.Response:
        report = self.driver.keeping.last
        return web.json_response({"pid": os.getpid(), "tick": None if report is None else report.tick})


def _others(settings: ClusterSettings) -> PlanningSettings:
    """Return what a planner plans by, but for the budget, of which it is told while it runs."""
    return msgspec.structs.replace(settings.planning, budget=BudgetSettings())


async def serve(
    settings: ClusterSettings,
    run: Path,
    stopping: asyncio.Event,
    ready: Callable[[PlannerNode], None],
    *,
    listeners: Sequence[Listener] = (),
) -> None:
    """Plan for a cluster over its run folder and its store until told to stop.

    Args:
        ready: called once it plans.
        listeners: told every tick.
    Raises:
        ConfigError: something in the settings can't be had.
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
    """Plan until told to stop, or until operators want it to plan by other settings."""
    waits = [asyncio.create_task(event.wait()) for event in (stopping, node.outdated)]
    try:
        await node.start()
        ready()
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await node.close()

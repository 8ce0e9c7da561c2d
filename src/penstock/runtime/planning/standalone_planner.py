"""Standalone planner (``penstock planner``): plans beside a running cluster, or over a Prometheus and an etcd."""

import asyncio
import ssl
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from yarl import URL

from penstock.adapters.connectors.scale_connector import ScaleConnector
from penstock.adapters.sources.frontend_source import FrontendSource
from penstock.adapters.sources.traffic_source import TrafficSource
from penstock.config.reading.load import resolved_yaml
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.planner.tick_record import TickRecord
from penstock.runtime.planning.admin_api_connector import AdminApiConnector
from penstock.runtime.planning.planner_assembly import build_connector, build_source
from penstock.runtime.planning.planner_node import PlannerNode, until_stopped
from penstock.runtime.planning.planner_report import PlannerReport
from penstock.runtime.planning.tick_log import Listener
from penstock.runtime.records.run_folder import RunFolder
from penstock.runtime.supervision.terminal import Say, on_signals, this_command


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

"""What does ``penstock planner`` run? A planner on its own, beside a cluster that runs, or a Prometheus and an etcd."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from yarl import URL

from penstock.adapters.connectors.scaling_seam import ScaleConnector
from penstock.adapters.sources.reading import Source
from penstock.adapters.sources.streams import StreamsSource
from penstock.config.cluster import ClusterSettings
from penstock.config.load import resolved_yaml
from penstock.planner.record import TickRecord
from penstock.runtime.planner_node import PlannerNode, until_stopped
from penstock.runtime.planning.building import build_connector, build_source
from penstock.runtime.planning.keeping import Listener
from penstock.runtime.planning.remote import RemoteConnector
from penstock.runtime.planning.report import PlannerReport, changes_of, reason_of
from penstock.runtime.run_folder import RunFolder
from penstock.runtime.terminal import Say, on_signals


class Watching(Protocol):
    """Who else is told every tick, such as a report; `close` once the planner has ended."""

    @property
    def watchers(self) -> Sequence[Listener]: ...

    async def close(self) -> None: ...


def plan(
    settings: ClusterSettings,
    *,
    url: str | None,
    key: str | None,
    say: Say = print,
    watch: Callable[[Path], Watching] | None = None,
) -> int:
    """Plan until Ctrl-C, and say each decision with its reason.

    Args:
        url: of a running cluster, whose frontends are asked and whose admin routes scale; None takes what the settings
            name instead.
        key: of an administrator of that cluster.
        watch: makes those who are told every tick, of the run folder.
    Raises:
        ConfigError: something in the settings can't be had.
    """
    folder = RunFolder.create(settings.runs.dir, "planner", config=resolved_yaml(settings))
    watching = None if watch is None else watch(folder.path)
    return asyncio.run(_plan(settings, folder.path, url, key, say, watching))


async def _plan(
    settings: ClusterSettings, run: Path, url: str | None, key: str | None, say: Say, watching: Watching | None
) -> int:
    stopping, hurry = asyncio.Event(), asyncio.Event()
    on_signals(stopping, hurry)
    source, connector = parts_of(settings, url, key)
    listeners: list[Listener] = [partial(told, say)]
    if watching is not None:
        listeners += watching.watchers
    node = PlannerNode(settings, run, None, source=source, connector=connector, listeners=listeners)
    does = "advises, and touches nothing" if settings.planner.advisory else f"scales by {connector.describe()}"
    planning = settings.planning
    say(
        f"Planning by policy {planning.policy} every {planning.base:g} s from {source.describe()}; it {does}.\n"
        f"Records: {run / 'planner.jsonl'} (penstock explain scale --run {run}). Ctrl-C ends it; what is wanted stays."
    )
    try:
        await until_stopped(node, stopping, lambda: None)
    finally:
        if watching is not None:
            await watching.close()
    say("Stopped; replica counts stay as they are.")
    return 0


def parts_of(settings: ClusterSettings, url: str | None, key: str | None) -> tuple[Source, ScaleConnector]:
    """Return where is looked and who scales.

    Raises:
        ConfigError: nothing says which cluster is meant.
    """
    if url is None:
        return build_source(settings, None, None), build_connector(settings, None)
    planning = settings.planning
    base = url.rstrip("/").removesuffix("/v1")

    async def urls() -> list[str]:
        return [base]

    def headers(_: URL) -> dict[str, str]:
        return {} if key is None else {"authorization": f"Bearer {key}"}

    source: Source
    if planning.source == "streams":
        source = StreamsSource(urls, headers, stale_after=planning.stale_after, told_by=f"the frontends at {base}")
    else:
        source = build_source(settings, None, None)
    connector = RemoteConnector(base, key) if planning.connector == "process" else build_connector(settings, None)
    return source, connector


def told(say: Say, record: TickRecord, report: PlannerReport) -> None:
    """Say what a tick changed, where it changed anything."""
    if record.outcome in ("apply", "advise"):
        changes = ", ".join(f"{name} {was} -> {now}" for name, (was, now) in changes_of(record.pools).items())
        word = "would be" if record.outcome == "advise" else "is to be"
        say(f"second {record.at:.0f}: {changes or 'roles change'} {word}, because {reason_of(record)}")
    elif record.outcome in ("blind", "timeout"):
        say(f"second {record.at:.0f}: {record.outcome}: {reason_of(record)}")

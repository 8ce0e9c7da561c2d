"""What does `penstock up` run? The supervisor: engines and frontends as children, watched, drained and ended."""

import asyncio
import json
import logging
import os
import socket
import ssl
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from penstock.adapters.seams import Store
from penstock.config.cluster import ClusterSettings
from penstock.config.live import Change
from penstock.config.load import Loaded, resolved_yaml
from penstock.config.names import pool_prefix
from penstock.config.secret import drop_secret, keep_secret, secret_text
from penstock.kernel.errors import ConfigError, PenstockError
from penstock.kernel.secret import ClusterSecret
from penstock.runtime.fleet import Fleet
from penstock.runtime.frontends import Frontends
from penstock.runtime.namespace import Namespace, earlier_secret, take_namespace
from penstock.runtime.opening import open_relays, open_store
from penstock.runtime.operator import Operator
from penstock.runtime.peers import FRONTENDS, FrontendCard
from penstock.runtime.planner_child import PlannerChild, policy_of
from penstock.runtime.rereading import Rereading
from penstock.runtime.restarting import Restarter
from penstock.runtime.revoked import Revoked
from penstock.runtime.run_folder import RunFolder
from penstock.runtime.terminal import Say, on_signals, this_command, unless_gone
from penstock.runtime.tuning import Tuning
from penstock.runtime.wishes import DESIRED, DRAINS, RESTART, SETTINGS

log = logging.getLogger("penstock.supervisor")

SUPERVISOR = "supervisor"
"""Key of the supervisor that runs the cluster's frontends."""
WISHES = (DESIRED, DRAINS, SETTINGS, RESTART)
TTFT, ITL = 0.5, 0.05
"""Seconds that a planner keeps where nothing else is said."""
PATIENCE = 3.0
"""Seconds beyond the ttl in which a supervisor that was killed has to be gone from the store."""
STRAGGLERS = 5.0
"""Seconds that the frontend may take to see all workers, once it has one of every model."""


def run(
    loaded: Loaded,
    *,
    command: str,
    say: Say = print,
    finished: Callable[[Path], object] | None = None,
    reload: Callable[[], Loaded] | None = None,
) -> int:
    """Run a cluster until Ctrl-C or SIGTERM, then drain it.

    Args:
        loaded: checked settings.
        command: word for the run folder's name: up, serve or attach.
        say: prints a line for the person at the terminal.
        finished: called with the run folder after an orderly end, such as to draw its report.
        reload: reads the settings again at SIGHUP; None where there is no file to read.
    Returns: the exit status: 0 after an orderly end, 1 where something could not be started.
    Raises:
        ConfigError: the port is taken or the run folder can't be written; nothing was started.
    """
    settings = loaded.settings
    namespace = take_namespace(settings, os.environ)
    try:
        given = settings.cluster_secret or settings.cluster_secret_file
        secret = (None if given else earlier_secret(namespace.state)) or secret_text(settings)
        settings = msgspec.structs.replace(settings, cluster_secret=secret)
        folder = RunFolder.create(settings.runs.dir, command, config=resolved_yaml(settings))
        keep_secret(folder.path, secret)
        namespace.state.own(folder.path)
        try:
            cluster = _Cluster(settings, folder, namespace, unless_gone(say), loaded.settings, reload)
            status = asyncio.run(cluster.run())
        finally:
            drop_secret(folder.path)
    finally:
        namespace.state.close()
    if status == 0 and finished is not None:
        finished(folder.path)
    return status


class _Cluster:
    def __init__(
        self,
        settings: ClusterSettings,
        folder: RunFolder,
        namespace: Namespace,
        say: Say,
        loaded: ClusterSettings,
        reload: Callable[[], Loaded] | None,
    ) -> None:
        self.settings = settings
        self.folder = folder
        self.say = say
        self.stopping = asyncio.Event()
        self.hurry = asyncio.Event()
        secret = settings.cluster_secret
        self.revoked = Revoked()
        cluster_secret = None if secret is None else ClusterSecret(secret)
        self.store = open_store(settings, folder.path, cluster_secret, revoked=self.revoked.add)
        self.fleet = Fleet(
            self.store,
            settings.supervise,
            namespace.state,
            logs=folder.path / "logs",
            ttl=settings.discovery.ttl,
            secret=secret,
            host=settings.discovery.host,
            relays=open_relays(settings, cluster_secret),
            orphan_grace=namespace.grace,
            # The frontends of a supervisor that was killed let their streams finish for so long.
            end=settings.frontend.drain_timeout + settings.supervise.stop_grace,
        )
        self.frontends = Frontends(settings, folder.path, self.give_up)
        self.operator = Operator(self.store, self.fleet, ttl=settings.discovery.ttl, frontends=self.frontends)
        self.restarter = Restarter(self.store, self.operator, self.fleet, self.frontends, ttl=settings.discovery.ttl)
        self.tuning = Tuning(self.store, settings, self.tuned)
        self.rereading = Rereading(self.store, self.tuning, loaded, reload, folder.path, say)
        self.planner = PlannerChild(settings, folder.path)
        self.failed: str | None = None
        self.wanted: dict[str, int] = {}
        """Workers that each model starts with."""

    def tuned(self, settings: ClusterSettings, changes: Sequence[Change], by: str) -> None:
        """Go on with other settings."""
        self.settings = self.frontends.settings = settings
        self.fleet.use(settings.supervise)

    def give_up(self, reason: str) -> None:
        """End the cluster, since a part of it could not even start."""
        self.failed = reason
        self.stopping.set()

    async def run(self) -> int:
        started = time.monotonic()
        on_signals(self.stopping, self.hurry, self.rereading.ask)
        operating: list[asyncio.Task[None]] = []
        try:
            await take_over(self.store, self.settings, str(self.folder.path))
            await self.fleet.open()
            for model, entry in self.settings.models.items():
                prefix = pool_prefix(model, len(self.settings.models))
                self.wanted[model] = sum(
                    len(self.fleet.add_pool(model, name, pool, prefix=prefix)) for name, pool in entry.pools.items()
                )
            workers = sum(self.wanted.values())
            self.say(f"Starting {workers} engine{'s' if workers != 1 else ''} and the frontend ...")
            await self.fleet.start()
            await self.frontends.start()
            operating = [
                asyncio.create_task(self.operator.run(), name="operator"),
                asyncio.create_task(self.restarter.run(), name="restarter"),
                asyncio.create_task(self.tuning.run(), name="tuning"),
                asyncio.create_task(self.rereading.run(), name="rereading"),
                asyncio.create_task(self.revoked.run(self.store), name="revoked"),
            ]
            for task in operating:
                task.add_done_callback(_told)
            ready = asyncio.create_task(self._ready())
            stop = asyncio.create_task(self.stopping.wait())
            await asyncio.wait({ready, stop}, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            if ready.done():
                if self.settings.planner.enabled:
                    # Not sooner: while its engines start for the first time a cluster has nothing to be planned.
                    self.planner.begin()
                self._banner(ready.result(), time.monotonic() - started)
                await self.stopping.wait()
            else:
                ready.cancel()
        except PenstockError as error:
            self.failed = str(error)
        finally:
            for task in operating:
                task.cancel()
            await asyncio.gather(*operating, return_exceptions=True)
            await self._stop()
        if self.failed is not None:
            self.say(f"penstock: {self.failed}")
            self.say(f"Logs: {self.folder.path / 'logs'}")
            return 1
        self.say("Stopped; no process is left behind.")
        return 0

    async def _ready(self) -> FrontendCard:
        timeout = self.settings.supervise.start_timeout
        await self.fleet.ready()
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            found = (await self.store.list(FRONTENDS)).values()
            # A forerunner that was killed may still stand in a store that it shared with us.
            ours = [msgspec.json.decode(raw, type=FrontendCard) for raw in found]
            cards = [card for card in ours if card.run == str(self.folder.path)]
            if len(cards) >= self.settings.frontend.processes:
                card = cards[0]
                await asyncio.to_thread(_wait_for_workers, card.url, self.wanted, end)
                return card
            if self.failed is not None:
                raise PenstockError(self.failed)
            await asyncio.sleep(0.05)
        raise PenstockError(f"the frontend did not answer within {timeout:g} s")

    async def _stop(self) -> None:
        """Drain from the front: frontends finish their streams, then the engines end."""
        self.stopping.set()
        await self.planner.stop()
        await self.frontends.stop(self.hurry, lambda: self.say("Stopping at once; running requests are cut off."))
        await self.fleet.stop(at_once=self.hurry.is_set())
        await self.store.close()

    def _banner(self, card: FrontendCard, took: float) -> None:
        models = list(self.settings.models)
        adopted = self.fleet.connector.adopted
        kept = f", {len(adopted)} of them taken over from the cluster before" if adopted else ""
        chat = {"model": models[0], "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}
        at = "" if card.url == "http://127.0.0.1:8000" else f" --url {card.url}"
        key = " -H 'authorization: Bearer KEY'" if self.settings.frontend.security.api_keys else ""
        self.say(
            f"""
Penstock is up after {took:.1f} s: {self.fleet.workers} workers{kept}, {self.settings.router.mode} routing.

  Model      {", ".join(models)}
  Endpoint   {card.url}/v1
  Page       {card.page}/ui
  Run        {self.folder.path}{self._planned()}

Try next, in another terminal:
  curl -s {card.url}/v1/chat/completions -H 'content-type: application/json'{key} -d '{json.dumps(chat)}'
  {this_command()} chat{at} "Hello"
  {this_command()} status{at}
  {this_command()} top{at}
  {this_command()} bench {card.url} --workload chat --rate 8 --requests 100

Ctrl-C drains and stops."""
        )

    def _planned(self) -> str:
        planning = self.settings.planning
        if not planning.enabled:
            return ""
        does = "advises, and touches nothing" if planning.advisory else f"looks every {planning.base:g} s"
        goal = f"TTFT {1e3 * (planning.slo.ttft or TTFT):g} ms, ITL {1e3 * (planning.slo.itl or ITL):g} ms"
        why = f"{this_command()} explain scale"
        return f"\n  Planner    {policy_of(planning)}: {does}; keeps {goal}. Why, says: {why}"


async def take_over(store: Store, settings: ClusterSettings, run: str) -> None:
    """Become the one supervisor of a cluster in its store; what operators wished of an earlier run is forgotten.

    Raises:
        ConfigError: another one is there, and stays.
        StoreUnavailable: the store can't be reached.
    """
    ttl = settings.discovery.ttl
    end = time.monotonic() + ttl + PATIENCE
    while (there := (await store.list(SUPERVISOR)).get(SUPERVISOR)) is not None:
        if time.monotonic() > end:
            raise ConfigError(
                f"cluster {settings.name!r} has a supervisor already: {there.decode(errors='replace')}",
                hint="penstock join adds engines to it; another cluster takes another name",
            )
        await asyncio.sleep(0.2)  # one that was killed goes when its ttl is over
    await store.put(SUPERVISOR, f"{socket.gethostname()} {run}".encode(), ttl=ttl)
    for prefix in WISHES:
        for key in await store.list(prefix):
            await store.delete(key)


def _wait_for_workers(url: str, wanted: Mapping[str, int], end: float) -> None:
    """Return when the frontend knows every worker, or, a while later, one of every model: the first request is served.

    Args:
        wanted: workers of each model.
        end: monotonic time to return at, whatever is known then.
    """
    context = ssl._create_unverified_context() if url.startswith("https") else None
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2.0, context=context) as answer:
                ready = json.load(answer)["models"]
        except (OSError, ValueError, KeyError):
            ready = {}
        if all(ready.get(model, 0) >= max(1, count) for model, count in wanted.items()):
            return
        if all(ready.get(model) for model in wanted):
            end = min(end, time.monotonic() + STRAGGLERS)
        time.sleep(0.05)


def _told(task: asyncio.Task[None]) -> None:
    """Say aloud where something that should run for the whole run has ended."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s has ended by a bug of ours", task.get_name(), exc_info=error)

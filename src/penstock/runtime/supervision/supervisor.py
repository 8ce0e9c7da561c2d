"""Supervisor of `penstock up`: runs engines, frontends and the planner as children, watches, drains and ends them."""

import asyncio
import json
import logging
import os
import shlex
import socket
import ssl
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from penstock.adapters.engines.pool_overrides import with_template
from penstock.adapters.seams import Store
from penstock.adapters.task_cancel import cancel_all
from penstock.adapters.tls import client_context
from penstock.config.cluster_secret_file import drop_secret, keep_secret, secret_text
from penstock.config.live_knobs import SettingChange
from penstock.config.reading.load import Loaded, resolved_yaml
from penstock.config.settings.cluster_settings import START_TIMEOUT, ClusterSettings, RunSettings
from penstock.config.worker_names import pool_prefix
from penstock.kernel.errors import ConfigError, PenstockError
from penstock.kernel.numeric_threads import ONE_THREAD
from penstock.kernel.plurals import counted
from penstock.kernel.secret import ClusterSecret
from penstock.planner.settings import PlannerSettings
from penstock.runtime.backends import open_relays, open_store
from penstock.runtime.cluster_state.crash_log import CrashBook
from penstock.runtime.cluster_state.current_settings import CurrentSettings
from penstock.runtime.cluster_state.desired_state import DESIRED, DRAINS, RESTART, SETTINGS, SettingSpec, decode
from penstock.runtime.cluster_state.membership import RevokedLeases
from penstock.runtime.cluster_state.placement_sync import FRONTENDS, FrontendCard
from penstock.runtime.records.response_folder import drop_responses, take_over_responses
from penstock.runtime.records.run_folder import RunFolder
from penstock.runtime.records.run_folders import remove, runs_of, spare
from penstock.runtime.supervision.change_book import SIGHUP, ChangeBook, ConfigReload
from penstock.runtime.supervision.child_process import ChildProcess, RestartedChild, secrets_of
from penstock.runtime.supervision.engine_fleet import EngineFleet
from penstock.runtime.supervision.frontend_processes import FrontendProcesses
from penstock.runtime.supervision.namespace import Namespace, earlier_secret, take_namespace
from penstock.runtime.supervision.reconciler import Reconciler
from penstock.runtime.supervision.terminal import Say, at_url, ignore_closed_terminal, on_signals, this_command

log = logging.getLogger("penstock.supervisor")

SUPERVISOR = "supervisor"
"""Key of the supervisor that runs the cluster's frontends."""
SPECS = (DESIRED, DRAINS, SETTINGS, RESTART)
PATIENCE = 3.0
"""Seconds beyond the ttl within which a killed supervisor's key has to be gone from the store."""
STRAGGLERS = 5.0
"""Seconds that the frontend may take to know all workers, once it has one of every model."""


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
        say: prints a line on the operator's terminal.
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
        config, before = resolved_yaml(settings), namespace.state.before
        earlier = Path(before.get("run", "/"))
        # In another runs.dir a run would not go on where the operator wants it now, such as on a disk with room.
        here = earlier.parent == Path(settings.runs.dir).resolve()
        resumed = RunFolder.resume(earlier, command, config=config) if here else None
        prune(settings.runs, say)
        folder = resumed or RunFolder.create(settings.runs.dir, command, config=config)
        drop_secret(folder.path)  # that of a killed supervisor, where its run goes on
        keep_secret(folder.path, secret)
        take_over_responses(earlier if before else None, folder.path)
        namespace.state.own(folder.path)
        try:
            cluster = _Cluster(settings, folder, namespace, ignore_closed_terminal(say), loaded.settings, reload)
            cluster.killed = before.get("pid") if resumed else None
            status = asyncio.run(cluster.run())
        finally:
            drop_secret(folder.path)
            drop_responses(folder.path)
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
        self.revoked = RevokedLeases()
        cluster_secret = None if secret is None else ClusterSecret(secret)
        self.store = open_store(settings, folder.path, cluster_secret, revoked=self.revoked.add)
        self.fleet = EngineFleet(
            self.store,
            settings.supervise,
            namespace.state,
            logs=folder.path / "logs",
            ttl=settings.discovery.ttl,
            secret=secret,
            host=settings.discovery.host,
            relays=open_relays(settings, cluster_secret),
            orphan_grace=namespace.grace,
            # The frontends of a killed supervisor let their streams finish for so long.
            end=settings.supervise.drain_timeout + settings.supervise.stop_grace,
            journal=folder.path / "journal" if settings.runs.journal else None,
            kubernetes=settings.discovery.kubernetes,
        )
        self.frontends = FrontendProcesses(settings, folder.path, self.give_up, self.fleet.crashes)
        self.fleet.frontends = self.frontends
        self.book = ChangeBook(folder.path, say)
        self.fleet.crashes.noted = self.book.crashed
        self.fleet.statuses.noted = self.book.reported
        self.operator = Reconciler(
            self.store, self.fleet, ttl=settings.discovery.ttl, frontends=self.frontends, noted=self.book.add
        )
        self.tuning = CurrentSettings(self.store, settings, self.tuned)
        self.rereading = ConfigReload(self.store, self.tuning, loaded, reload, folder.path, say)
        self.planner = planner_child(settings, folder.path, self.fleet.crashes)
        self.failed: str | None = None
        self.namespace = namespace.state.namespace
        self.killed: int | None = None
        """Process id of the supervisor whose run goes on here, since it was killed."""
        self.earlier: frozenset[str] = frozenset()
        """Frontends of a killed supervisor, which are still in the store."""
        self.wanted: dict[str, int] = {}
        """Workers that each model starts with."""

    def tuned(self, settings: ClusterSettings, changes: Sequence[SettingChange], by: str) -> None:
        """Use these settings from now on."""
        self.settings = self.frontends.settings = settings
        self.fleet.use(settings.supervise)
        for change in changes:
            if by != SIGHUP:  # which has said so itself
                self.book.add(change.key, change.old, change.new, by)

    def give_up(self, reason: str) -> None:
        """End the cluster, since a part of it could not even start."""
        self.failed = reason
        self.stopping.set()

    async def run(self) -> int:
        began = time.monotonic()
        on_signals(self.stopping, self.hurry, self.rereading.ask)
        operating: list[asyncio.Task[None]] = []
        try:
            await take_over(self.store, self.settings, str(self.folder.path), resumed=self.killed is not None)
            self.earlier = frozenset(await self.store.list(FRONTENDS))
            if self.killed is not None:
                self.say(
                    f"The run {self.folder.path} goes on: its supervisor (process {self.killed}) was killed. "
                    "Its records and counts are kept."
                )
                self.fleet.crashes.add("supervisor", "supervisor", "was killed")
            await self.fleet.open()
            for model, entry in self.settings.models.items():
                prefix = pool_prefix(model, len(self.settings.models))
                self.wanted[model] = sum(
                    len(self.fleet.add_pool(model, name, with_template(pool, entry.chat_template), prefix=prefix))
                    for name, pool in entry.pools.items()
                )
            workers = sum(self.wanted.values())
            state = self.fleet.driver.fleet.state
            started = sum(not state.pools[life.pool].attached for life in state.lives.values())
            engines = f"{counted(started, 'engine')} and the frontend"
            self.say(f"Starting {engines if started else 'the frontend'} ...")
            self.book.add(f"start {self.namespace}", None, f"{counted(workers, 'engine')}, run {self.folder.path.name}")
            await self.fleet.start()
            await self.frontends.start()
            operating = [
                asyncio.create_task(self.operator.run(), name="operator"),
                asyncio.create_task(self.tuning.run(), name="tuning"),
                asyncio.create_task(self.rereading.run(), name="rereading"),
                asyncio.create_task(self.revoked.run(self.store), name="revoked"),
            ]
            for task in operating:
                task.add_done_callback(_log_end)
            ready = asyncio.create_task(self._ready())
            stop = asyncio.create_task(self.stopping.wait())
            await asyncio.wait({ready, stop}, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            if ready.done():
                if self.settings.planner.enabled:
                    # Not sooner: while its engines start for the first time there is nothing to plan.
                    self.planner.begin()
                self._banner(ready.result(), time.monotonic() - began)
                await self.stopping.wait()
            else:
                ready.cancel()
        except PenstockError as error:
            self.failed = str(error)
        finally:
            await cancel_all(operating)
            await self._stop()
        if self.failed is not None:
            self.say(f"penstock: {self.failed}")
            self.say(f"Logs: {self.folder.path / 'logs'}")
            return 1
        self.say("Stopped; no process is left behind.")
        return 0

    async def _ready(self) -> FrontendCard:
        timeout = self.settings.supervise.start_timeout or START_TIMEOUT
        for worker, reason in (await self.fleet.ready()).items():
            self.say(f"{worker} is taken in when it answers: {reason}")
        state = self.fleet.driver.fleet.state
        serving = Counter(state.pools[life.pool].configured.model for life in state.lives.values() if life.served)
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            entries = await self.store.list(FRONTENDS)
            new = [
                msgspec.json.decode(raw, type=FrontendCard) for key, raw in entries.items() if key not in self.earlier
            ]
            cards = [card for card in new if card.run == str(self.folder.path)]
            if len(cards) >= self.settings.frontend.processes:
                card = cards[0]
                await asyncio.to_thread(_wait_for_workers, card.url, serving, end)
                return card
            if self.failed is not None:
                raise PenstockError(self.failed)
            await asyncio.sleep(0.05)
        raise PenstockError(f"the frontend did not answer within {timeout:g} s")

    async def _stop(self) -> None:
        """Drain from the front: frontends finish their streams, then the engines end."""
        self.book.add(f"stop {self.namespace}", None, self.failed)
        self.stopping.set()
        await self.planner.stop()
        await self.frontends.stop(self.hurry, lambda: self.say("Stopping at once; running requests are cut off."))
        await self.fleet.stop(at_once=self.hurry.is_set())
        await self.store.close()

    def _banner(self, card: FrontendCard, took: float) -> None:
        models = list(self.settings.models)
        adopted = self.fleet.driver.adopted
        adopted_text = f", {len(adopted)} of them taken over from the cluster before" if adopted else ""
        for worker, why in self.fleet.driver.runner.not_adopted.items():
            self.say(f"{worker} of the cluster before was not taken over: {why}")
        workers = counted(self.fleet.workers, "worker")
        self.say(
            f"""
Penstock is up after {took:.1f} s: {workers}{adopted_text}, {self.settings.router.mode} routing.

  Model      {", ".join(models)}
  Endpoint   {card.url}/v1
  Page       {card.page}/ui
  Run        {self.folder.path}{self._planned(card.page)}

{next_steps(self.settings, card)}

Ctrl-C drains and stops."""
        )

    def _planned(self, page: str) -> str:
        planning = self.settings.planner
        if not planning.enabled:
            return ""
        does = "advises, and touches nothing" if planning.advisory else f"looks every {planning.base:g} s"
        ttft, itl = self.settings.slo.planned
        goal = f"TTFT {1e3 * ttft:g} ms, ITL {1e3 * itl:g} ms"
        why = f"{this_command()} explain scale{at_url(page)}"
        return f"\n  Planner    {policy_of(planning)}: {does}; keeps {goal}. Why, says: {why}"


def planner_child(settings: ClusterSettings, run: Path, crashes: CrashBook) -> RestartedChild:
    """Return the planner process of a cluster, to be begun once the cluster is up.

    Losing it freezes replica counts, never traffic; the next one continues from its state in the run folder.

    Args:
        run: the run folder.
        crashes: record of its crashes.
    """

    def start() -> Awaitable[ChildProcess]:
        return ChildProcess.start(
            "planner",
            "penstock.cli.planner_process",
            ["--run", str(run)],
            log_path=run / "logs" / "planner.log",
            env={**ONE_THREAD, **os.environ, **secrets_of(settings)},
        )

    return RestartedChild(
        "the planner",
        "replica counts stay as they are",
        lambda: settings.supervise,
        start,
        crashed=lambda words: crashes.add("planner", "planner", words),
    )


def policy_of(settings: PlannerSettings) -> str:
    """Return the name of the policy that decides."""
    target = settings.optimization_target
    return f"policy {settings.policy}" if target == "sla" else f"thresholds for {target}"


def prune(settings: RunSettings, say: Say) -> None:
    """Delete the run folders that are older, or together larger, than the settings allow."""
    if settings.keep_for is None and settings.keep_bytes is None:
        return
    runs = runs_of(Path(settings.dir))
    for run in spare(runs, now=time.time(), keep_for=settings.keep_for, keep_bytes=settings.keep_bytes):
        try:
            remove(run)
        except ConfigError as error:
            log.warning("%s", error)
        else:
            say(f"{run.path} is deleted: runs.keep_for and runs.keep_bytes keep no more")


def next_steps(settings: ClusterSettings, card: FrontendCard) -> str:
    """Return commands that the operator may try now; they work as printed, once the needed keys are exported."""
    security, models, command = settings.frontend.security, list(settings.models), this_command()
    keys, bearer = [], ""
    model, holder = models[0], client_key(settings)
    if holder is not None:
        model, key = holder
        bearer = ' -H "authorization: Bearer $PENSTOCK_API_KEY"'
        keys.append(f"  export PENSTOCK_API_KEY=...       # {key}")
    chat = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}
    if security.admin_keys:
        keys.append("  export PENSTOCK_ADMIN_KEY=...     # a key of frontend.security.admin_keys")
    trust = ""
    if security.tls_cert is not None:
        name, value, trust = trusted_by(card.url, security.tls_cert)
        keys += [f"  export {name}={shlex.quote(value)}"] if name else []
    json_type = "-H 'content-type: application/json'"
    lines = [
        "Try next, in another terminal:",
        *keys,
        f"  curl -s {trust}{card.url}/v1/chat/completions {json_type}{bearer} -d {shlex.quote(json.dumps(chat))}",
        f'  {command} chat{at_url(card.url)} "Hello"',
        f"  {command} status{at_url(card.page)}",
        f"  {command} top{at_url(card.page)}",
        f"  {command} bench {card.url} --model {shlex.quote(model)} --workload chat --rate 8 --requests 100",
    ]
    return "\n".join(lines)


def client_key(settings: ClusterSettings) -> tuple[str, str] | None:
    """Return a model and, in words, a key or token that may ask it; None where the endpoint asks for neither."""
    security, models = settings.frontend.security, list(settings.models)
    if security.api_keys:
        return models[0], "a key of frontend.security.api_keys"
    issuer, entries = security.jwt.issuer, settings.models.values()
    tenants = {name: each for name, each in settings.tenants.items() if issuer or each.keys or each.key_files}
    if not tenants:
        return None
    names = [*models, *(name for entry in entries for name in (*entry.aliases, *entry.adapters)), *settings.names]
    usable = ((name, model) for name, tenant in tenants.items() for model in names if tenant.names(model))
    name, own = next(usable, (next(iter(tenants)), models[0]))
    tenant = tenants[name]
    ways = [f"a key of tenants.{name}"] if tenant.keys or tenant.key_files else []
    if issuer:
        claim = f"{security.jwt.tenant_claim}={name}"
        ways.append(f"a token of {issuer} for {security.jwt.audience} with the claim {claim}")
    return own, ", or ".join(ways)


def trusted_by(url: str, cert: str) -> tuple[str, str, str]:
    """Return what makes commands of this machine trust a cluster: a variable, its value and an option of curl.

    Nothing where the system trusts its certificate; else the certificate's own file, or, where its name is another one
    than the URL's, no check at all.
    """
    address = urlsplit(url)
    for ca in (None, cert):
        try:
            with socket.create_connection((address.hostname or "", address.port or 443), timeout=2.0) as connection:
                client_context(ca=ca).wrap_socket(connection, server_hostname=address.hostname).close()
        except (OSError, ConfigError):
            continue
        path = str(Path(cert).absolute())
        return ("", "", "") if ca is None else ("PENSTOCK_CACERT", path, f"--cacert {shlex.quote(path)} ")
    return "PENSTOCK_INSECURE", "1", "-k "


async def take_over(store: Store, settings: ClusterSettings, run: str, *, resumed: bool) -> None:
    """Become the one supervisor of a cluster in its store; the desired state of an earlier run is deleted.

    Args:
        resumed: a killed supervisor's run goes on, with the settings that operators changed. Those of a config that was
            read again are in the config.
    Raises:
        ConfigError: there is another supervisor, and it stays.
        StoreUnavailable: the store can't be reached.
    """
    ttl, mine = settings.discovery.ttl, f"{socket.gethostname()} {run}".encode()
    end = time.monotonic() + ttl + PATIENCE
    # Of our own run it is that of a killed supervisor, whose namespace we have taken.
    while (there := (await store.list(SUPERVISOR)).get(SUPERVISOR)) not in (None, mine):
        if time.monotonic() > end:
            raise ConfigError(
                f"cluster {settings.name!r} has a supervisor already: {(there or b'').decode(errors='replace')}",
                hint="penstock join adds engines to it; another cluster takes another name",
            )
        await asyncio.sleep(0.2)  # the key of a killed supervisor goes when its ttl is over
    await store.put(SUPERVISOR, mine, ttl=ttl)
    for prefix in SPECS:
        for key, raw in (await store.list(prefix)).items():
            spec = decode(SettingSpec, raw) if resumed and prefix == SETTINGS else None
            if spec is None or spec.by == SIGHUP:
                await store.delete(key)


def _wait_for_workers(url: str, wanted: Mapping[str, int], end: float) -> None:
    """Return when the frontend knows every worker, or, a while later, one of every model: enough for a first request.

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


def _log_end(task: asyncio.Task[None]) -> None:
    """Log that a task which should run for the whole run has ended."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s has ended by a bug of ours", task.get_name(), exc_info=error)

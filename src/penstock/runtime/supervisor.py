"""What does `penstock up` run? The supervisor: engines and frontends as children, watched, drained and ended."""

import asyncio
import json
import logging
import os
import secrets
import shutil
import signal
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from penstock.adapters.stores.file import FileStore
from penstock.config.cluster import ClusterSettings, PoolSettings, SuperviseSettings
from penstock.config.load import Loaded, resolved_yaml
from penstock.kernel.errors import ConfigError, PenstockError
from penstock.runtime.children import Child
from penstock.runtime.fleet import Fleet
from penstock.runtime.peers import FRONTENDS, FrontendCard
from penstock.runtime.ports import bind_error
from penstock.runtime.run_folder import RunFolder

log = logging.getLogger("penstock.supervisor")

Say = Callable[[str], None]


def run(loaded: Loaded, *, command: str, say: Say = print, finished: Callable[[Path], object] | None = None) -> int:
    """Run a cluster until Ctrl-C or SIGTERM, then drain it.

    Args:
        loaded: checked settings.
        command: word for the run folder's name: up, serve or attach.
        say: prints a line for the person at the terminal.
        finished: called with the run folder after an orderly end, such as to draw its report.
    Returns: the exit status: 0 after an orderly end, 1 where something could not be started.
    Raises:
        ConfigError: the port is taken or the run folder can't be written; nothing was started.
    """
    settings = loaded.settings
    _check_port(settings)
    folder = RunFolder.create(settings.runs.dir, command, config=resolved_yaml(settings))
    status = asyncio.run(_Cluster(settings, folder, say).run())
    if status == 0 and finished is not None:
        finished(folder.path)
    return status


def join(cluster: str, pool: PoolSettings, model: str, *, name: str = "joined", say: Say = print) -> int:
    """Add engines of this machine to a running cluster until Ctrl-C.

    Args:
        cluster: the frontend's URL, or the cluster's run folder.
    Raises:
        ConfigError: no cluster is there, or it keeps its membership where this process can't reach it.
    """
    return asyncio.run(_join(_run_folder_of(cluster), pool, model, name, say))


class _Cluster:
    def __init__(self, settings: ClusterSettings, folder: RunFolder, say: Say) -> None:
        self.settings = settings
        self.folder = folder
        self.say = say
        self.stopping = asyncio.Event()
        self.hurry = asyncio.Event()
        self.store = FileStore(folder.path / "discovery")
        self.fleet = Fleet(self.store, settings.supervise, logs=folder.path / "logs", ttl=settings.discovery.ttl)
        self.frontends: dict[int, Child] = {}
        self.failed: str | None = None

    async def run(self) -> int:
        started = time.monotonic()
        _on_signals(self.stopping, self.hurry)
        count = sum(len(p.urls) or p.replicas for m in self.settings.models.values() for p in m.pools.values())
        self.say(f"Starting {count} engine{'s' if count != 1 else ''} and the frontend ...")
        watchers: list[asyncio.Task[None]] = []
        try:
            for model, entry in self.settings.models.items():
                for name, pool in entry.pools.items():
                    prefix = "" if len(self.settings.models) == 1 else f"{model.replace('/', '-')}-"
                    self.fleet.add_pool(model, name, pool, prefix=prefix)
            for index in range(self.settings.frontend.processes):
                await self._start_frontend(index)
            watchers = [asyncio.create_task(self._watch_frontend(i)) for i in self.frontends]
            ready = asyncio.create_task(self._ready())
            stop = asyncio.create_task(self.stopping.wait())
            await asyncio.wait({ready, stop}, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            if ready.done():
                self._banner(ready.result(), time.monotonic() - started)
                await self.stopping.wait()
            else:
                ready.cancel()
        except PenstockError as error:
            self.failed = str(error)
        finally:
            await self._stop(watchers)
        if self.failed is not None:
            self.say(f"penstock: {self.failed}")
            self.say(f"Logs: {self.folder.path / 'logs'}")
            return 1
        self.say("Stopped; no process is left behind.")
        return 0

    async def _ready(self) -> FrontendCard:
        timeout = self.settings.supervise.start_timeout
        await self.fleet.ready(timeout)
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            cards = await self.store.list(FRONTENDS)
            if len(cards) >= self.settings.frontend.processes:
                card = msgspec.json.decode(next(iter(cards.values())), type=FrontendCard)
                await asyncio.to_thread(_wait_for_models, card.url, set(self.settings.models), end)
                return card
            if self.failed is not None:
                raise PenstockError(self.failed)
            await asyncio.sleep(0.05)
        raise PenstockError(f"the frontend did not answer within {timeout:g} s")

    async def _start_frontend(self, index: int) -> None:
        self.frontends[index] = await Child.start(
            f"frontend-{index}",
            "penstock.frontend.process",
            ["--run", str(self.folder.path), "--index", str(index)],
            log_path=self.folder.path / "logs" / f"frontend-{index}.log",
            env={**os.environ, **_secrets(self.settings)},
        )

    async def _watch_frontend(self, index: int) -> None:
        """Restart a frontend that ends; one that can't even start ends the cluster with its reason."""
        wait = self.settings.supervise.restart_backoff
        ever_ready = False
        while not self.stopping.is_set():
            child = self.frontends[index]
            try:
                await child.ready(self.settings.supervise.start_timeout)
                ever_ready = True
            except PenstockError as error:
                if not ever_ready:
                    self.failed = str(error)
                    self.stopping.set()
                    return
                log.error("%s", error)
            status = await child.wait()
            if self.stopping.is_set():
                return
            log.error("frontend %d ended with status %s; it restarts in %.1f s", index, status, wait)
            await asyncio.sleep(wait)
            wait = min(self.settings.supervise.restart_backoff_max, wait * 2)
            await self._start_frontend(index)

    async def _stop(self, watchers: list[asyncio.Task[None]]) -> None:
        """Drain from the front: frontends finish their streams, then the engines end."""
        self.stopping.set()
        for task in watchers:
            task.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        grace = self.settings.frontend.drain_timeout + self.settings.supervise.stop_grace
        drain = asyncio.gather(*(child.stop(grace) for child in self.frontends.values()))
        hurry = asyncio.create_task(self.hurry.wait())
        either: set[asyncio.Future[Any]] = {drain, hurry}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not drain.done():
            self.say("Stopping at once; running requests are cut off.")
            for child in self.frontends.values():
                if child.process.returncode is None:
                    child.process.kill()
        await drain
        hurry.cancel()
        await self.fleet.stop(0.0 if self.hurry.is_set() else self.settings.supervise.stop_grace)
        await self.store.close()

    def _banner(self, card: FrontendCard, took: float) -> None:
        models = list(self.settings.models)
        workers = sum(len(p.urls) or p.replicas for m in self.settings.models.values() for p in m.pools.values())
        chat = {"model": models[0], "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}
        at = "" if card.url == "http://127.0.0.1:8000" else f" --url {card.url}"
        key = " -H 'authorization: Bearer KEY'" if self.settings.frontend.security.api_keys else ""
        self.say(
            f"""
Penstock is up after {took:.1f} s: {workers} workers, {self.settings.router.mode} routing.

  Model      {", ".join(models)}
  Endpoint   {card.url}/v1
  Page       {card.admin_url}/ui
  Run        {self.folder.path}

Try next, in another terminal:
  curl -s {card.url}/v1/chat/completions -H 'content-type: application/json'{key} -d '{json.dumps(chat)}'
  {_command()} chat{at} "Hello"
  {_command()} status{at}
  {_command()} top{at}
  {_command()} bench {card.url} --workload chat --rate 8 --requests 100

Ctrl-C drains and stops."""
        )


async def _join(folder: Path, pool: PoolSettings, model: str, name: str, say: Say) -> int:
    stopping, hurry = asyncio.Event(), asyncio.Event()
    _on_signals(stopping, hurry)
    settings = SuperviseSettings()
    store = FileStore(folder / "discovery")
    fleet = Fleet(store, settings, logs=folder / "logs", ttl=10.0)
    status = 0
    try:
        ids = fleet.add_pool(model, name, pool, prefix=f"{secrets.token_hex(2)}-")
        ready = asyncio.create_task(fleet.ready(settings.start_timeout))
        stop = asyncio.create_task(stopping.wait())
        await asyncio.wait({ready, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if ready.done():
            ready.result()
            say(f"Joined with {len(ids)} workers of {model}: {', '.join(ids)}. Ctrl-C takes them out.")
            await stopping.wait()
    except PenstockError as error:
        say(f"penstock: {error}")
        status = 1
    finally:
        await fleet.stop(settings.stop_grace)
        await store.close()
    return status


def _run_folder_of(cluster: str) -> Path:
    if not cluster.startswith(("http://", "https://")):
        folder = Path(cluster)
        if not (folder / "discovery").is_dir():
            raise ConfigError(f"{folder} is no run folder of a live cluster", hint="penstock status shows the folder")
        return folder
    request = urllib.request.Request(f"{cluster.rstrip('/')}/admin/status")
    admin = os.environ.get("PENSTOCK_ADMIN_KEY")
    if admin:
        request.add_header("authorization", f"Bearer {admin}")
    try:
        with urllib.request.urlopen(request, timeout=5.0) as answer:
            folder = Path(json.load(answer)["run"])
    except (urllib.error.URLError, OSError, ValueError, KeyError) as error:
        raise ConfigError(f"no cluster answers at {cluster}: {error}", hint="penstock up starts one") from error
    if not (folder / "discovery").is_dir():
        raise ConfigError(
            f"the cluster at {cluster} keeps its membership in {folder}, which is not on this machine",
            hint="join works on the cluster's own machine; attach servers of other machines by URL",
        )
    return folder


def _command() -> str:
    """Return how this person calls penstock: by name where that is found, else by the path beside this Python."""
    if shutil.which("penstock"):
        return "penstock"
    beside = Path(sys.executable).parent / "penstock"
    return os.path.relpath(beside) if beside.is_relative_to(Path.cwd()) else str(beside)


def _wait_for_models(url: str, models: set[str], end: float) -> None:
    """Return when the frontend knows a ready worker of every model, so that the first request finds one."""
    context = ssl._create_unverified_context() if url.startswith("https") else None
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2.0, context=context) as answer:
                ready = json.load(answer)["models"]
        except (OSError, ValueError, KeyError):
            ready = {}
        if all(ready.get(model) for model in models):
            return
        time.sleep(0.05)


def _check_port(settings: ClusterSettings) -> None:
    host, port = settings.frontend.host, settings.frontend.port
    if not port:
        return
    reason = bind_error(host, port)
    if reason is not None:
        raise ConfigError(
            f"frontend.port {port} on {host} can't be bound: {reason}",
            hint="another server has it; choose one with --frontend.port, 0 takes any free one",
        )


def _secrets(settings: ClusterSettings) -> dict[str, str]:
    """Hand secrets to a child by its environment: the run folder's config.yaml has none."""
    security = settings.frontend.security
    found = {}
    if security.api_keys:
        found["PENSTOCK_FRONTEND__SECURITY__API_KEYS"] = json.dumps(list(security.api_keys))
    if security.admin_keys:
        found["PENSTOCK_FRONTEND__SECURITY__ADMIN_KEYS"] = json.dumps(list(security.admin_keys))
    return found


def _on_signals(stopping: asyncio.Event, hurry: asyncio.Event) -> None:
    def asked() -> None:
        (hurry if stopping.is_set() else stopping).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked)
    if hasattr(signal, "SIGHUP"):
        loop.add_signal_handler(signal.SIGHUP, asked)

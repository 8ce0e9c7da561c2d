"""Adapter loads: carries out `AdapterChange`, one at a time per engine, and lets requests wait for their adapter.

It also keeps adapters on as many workers as operators want: of the frontends one decides, by what the engines list.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import aiohttp
import msgspec

from penstock.adapters.background_tasks import BackgroundTasks
from penstock.adapters.engines.describe import listed_adapters
from penstock.adapters.engines.dialects.dialect_registry import dialect_of
from penstock.adapters.http_session import HttpSession
from penstock.adapters.task_cancel import cancel_all
from penstock.kernel.machine import Event, Nanos
from penstock.kernel.values import WorkerCard, WorkerId
from penstock.router.events import (
    AdapterChange,
    AdapterDesired,
    AdapterDropped,
    AdapterFailed,
    AdapterLoaded,
    AdapterMissing,
    AdaptersListed,
    AdaptersWanted,
)
from penstock.router.router import Router
from penstock.runtime.cluster_state.adapter_registry import AdapterRegistry, KnownAdapter
from penstock.runtime.live_driver import LiveDriver

log = logging.getLogger("penstock.adapters")

LOAD_TIMEOUT = 60.0
"""Seconds for one load: some hundred MB from a slow disk; then the request goes elsewhere."""
UNLOAD_TIMEOUT = 5.0
"""Seconds for one unload, which an engine only notes down."""
LOADS_AT_ONCE = 8
"""Loads of all engines at once: they read the same disks."""
RECONCILE_EVERY = 5.0
"""Seconds after which it is looked again whether adapters are on as many workers as they are to be."""
ANSWER_MAX = 64 << 10
JSON = {"content-type": "application/json"}
LOADED_ALREADY = ("has already been loaded", "because it is already loaded")
NOT_LOADED = "does not exist. Loaded LoRAs"
"""Texts of engines that hold other adapters than we believe: vLLM's and SGLang's to a load, SGLang's to an unload."""
NO_ROUTE = '{"detail":"Not Found"}'
"""Answer of an engine that has no route for loads, as FastAPI writes it."""


class LoadFailure(NamedTuple):
    """Why an adapter could not be loaded. ``status``: 404 where it is not there, 502 or 503 for the engine's fault."""

    reason: str
    status: int


class AdapterLoads:
    """The loads of one frontend."""

    def __init__(
        self, live: LiveDriver, router: Router, registry: AdapterRegistry, http: HttpSession | None = None
    ) -> None:
        self.registry = registry
        self._live = live
        self._router = router
        self._loads: dict[tuple[WorkerId, str], asyncio.Task[LoadFailure | None]] = {}
        self._others = BackgroundTasks()
        self._turns: dict[WorkerId, asyncio.Lock] = {}
        self._budget = asyncio.Semaphore(LOADS_AT_ONCE)
        self._http = http or HttpSession()
        self._changed = asyncio.Event()
        registry.on_changed = self._changed.set
        live.on(AdapterChange, self._change)
        registry.on_dropped = self._dropped

    # --- what requests need -----------------------------------------------------------------------------------------

    def pending(self, worker: WorkerId, adapter: str) -> "asyncio.Task[LoadFailure | None] | None":
        """Return the load for which a request must wait; None where there is none. Do not cancel it."""
        return self._loads.get((worker, adapter))

    def missing(self, card: WorkerCard, adapter: str) -> None:
        """An engine answered that it does not hold an adapter: after this, `pending` has its load."""
        self._live.post("router", AdapterMissing(worker=card.id, epoch=card.incarnation, adapter=adapter))

    # --- what operators want ----------------------------------------------------------------------------------------

    async def load(self, known: KnownAdapter) -> LoadFailure | None:
        """Have an adapter loaded where that costs least, unless a worker holds it; return why it could not be."""
        self._live.post("router", AdapterDesired(model=known.model, adapter=known.name))
        failures = []
        for worker in self.holders(known.model, known.name):
            task = self.pending(worker, known.name)
            failure = None if task is None else await asyncio.shield(task)
            if failure is None:
                return None
            failures.append(failure)
        return failures[0] if failures else None

    async def unload(self, model: str, adapter: str) -> None:
        """Have an adapter unloaded wherever it is."""
        self._live.post("router", AdapterDropped(model=model, adapter=adapter))
        await self._others.settled()

    def holders(self, model: str, adapter: str) -> Sequence[WorkerId]:
        """Return the workers that hold an adapter, or load it, as far as this router knows."""
        pool = self._router.pools.get(model)
        return [] if pool is None else pool.adapters.holders(adapter)

    def loading_models(self) -> list[str]:
        """Return the models with workers that load adapters."""
        return [model for model, pool in self._router.pools.items() if pool.adapters.workers]

    def lacking(self, model: str, adapter: str) -> str:
        """Return why fewer workers than wanted hold an adapter; empty where enough do."""
        pool = self._router.pools.get(model)
        if pool is None:
            return f"{model} has no worker"
        if adapter not in pool.adapters.lacking():
            return ""
        now, holders = self._live.now(), pool.adapters.holders(adapter)
        others = [one for one in self._router.roster if one.card.model == model and one.card.id not in holders]
        for worker in others:
            reason = worker.why_not(now)
            if reason is None and worker.card.id in pool.adapters.workers:
                reason = pool.adapters.why_not(worker.card.id, adapter, now)
            elif reason is None:
                reason = "loads no adapters while it runs"
            if reason is not None:
                return f"{worker.card.id} {reason}"
        return f"{model} has no other worker" if not others else "it is about to be loaded"

    async def run(self, decides: Callable[[], bool]) -> None:
        """Keep adapters on as many workers as they are to be on, until cancelled.

        Args:
            decides: tells whether it is this frontend that has the missing ones loaded; the others follow.
        """
        while True:
            await self._reconcile(decides())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), RECONCILE_EVERY)
            self._changed.clear()

    async def _reconcile(self, decides: bool) -> None:
        wanted = await asyncio.to_thread(self.registry.wanted)  # it may look into folders
        for model, pool in list(self._router.pools.items()):
            level = wanted.get(model, {})
            if pool.adapters.wanted == level and not pool.adapters.lacking():
                continue
            # What other frontends had loaded is known to the engines alone.
            cards = [one.card for one in self._router.roster if one.card.model == model and one.card.adapter_slots]
            await asyncio.gather(*(self._list(card) for card in cards))
            if pool.adapters.wanted != level or (decides and pool.adapters.lacking()):
                self._live.post("router", AdaptersWanted(model=model, workers=level, decides=decides))

    # --- workers ----------------------------------------------------------------------------------------------------

    def start(self, card: WorkerCard) -> None:
        """A worker came: read what it holds."""
        if card.adapter_slots:
            self._others.spawn(self._list(card))
        self._changed.set()

    def stop(self, card: WorkerCard) -> None:
        """A worker went."""
        self._turns.pop(card.id, None)
        self._changed.set()

    async def close(self) -> None:
        """Cancel everything."""
        await cancel_all([*self._loads.values(), *self._others])
        await self._http.close()

    def _dropped(self, model: str, adapter: str) -> None:
        """An operator took an adapter out of service; the frontend that was told has the workers unload it."""
        self._live.post("router", AdapterDropped(model=model, adapter=adapter, unload=False))

    # --- inside -----------------------------------------------------------------------------------------------------

    def _change(self, now: Nanos, sender: str, effect: AdapterChange) -> None:
        card = effect.card
        if effect.load is None:
            self._others.spawn(self._unload(card, effect.unload))
            return
        key = (card.id, effect.load)
        before = self._loads.get(key)
        task = asyncio.create_task(self._load(card, effect.load, effect.unload, before), name=f"load-{effect.load}")
        self._loads[key] = task
        task.add_done_callback(lambda done: self._over(key, done))

    def _over(self, key: tuple[WorkerId, str], task: "asyncio.Task[LoadFailure | None]") -> None:
        if self._loads.get(key) is task:
            del self._loads[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the load of adapter %s failed by a bug of ours", key[1], exc_info=error)

    async def _load(
        self, card: WorkerCard, adapter: str, unload: Sequence[str], before: "asyncio.Task[LoadFailure | None] | None"
    ) -> LoadFailure | None:
        if before is not None:
            await asyncio.wait([before])
        async with self._turn(card.id), self._budget:
            for name in unload:
                await self._unload_one(card, name)
            began = time.monotonic()
            failure = await self._load_one(card, adapter)
        worker, epoch = card.id, card.incarnation
        event: Event
        if failure is None:
            took = time.monotonic() - began
            event = AdapterLoaded(worker=worker, epoch=epoch, adapter=adapter, seconds=took)
        else:
            event = AdapterFailed(worker=worker, epoch=epoch, adapter=adapter, reason=failure.reason)
        self._live.post("router", event)
        return failure

    async def _load_one(self, card: WorkerCard, adapter: str) -> LoadFailure | None:
        known = self.registry.find(adapter)
        if known is None:
            return LoadFailure(f"nobody says any more where adapter {adapter} lies", 404)
        routes = dialect_of(card.engine).lora_routes
        if routes is None:
            return LoadFailure(f"an engine of kind {card.engine} loads no adapters while it runs", 503)
        body = {"lora_name": adapter, "lora_path": known.path}
        status, text = await self._post(card.url + routes[0], body, LOAD_TIMEOUT)
        if status == 200 or any(words in text for words in LOADED_ALREADY):
            return None
        if status == 404 and text.replace(" ", "") == NO_ROUTE.replace(" ", ""):
            return LoadFailure("it loads no adapters while it runs (VLLM_ALLOW_RUNTIME_LORA_UPDATING is not set)", 503)
        if status == 404:
            return LoadFailure(f"it finds no adapter {adapter} at {known.path}: {text}", 404)
        if status is None:
            return LoadFailure(text, 503)
        return LoadFailure(f"it answered {status} to the load of adapter {adapter}: {text}", 502)

    async def _unload(self, card: WorkerCard, names: Sequence[str]) -> None:
        async with self._turn(card.id):
            for name in names:
                await self._unload_one(card, name)

    async def _unload_one(self, card: WorkerCard, name: str) -> None:
        """Unload an adapter; an engine that does not know it has unloaded it already."""
        routes = dialect_of(card.engine).lora_routes
        if routes is None:
            return
        status, text = await self._post(card.url + routes[1], {"lora_name": name}, UNLOAD_TIMEOUT)
        if status not in (200, 404) and NOT_LOADED not in text:
            log.warning("worker %s did not unload adapter %s: %s %s", card.id, name, status or "", text)

    async def _list(self, card: WorkerCard) -> None:
        names = await listed_adapters(self._http.session, card.url, card.model)
        if names is None:
            return  # it is asked for them by requests, and its answers say what it holds
        pinned = tuple(name for name in names if self.registry.find(name) is None)
        if self._known(card.id, names, pinned):
            return
        self._live.post("router", AdaptersListed(worker=card.id, epoch=card.incarnation, names=names, pinned=pinned))

    def _known(self, worker: WorkerId, names: Sequence[str], pinned: Sequence[str]) -> bool:
        """Return whether the router's table says what a worker lists."""
        card = self._router.roster.get(worker)
        pool = None if card is None else self._router.pools.get(card.card.model)
        mine = None if pool is None else pool.adapters.workers.get(worker)
        if mine is None:
            return False
        there = {name: one.pinned for name, one in mine.resident.items() if not one.loading}
        return there == {name: name in pinned for name in names if name in there or name not in mine.resident}

    async def _post(self, url: str, body: dict[str, str], timeout: float) -> tuple[int | None, str]:
        """Return status and the beginning of the text; None and what went wrong where no answer came."""
        try:
            limit = aiohttp.ClientTimeout(total=timeout)
            async with self._http.session.post(
                url, data=msgspec.json.encode(body), headers=JSON, timeout=limit
            ) as answer:
                raw = await answer.content.read(ANSWER_MAX)
                return answer.status, " ".join(raw[:300].decode("utf-8", "replace").split())
        except TimeoutError:
            return None, f"no answer within {timeout:g} s"
        except (aiohttp.ClientError, OSError) as error:
            return None, f"no answer: {type(error).__name__}: {error}"

    def _turn(self, worker: WorkerId) -> asyncio.Lock:
        return self._turns.setdefault(worker, asyncio.Lock())

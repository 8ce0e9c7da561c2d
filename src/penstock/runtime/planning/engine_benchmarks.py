"""Engine benchmarks: reads the self-benchmark of one worker of each model and role, once, as soon as it serves."""

import asyncio
import logging
from collections.abc import Callable

import aiohttp

from penstock.adapters.engines.describe import self_benchmark
from penstock.adapters.engines.http.engine_access import EngineAccesses, engine_session
from penstock.adapters.seams import Store, StoreUnavailable
from penstock.kernel.errors import ConfigError
from penstock.kernel.values import Role, WorkerCard
from penstock.planner.events import Benchmarked
from penstock.runtime.cluster_state.membership import WORKERS, entry_of

log = logging.getLogger("penstock.planner")

EVERY = 5.0
"""Seconds between two reads of the present workers."""
TRIES = 3
"""Times that workers of a model and role are queried before they count as having no benchmark."""


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
                await asyncio.sleep(EVERY)

    async def _ask(self, http: aiohttp.ClientSession, card: WorkerCard) -> None:
        kind = (card.model, card.role)
        left = self._left.setdefault(kind, TRIES)
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

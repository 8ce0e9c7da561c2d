"""Who tells what an engine did in the last window? Its plug-in, its /metrics, or the simulated engine itself."""

import asyncio
from typing import Literal, Protocol

import aiohttp
import msgspec

from penstock.adapters.engines.asking import TIMEOUT, Server
from penstock.adapters.engines.dialects import dialect_of
from penstock.adapters.engines.passes import Passes
from penstock.adapters.engines.scraped import Scraped
from penstock.kernel.values import StepStats, WorkerCard

Source = Literal["engine", "plug-in", "metrics", "none"]
"""Who told: the simulated engine (exact), the plug-in (exact, in part), /metrics (worked out), nobody."""


class StepSource(Protocol):
    """One engine's passes, window by window. One reader each: what is taken is gone."""

    source: Source

    async def take(self, *, busy: bool) -> StepStats | None:
        """Return what it did since the last call, or None where nobody can tell.

        Args:
            busy: whether it has had requests since then, as far as we know: then silence is no idleness.
        """
        ...

    def close(self) -> None:
        """Stop listening."""
        ...


def steps_of(card: WorkerCard, http: aiohttp.ClientSession, reader: str, *, scrape: bool = False) -> StepSource:
    """Return the source for an engine.

    Args:
        reader: name under which a simulated engine keeps our window.
        scrape: look at /metrics only, also where there is more.
    """
    if card.engine == "sim" and not scrape:
        return SimSteps(http, card.url, reader)
    return EngineSteps(card, http, scrape=scrape)


class SimSteps:
    """Ask a simulated engine, which knows."""

    source: Source = "engine"

    def __init__(self, http: aiohttp.ClientSession, url: str, reader: str) -> None:
        self._http = http
        self._url = url.rstrip("/") + "/step_stats"
        self._reader = reader
        self._begun = False

    async def take(self, *, busy: bool) -> StepStats | None:
        try:
            async with self._http.get(self._url, params={"reader": self._reader}, timeout=TIMEOUT) as answer:
                if answer.status != 200:
                    return None
                found = msgspec.json.decode(await answer.read(), type=StepStats)
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError):
            return None
        if not self._begun:  # the first answer has what was before we began to listen
            self._begun = True
            return None
        return found

    def close(self) -> None:
        return None


class EngineSteps:
    """Listen to the plug-in where the card names one; look at /metrics where it says nothing."""

    def __init__(self, card: WorkerCard, http: aiohttp.ClientSession, *, scrape: bool = False) -> None:
        self.source: Source = "none"
        self.passes: Passes | None = None
        self._http = http
        self._url = card.url
        self._scraped = Scraped(dialect_of(card.engine).counters)
        self._task: asyncio.Task[None] | None = None
        if card.stats is not None and not scrape:
            self.passes = Passes(card.stats)
            self._task = asyncio.create_task(self.passes.run(), name=f"passes-{card.id}")

    async def take(self, *, busy: bool) -> StepStats | None:
        if self.passes is not None and self.passes.heard:
            found = self.passes.take()
            if found.passes or not busy:
                self.source = "plug-in"
                self._scraped.forget()
                return found
        if not self._scraped.possible:
            self.source = "none"
            return None
        self.source = "metrics"
        page = await Server(self._http, self._url).text("/metrics")
        return None if page is None else self._scraped.take(page)

    def close(self) -> None:
        if self.passes is not None:
            self.passes.close()
        if self._task is not None:
            self._task.cancel()

"""Source of an engine's step statistics: its plug-in, its /metrics, or the simulated engine itself."""

import asyncio
from typing import Literal, Protocol

import aiohttp
import msgspec

from penstock.adapters.engines.dialects.dialect_registry import dialect_of
from penstock.adapters.engines.http.engine_http import TIMEOUT, EngineServer
from penstock.adapters.engines.stats.step_stats_metrics import ScrapedSteps
from penstock.adapters.engines.stats.step_stats_plugin import PassSubscriber
from penstock.kernel.values import StepStats, WorkerCard

Source = Literal["engine", "plug-in", "metrics", "none"]
"""The source: the simulated engine (exact), the plug-in (exact, in part), /metrics (estimated), none."""


class StepSource(Protocol):
    """One engine's passes, window by window. It has one reader: what is taken is gone."""

    source: Source

    async def take(self, *, busy: bool) -> StepStats | None:
        """Return the engine's passes since the last call, or None where no source has them.

        Args:
            busy: whether it has had requests since then, as far as we know: then no report does not mean idle.
        """
        ...

    def close(self) -> None:
        """Stop receiving."""
        ...


def steps_of(card: WorkerCard, http: aiohttp.ClientSession, reader: str, *, scrape: bool = False) -> StepSource:
    """Return the source for an engine.

    Args:
        reader: name under which a simulated engine keeps this reader's window.
        scrape: read /metrics only, also where there is a better source.
    """
    if card.engine == "sim" and not scrape:
        return SimSteps(http, card.url, reader)
    return EngineSteps(card, http, scrape=scrape)


class SimSteps:
    """Read a simulated engine's own step statistics."""

    source: Source = "engine"

    def __init__(self, http: aiohttp.ClientSession, url: str, reader: str) -> None:
        self._http = http
        self._url = url.rstrip("/") + "/step_stats"
        self._reader = reader
        self._begun = False

    async def take(self, *, busy: bool) -> StepStats | None:
        try:
            async with self._http.get(
                self._url, params={"reader": self._reader}, timeout=aiohttp.ClientTimeout(total=TIMEOUT)
            ) as answer:
                if answer.status != 200:
                    return None
                window = msgspec.json.decode(await answer.read(), type=StepStats)
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError):
            return None
        if not self._begun:  # the first answer has passes from before this reader began
            self._begun = True
            return None
        return window

    def close(self) -> None:
        return None


class EngineSteps:
    """Read the plug-in where the card names one; read /metrics where the plug-in is silent."""

    def __init__(self, card: WorkerCard, http: aiohttp.ClientSession, *, scrape: bool = False) -> None:
        self.source: Source = "none"
        self.passes: PassSubscriber | None = None
        self._http = http
        self._url = card.url
        self._scraped = ScrapedSteps(dialect_of(card.engine).counters)
        self._task: asyncio.Task[None] | None = None
        if card.stats is not None and not scrape:
            self.passes = PassSubscriber(card.stats)
            self._task = asyncio.create_task(self.passes.run(), name=f"passes-{card.id}")

    async def take(self, *, busy: bool) -> StepStats | None:
        if self.passes is not None and self.passes.passes:
            window = self.passes.take()
            if window.passes or not busy:
                self.source = "plug-in"
                self._scraped.forget()
                return window
        if not self._scraped.possible:
            self.source = "none"
            return None
        self.source = "metrics"
        page = await EngineServer(self._http, self._url).text("/metrics")
        return None if page is None else self._scraped.take(page)

    def close(self) -> None:
        if self.passes is not None:
            self.passes.close()
        if self._task is not None:
            self._task.cancel()

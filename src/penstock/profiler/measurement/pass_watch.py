"""Pass watch: a profile of what an engine's passes took while it served others, at no GPU time of its own.

Only passes that are alike are joined: a window of several passes counts where all decoded as many sequences and none
computed a prompt, and a prompt counts where it was the only one of its pass. Other passes are left out and counted:
a mean of unequal requests is the time of none of them.
"""

import asyncio
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import aiohttp
import msgspec

from penstock.adapters.engines.dialects.dialect import samples
from penstock.adapters.engines.dialects.dialect_registry import dialect_of
from penstock.adapters.engines.http.engine_http import EngineServer
from penstock.adapters.engines.stats.step_stats_source import steps_of
from penstock.config.files.profile_manifest import PointKind, ProfileManifest, ProfilePoint
from penstock.kernel.errors import EngineError
from penstock.kernel.values import StepStats, WorkerCard
from penstock.page.page_file import write_page
from penstock.profiler.measurement.measured_engines import attached_engine, size_of
from penstock.profiler.measurement.profile_page import profile_page, unseen
from penstock.profiler.measurement.profile_run import utc_now
from penstock.profiler.measurement.profile_writer import write_profile

EVERY = 0.005
"""Seconds between two reads: most passes of a GPU are longer, so that a window has one."""
USAGE_EVERY = 1.0
"""Seconds between two reads of KV use, for engines whose passes do not say what they read."""
BIN = 1.1
"""Prompts, contexts and numbers in flight within this factor are one point."""


class PassBook:
    """Collects windows of passes, and makes points of those that are alike.

    Args:
        tp: the engine's tensor-parallel size; ``kv_tokens``: what its cache holds, for those that report only its use.
    """

    def __init__(self, tp: int, kv_tokens: int | None) -> None:
        self.usage: float | None = None
        """Share of the cache that is in use, where passes do not say what they read."""
        self.passes = 0
        self.unequal = 0
        """Passes that were left out."""
        self._tp = tp
        self._kv_tokens = kv_tokens
        self._seconds: dict[tuple[PointKind, int, int, int], list[tuple[float, float, float, float]]]
        self._seconds = defaultdict(list)

    def add(self, window: StepStats) -> None:
        """Take one window."""
        if not window.passes or window.wall is None or "wall" in window.estimated:
            return
        self.passes += window.passes
        kind, tokens, seqs = alike(window)
        kv = self._kv(window)
        if kind is None or (kind != "prefill" and kv is None):
            self.unequal += window.passes
            return
        context = 0.0 if kind == "prefill" or kv is None else kv / seqs
        place = (kind, _bin(tokens), _bin(seqs), _bin(context))
        self._seconds[place].append((window.wall / window.passes, tokens, seqs, context))

    def points(self) -> list[ProfilePoint]:
        """Return the points of all that was seen."""
        points = []
        for (kind, *_), rows in sorted(self._seconds.items()):
            seconds, tokens, seqs, context = zip(*rows, strict=True)
            points.append(
                ProfilePoint(
                    kind=kind,
                    tp=self._tp,
                    tokens=round(statistics.fmean(tokens)),
                    seqs=round(statistics.fmean(seqs)),
                    context=statistics.fmean(context),
                    mean=statistics.fmean(seconds),
                    sd=statistics.stdev(seconds) if len(seconds) > 1 else 0.0,
                    repeats=len(seconds),
                )
            )
        return points

    def _kv(self, window: StepStats) -> float | None:
        if window.decode_kv is not None:
            return window.decode_kv / window.passes
        return None if self.usage is None or self._kv_tokens is None else self.usage * self._kv_tokens


def alike(window: StepStats) -> tuple[PointKind | None, float, float]:
    """Return what all passes of a window did, with prompt tokens and sequences of each; None where they differ."""
    passes, tokens, seqs = window.passes, window.prefill_tokens, window.decode_seqs
    if tokens is None or seqs is None:
        return None, 0.0, 0.0
    if not tokens:
        # By Cauchy's inequality the squares add up to so little only where all are equal.
        equal = window.decode_seqs_sq is not None and window.decode_seqs_sq * passes == seqs * seqs
        return ("decode" if equal and seqs else None), 0.0, seqs / passes
    if passes > 1 or window.prefill_requests != 1:
        return None, 0.0, 0.0
    return ("mixed" if seqs else "prefill"), float(tokens), float(seqs)


async def watch(
    url: str,
    seconds: float,
    out: Path,
    tp: int | None = None,
    stats: str | None = None,
    *,
    now: Callable[[], float] = time.monotonic,
) -> ProfileManifest:
    """Listen to an engine for some seconds, write the profile and return its manifest.

    Args:
        stats: endpoint of its statistics plug-in; a simulated engine needs none.
    Raises:
        EngineError: it can't be reached, or reports no passes.
    """
    async with aiohttp.ClientSession() as http:
        card = await attached_engine(http, url, None, "engine", stats)
        version = (await EngineServer(http, card.url).object("/version")).get("version")
        size = size_of(card, () if tp is None else (tp,))
        book = PassBook(size, card.limits.kv_tokens)
        await _listen(book, card, http, now() + seconds, now)
    points = book.points()
    if not points:
        raise EngineError(
            f"{url} reported no pass that counts: {book.passes} passes, {book.unequal} of unequal requests",
            hint="vLLM reports passes with penstock's plug-in; and somebody must use it meanwhile",
        )
    manifest = ProfileManifest(
        source="production",
        model=card.model,
        engine=card.engine,
        engine_version=version if isinstance(version, str) else None,
        sizes=(size,),
        limits={size: card.limits},
        date=utc_now(),
        seconds=seconds,
        left_out=[
            f"{book.passes:,} passes in {timedelta(seconds=seconds)}; {book.unequal:,} of them, of unequal requests, "
            "were left out."
        ],
    )
    write_profile(out, manifest, points)
    write_page(out / "report.html", profile_page(manifest, points))
    return msgspec.structs.replace(manifest, left_out=[*manifest.left_out, *unseen(manifest, points)])


async def _listen(
    book: PassBook, card: WorkerCard, http: aiohttp.ClientSession, until: float, now: Callable[[], float]
) -> None:
    source, gauge = steps_of(card, http, "profile-watch"), dialect_of(card.engine).counters.kv_usage
    asked = now() - USAGE_EVERY
    try:
        while now() < until:
            window = await source.take(busy=True)
            if window is not None:
                if window.decode_kv is None and gauge is not None and now() - asked >= USAGE_EVERY:
                    asked = now()
                    page = await EngineServer(http, card.url).text("/metrics")
                    book.usage = None if page is None else samples(page).get(gauge)
                book.add(window)
            await asyncio.sleep(EVERY)
    finally:
        source.close()


def _bin(value: float) -> int:
    return round(math.log(value) / math.log(BIN)) if value > 0 else -1

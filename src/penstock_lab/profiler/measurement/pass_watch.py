"""Pass watch: a profile of what engines' passes took while they served others, at no GPU time of its own.

Only passes that are alike are joined: a window of several passes counts where all decoded as many sequences and none
computed a prompt, and a prompt counts where it was the only one of its pass. Other passes are left out and counted:
a mean of unequal requests is the time of none of them. Windows of several engines are joined by the same rule: each is
of one engine, and counts beside those of another where all their passes did the same.
"""

import asyncio
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import aiohttp
import msgspec

from penstock.adapters.engines.dialects.dialect import samples
from penstock.adapters.engines.dialects.dialect_registry import dialect_of
from penstock.adapters.engines.http.engine_access import OPEN, EngineAccess, engine_session
from penstock.adapters.engines.http.engine_http import EngineServer
from penstock.adapters.engines.stats.step_stats_source import steps_of
from penstock.config.files.profile_manifest import PointKind, ProfileManifest, ProfilePoint
from penstock.frontend.admin.admin_answers import ClusterStatus
from penstock.kernel.errors import ConfigError, EngineError
from penstock.kernel.values import StepStats, WorkerCard
from penstock.page.page_file import write_page
from penstock.router.status_rows import WorkerStatus
from penstock_lab.profiler.measurement.measured_engines import attached_engine, size_of
from penstock_lab.profiler.measurement.profile_run import utc_now
from penstock_lab.profiler.measurement.profile_writer import profile_page, unseen, write_profile

STATUS = "/admin/status"


class WatchedEngine(NamedTuple):
    """An engine that is listened to. ``version``: as it says itself; None is unknown."""

    card: WorkerCard
    version: str | None


async def watched_engines(
    http: aiohttp.ClientSession, url: str, model: str | None, key: str | None, stats: str | None
) -> list[WatchedEngine]:
    """Return the engines behind a URL, all of one model, kind and version.

    Args:
        model: which one; None takes the only one. ``key``: of an administrator, where a frontend asks for one.
        stats: endpoint of the statistics plug-in of the engine at the URL; those of a cluster are known to it.
    Raises:
        EngineError: one can't be reached, or a cluster has none.
        ConfigError: they are not of one model, kind and version.
    """
    rows = await _worker_rows(http, url.rstrip("/").removesuffix("/v1"), key)
    if rows is None:
        cards = [await attached_engine(http, url, model, "engine", stats)]
    else:
        rows = [row for row in rows if row.role != "encode" and model in (None, row.model)]
        if not rows:
            raise EngineError(f"the cluster at {url} has no engine" + (f" of {model}" if model else ""))
        cards = [await attached_engine(http, row.url, row.model, row.id, row.stats, row.labels) for row in rows]
    watched = []
    for card in cards:
        version = (await EngineServer(http, card.url).object("/version")).get("version")
        watched.append(WatchedEngine(card, version if isinstance(version, str) else None))
    for what, values in (
        ("models", {each.card.model for each in watched}),
        ("engines", {each.card.engine for each in watched}),
        ("versions", {each.version or "unknown" for each in watched}),
    ):
        if len(values) > 1:
            raise ConfigError(
                f"{url} has engines of {what} {', '.join(sorted(values))}, and a profile is of one",
                hint="name one by --model" if what == "models" else "give the URL of one engine",
            )
    return watched


async def _worker_rows(http: aiohttp.ClientSession, base: str, key: str | None) -> list[WorkerStatus] | None:
    """Return the rows of a cluster's status; None where the server at the URL is no frontend."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        async with http.get(base + STATUS, headers=headers) as answer:
            if answer.status in (401, 403):
                raise ConfigError(f"{base}{STATUS} asks for a key", hint="give --admin-key, or PENSTOCK_ADMIN_KEY")
            if answer.status != 200:
                return None
            return msgspec.json.decode(await answer.read(), type=ClusterStatus).workers
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise EngineError(f"{base} can't be reached: {error}") from error
    except msgspec.DecodeError:
        return None


EVERY = 0.005
"""Seconds between two reads: most passes of a GPU are longer, so that a window has one."""
USAGE_EVERY = 1.0
"""Seconds between two reads of KV use, for engines whose passes do not say what they read."""
BIN = 1.1
"""Prompts, contexts and numbers in flight within this factor are one point."""


UNEVEN = 1.1
"""Times the others' seconds at the same passes from which an engine is named: it may be on another GPU, or ill."""

SamePass = tuple[PointKind, int, int, int, int]
"""Passes of one point: kind, tensor-parallel size, and bins of prompt tokens, sequences and context."""


class PassBook:
    """Collects windows of one engine's passes.

    Args:
        tp: the engine's tensor-parallel size; ``kv_tokens``: what its cache holds, for those that report only its use.
    """

    def __init__(self, tp: int, kv_tokens: int | None, name: str = "engine") -> None:
        self.name = name
        self.windows: dict[SamePass, list[tuple[float, float, float, float]]] = defaultdict(list)
        """Seconds, prompt tokens, sequences and context of each window that counts."""
        self.usage: float | None = None
        """Share of the cache that is in use, where passes do not say what they read."""
        self.passes = 0
        self.unequal = 0
        """Passes that were left out."""
        self.tp = tp
        self._kv_tokens = kv_tokens

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
        place = (kind, self.tp, _context_bin(tokens), _context_bin(seqs), _context_bin(context))
        self.windows[place].append((window.wall / window.passes, tokens, seqs, context))

    def _kv(self, window: StepStats) -> float | None:
        if window.decode_kv is not None:
            return window.decode_kv / window.passes
        return None if self.usage is None or self._kv_tokens is None else self.usage * self._kv_tokens


def points_of(books: Sequence[PassBook]) -> list[ProfilePoint]:
    """Return the points of all that engines were seen to do; each window counts once, whichever engine it is of."""
    points = []
    for place in sorted({place for book in books for place in book.windows}):
        rows = [row for book in books for row in book.windows.get(place, ())]
        seconds, tokens, seqs, context = zip(*rows, strict=True)
        points.append(
            ProfilePoint(
                kind=place[0],
                tp=place[1],
                tokens=round(statistics.fmean(tokens)),
                seqs=round(statistics.fmean(seqs)),
                context=statistics.fmean(context),
                mean=statistics.fmean(seconds),
                sd=statistics.stdev(seconds) if len(seconds) > 1 else 0.0,
                repeats=len(seconds),
            )
        )
    return points


def uneven(books: Sequence[PassBook]) -> list[str]:
    """Return in sentences which engines take another time than the others for the same passes."""
    texts = []
    for book in books:
        ratios = [
            statistics.fmean(row[0] for row in rows) / statistics.fmean(others)
            for place, rows in book.windows.items()
            if (others := [row[0] for other in books if other is not book for row in other.windows.get(place, ())])
        ]
        usual = statistics.median(ratios) if ratios else 1.0
        if not 1.0 / UNEVEN <= usual <= UNEVEN:
            texts.append(f"{book.name} takes {usual:.2f} times the seconds of the others for the same passes.")
    return texts


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
    model: str | None = None,
    key: str | None = None,
    access: EngineAccess = OPEN,
    now: Callable[[], float] = time.monotonic,
) -> ProfileManifest:
    """Listen to an engine, or to all engines of a cluster, for some seconds; write the profile, return its manifest.

    Args:
        url: of the engine, or of a frontend of the cluster.
        tp: tensor-parallel size, where the engines do not say it.
        stats: endpoint of an engine's statistics plug-in; a simulated engine and a cluster need none.
        model: which one of a cluster's; ``key``: of an administrator of it.
        access: what the engines ask for.
    Raises:
        EngineError: an engine can't be reached, or none reports passes.
        ConfigError: the engines are of several models, kinds or versions: one profile is of one.
    """
    async with engine_session(lambda url: access) as http:
        watched = await watched_engines(http, url, model, key, stats)
        subject = watched[0]
        books = []
        for engine in watched:
            size = size_of(engine.card, () if tp is None else (tp,))
            books.append(PassBook(size, engine.card.limits.kv_tokens, str(engine.card.id)))
        until = now() + seconds
        async with asyncio.TaskGroup() as listening:
            for book, engine in zip(books, watched, strict=True):
                listening.create_task(_listen_to_engine(book, engine.card, http, until, now))
    points, passes = points_of(books), sum(book.passes for book in books)
    unequal = sum(book.unequal for book in books)
    if not points:
        raise EngineError(
            f"{url} reported no pass that counts: {passes} passes, {unequal} of unequal requests",
            hint="vLLM reports passes with penstock's plug-in; and somebody must use it meanwhile",
        )
    limits = {book.tp: engine.card.limits for book, engine in zip(books, watched, strict=True)}
    silent = [book.name for book in books if not book.passes]
    manifest = ProfileManifest(
        source="production",
        model=subject.card.model,
        engine=subject.card.engine,
        engine_version=subject.version,
        sizes=tuple(sorted(limits)),
        limits=limits,
        date=utc_now(),
        seconds=seconds,
        left_out=[
            f"{passes:,} passes of {len(books)} engines in {timedelta(seconds=seconds)}; {unequal:,} of them, of "
            "unequal requests, were left out.",
            *([f"No pass was reported by {', '.join(silent)}."] if silent else ()),
            *uneven(books),
        ],
    )
    write_profile(out, manifest, points)
    write_page(out / "report.html", profile_page(manifest, points))
    return msgspec.structs.replace(manifest, left_out=[*manifest.left_out, *unseen(manifest, points)])


async def _listen_to_engine(
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


def _context_bin(value: float) -> int:
    return round(math.log(value) / math.log(BIN)) if value > 0 else -1

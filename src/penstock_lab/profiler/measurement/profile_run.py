"""Run of `penstock profile`: measures every size of an engine, and writes the profile, its tables and its page.

Each point is written to ``measured.jsonl`` as soon as it is known: a run that was cut off goes on where it was.
"""

import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from penstock.adapters.engines.http.engine_access import engine_session, read_access
from penstock.adapters.engines.http.engine_http import EngineServer
from penstock.config.files.profile_manifest import HostCosts, PointKind, ProfileManifest, ProfilePoint
from penstock.config.settings.cluster_settings import PoolSettings
from penstock.kernel.errors import ConfigError
from penstock.kernel.values import EngineLimits, Slo, WorkerCard
from penstock.page.page_file import write_page
from penstock.planner.performance.benchmark_table import nonnegative
from penstock_lab.profiler.measurement.engine_probe import HttpProbe, PointKey
from penstock_lab.profiler.measurement.measured_engines import (
    FoundGpus,
    attached_engine,
    machine_gpus,
    size_of,
    sizes_of,
    started_engine,
)
from penstock_lab.profiler.measurement.profile_writer import profile_page, write_profile
from penstock_lab.profiler.measurement.recommendation import pick_decode, pick_prefill
from penstock_lab.profiler.measurement.sweep import Sweep, SweepOptions


def host_costs(points: Sequence[ProfilePoint]) -> HostCosts:
    """Return the constants; what no engine could be asked for is absent, never assumed."""
    asked = [point for point in points if point.inside is not None]
    return HostCosts(
        pass_gap=_by_size([point for point in asked if point.kind == "decode"]),
        request=_by_size([point for point in asked if point.kind == "prefill"]),
        collectives=collective_seconds(points),
    )


def collective_seconds(points: Sequence[ProfilePoint]) -> float | None:
    """Return what the exchanges of one decode pass cost, as the part that sizes above 1 have and size 1 has not.

    A pass of one sequence takes fixed + work / size + collectives where the size is above 1. That is three unknowns:
    None unless three sizes were measured, 1 among them. What grows with the size counts to the collectives.
    """
    mine = [point for point in points if point.kind == "decode" and point.seqs == 1]
    least = min((point.context for point in mine), default=0.0)
    passes = {p.tp: p.mean if p.inside is None else p.inside for p in mine if p.context <= 1.1 * least}
    if len(passes) < 3 or 1 not in passes:
        return None
    sizes = np.asarray(sorted(passes), dtype=np.float64)
    seconds = np.asarray([passes[int(size)] for size in sizes])
    _, _, several = nonnegative(np.column_stack([1.0 / sizes, sizes > 1.0]).astype(np.float64), seconds)
    return several


def _by_size(points: Sequence[ProfilePoint]) -> dict[int, float]:
    sizes = sorted({point.tp for point in points})
    gaps = {tp: [p.mean - p.inside for p in points if p.tp == tp and p.inside is not None] for tp in sizes}
    return {tp: max(0.0, statistics.median(each)) for tp, each in gaps.items()}


MEASURED, SUBJECT = "measured.jsonl", "measuring.json"


class ProfileOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One profile.

    Args:
        url: of an engine that runs; None starts ``pool``'s. ``partner``: one that it can take KV from. ``stats``:
            endpoint of the statistics plug-in of the one at the URL.
        model: its name for clients; None takes what a URL serves.
        sizes: tensor-parallel sizes; empty takes all that the machine has GPUs for.
        seconds, gpu_hours: after which no point is begun; None has no end. ``gpus``: most that are used.
    """

    sweep: SweepOptions
    out: Path
    slo: Slo
    pool: PoolSettings = PoolSettings()
    model: str | None = None
    url: str | None = None
    partner: str | None = None
    stats: str | None = None
    sizes: tuple[int, ...] = ()
    seconds: float | None = None
    gpu_hours: float | None = None
    gpus: int | None = None


class MeasuredLine(msgspec.Struct, frozen=True):
    """One line of ``measured.jsonl``. ``seconds``: what the point cost."""

    key: PointKey
    point: ProfilePoint
    seconds: float


class ShareOfBudget:
    """The share of time and GPU-hours that one size of those left may use; what it leaves goes to the next.

    Args:
        spent: GPU-seconds of earlier sizes and runs.
        now: seconds of any clock.
    """

    def __init__(
        self, options: ProfileOptions, tp: int, left: int, begun: float, spent: float, now: Callable[[], float]
    ) -> None:
        self._now = now
        start = now()
        ends = []
        if options.seconds is not None:
            ends.append(start + (begun + options.seconds - start) / left)
        if options.gpu_hours is not None:
            ends.append(start + (3600.0 * options.gpu_hours - spent) / left / tp)
        self._end = min(ends, default=None)

    def over(self) -> bool:
        return self._end is not None and self._now() >= self._end


class MeasuredPoints:
    """The points of a profile folder that is being made, on disk as soon as they are known."""

    def __init__(self, folder: Path, now: Callable[[], float] = time.monotonic) -> None:
        self.lines: list[MeasuredLine] = []
        self._path = folder / MEASURED
        self._now = now
        self._since = now()

    def open(self, subject: ProfileManifest) -> None:
        """Read the points of an earlier run of the same engine.

        Raises:
            ConfigError: the folder has points of another one.
        """
        facts = self._path.with_name(SUBJECT)
        if facts.exists():
            before = msgspec.json.decode(facts.read_bytes(), type=ProfileManifest)
            for name in ("model", "engine", "engine_version", "flags", "gpu"):
                old, new = getattr(before, name), getattr(subject, name)
                if old != new:
                    raise ConfigError(
                        f"{facts.parent} has points of {name} {old}, and this is {new}", hint="give another --out"
                    )
        facts.write_bytes(msgspec.json.encode(subject))
        if self._path.exists():
            self.lines = [
                msgspec.json.decode(line, type=MeasuredLine)
                for line in self._path.read_bytes().splitlines(keepends=True)
                if line.endswith(b"\n")  # the last one may have been cut off
            ]
            self._path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in self.lines))

    @property
    def done(self) -> dict[PointKey, ProfilePoint]:
        return {line.key: line.point for line in self.lines}

    @property
    def seconds(self) -> float:
        return sum(line.seconds for line in self.lines)

    @property
    def gpu_seconds(self) -> float:
        return sum(line.seconds * line.key.tp for line in self.lines)

    def begin(self) -> None:
        """What happens from now on belongs to the next point."""
        self._since = self._now()

    def add(self, key: PointKey, point: ProfilePoint) -> None:
        """Keep a point."""
        now = self._now()
        line = MeasuredLine(key, point, now - self._since)
        self._since = now
        self.lines.append(line)
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")


async def run(options: ProfileOptions) -> ProfileManifest:
    """Measure, write the folder and return its manifest.

    Raises:
        ConfigError: the options contradict the machine, or the folder is another engine's.
        EngineError: an engine did not start or answer.
    """
    gpus = machine_gpus(os.environ) if options.url is None else FoundGpus()
    indices = gpus.indices if options.gpus is None else gpus.indices[: options.gpus]
    sizes = sizes_of(options.pool, options.sizes, len(indices)) if options.url is None else ()
    if options.gpus is not None:
        sizes = tuple(size for size in sizes if size <= options.gpus)
    options.out.mkdir(parents=True, exist_ok=True)
    points, limits, left_out, begun = MeasuredPoints(options.out), {}, list[str](), time.monotonic()
    manifest: ProfileManifest | None = None
    access = read_access(options.pool.access, "access")
    async with engine_session(lambda url: access, connector=aiohttp.TCPConnector(limit=0)) as http:
        for place, tp in enumerate(sizes or (0,)):
            if manifest is not None and ShareOfBudget(options, tp, 1, begun, points.gpu_seconds, time.monotonic).over():
                left_out.append(f"TP {tp}: time was up before its engine was started")
                continue
            async with _engine_of_size(options, tp, http, indices, points, first=place == 0) as (card, size, starts):
                if manifest is None:
                    manifest = await _measured_subject(options, card, gpus, http)
                    points.open(manifest)
                limits[size] = card.limits
                points.begin()
                if starts is not None and (key := PointKey("cold_start", size)) not in points.done:
                    points.add(key, _start_point(key.kind, size, starts))
                budget = ShareOfBudget(
                    options, size, max(1, len(sizes) - place), begun, points.gpu_seconds, time.monotonic
                )
                partner = None
                if options.partner is not None:
                    partner = await attached_engine(http, options.partner, card.model, "partner")
                probe = HttpProbe(http, card, partner)
                swept = msgspec.structs.replace(options.sweep, ttft=options.slo.ttft, itl=options.slo.itl)
                try:
                    with _shown_progress(f"TP {size}") as begun_point:
                        sweep = Sweep(probe, size, swept, points.done, budget, record=points.add, begun=begun_point)
                        await sweep.run()
                finally:
                    probe.close()
                left_out += sweep.left_out
            warm = PointKey("warm_start", size)
            if starts is not None and warm not in points.done and not budget.over():
                points.begin()
                async with started_engine(http, card.model, options.pool, tp, indices, options.out / "logs") as again:
                    points.add(warm, _start_point("warm_start", size, again.seconds))
    assert manifest is not None
    manifest = finished(manifest, options, points, limits, left_out)
    measured = list(points.done.values())
    write_profile(options.out, manifest, measured)
    write_page(options.out / "report.html", profile_page(manifest, measured))
    return manifest


def finished(
    subject: ProfileManifest,
    options: ProfileOptions,
    points: MeasuredPoints,
    limits: dict[int, EngineLimits[int | None]],
    left_out: list[str],
) -> ProfileManifest:
    """Return the manifest with what was measured and picked."""
    measured, shape, slo = list(points.done.values()), options.sweep.shape, options.slo
    return msgspec.structs.replace(
        subject,
        sizes=tuple(sorted({point.tp for point in measured})) or tuple(sorted(limits)),
        limits=limits,
        date=utc_now(),
        seconds=points.seconds,
        gpu_seconds=points.gpu_seconds,
        prefill=pick_prefill(measured, options.sweep.isl, slo.ttft),
        decode=pick_decode(measured, shape, slo.itl, limits),
        host=host_costs(measured),
        left_out=left_out,
    )


def utc_now() -> str:
    """Return the time of day, for people."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@asynccontextmanager
async def _engine_of_size(
    options: ProfileOptions,
    tp: int,
    http: aiohttp.ClientSession,
    indices: tuple[int, ...],
    points: MeasuredPoints,
    *,
    first: bool,
) -> AsyncIterator[tuple[WorkerCard, int, float | None]]:
    """Yield an engine's card, its size, and the seconds of its start where it was started here."""
    if options.url is not None:
        card = await attached_engine(http, options.url, options.model, "engine", options.stats)
        yield card, size_of(card, options.sizes), None
        return
    if options.model is None:
        raise ConfigError("neither a model nor a URL is given", hint="penstock profile MODEL, or penstock profile URL")
    async with started_engine(http, options.model, options.pool, tp, indices, options.out / "logs") as engine:
        yield engine.card, tp, engine.seconds


async def _measured_subject(
    options: ProfileOptions, card: WorkerCard, gpus: FoundGpus, http: aiohttp.ClientSession
) -> ProfileManifest:
    version = (await EngineServer(http, card.url).object("/version")).get("version")
    flags = [] if options.url is not None else list(options.pool.args)
    if options.url is None and options.pool.engine == "sim":
        flags = [msgspec.json.encode(options.pool.sim).decode()]
    return ProfileManifest(
        model=card.model,
        engine=card.engine,
        engine_version=version if isinstance(version, str) else None,
        flags=flags,
        gpu=gpus.name or (options.pool.sim.timing.gpu if options.url is None else None),
        gpu_memory_mib=gpus.memory_mib,
        gpu_count=len(gpus.indices),
        links=gpus.links,
        shape=options.sweep.shape,
        slo=options.slo,
    )


def _start_point(kind: PointKind, tp: int, seconds: float) -> ProfilePoint:
    return ProfilePoint(kind=kind, tp=tp, mean=seconds)


@contextmanager
def _shown_progress(what: str) -> Iterator[Callable[[PointKey], None]]:
    """Show which point is measured, on a terminal; elsewhere nothing."""
    if not sys.stderr.isatty():
        yield lambda key: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.completed} points,"), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        line = bar.add_task(what, total=None)

        def begun(key: PointKey) -> None:
            bar.update(line, advance=1, description=str(key))

        yield begun

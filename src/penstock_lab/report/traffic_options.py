"""Traffic options of commands: a trace from disk, with errors that name the file, or a workload, read as requests."""

import gzip
import itertools
import random
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.config.reading.units import parse_number
from penstock.kernel.errors import ConfigError
from penstock.kernel.plurals import counted
from penstock.runtime.records import segments
from penstock_lab.traffic import trace_slices
from penstock_lab.traffic.arrival_patterns import parse_arrivals
from penstock_lab.traffic.formats.table_trace import check_columns
from penstock_lab.traffic.formats.time_units import TimeUnit
from penstock_lab.traffic.formats.trace_format import Format, reader
from penstock_lab.traffic.formats.trace_rows import TraceRequests
from penstock_lab.traffic.formats.trace_tables import NAMED
from penstock_lab.traffic.image_spec import IMAGE_KINDS
from penstock_lab.traffic.inline_spec import parse
from penstock_lab.traffic.lengths import parse_lengths
from penstock_lab.traffic.planned_sessions import Form
from penstock_lab.traffic.traffic_request import TrafficRequest
from penstock_lab.traffic.workloads import SETTLE, Name, Plain, images, plain, workload


@contextmanager
def opened(
    path: Path,
    format_name: Format | None,
    *,
    block_size: int | None,
    skip_bad: bool,
    time_unit: TimeUnit | None = None,
    columns: str | None = None,
) -> Iterator[TraceRequests]:
    """Open a trace, whose requests are read on demand; ``.gz`` is unpacked.

    The records of a run are read with all their segments. ``columns``: ``WHAT=NAME,...``, see `check_columns`.

    Raises:
        ConfigError: the file can't be read, matches no format, or has a bad row that is not to be skipped.
    """
    named = None if columns is None else check_columns(columns, NAMED)
    with reading(path), _trace_lines(path) as file:
        yield reader(
            format_name,
            file,
            name=str(path),
            skip_bad=skip_bad,
            block_size=block_size,
            time_unit=time_unit,
            columns=named,
        )


def trace_notes(trace: TraceRequests) -> list[str]:
    """Return what is to be said aloud of a trace that was read to its end: what was taken for granted and left out."""
    notes = list(trace.notes)
    if trace.unanswered:
        notes.append(f"left out: {counted(trace.unanswered, 'request')} of the trace without an answer")
    if trace.skipped:
        notes.append(f"skipped: {counted(trace.skipped, 'bad row')} of the trace; the first: {trace.errors[0].message}")
    return notes


@contextmanager
def _trace_lines(path: Path) -> Iterator[Iterable[bytes]]:
    if path.name == "requests.jsonl" and (path.parent / "run.json").exists() and segments.there(path):
        # Only in a run folder: elsewhere a file of a similar name is another trace.
        yield (line for file in segments.opened(path) for line in file)
        return
    with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as file:
        yield file


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors of a file while the block runs into a `ConfigError` that names it."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror or error}") from error
    except (EOFError, zlib.error, tarfile.TarError) as error:
        raise ConfigError(f"{path} can't be unpacked: {error}", hint="the file may have been cut off") from error


DURATION = 60.0
"""Seconds of a workload where neither a number of requests nor a duration is given."""
ROUNDS = 10
"""Requests of each client in that case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficOptions:
    """Requested traffic. Times in seconds, lengths in tokens.

    Args:
        trace: a file, in ``trace_format`` or in the one that its first lines match; or else ``workload`` at
            ``rate`` requests per second, spaced by ``arrivals`` (`penstock_lab.traffic.arrival_patterns`). A trace
            without times comes at that rate, too.
        trace_block_size: tokens per hash id, where the rows don't have it. trace_time_unit: of its times, and
        trace_columns (``WHAT=NAME,...``), where they don't say them. trace_start, trace_end: slice of its clock.
        spread_ties: spread requests of one timestamp evenly up to the next one.
        skip_bad: leave bad rows of the trace out and count them.
        prompt, answer: lengths of the workload ``fixed``, such as ``1k`` or ``lognormal:median=800``.
        form: workload prompts as token ids or as text messages.
        requests, duration: end after so many requests or seconds, whichever comes first; unset, a trace runs to its
            end and a workload for 60 s.
        speed_up: all requests arrive so many times faster than in the trace or workload.
        images: the workload ``images``, such as ``count=2,side=1024,repeats=0.5``.
        seed: same seed, same requests.
    """

    trace: Path | None = None
    trace_format: Format | None = None
    trace_block_size: int | None = None
    trace_time_unit: TimeUnit | None = None
    trace_columns: str | None = None
    trace_start: float = 0.0
    trace_end: float | None = None
    spread_ties: bool = False
    skip_bad: bool = False
    workload: Name | None = None
    rate: float = 4.0
    arrivals: str = "poisson"
    prompt: str | None = None
    answer: str | None = None
    images: str | None = None
    form: Form = "tokens"
    requests: int | None = None
    duration: float | None = None
    speed_up: float = 1.0
    seed: int = 0


def of_trace(options: TrafficOptions) -> tuple[list[TrafficRequest], TraceRequests]:
    """Read the requested slice of a trace; also the whole trace as read, with what is to be said of it (`trace_notes`).

    Raises:
        ConfigError: the trace can't be read, has a bad row, or nothing in the slice.
    """
    path = options.trace
    assert path is not None
    with opened(
        path,
        options.trace_format,
        block_size=options.trace_block_size,
        skip_bad=options.skip_bad,
        time_unit=options.trace_time_unit,
        columns=options.trace_columns,
    ) as trace:
        requests = list(trace)
    if not trace.timed:
        requests = list(trace_slices.paced(requests, options.rate, random.Random(options.seed)))
        trace.notes.append(f"the trace has no times: its requests come at {options.rate:g} per second, as --rate says")
    start = options.trace_start
    chosen = trace_slices.rebase(trace_slices.by_time(requests, start, options.trace_end), start)
    if options.spread_ties:
        chosen = trace_slices.spread_ties(chosen)
    scaled = list(trace_slices.scale_rate(chosen, options.speed_up))
    if not scaled:
        raise ConfigError(
            f"the trace {path} has no request in the slice that was asked for",
            hint="--trace-start and --trace-end are seconds of the trace's own clock; 'penstock trace info' shows it",
        )
    return scaled, trace


def of_workload(options: TrafficOptions) -> Iterator[TrafficRequest]:
    """Return the endless stream of a workload.

    Raises:
        ConfigError: the arrivals or the lengths can't be read.
    """
    pattern = parse_arrivals(options.arrivals, parse_number)
    rng, own = random.Random(options.seed), random.Random(options.seed + 1)
    name = options.workload or "chat"
    shape = Plain()
    if options.prompt is not None or options.answer is not None:
        if name != "fixed":
            raise ConfigError(f"--prompt and --answer are of the workload fixed, not of {name}")
        if options.prompt is not None:
            shape = Plain(prompt=parse_lengths(options.prompt, parse_number, what="--prompt"), answer=shape.answer)
        if options.answer is not None:
            shape = Plain(prompt=shape.prompt, answer=parse_lengths(options.answer, parse_number, what="--answer"))

    if options.images is not None and name != "images":
        raise ConfigError(f"--images is of the workload images, not of {name}")

    def starts(rate: float) -> Iterator[float]:
        # Arrivals left out at the start of a workload of sessions come before second 0 of the shape.
        return pattern.stream(rate, own, lead=SETTLE.get(name, 0.0))

    if name == "fixed":
        requests = plain(options.rate, rng, form=options.form, shape=shape, starts=starts, kind=name)
    elif name == "images":
        spec = parse("--images", f"images:{options.images}" if options.images else name, IMAGE_KINDS, parse_number)
        requests = images(options.rate, rng, form=options.form, shape=spec.shape(), starts=starts)
    else:
        requests = workload(name, options.rate, rng, form=options.form, starts=starts)
    return trace_slices.scale_rate(requests, options.speed_up)


def of_clients(options: TrafficOptions, clients: int) -> Iterator[TrafficRequest]:
    """Return a workload's requests, dealt out to so many clients, each with one request at a time.

    Raises:
        ConfigError: as `of_workload`.
    """
    count = options.requests
    if count is None and options.duration is None:
        count = ROUNDS * clients
    for number, request in enumerate(itertools.islice(of_workload(options), count)):
        client, turn = number % clients, number // clients
        yield msgspec.structs.replace(request, at=0.0, session=f"client-{client}", turn=turn, think=0.0)


def cut(options: TrafficOptions, source: Iterator[TrafficRequest]) -> Iterator[TrafficRequest]:
    """End a stream after the requested number of requests and time; a workload has one of them."""
    if options.requests is not None:
        source = itertools.islice(source, options.requests)
    until = options.duration
    if until is None and options.trace is None and options.requests is None:
        until = DURATION
    return source if until is None else itertools.takewhile(lambda request: request.at < until, source)

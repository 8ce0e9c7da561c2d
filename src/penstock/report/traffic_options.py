"""Traffic options of bench and simulate: a slice of a trace or a workload, read as requests."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.config.reading.units import parse_number
from penstock.kernel.errors import ConfigError
from penstock.report.trace_file import opened
from penstock.traffic import trace_slices
from penstock.traffic.arrival_patterns import parse_arrivals
from penstock.traffic.formats.trace_format import Format
from penstock.traffic.formats.trace_rows import TraceRequests
from penstock.traffic.lengths import parse_lengths
from penstock.traffic.traffic_request import TrafficRequest
from penstock.traffic.workloads import SETTLE, Form, Name, Plain, plain, workload

DURATION = 60.0
"""Seconds of a workload where neither a number of requests nor a duration is given."""
ROUNDS = 10
"""Requests of each client in that case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficOptions:
    """Requested traffic. Times in seconds, lengths in tokens.

    Args:
        trace: a file, in ``trace_format`` or in the one that its first lines match; or else ``workload`` at
            ``rate`` requests per second, spaced by ``arrivals`` (`penstock.traffic.arrival_patterns`).
        trace_block_size: tokens per hash id, where the rows don't have it. trace_start, trace_end: slice of its clock.
        spread_ties: spread requests of one timestamp evenly up to the next one.
        skip_bad: leave bad rows of the trace out and count them.
        prompt, answer: lengths of the workload ``fixed``, such as ``1k`` or ``lognormal:median=800``.
        form: workload prompts as token ids or as text messages.
        requests, duration: end after so many requests or seconds, whichever comes first; unset, a trace runs to its
            end and a workload for 60 s.
        speed_up: all requests arrive so many times faster than in the trace or workload.
        seed: same seed, same requests.
    """

    trace: Path | None = None
    trace_format: Format | None = None
    trace_block_size: int | None = None
    trace_start: float = 0.0
    trace_end: float | None = None
    spread_ties: bool = False
    skip_bad: bool = False
    workload: Name | None = None
    rate: float = 4.0
    arrivals: str = "poisson"
    prompt: str | None = None
    answer: str | None = None
    form: Form = "tokens"
    requests: int | None = None
    duration: float | None = None
    speed_up: float = 1.0
    seed: int = 0


def of_trace(asked: TrafficOptions) -> tuple[list[TrafficRequest], TraceRequests]:
    """Read the requested slice of a trace; also the whole trace as read, with its skipped rows.

    Kept whole: a trace's hash ids are a few MB, and its rows need not be in order of time.

    Raises:
        ConfigError: the trace can't be read, has a bad row, or nothing in the slice.
    """
    path = asked.trace
    assert path is not None
    with opened(path, asked.trace_format, block_size=asked.trace_block_size, skip_bad=asked.skip_bad) as trace:
        requests = sorted(trace, key=lambda request: request.at)
    found = trace_slices.rebase(trace_slices.by_time(requests, asked.trace_start, asked.trace_end), asked.trace_start)
    if asked.spread_ties:
        found = trace_slices.spread_ties(found)
    kept = list(trace_slices.scale_rate(found, asked.speed_up))
    if not kept:
        raise ConfigError(
            f"the trace {path} has no request in the slice that was asked for",
            hint="--trace-start and --trace-end are seconds of the trace's own clock; 'penstock trace info' shows it",
        )
    return kept, trace


def of_workload(asked: TrafficOptions) -> Iterator[TrafficRequest]:
    """Return the endless stream of a workload.

    Raises:
        ConfigError: the arrivals or the lengths can't be read.
    """
    pattern = parse_arrivals(asked.arrivals, parse_number)
    rng, own = random.Random(asked.seed), random.Random(asked.seed + 1)
    name = asked.workload or "chat"
    shape = Plain()
    if asked.prompt is not None or asked.answer is not None:
        if name != "fixed":
            raise ConfigError(f"--prompt and --answer are of the workload fixed, not of {name}")
        if asked.prompt is not None:
            shape = Plain(prompt=parse_lengths(asked.prompt, parse_number, what="--prompt"), answer=shape.answer)
        if asked.answer is not None:
            shape = Plain(prompt=shape.prompt, answer=parse_lengths(asked.answer, parse_number, what="--answer"))

    def starts(rate: float) -> Iterator[float]:
        # Arrivals left out at the start of a workload of sessions come before second 0 of the shape.
        return pattern.stream(rate, own, lead=SETTLE.get(name, 0.0))

    if name == "fixed":
        found = plain(asked.rate, rng, form=asked.form, shape=shape, starts=starts, kind=name)
    else:
        found = workload(name, asked.rate, rng, form=asked.form, starts=starts)
    return trace_slices.scale_rate(found, asked.speed_up)


def of_clients(asked: TrafficOptions, clients: int) -> Iterator[TrafficRequest]:
    """Return a workload's requests, dealt out to so many clients, each with one request at a time.

    Raises:
        ConfigError: as `of_workload`.
    """
    count = asked.requests
    if count is None and asked.duration is None:
        count = ROUNDS * clients
    for number, request in enumerate(itertools.islice(of_workload(asked), count)):
        client, turn = number % clients, number // clients
        yield msgspec.structs.replace(request, at=0.0, session=f"client-{client}", turn=turn, think=0.0)


def cut(asked: TrafficOptions, source: Iterator[TrafficRequest]) -> Iterator[TrafficRequest]:
    """End a stream after the requested number of requests and time; a workload has one of them."""
    if asked.requests is not None:
        source = itertools.islice(source, asked.requests)
    until = asked.duration
    if until is None and asked.trace is None and asked.requests is None:
        until = DURATION
    return source if until is None else itertools.takewhile(lambda request: request.at < until, source)

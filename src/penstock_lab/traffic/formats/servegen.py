"""Draws requests from the rates and lengths of ServeGen's measured clients -> `TrafficRequest`s.

An archive has two files per client: ``chunk-N-trace.csv`` with a row per window (start in seconds, requests per second,
CV, family of the gaps, two parameters), and for some clients ``chunk-N-dataset.json`` with histograms of prompt and
output lengths per span of time. Requests are drawn per client: on average each window has exactly its rate, and the
fitted family only shapes the gaps. Lengths come from the client's latest span that has any; a client without
histograms draws from those of the others, weighted by their rates. Nothing is known of prefixes, so prompts share
nothing.
Source: alibaba/ServeGen (arXiv 2505.09999).
"""

import bisect
import heapq
import math
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import msgspec

from penstock.kernel.errors import ConfigError
from penstock_lab.traffic.formats.trace_rows import RowProblem, Rows, number_of, split_cells
from penstock_lab.traffic.lengths import Empirical
from penstock_lab.traffic.rate_profiles import PiecewiseProfile, TimeWarp, first_gap, gap
from penstock_lab.traffic.traffic_request import TrafficRequest

WINDOW = 600.0
"""Seconds of a window."""
SHAPE_LEAST = {"Gamma": 0.001, "Weibull": 0.05}
"""Family -> least shape. Below it thousands of gaps are as good as 0 for each one that is not. In the archive of
m-large the least are 0.011 and 0.179."""
_LITERAL_KEY = re.compile(r"(\d+)\s*:")


class ServegenWindow(NamedTuple):
    """One client's arrivals from ``start`` on: requests per second, and the family and shape of their gaps."""

    start: float
    rate: float
    family: str
    shape: float


class ServegenSpan(NamedTuple):
    """One client's lengths from ``start`` on."""

    start: float
    prompt: Empirical
    answer: Empirical


class RateRows(Rows[ServegenWindow]):
    """Iterate over the windows of ``chunk-N-trace.csv``."""

    def __iter__(self) -> Iterator[ServegenWindow]:
        return self.good()

    def _row(self, line: str | bytes) -> ServegenWindow:
        cells = split_cells(line)
        if len(cells) != 6:
            raise RowProblem("(whole row)", cells, "start, rate, CV, family and its two parameters are needed")
        start = number_of("start", _float_or_text(cells[0]), "seconds")
        rate = number_of("rate", _float_or_text(cells[1]), "requests per second")
        if rate == 0.0:
            return ServegenWindow(start, 0.0, "", 1.0)
        if cells[3] not in SHAPE_LEAST:
            raise RowProblem("family", cells[3], f"one of {', '.join(SHAPE_LEAST)} is needed")
        shape = _float_or_text(cells[4])
        least = SHAPE_LEAST[cells[3]]
        if not isinstance(shape, float) or not least <= shape < math.inf:
            raise RowProblem("shape", shape, f"{cells[3]} gaps need a number from {least} on")
        return ServegenWindow(start, rate, cells[3], shape)


def read_spans(text: bytes, name: str) -> list[ServegenSpan]:
    """Read ``chunk-N-dataset.json``; spans without a request are left out.

    Raises:
        ConfigError: it is not of that form; names file, span and field.
    """
    try:
        rows = msgspec.json.decode(text, type=dict[str, dict[str, str]])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{name}: {error}", hint="each span has input_tokens and output_tokens") from error
    spans: list[ServegenSpan] = []
    for start, fields in rows.items():
        prompt, answer = (_read_histogram(name, start, fields, key) for key in ("input_tokens", "output_tokens"))
        if prompt is not None and answer is not None:
            spans.append(ServegenSpan(float(start), prompt, answer))
    return sorted(spans, key=lambda span: span.start)


@dataclass(frozen=True, slots=True)
class ServegenClient:
    """One client of the archive; ``rate`` is its requests per second over time."""

    name: str
    windows: Sequence[ServegenWindow]
    spans: Sequence[ServegenSpan]
    rate: PiecewiseProfile


def make_client(name: str, windows: Iterable[ServegenWindow], spans: Sequence[ServegenSpan]) -> ServegenClient:
    """Put a client together; where it has no window it sends nothing.

    Raises:
        ConfigError: it has no window, or two that begin alike.
    """
    ordered = sorted(windows)
    if not ordered:
        raise ConfigError(f"{name} has no window with a rate", hint="look whether the file is whole")
    for before, after in pairwise(ordered):
        if before.start == after.start:
            raise ConfigError(f"{name} has two windows that begin at {after.start:g} s", hint="leave one of them out")
    filled: list[ServegenWindow] = []
    end = 0.0
    for window in ordered:
        if window.start > end:
            filled.append(ServegenWindow(end, 0.0, "", 1.0))
        filled.append(window)
        end = window.start + WINDOW
    filled.append(ServegenWindow(end, 0.0, "", 1.0))
    rate = PiecewiseProfile([window.start for window in filled], [window.rate for window in filled])
    return ServegenClient(name, filled, spans, rate)


def rate_over_time(clients: Sequence[ServegenClient]) -> list[tuple[float, float]]:
    """Return (start in seconds, requests per second of all clients together) for each window."""
    total: dict[float, float] = {}
    for client in clients:
        for window in client.windows:
            total[window.start] = total.get(window.start, 0.0) + window.rate
    return sorted(total.items())


def draw(
    clients: Sequence[ServegenClient],
    rng: random.Random,
    *,
    start: float = 0.0,
    end: float = math.inf,
    factor: float = 1.0,
) -> Iterator[TrafficRequest]:
    """Yield the requests of all clients in order of arrival; ``at`` counts from ``start``, ``kind`` is the client.

    Args:
        start, end: seconds of the archive's clock.
        factor: every rate is multiplied by it.

    Raises:
        ConfigError: no client has lengths.
    """
    others = _Others(clients)
    streams = [
        _requests_of(client, others, random.Random(rng.getrandbits(64)), start, end, factor) for client in clients
    ]
    return heapq.merge(*streams, key=lambda request: request.at)


def _requests_of(
    client: ServegenClient, others: "_Others", rng: random.Random, start: float, end: float, factor: float
) -> Iterator[TrafficRequest]:
    starts = [window.start for window in client.windows]
    spans_from = [span.start for span in client.spans]
    warp = TimeWarp(client.rate, factor, start)
    at = warp.after(_drawn_gap(client.windows[_place_of(starts, start)], rng, first=True))
    while at < end:
        span = client.spans[_place_of(spans_from, at)] if spans_from else others.sample(rng)
        yield TrafficRequest(at=at - start, isl=span.prompt.sample(rng), osl=span.answer.sample(rng), kind=client.name)
        at = warp.after(_drawn_gap(client.windows[_place_of(starts, at)], rng))


class _Others:
    """The spans of all clients that have lengths, each as likely as its requests are many."""

    def __init__(self, clients: Sequence[ServegenClient]) -> None:
        self._spans: list[ServegenSpan] = []
        shares: list[float] = []
        for client in clients:
            ends = [*(span.start for span in client.spans[1:]), client.windows[-1].start]
            for span, end in zip(client.spans, ends, strict=False):
                share = client.rate.expected(end) - client.rate.expected(span.start)
                if share > 0.0:
                    self._spans.append(span)
                    shares.append(share)
        if not shares:
            raise ConfigError(
                "no client has lengths", hint="at least one chunk-N-dataset.json with a histogram is needed"
            )
        self._which = Empirical(range(len(shares)), shares)

    def sample(self, rng: random.Random) -> ServegenSpan:
        """Draw one span."""
        return self._spans[self._which.sample(rng)]


def _drawn_gap(window: ServegenWindow, rng: random.Random, *, first: bool = False) -> float:
    """Draw a gap of mean 1; the first one as an observer at any time finds it (see `rate_profiles.first_gap`)."""
    shape = window.shape
    if window.family != "Weibull":
        cv = 1.0 / math.sqrt(shape)
        return first_gap(cv, rng) if first else gap(cv, rng)
    scale = 1.0 / math.gamma(1.0 + 1.0 / shape)
    if first:  # a Weibull gap weighted by its length: its power ``shape`` is gamma-distributed
        return rng.random() * scale * math.pow(rng.gammavariate(1.0 + 1.0 / shape, 1.0), 1.0 / shape)
    return rng.weibullvariate(scale, shape)


def _read_histogram(name: str, start: str, fields: dict[str, str], key: str) -> Empirical | None:
    """Read a histogram, which stands in the file as the text of a Python dict; None where it is empty."""
    text = fields.get(key, "")
    try:
        # JSON wants its keys quoted.
        counts = msgspec.json.decode(_LITERAL_KEY.sub(r'"\1":', text), type=dict[int, float])
        float(start)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(
            f"{name}: span {start}, field {key}: {error}", hint="{length: share, ...} is needed"
        ) from error
    counts = {length: share for length, share in counts.items() if length > 0 and share > 0.0}
    return Empirical.of_histogram(counts) if counts else None


def _place_of(starts: Sequence[float], at: float) -> int:
    return max(0, bisect.bisect_right(starts, at) - 1)


def _float_or_text(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text

"""Summary of a trace: its span, rate over time, token lengths, sessions, and what a cache could hit of it."""

import math
from array import array
from collections.abc import Iterable

import msgspec
import numpy as np

from penstock_lab.traffic.hit_rate_bound import InfiniteCache
from penstock_lab.traffic.traffic_request import TrafficRequest

WIDTHS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400, 604_800)
"""Widths in seconds that a window of the rate over time may have."""
WINDOWS = 12
"""Most windows that the rate over time is reported in, unless they would be longer than a week."""


class TraceSpread(msgspec.Struct, frozen=True, kw_only=True):
    """How a number is spread over the requests."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float
    total: float


class RateWindow(msgspec.Struct, frozen=True, kw_only=True):
    """What arrived in one stretch of time; ``start_s`` seconds, rates per second of its width."""

    start_s: float
    requests: int
    requests_per_s: float
    prompt_tokens_per_s: float


class TraceSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A trace in numbers. ``span_s``: from first to last arrival. What is not known is None.

    ``peak_per_s`` is the rate of the busiest window of ``window_s``. ``named_share``: share of the prompt tokens whose
    blocks have ids. ``bound``: share of the prompt tokens that one infinite cache would hit, None without any ids.
    """

    requests: int
    start_s: float | None
    span_s: float | None
    requests_per_s: float | None
    window_s: float
    peak_per_s: float | None
    windows: list[RateWindow]
    prompts: TraceSpread | None = msgspec.field(name="isl")
    outputs: TraceSpread | None = msgspec.field(name="osl")
    named_share: float | None
    block_size: int
    bound: float | None
    sessions: int
    turns_per_session: float | None
    think_s: TraceSpread | None
    kinds: dict[str, int]


def summarise(requests: Iterable[TrafficRequest], *, block_size: int) -> TraceSummary:
    """Go through a trace once.

    Args:
        requests: in order of arrival, as `InfiniteCache` needs them.
        block_size: tokens per block of an engine, for the bound.
    Memory: 24 bytes per request, and the different ids.
    """
    times, prompts, answers, thinks = array("d"), array("q"), array("q"), array("d")
    cache = InfiniteCache(block_size)
    named = 0
    turns: dict[str, int] = {}
    kinds: dict[str, int] = {}
    for request in requests:
        times.append(request.at)
        prompts.append(request.isl)
        answers.append(request.osl)
        if request.hash_ids:
            named += min(request.isl, len(request.hash_ids) * request.block_size)
        cache.hit(request)
        if request.session is not None:
            turns[request.session] = turns.get(request.session, 0) + 1
        if request.think is not None:
            thinks.append(request.think)
        if request.kind is not None:
            kinds[request.kind] = kinds.get(request.kind, 0) + 1
    start = min(times) if times else None
    span = max(times) - min(times) if times else None
    width, windows = _rate_windows(times, prompts)
    return TraceSummary(
        requests=len(times),
        start_s=start,
        span_s=span,
        requests_per_s=mean_rate(len(times), span),
        window_s=width,
        peak_per_s=max((window.requests_per_s for window in windows), default=None),
        windows=windows,
        prompts=_value_spread(prompts),
        outputs=_value_spread(answers),
        named_share=named / cache.tokens if cache.tokens else None,
        block_size=block_size,
        bound=cache.share if named else None,
        sessions=len(turns),
        turns_per_session=sum(turns.values()) / len(turns) if turns else None,
        think_s=_value_spread(thinks),
        kinds=dict(sorted(kinds.items())),
    )


def mean_rate(requests: int, span: float | None) -> float | None:
    """Return arrivals per second: gaps between requests over their time; None where there is no gap."""
    return (requests - 1) / span if span else None


def _rate_windows(times: "array[float]", prompts: "array[int]") -> tuple[float, list[RateWindow]]:
    """Return the width of a window in seconds and the windows from the first arrival's to the last's."""
    if not times:
        return float(WIDTHS[0]), []
    first, last = min(times), max(times)
    width = next((each for each in WIDTHS if _window_count(first, last, each) <= WINDOWS), WIDTHS[-1])
    lowest = math.floor(first / width)
    places = np.floor_divide(np.frombuffer(times), width).astype(np.int64) - lowest
    counts = np.bincount(places)
    tokens = np.bincount(places, weights=np.frombuffer(prompts, dtype=np.int64))
    return float(width), [
        RateWindow(
            start_s=float((lowest + place) * width),
            requests=int(count),
            requests_per_s=float(count / width),
            prompt_tokens_per_s=float(token / width),
        )
        for place, (count, token) in enumerate(zip(counts, tokens, strict=True))
    ]


def _window_count(first: float, last: float, width: float) -> int:
    return math.floor(last / width) - math.floor(first / width) + 1


def _value_spread(values: "array[int] | array[float]") -> TraceSpread | None:
    if not values:
        return None
    array = np.frombuffer(values, dtype=np.int64 if values.typecode == "q" else np.float64)
    p50, p90, p99 = np.percentile(array, (50, 90, 99))
    return TraceSpread(
        mean=float(array.mean()),
        p50=float(p50),
        p90=float(p90),
        p99=float(p99),
        max=float(array.max()),
        total=float(array.sum()),
    )

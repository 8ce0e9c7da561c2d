"""`PlannedTraffic`: the requests that a deployment is planned for, and their rates and lengths for closed forms."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.config.reading.units import parse_number
from penstock.kernel.errors import ConfigError
from penstock.kernel.latency_bins import Bins
from penstock.kernel.plurals import counted
from penstock.planner.sizing.workload_mix import WorkloadMix, count_into, shape_bin
from penstock_lab.profiler.deployment_plan.plan_request import PlanRequest
from penstock_lab.report.traffic_options import TrafficOptions, cut, of_trace, of_workload, trace_notes
from penstock_lab.traffic.hit_rate_bound import InfiniteCache
from penstock_lab.traffic.lengths import parse_lengths
from penstock_lab.traffic.trace_slices import scale_rate
from penstock_lab.traffic.traffic_request import TrafficRequest

Floats = npt.NDArray[np.float64]

BLOCK = 16
"""Tokens per KV block of the planned engines: vLLM's default."""
WINDOW = 60.0
"""Seconds of a trace that count as one rate: engines forget a burst within that time."""
LEVELS = 12
"""Rates that a trace's windows are reduced to."""
HIT_SHARE = 0.5
"""Share of what one infinite cache would hit that closed forms count on. A guess: caches are finite and several. The
simulation has the caches themselves."""
REQUESTS_LEAST, REQUESTS_MOST = 1_000, 20_000
"""Requests of made-up traffic: enough for a 99th percentile, few enough for a simulation of about a minute."""
LIVES = 5.0
"""Lives of a request that made-up traffic covers: in the first one a cluster is not full yet."""


@dataclass(frozen=True, slots=True)
class PlannedTraffic:
    """Requests in the order of arrival, with their mix; ``rates`` per second and their ``weights``, which sum to 1."""

    requests: Sequence[TrafficRequest]
    mix: WorkloadMix
    rates: Floats
    weights: Floats
    longest: int
    """Tokens of prompt and answer of the longest request."""
    notes: tuple[str, ...] = ()
    rate_given: float | None = None
    """Requests per second that were asked for; None is the trace's own rate."""

    @property
    def rate(self) -> float:
        """Mean requests per second, as a request meets it."""
        return float(np.dot(self.rates, self.weights))

    def at(self, factor: float) -> "PlannedTraffic":
        """Return the same traffic at a multiple of its rates, for closed forms."""
        return replace(self, rates=self.rates * factor)

    @property
    def seconds(self) -> float:
        """Time from the first to the last arrival, and one gap more."""
        first, last = self.requests[0].at, self.requests[-1].at
        return (last - first) * len(self.requests) / max(1, len(self.requests) - 1)

    @property
    def prompt(self) -> float:
        """Mean tokens of a prompt."""
        return self.mix.mean(self.mix.isl)

    @property
    def answer(self) -> float:
        """Mean tokens of an answer."""
        return self.mix.mean(self.mix.osl)

    def tokens_per_second(self, each: float) -> float:
        """Return tokens per second at ``each`` per request: at the rate asked for, not at that of the sample."""
        rate = len(self.requests) / max(1e-9, self.seconds) if self.rate_given is None else self.rate_given
        return each * rate

    def longer_than(self, tokens: int) -> int:
        """Return how many requests are longer than that."""
        return sum(each.isl + each.osl > tokens for each in self.requests)


def traffic_of(request: PlanRequest) -> PlannedTraffic:
    """Return the traffic that a request names.

    Raises:
        ConfigError: the trace can't be read or is too short, or the lengths can't be read.
    """
    made = request.trace is None
    notes: list[str] = []
    requests = list(_made_up_traffic(request) if made else _traced_traffic(request, notes))
    if len(requests) < 2 or requests[-1].at <= requests[0].at:
        raise ConfigError(
            f"the trace has {counted(len(requests), 'request')} at one time", hint="a rate needs two that differ"
        )
    mix = _workload_mix(requests)
    hit = 1.0 - mix.mean(mix.fresh) / mix.mean(mix.isl)
    if hit > 0.005:
        notes.append(f"closed forms count on {hit:.0%} of the prompts from cache, half of what one infinite cache hits")
    if made and len(requests) == REQUESTS_MOST:
        notes.append(f"the simulation ends after {requests[-1].at:,.0f} s, {REQUESTS_MOST:,} requests")
    if made:
        assert request.rate is not None
        rates, weights = np.array([request.rate]), np.ones(1)
    else:
        rates, weights = _rate_levels(requests)
    longest = max(each.isl + each.osl for each in requests)
    return PlannedTraffic(requests, mix, rates, weights, longest, tuple(notes), request.rate)


def _made_up_traffic(request: PlanRequest) -> Sequence[TrafficRequest]:
    assert request.rate is not None and request.prompt is not None and request.answer is not None
    for what, text in (("--isl", request.prompt), ("--osl", request.answer)):
        parse_lengths(text, parse_number, what=what)  # so that an error names our option
    options = TrafficOptions(
        workload="fixed", rate=request.rate, prompt=request.prompt, answer=request.answer, seed=request.seed
    )
    count = request.requests
    source = of_workload(options)
    first = [next(source) for _ in range(REQUESTS_LEAST if count is None else count)]
    if count is not None:
        return first
    slo, answer = request.slo, sum(each.osl for each in first) / len(first)
    life = (slo.ttft or 0.0) + (slo.itl or 0.0) * answer
    more = min(REQUESTS_MOST, round(request.rate * LIVES * life)) - len(first)
    return [*first, *(next(source) for _ in range(max(0, more)))]


def _traced_traffic(request: PlanRequest, notes: list[str]) -> Sequence[TrafficRequest]:
    """Return a trace's requests, and add to ``notes`` what is to be said of it."""
    options = TrafficOptions(
        trace=Path(request.trace or ""), requests=request.requests, spread_ties=True, rate=request.rate or 1.0
    )
    traced, trace = of_trace(options)
    if not trace.timed and request.rate is None:
        raise ConfigError(f"the trace {request.trace} has no times", hint="say with --rate how fast requests come")
    notes += trace_notes(trace)
    requests = list(cut(options, iter(traced)))
    if not request.answers:
        requests = [msgspec.structs.replace(each, osl=1) for each in requests]
    span = requests[-1].at - requests[0].at
    if request.rate is None or span <= 0:
        return requests
    return list(scale_rate(requests, request.rate * span / max(1, len(requests) - 1)))


def _workload_mix(requests: Sequence[TrafficRequest]) -> WorkloadMix:
    bins: Bins = {}
    cache = InfiniteCache(BLOCK)
    for each in requests:
        shared = HIT_SHARE * cache.hit(each) / each.isl if each.messages is None and each.isl else 0.0
        count_into(bins, shape_bin(each.isl, each.osl, shared))
    count = len(requests)
    means = sum(each.isl for each in requests) / count, sum(each.osl for each in requests) / count
    return WorkloadMix.of_bins(bins).scaled(*means)


def _rate_levels(requests: Sequence[TrafficRequest]) -> tuple[Floats, Floats]:
    """Return the rates that a trace's requests meet, and the share of the requests that meets each."""
    times = np.array([each.at - requests[0].at for each in requests])
    windows = max(1, round(float(times[-1]) / WINDOW))
    counts, edges = np.histogram(times, bins=windows)
    ordered = np.sort(counts[counts > 0]).astype(np.float64)
    parts = [part for part in np.array_split(ordered, min(LEVELS, len(ordered))) if len(part)]
    # A request meets the rate of its window, so that a window counts by its requests.
    rates = np.array([float((part**2).sum() / part.sum()) for part in parts]) / float(edges[1] - edges[0])
    weights = np.array([float(part.sum()) for part in parts])
    return rates, weights / weights.sum()

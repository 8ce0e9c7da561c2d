"""What did a planner do over a run, and how good was it? Its records as series over time, and as a few numbers.

The perfect bound is what a fleet would cost that always had exactly ``ceil(rate / mu)`` replicas, without start-up
times: nobody reaches it, and all can be held against it. mu is the rate that one replica bears.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from penstock.kernel.records import RecordOutcome
from penstock.planner.proposals import Because
from penstock.planner.record import TickRecord

WINDOWS = 120
"""About the most windows of attainment: more could not be told apart on a page."""
WIDTHS = (5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400)
CHANGES = ("apply", "advise")
FAULTS = ("error", "timeout")
SMOOTH = 60.0
"""Seconds over which the rate is taken for the perfect bound."""
TARGET = 0.99
"""Attainment that is asked for where nobody says another."""


class Request(Protocol):
    """What is read of a request: `penstock.kernel.records.RequestRecord` is one."""

    @property
    def arrival(self) -> float: ...

    @property
    def outcome(self) -> RecordOutcome: ...

    def within(self, ttft: float | None, itl: float | None) -> bool: ...


class Attained(NamedTuple):
    """One window of requests by arrival: ``share`` of ``judged`` kept the service level."""

    at: float
    until: float
    judged: int
    kept: int

    @property
    def share(self) -> float:
        return self.kept / self.judged


class Forecast(NamedTuple):
    """What was forecast at ``made`` for the seconds around ``at``, in requests/s, and what came.

    ``low`` and ``high``: the outermost quantiles that were told; ``actual`` is None where the run ended before.
    """

    made: float
    at: float
    q50: float
    low: float | None
    q90: float | None
    high: float | None
    actual: float | None


class Decision(NamedTuple):
    """A tick that changed something. ``changes``: pool -> (from, to)."""

    tick: int
    at: float
    outcome: str
    changes: dict[str, tuple[int, int]]
    because: tuple[Because, ...]
    bound: tuple[Because, ...]
    evidence: dict[str, Any]


@dataclass(slots=True)
class Series:
    """One value over time; a point holds until the next one."""

    times: list[float] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)

    def add(self, at: float, value: float | None) -> None:
        self.times.append(at)
        self.values.append(value)

    def mean(self, start: float, end: float) -> float | None:
        """Return the mean of the points in (start, end]; None where there is none, or one is not known."""
        first, last = bisect_right(self.times, start + 1e-9), bisect_right(self.times, end + 1e-9)
        found = self.values[first:last]
        known = [value for value in found if value is not None]
        return sum(known) / len(known) if known and len(known) == len(found) else None


@dataclass(slots=True)
class Story:
    """A planner's run. Times in seconds of the run; ``end`` is one tick after the last."""

    ticks: list[TickRecord]
    begin: float
    end: float
    base: float
    slo: tuple[float | None, float | None]
    target: float
    attained: list[Attained]
    attained_from: str
    rates: dict[str, Series]
    """By model: requests/s that arrived."""
    queued: dict[str, Series]
    gpus: Series
    cost: Series
    """GPU-hours up to then."""
    bound: Series
    """GPUs of the perfect bound; empty where mu is not known."""
    bound_cost: Series
    mu: dict[str, float]
    """By model: requests/s that one GPU bears..."""
    mu_from: str
    """... and where that is from."""
    forecasts: dict[str, list[Forecast]]
    decisions: list[Decision]
    pools: list[str]
    models: list[str]

    @property
    def hours(self) -> float:
        return (self.end - self.begin) / 3600

    def numbers(self) -> dict[str, Any]:
        """Return the run in numbers, as plain data; what is not known is None."""
        judged = sum(window.judged for window in self.attained)
        gpu_hours = self.cost.values[-1] or 0.0
        perfect = self.bound_cost.values[-1] if self.bound_cost.values else None
        flips = {pool: direction_changes(self.ticks, pool) for pool in self.pools}
        return {
            "hours": self.hours,
            "ticks": len(self.ticks),
            "attainment": sum(window.kept for window in self.attained) / judged if judged else None,
            "attainment_target": self.target,
            "judged": judged,
            "worst_window": min((window.share for window in self.attained if window.judged), default=None),
            "gpu_hours": gpu_hours,
            "perfect_gpu_hours": perfect,
            "cost_over_perfect": gpu_hours / perfect if perfect else None,
            "below_q50": calibration([f for each in self.forecasts.values() for f in each], "q50"),
            "below_q90": calibration([f for each in self.forecasts.values() for f in each], "q90"),
            "forecast_error": error_of([f for each in self.forecasts.values() for f in each]),
            "decisions": len(self.decisions),
            "direction_changes": sum(flips.values()),
            "direction_changes_per_hour": sum(flips.values()) / self.hours if self.hours else None,
            "plugin_errors": sum(said.result in FAULTS for tick in self.ticks for said in tick.said),
            "ticks_without_sight": sum(tick.outcome in ("blind", "timeout") for tick in self.ticks),
            "late_max": max((tick.late for tick in self.ticks), default=0.0),
        }


def tell(
    ticks: Sequence[TickRecord],
    requests: Iterable[Request] = (),
    *,
    slo: tuple[float | None, float | None] = (None, None),
    target: float = TARGET,
    mu: Mapping[str, float] | None = None,
) -> Story:
    """Make a story of a run's records.

    Args:
        ticks: at least one, ascending.
        requests: of the same run, where there are, gone through once; attainment is then over all that were submitted,
            else over those that the planner heard of.
        slo: TTFT and mean ITL in seconds by which ``requests`` are judged.
        mu: by model, requests/s that one GPU bears; what is not given is the best that was seen (`best_seen`).
    """
    base = _base(ticks)
    begin, end = ticks[0].at, ticks[-1].at + base
    rates: dict[str, Series] = {}
    queued: dict[str, Series] = {}
    gpus, cost = Series(), Series()
    paid = 0.0
    for place, tick in enumerate(ticks):
        gpus.add(tick.at, tick.gpus)
        cost.add(tick.at, paid / 3600)
        until = ticks[place + 1].at if place + 1 < len(ticks) else end
        paid += tick.gpus * (until - tick.at)
        for model, each in tick.models.items():
            rates.setdefault(model, Series()).add(tick.at, each.rate)
            queued.setdefault(model, Series()).add(tick.at, each.queued)
    cost.add(end, paid / 3600)
    attained, attained_from = _attained(ticks, requests, slo, begin, end, base)
    story = Story(
        ticks=list(ticks),
        begin=begin,
        end=end,
        base=base,
        slo=slo,
        target=target,
        attained=attained,
        attained_from=attained_from,
        rates=rates,
        queued=queued,
        gpus=gpus,
        cost=cost,
        bound=Series(),
        bound_cost=Series(),
        mu={},
        mu_from="",
        forecasts={model: _forecasts(ticks, model, rates[model]) for model in rates},
        decisions=[_decision(tick) for tick in ticks if _changes(tick)],
        pools=list(dict.fromkeys(name for tick in ticks for name in tick.pools)),
        models=list(dict.fromkeys(name for tick in ticks for name in tick.models)),
    )
    _perfect(story, dict(mu or {}))
    return story


def best_seen(story: Story, model: str, least: int = 12) -> float | None:
    """Return the highest rate per GPU of a model's ready replicas that was borne while attainment kept the target.

    What a fleet bore is no more than what it can bear, so the bound that comes of it is rather too high than too low,
    and cost against it rather too good. Windows of fewer than ``least`` requests say nothing and are left out.
    """
    found = []
    rates = story.rates[model]
    for window in story.attained:
        # A window of 60 has 60 or 59 in SLO, never 99 %: one that misses no more than its share, rounded up, is good.
        missed = math.ceil(window.judged * (1 - story.target) - 1e-9)
        if window.judged < least or window.judged - window.kept > missed:
            continue
        rate = rates.mean(window.at, window.until)
        inside = [tick for tick in story.ticks if window.at < tick.at <= window.until]
        ready = [_ready_gpus(tick, model) for tick in inside]
        if rate and ready and min(ready) > 0:
            found.append(rate / max(ready))
    return max(found, default=None)


def direction_changes(ticks: Iterable[TickRecord], pool: str) -> int:
    """Count how often a pool's wanted number turned from rising to falling, or back."""
    turns, last = 0, 0
    for tick in ticks:
        each = tick.pools.get(pool)
        if each is None or tick.outcome not in CHANGES or each.target == each.desired:
            continue
        direction = 1 if each.target > each.desired else -1
        turns += bool(last) and direction != last
        last = direction
    return turns


def calibration(forecasts: Iterable[Forecast], rank: str) -> float | None:
    """Return the share of actuals at or below a quantile; None where none can be held against it."""
    pairs = [(getattr(f, rank), f.actual) for f in forecasts if f.actual is not None and getattr(f, rank) is not None]
    return sum(actual <= told for told, actual in pairs) / len(pairs) if pairs else None


def error_of(forecasts: Iterable[Forecast]) -> float | None:
    """Return the sum of absolute errors of the median over the sum of actuals (WAPE)."""
    known = [(f.q50, f.actual) for f in forecasts if f.actual is not None]
    total = sum(actual for _, actual in known)
    return sum(abs(told - actual) for told, actual in known) / total if total else None


def _base(ticks: Sequence[TickRecord]) -> float:
    gaps = sorted(later.at - earlier.at for earlier, later in pairwise(ticks) if later.at > earlier.at)
    return gaps[len(gaps) // 2] if gaps else 1.0


def _attained(
    ticks: Sequence[TickRecord],
    requests: Iterable[Request],
    slo: tuple[float | None, float | None],
    begin: float,
    end: float,
    base: float,
) -> tuple[list[Attained], str]:
    least = max(base, (end - begin) / WINDOWS)
    width = next((width for width in WIDTHS if width >= least), WIDTHS[-1])
    counts: dict[int, tuple[int, int]] = {}

    def count(at: float, judged: int, kept: int) -> None:
        place = int((at - begin) // width)
        before = counts.get(place, (0, 0))
        counts[place] = (before[0] + judged, before[1] + kept)

    source = "all requests that were submitted, by arrival"
    if slo != (None, None):
        for record in requests:
            if record.outcome != "cancelled" and begin - base <= record.arrival <= end:
                count(max(record.arrival, begin), 1, record.within(*slo))
    if not counts:
        for tick in ticks:
            for each in tick.models.values():
                # What a tick tells is of the time before it.
                count(max(begin, tick.at - 1e-6), each.judged, each.in_slo)
        source = "requests of which the planner heard, by their end"
    found = [
        Attained(begin + place * width, min(end, begin + (place + 1) * width), *pair)
        for place, pair in sorted(counts.items())
        if pair[0]
    ]
    return found, source


def lead_of(tick: TickRecord) -> float | None:
    """Return how far ahead a tick decided, in seconds, where its plugins say so."""
    leads = (each.get("lead") for each in tick.evidence.values() if isinstance(each, dict))
    return next((float(lead) for lead in leads if isinstance(lead, int | float)), None)


def _forecasts(ticks: Sequence[TickRecord], model: str, rates: Series) -> list[Forecast]:
    """Hold each forecast against what came: at the horizon that the run mostly decided by, else in the middle of those
    told; one without horizons over the time it was for."""
    found = []
    leads = sorted(lead for tick in ticks if (lead := lead_of(tick)) is not None)
    lead = leads[len(leads) // 2] if leads else None
    last = ticks[-1].at
    for tick in ticks:
        predicted = tick.models[model].predicted if model in tick.models else {}
        seconds = float(predicted.get("seconds") or 0.0)
        horizons = predicted.get("horizons") or ()
        told: dict[float, Sequence[float]] = {float(q): row for q, row in (predicted.get("quantiles") or {}).items()}
        if told and horizons:
            place = len(horizons) // 2
            if lead is not None:
                place = min(range(len(horizons)), key=lambda each: abs(horizons[each] - lead))
            ahead = float(horizons[place])
            ranks = sorted(told)
            at = tick.at + ahead
            width = min(seconds, ahead) or 1.0
            low, high = (told[rank][place] for rank in (ranks[0], ranks[-1]))
            q50, q90 = (_quantile(told, place, q) for q in (0.5, 0.9))
            start, end = at - width / 2, at + width / 2
        elif seconds and predicted.get("requests") is not None:
            q50, low, q90, high = float(predicted["requests"]) / seconds, None, None, None
            start, end = tick.at, tick.at + seconds
            at = (start + end) / 2
        else:
            continue
        if q50 is None:
            continue
        actual = rates.mean(start, end) if end <= last + 1e-6 else None
        found.append(Forecast(tick.at, at, q50, low, q90, high, actual))
    return found


def _quantile(told: Mapping[float, Sequence[float]], place: int, rank: float) -> float | None:
    """Return a quantile, on the line between the two ranks beside it; None beyond those told."""
    ranks = sorted(told)
    right = bisect_left(ranks, rank)
    if right < len(ranks) and math.isclose(ranks[right], rank):
        return told[ranks[right]][place]
    if not 0 < right < len(ranks):
        return None
    left, right_rank = ranks[right - 1], ranks[right]
    part = (rank - left) / (right_rank - left)
    return told[left][place] + part * (told[right_rank][place] - told[left][place])


def _changes(tick: TickRecord) -> dict[str, tuple[int, int]]:
    if tick.outcome not in CHANGES:
        return {}
    return {name: (pool.desired, pool.target) for name, pool in tick.pools.items() if pool.desired != pool.target}


def _decision(tick: TickRecord) -> Decision:
    return Decision(tick.tick, tick.at, tick.outcome, _changes(tick), tick.chosen, tick.bound, tick.evidence)


def _ready_gpus(tick: TickRecord, model: str) -> int:
    """Return the GPUs of a model's ready replicas."""
    return sum(pool.ready * pool.gpus for pool in tick.pools.values() if pool.model in ("", model))


def _perfect(story: Story, given: dict[str, float]) -> None:
    """Put the perfect bound into a story, where mu is known of every model that had traffic."""
    busy = [model for model, rates in story.rates.items() if any(rates.values)]
    for model in busy:
        mu = given.get(model)
        if mu is None:
            mu = best_seen(story, model)
        if mu is None or mu <= 0:
            return
        story.mu[model] = mu
    if not busy:
        return
    seen = [model for model in busy if model not in given]
    story.mu_from = "the best that was seen within the service level" if seen else "given"
    paid = 0.0
    for place, tick in enumerate(story.ticks):
        gpus = 0
        for model in busy:
            # Of a minute: whole replicas for every few seconds would follow the noise of counting, upwards.
            rate = story.rates[model].mean(tick.at - SMOOTH / 2, tick.at + SMOOTH / 2)
            if rate:
                gpus += _whole(rate / story.mu[model], tick, model)
        until = story.ticks[place + 1].at if place + 1 < len(story.ticks) else story.end
        story.bound.add(tick.at, gpus)
        story.bound_cost.add(tick.at, paid / 3600)
        paid += gpus * (until - tick.at)
    story.bound_cost.add(story.end, paid / 3600)


def _whole(gpus: float, tick: TickRecord, model: str) -> int:
    """Round up to whole replicas of the model's narrowest pool."""
    widths = [pool.gpus for pool in tick.pools.values() if pool.gpus and pool.model in ("", model)]
    width = min(widths, default=1)
    return math.ceil(gpus / width - 1e-9) * width

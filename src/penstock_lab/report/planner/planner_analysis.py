"""Analysis of a planner's run: its records as series over time, and as a few numbers.

The perfect bound is the cost of a fleet that always had exactly ``ceil(rate / mu)`` replicas, without start-up
times: no planner reaches it, and all can be compared with it. mu is the rate that one replica bears.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from penstock.kernel.request_record import RecordOutcome
from penstock.kernel.values import Slo
from penstock.planner.plugins.proposals import Reason
from penstock.planner.tick_record import TickRecord

WINDOWS = 120
"""About the most windows of attainment: more could not be distinguished on a page."""
WIDTHS = (5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400)
CHANGES = ("apply", "advise")
FAULTS = ("error", "timeout")
SMOOTH = 60.0
"""Seconds over which the rate is averaged for the perfect bound."""
MARGIN, MOST = 0.05, 0.9
"""Share of the eventful time that is shown before and after it; share of a run above which all of it is shown."""
TARGET = 0.99
"""Attainment that a report holds a run against, where none is given: what objectives of latency usually name."""


class AnalysedRequest(Protocol):
    """Fields that are read of a request: `penstock.kernel.request_record.RequestRecord` is one."""

    @property
    def arrival(self) -> float: ...

    @property
    def outcome(self) -> RecordOutcome: ...

    def within(self, slo: Slo) -> bool: ...


class AttainedShare(NamedTuple):
    """One window of requests by arrival: ``share`` of ``judged`` kept the service level."""

    at: float
    until: float
    judged: int
    in_slo: int

    @property
    def share(self) -> float:
        return self.in_slo / self.judged


class ForecastPoint(NamedTuple):
    """Forecast made at ``made_at`` for the seconds around ``at``, in requests/s, and the actual rate.

    ``low`` and ``high``: the outermost forecast quantiles; ``actual`` is None where the run ended before. ``idle``:
    nothing had come for a minute, and nothing came: such a forecast says nothing of how good forecasts are.
    """

    made_at: float
    at: float
    q50: float
    low: float | None
    q90: float | None
    high: float | None
    actual: float | None
    idle: bool = False


class PredictedLoad(NamedTuple):
    """A tick's prediction for the fleet that it chose: at second ``at``, when that serves, ``share`` of ``rate``
    requests/s keep the service level."""

    at: float
    share: float
    rate: float


class PlannerDecision(NamedTuple):
    """A tick that changed something. ``changes``: pool -> (from, to); ``whys``: pool -> its own reason."""

    tick: int
    at: float
    outcome: str
    changes: dict[str, tuple[int, int]]
    why: str
    whys: dict[str, str]
    reasons: tuple[Reason, ...]
    bound: tuple[Reason, ...]
    evidence: dict[str, Any]


@dataclass(slots=True)
class PlannerSeries:
    """One value over time; a point holds until the next one."""

    times: list[float] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)

    def add(self, at: float, value: float | None) -> None:
        self.times.append(at)
        self.values.append(value)

    def mean(self, start: float, end: float) -> float | None:
        """Return the mean of the points in (start, end]; None where there is none, or one is unknown."""
        first, last = bisect_right(self.times, start + 1e-9), bisect_right(self.times, end + 1e-9)
        values = self.values[first:last]
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known and len(known) == len(values) else None


@dataclass(slots=True)
class PlannerAnalysis:
    """A planner's run. Times in seconds of the run; ``end`` is one tick after the last."""

    ticks: list[TickRecord]
    begin: float
    end: float
    base: float
    slo: Slo
    target: float
    attained: list[AttainedShare]
    attained_from: str
    predicted: list["PredictedLoad"]
    """Predictions for the fleets that were chosen, where the policy gives them."""
    rates: dict[str, PlannerSeries]
    """By model: requests/s that arrived."""
    queued: dict[str, PlannerSeries]
    gpus: PlannerSeries
    cost: PlannerSeries
    """GPU-hours up to that time."""
    bound: PlannerSeries
    """GPUs of the perfect bound; empty where mu is unknown."""
    bound_cost: PlannerSeries
    mu: dict[str, float]
    """By model: requests/s that one GPU bears..."""
    mu_from: str
    """... and its source."""
    forecasts: dict[str, list[ForecastPoint]]
    decisions: list[PlannerDecision]
    pools: list[str]
    models: list[str]

    @property
    def hours(self) -> float:
        return (self.end - self.begin) / 3600

    @property
    def eventful(self) -> tuple[float, float] | None:
        """From when to when something happened, requests or decisions, with a margin; None where that is most of it."""
        arrived = [at for rates in self.rates.values() for at, rate in zip(rates.times, rates.values) if rate]
        times = [*arrived, *(each.at for each in self.decisions)]
        if not times:
            return None
        first, last = min(times) - self.base, max(times)  # a rate is of the time before its tick
        margin = max(self.base, MARGIN * (last - first))
        low, high = max(self.begin, first - margin), min(self.end, last + margin)
        return (low, high) if high - low < MOST * (self.end - self.begin) else None

    def numbers(self) -> dict[str, Any]:
        """Return the run in numbers, as plain data; unknown is None."""
        made = [forecast for each in self.forecasts.values() for forecast in each if not forecast.idle]
        judged = sum(window.judged for window in self.attained)
        gpu_hours = self.cost.values[-1] or 0.0
        perfect = self.bound_cost.values[-1] if self.bound_cost.values else None
        flips = {pool: direction_changes(self.ticks, pool) for pool in self.pools}
        return {
            "hours": self.hours,
            "ticks": len(self.ticks),
            "attainment": sum(window.in_slo for window in self.attained) / judged if judged else None,
            "attainment_predicted": predicted_mean(self.predicted, self.end),
            "attainment_target": self.target,
            "judged": judged,
            "worst_window": min((window.share for window in self.attained if window.judged), default=None),
            "gpu_hours": gpu_hours,
            "perfect_gpu_hours": perfect,
            "cost_over_perfect": gpu_hours / perfect if perfect else None,
            "below_q50": calibration(made, "q50"),
            "below_q90": calibration(made, "q90"),
            "forecast_error": error_of(made),
            "idle_forecasts": sum(forecast.idle for each in self.forecasts.values() for forecast in each),
            "decisions": len(self.decisions),
            "direction_changes": sum(flips.values()),
            "direction_changes_per_hour": sum(flips.values()) / self.hours if self.hours else None,
            "plugin_errors": sum(plugin.result in FAULTS for tick in self.ticks for plugin in tick.plugin_results),
            "ticks_without_sight": sum(tick.outcome in ("blind", "timeout") for tick in self.ticks),
            "late_max": max((tick.late for tick in self.ticks), default=0.0),
        }


def analyse(
    ticks: Sequence[TickRecord],
    requests: Iterable[AnalysedRequest] = (),
    *,
    slo: Slo = Slo(),
    target: float = TARGET,
    mu: Mapping[str, float] | None = None,
) -> PlannerAnalysis:
    """Analyse the records of a run.

    Args:
        ticks: at least one, ascending.
        requests: of the same run, where there are any, read once; attainment is then over all submitted requests,
            else over those that the planner observed.
        slo: by which ``requests`` are judged.
        mu: by model, requests/s that one GPU bears; where absent, the best observed one (`best_observed_rate`).
    """
    base = _tick_interval(ticks)
    begin, end = ticks[0].at, ticks[-1].at + base
    rates: dict[str, PlannerSeries] = {}
    queued: dict[str, PlannerSeries] = {}
    gpus, cost = PlannerSeries(), PlannerSeries()
    paid = 0.0
    for place, tick in enumerate(ticks):
        gpus.add(tick.at, tick.gpus)
        cost.add(tick.at, paid / 3600)
        until = ticks[place + 1].at if place + 1 < len(ticks) else end
        paid += tick.gpus * (until - tick.at)
        for model, each in tick.models.items():
            rates.setdefault(model, PlannerSeries()).add(tick.at, each.rate)
            queued.setdefault(model, PlannerSeries()).add(tick.at, each.queued)
    cost.add(end, paid / 3600)
    attained, attained_from = _attained_shares(ticks, requests, slo, begin, end, base)
    story = PlannerAnalysis(
        ticks=list(ticks),
        begin=begin,
        end=end,
        base=base,
        slo=slo,
        target=target,
        attained=attained,
        attained_from=attained_from,
        predicted=[load for tick in ticks if (load := _predicted_load(tick)) is not None],
        rates=rates,
        queued=queued,
        gpus=gpus,
        cost=cost,
        bound=PlannerSeries(),
        bound_cost=PlannerSeries(),
        mu={},
        mu_from="",
        forecasts={model: _forecast_points(ticks, model, rates[model]) for model in rates},
        decisions=[_decision_of(tick) for tick in ticks if _changed_targets(tick)],
        pools=list(dict.fromkeys(name for tick in ticks for name in tick.pools)),
        models=list(dict.fromkeys(name for tick in ticks for name in tick.models)),
    )
    _add_perfect_bound(story, dict(mu or {}))
    return story


def best_observed_rate(story: PlannerAnalysis, model: str, least: int = 12) -> float | None:
    """Return the highest rate per GPU of a model's ready replicas while attainment kept the target.

    The load that a fleet bore is no more than it can bear, so the resulting bound is rather too high than too low,
    and cost against it rather too good. Windows of fewer than ``least`` requests prove nothing and are left out.
    """
    per_gpu = []
    rates = story.rates[model]
    for window in story.attained:
        # A window of 60 has 60 or 59 in SLO, never 99 %: one that misses no more than its share, rounded up, is good.
        missed = math.ceil(window.judged * (1 - story.target) - 1e-9)
        if window.judged < least or window.judged - window.in_slo > missed:
            continue
        rate = rates.mean(window.at, window.until)
        inside = [tick for tick in story.ticks if window.at < tick.at <= window.until]
        ready = [_ready_gpus(tick, model) for tick in inside]
        if rate and ready and min(ready) > 0:
            per_gpu.append(rate / max(ready))
    return max(per_gpu, default=None)


def direction_changes(ticks: Iterable[TickRecord], pool: str) -> int:
    """Count how often a pool's desired number turned from rising to falling, or back."""
    turns, last = 0, 0
    for tick in ticks:
        each = tick.pools.get(pool)
        if each is None or tick.outcome not in CHANGES or each.target == each.desired:
            continue
        direction = 1 if each.target > each.desired else -1
        turns += bool(last) and direction != last
        last = direction
    return turns


def calibration(forecasts: Iterable[ForecastPoint], rank: str) -> float | None:
    """Return the share of actuals at or below a quantile; None where none can be compared with it."""
    pairs = [(getattr(f, rank), f.actual) for f in forecasts if f.actual is not None and getattr(f, rank) is not None]
    return sum(actual <= predicted for predicted, actual in pairs) / len(pairs) if pairs else None


def error_of(forecasts: Iterable[ForecastPoint]) -> float | None:
    """Return the sum of absolute errors of the median over the sum of actuals (WAPE)."""
    known = [(f.q50, f.actual) for f in forecasts if f.actual is not None]
    total = sum(actual for _, actual in known)
    return sum(abs(predicted - actual) for predicted, actual in known) / total if total else None


def _tick_interval(ticks: Sequence[TickRecord]) -> float:
    gaps = sorted(later.at - earlier.at for earlier, later in pairwise(ticks) if later.at > earlier.at)
    return gaps[len(gaps) // 2] if gaps else 1.0


def _attained_shares(
    ticks: Sequence[TickRecord],
    requests: Iterable[AnalysedRequest],
    slo: Slo,
    begin: float,
    end: float,
    base: float,
) -> tuple[list[AttainedShare], str]:
    least = max(base, (end - begin) / WINDOWS)
    width = next((width for width in WIDTHS if width >= least), WIDTHS[-1])
    counts: dict[int, tuple[int, int]] = {}

    def count(at: float, judged: int, in_slo: int) -> None:
        place = int((at - begin) // width)
        before = counts.get(place, (0, 0))
        counts[place] = (before[0] + judged, before[1] + in_slo)

    source = "all requests that were submitted, by arrival"
    if slo != Slo():
        for record in requests:
            if record.outcome != "cancelled" and begin - base <= record.arrival <= end:
                count(max(record.arrival, begin), 1, record.within(slo))
    if not counts:
        for tick in ticks:
            for each in tick.models.values():
                # A tick reports the time before it.
                count(max(begin, tick.at - 1e-6), each.judged, each.in_slo)
        source = "requests of which the planner heard, by their end"
    points = [
        AttainedShare(begin + place * width, min(end, begin + (place + 1) * width), *pair)
        for place, pair in sorted(counts.items())
        if pair[0]
    ]
    return points, source


def lead_of(tick: TickRecord) -> float | None:
    """Return how far ahead a tick decided, in seconds, where its plugins report it."""
    leads = (each.get("lead") for each in tick.evidence.values() if isinstance(each, dict))
    return next((float(lead) for lead in leads if isinstance(lead, int | float)), None)


def predicted_mean(predicted: Sequence[PredictedLoad], end: float) -> float | None:
    """Return the predicted share of all requests up to ``end``; None without predictions."""
    due = [each for each in predicted if each.at <= end]
    total = sum(each.rate for each in due)
    return sum(each.share * each.rate for each in due) / total if total else None


def _predicted_load(tick: TickRecord) -> PredictedLoad | None:
    """Return a tick's prediction for its choice, all models together; None where its policy gives none."""
    loads = [
        (float(parts[prefix + "demand"]["mean"]), float(chosen["attainment"]))
        for parts in tick.evidence.values()
        if isinstance(parts, dict)
        for key, chosen in parts.items()
        if key.endswith("chosen") and (prefix := key.removesuffix("chosen")) + "demand" in parts
    ]
    rate = sum(each for each, _ in loads)
    if not rate:
        return None
    return PredictedLoad(tick.at + (lead_of(tick) or 0.0), sum(each * share for each, share in loads) / rate, rate)


def _forecast_points(ticks: Sequence[TickRecord], model: str, rates: PlannerSeries) -> list[ForecastPoint]:
    """Compare each forecast with the actual rate: at the horizon that the run mostly decided by, else in the middle of
    the horizons; a forecast without horizons over its own time."""
    forecasts = []
    leads = sorted(lead for tick in ticks if (lead := lead_of(tick)) is not None)
    lead = leads[len(leads) // 2] if leads else None
    last = ticks[-1].at
    for tick in ticks:
        predicted = tick.models[model].predicted if model in tick.models else {}
        seconds = float(predicted.get("seconds") or 0.0)
        horizons = predicted.get("horizons") or ()
        rows: dict[float, Sequence[float]] = {float(q): row for q, row in (predicted.get("quantiles") or {}).items()}
        if rows and horizons:
            place = len(horizons) // 2
            if lead is not None:
                place = min(range(len(horizons)), key=lambda each: abs(horizons[each] - lead))
            ahead = float(horizons[place])
            ranks = sorted(rows)
            at = tick.at + ahead
            width = min(seconds, ahead) or 1.0
            low, high = (rows[rank][place] for rank in (ranks[0], ranks[-1]))
            q50, q90 = (_between_ranks(rows, place, q) for q in (0.5, 0.9))
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
        idle = actual == 0 and rates.mean(tick.at - SMOOTH, end) == 0
        forecasts.append(ForecastPoint(tick.at, at, q50, low, q90, high, actual, idle))
    return forecasts


def _between_ranks(quantiles: Mapping[float, Sequence[float]], place: int, rank: float) -> float | None:
    """Return a forecast's quantile, interpolated between the two ranks beside it; None beyond the outermost."""
    ranks = sorted(quantiles)
    right = bisect_left(ranks, rank)
    if right < len(ranks) and math.isclose(ranks[right], rank):
        return quantiles[ranks[right]][place]
    if not 0 < right < len(ranks):
        return None
    left, right_rank = ranks[right - 1], ranks[right]
    part = (rank - left) / (right_rank - left)
    return quantiles[left][place] + part * (quantiles[right_rank][place] - quantiles[left][place])


def _changed_targets(tick: TickRecord) -> dict[str, tuple[int, int]]:
    if tick.outcome not in CHANGES:
        return {}
    return {name: (pool.desired, pool.target) for name, pool in tick.pools.items() if pool.desired != pool.target}


def _decision_of(tick: TickRecord) -> PlannerDecision:
    changes = _changed_targets(tick)
    whys = {pool: tick.why_of(pool) for pool in changes}
    return PlannerDecision(
        tick.tick, tick.at, tick.outcome, changes, tick.why, whys, tick.chosen, tick.bound, tick.evidence
    )


def _ready_gpus(tick: TickRecord, model: str) -> int:
    """Return the GPUs of a model's ready replicas."""
    return sum(pool.ready * pool.gpus for pool in tick.pools.values() if pool.model in ("", model))


def _add_perfect_bound(story: PlannerAnalysis, given: dict[str, float]) -> None:
    """Add the perfect bound to an analysis, where mu is known of every model that had traffic."""
    busy = [model for model, rates in story.rates.items() if any(rates.values)]
    for model in busy:
        mu = given.get(model)
        if mu is None:
            mu = best_observed_rate(story, model)
        if mu is None or mu <= 0:
            return
        story.mu[model] = mu
    if not busy:
        return
    observed = [model for model in busy if model not in given]
    story.mu_from = "the best that was seen within the service level" if observed else "given"
    paid = 0.0
    for place, tick in enumerate(story.ticks):
        gpus = 0
        for model in busy:
            # Over a minute: whole replicas for every few seconds would follow the noise of counting, upwards.
            rate = story.rates[model].mean(tick.at - SMOOTH / 2, tick.at + SMOOTH / 2)
            if rate:
                gpus += _whole_replicas(rate / story.mu[model], tick, model)
        until = story.ticks[place + 1].at if place + 1 < len(story.ticks) else story.end
        story.bound.add(tick.at, gpus)
        story.bound_cost.add(tick.at, paid / 3600)
        paid += gpus * (until - tick.at)
    story.bound_cost.add(story.end, paid / 3600)


def _whole_replicas(gpus: float, tick: TickRecord, model: str) -> int:
    """Round up to whole replicas of the model's narrowest pool."""
    widths = [pool.gpus for pool in tick.pools.values() if pool.gpus and pool.model in ("", model)]
    width = min(widths, default=1)
    return math.ceil(gpus / width - 1e-9) * width

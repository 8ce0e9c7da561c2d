"""Page of a planner's run: planner-report.html, with its numbers as CSV beside it.

Reads planner.jsonl, and requests.jsonl and config.yaml where they exist. All charts share one axis of time; a click on
a decision leads to its reason.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.kernel.errors import ConfigError
from penstock.kernel.plurals import counted
from penstock.kernel.request_record import RecordOutcome, RequestRecord
from penstock.kernel.values import Slo
from penstock.page.page_file import write_csv, write_page
from penstock.page.page_schema import (
    Chart,
    ChartNote,
    Colour,
    Column,
    KeyFigure,
    Mark,
    Page,
    Row,
    Section,
    Series,
    Table,
    over_time,
    percent,
    series_of,
    text_table,
)
from penstock.planner.tick_record import TickRecord
from penstock.runtime.planning.planner_report import RECORDS
from penstock.runtime.records import segments
from penstock_lab.report.planner.planner_analysis import (
    TARGET,
    AttainedShare,
    PlannerAnalysis,
    PlannerDecision,
    PlannerSeries,
    analyse,
)
from penstock_lab.report.run.run_files import json_of, lines
from penstock_lab.report.run.run_summary import slo_of

PAGE = "planner-report.html"
DECISIONS_SHOWN = 400
"""Most decisions of a run on the page; planner-decisions.csv has them all."""
COLOURS: dict[str, Colour] = {"fresh": "good", "stale": "warn", "broken": "bad", "no say": "bad"}


class LaneStretch(NamedTuple):
    """What holds for some time in one lane of a chart; ``kind`` has its colour in `COLOURS`."""

    lane: str
    kind: str
    text: str


def write_planner_report(
    run: Path | str,
    *,
    slo: Slo | None = None,
    target: float | None = None,
    mu: Mapping[str, float] | None = None,
    requests_max: int | None = None,
) -> Path:
    """Write planner-report.html and its CSV files into a run folder; return the page's path.

    Args:
        slo: by which requests are judged; None takes the run's own.
        target: attainment target, 0..1; None takes 0.99.
        mu: by model, requests/s that one GPU bears, for the perfect bound; None takes the best observed one.
        requests_max: bytes of requests.jsonl above which it is not read; attainment is then the planner's own count.
    Raises:
        ConfigError: the folder has no readable planner.jsonl, or can't be written.
    """
    folder = Path(run)
    ticks = read_ticks(folder)
    own = slo_of(folder) if slo is None else slo
    story = analyse(
        ticks, _requests_of(folder, requests_max), slo=own, target=TARGET if target is None else target, mu=mu
    )
    path = folder / PAGE
    write_tables(folder, story)
    write_page(path, planner_page(story, folder.name, json_of(folder / "run.json")))
    return path


def read_ticks(folder: Path) -> list[TickRecord]:
    """Return the records of a run in order of time.

    A planner that took over from an earlier one continues the same file.

    Raises:
        ConfigError: there are none, or a line is no record.
    """
    decode = msgspec.json.Decoder(TickRecord).decode
    ticks: list[TickRecord] = []
    path = folder / RECORDS
    for number, line in enumerate(lines(path, needed=True), 1):
        try:
            ticks.append(decode(line))
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}, line {number}, is not a planner's record: {error}") from error
    if not ticks:
        raise ConfigError(f"{folder / RECORDS} has no tick yet", hint="the first one comes after planner.load_interval")
    return sorted(ticks, key=lambda tick: tick.at)


def planner_page(story: PlannerAnalysis, name: str, run: Mapping[str, Any]) -> Page:
    """Return the page."""
    policy = ", ".join(dict.fromkeys(tick.policy for tick in story.ticks))
    about = f"policy {policy}, {len(story.ticks):,} ticks of {story.base:.3g} s"
    charts, zoom = charts_of(story), story.eventful
    shown = (
        []
        if zoom is None
        else [f"Shown is where something happened, second {zoom[0]:,.0f} to {zoom[1]:,.0f}; a double click shows all."]
    )
    return Page(
        title=f"Planner: {name}",
        about=f"penstock {run['penstock']}, {about}" if "penstock" in run else about,
        figures=_key_figures(story),
        sections=[
            Section(
                "The run",
                [f"In SLO is counted over {story.attained_from}." + _mu_text(story), *shown],
                charts=[chart for chart in charts if any(series.at for series in chart.series)],
                shared=True,
                zoom=zoom,
                files=[*dict.fromkeys(chart.csv for chart in charts)],
            ),
            _decision_section(story),
        ],
    )


def charts_of(story: PlannerAnalysis) -> list[Chart]:
    """Return the charts of the page, the most important first; some may have nothing to show."""
    kept = [
        series_of("attainment", _window_levels(story.attained), "steps"),
        series_of("predicted", [(p.at, p.share) for p in story.predicted if p.at <= story.end], colour="s1"),
    ]
    target = Mark(f"target {story.target:.0%}", story.target, "y")
    gpus = [
        series_of("paid for", _known_points(story.gpus), "steps"),
        series_of("perfect bound", _known_points(story.bound), "steps"),
    ]
    cost = [series_of("paid", _known_points(story.cost)), series_of("perfect bound", _known_points(story.bound_cost))]
    waiting = [series_of(model, _known_points(series)) for model, series in story.queued.items()]
    level = _slo_text(story)
    included = "those of starting and draining replicas included"
    return [
        over_time(
            "Requests within the service level", kept, level, "share", marks=[target], csv="planner-attainment.csv"
        ),
        *(_demand_chart(story, model) for model in story.models),
        *(_replicas_chart(story, pool) for pool in story.pools),
        over_time("GPUs", gpus, included, csv="planner-cost.csv"),
        over_time("GPU-hours up to then", cost, unit="hours", csv="planner-cost.csv"),
        over_time("Requests that wait in the router", waiting, csv="planner-models.csv"),
        _decisions_chart(story),
        _lanes_chart(
            story, "Sources", partial(_health_of, models=story.models), "fresh, stale, broken", "planner-models.csv"
        ),
        _lanes_chart(story, "Plugins that had no say", _plugin_faults, "errors and timeouts", "planner-plugins.csv"),
    ]


def _demand_chart(story: PlannerAnalysis, model: str) -> Chart:
    forecasts = [forecast for forecast in story.forecasts[model] if forecast.at <= story.end]
    ahead = sorted(forecast.at - forecast.made_at for forecast in forecasts)
    wide = [forecast for forecast in forecasts if forecast.low is not None and forecast.high is not None]
    series = [
        series_of("arrived", _known_points(story.rates[model])),
        series_of("forecast q50", [(f.at, f.q50) for f in forecasts]),
        series_of("lowest quantile", [(f.at, f.low) for f in wide], "hidden", "s1"),
        series_of("highest quantile", [(f.at, f.high) for f in wide], "hidden", "s1"),
    ]
    about = "requests/s" + (f"; forecast made {ahead[len(ahead) // 2]:.0f} s before" if ahead else "")
    band = (2, 3) if wide else None
    return over_time(f"Demand of {model}", series, about, "rate", band=band, csv="planner-forecast.csv")


def _replicas_chart(story: PlannerAnalysis, pool: str) -> Chart:
    lines = {"wanted": "target", "ready": "ready", "starting": "starting", "draining": "draining"}
    series = [series_of(name, _of_pool(story, pool, field), "steps") for name, field in lines.items()]
    return over_time(f"Replicas of {pool}", series, csv="planner-pools.csv")


def _decisions_chart(story: PlannerAnalysis) -> Chart:
    series = [
        Series(pool, times, [float(lane)] * len(times), "points", "s1")
        for lane, pool in enumerate(story.pools)
        if (times := [each.at for each in story.decisions if pool in each.changes])
    ]
    notes = [
        ChartNote(each.at, f"{each.at:.0f} s: {_change_text(each, pool)}", link=f"tick-{each.tick}")
        for each in story.decisions
        for pool in each.changes
    ]
    about, names = "click one to see why", story.pools
    return over_time("Decisions", series, about, kind="lanes", names=names, notes=notes, csv="planner-decisions.csv")


def _key_figures(story: PlannerAnalysis) -> list[KeyFigure]:
    n = story.numbers()
    kept = [f"of {counted(n['judged'], 'request')}", f"{story.target:.0%} are asked for"]
    if story.predicted:
        kept.append(f"{percent(n['attainment_predicted'])} were predicted")
    if n["worst_window"] is not None:
        kept.append(f"{percent(n['worst_window'])} in the worst window")
    perfect = n["perfect_gpu_hours"]
    bound = "needs windows that kept the target, or mu" if perfect is None else f"of {perfect:.2f} GPU-hours"
    idle = f"; without {counted(n['idle_forecasts'], 'forecast')} of idle time" if n["idle_forecasts"] else ""
    turns = f"{_number_text(n['direction_changes_per_hour'])} turns an hour; 2 or fewer is calm"
    return [
        KeyFigure("in SLO", percent(n["attainment"]), "; ".join(kept)),
        KeyFigure("GPU-hours", f"{n['gpu_hours']:.2f}", f"in {n['hours']:.2f} h"),
        KeyFigure("times the perfect bound", _number_text(n["cost_over_perfect"]), bound),
        KeyFigure("decisions", f"{n['decisions']:,}", turns),
        KeyFigure("actuals at or below q50", percent(n["below_q50"]), f"50% is calibrated{idle}"),
        KeyFigure("actuals at or below q90", percent(n["below_q90"]), f"90% is calibrated{idle}"),
        KeyFigure("error of the forecast", percent(n["forecast_error"]), "sum of |q50 - actual| over sum of actuals"),
        KeyFigure("failures of plugins", f"{n['plugin_errors']:,}", "errors and timeouts"),
        KeyFigure("ticks without sight", f"{n['ticks_without_sight']:,}", f"of {n['ticks']:,}"),
        KeyFigure("latest tick", f"{n['late_max']:.2f} s", "after its time"),
    ]


def _decision_section(story: PlannerAnalysis) -> Section:
    shown = story.decisions[-DECISIONS_SHOWN:]
    left = len(story.decisions) - len(shown)
    rows = []
    for each in reversed(shown):
        reasons = [reason.text for reason in (*each.reasons, *each.bound) if reason.text not in each.whys.values()]
        advice = "advice only: " if each.outcome == "advise" else ""
        because = "\n".join([f"{advice}{each.why}", *reasons])
        rows.append(Row([f"{each.at:,.0f}", f"{each.tick:,}", because], id=f"tick-{each.tick}", more=_choices_of(each)))
    return Section(
        "Decisions",
        [f"planner-decisions.csv has {counted(left, 'older one')} as well."] if left else [],
        tables=[
            Table(
                "Decisions, the newest first",
                [Column("time (s)"), Column("tick"), Column("what, and why", "long")],
                rows,
                empty="Nothing was changed in this run.",
            )
        ],
    )


def _choices_of(decision: PlannerDecision) -> Table | None:
    """Return the candidates of a choice, where a plugin reported them as a list."""
    for plugin, evidence in decision.evidence.items():
        candidates = evidence.get("candidates") if isinstance(evidence, dict) else None
        if not isinstance(candidates, list) or not all(isinstance(one, dict) for one in candidates) or not candidates:
            continue
        chosen = evidence.get("chosen")
        rows = [("chosen", chosen)] if isinstance(chosen, dict) else []
        rows += [("", one) for one in candidates]
        head = list(dict.fromkeys(name for _, one in rows for name in one))
        cells = [(mark, *(_evidence_cell(one.get(name)) for name in head)) for mark, one in rows]
        return text_table(f"what {plugin} chose from", ("", *head), cells)
    return None


def _evidence_cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {one}" for key, one in value.items())
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _health_of(tick: TickRecord, models: Sequence[str]) -> Iterator[LaneStretch]:
    for model in models:
        health = tick.models[model].health if model in tick.models else "broken"
        yield LaneStretch(model, health, f"{model} is {health}")


def _plugin_faults(tick: TickRecord) -> Iterator[LaneStretch]:
    for result in tick.plugin_results:
        if result.result in ("error", "timeout") and result.reasons:
            yield LaneStretch(result.id, "no say", f"{result.id}: {result.reasons[0].text}")


def _lanes_chart(
    story: PlannerAnalysis, title: str, stretches: Callable[[TickRecord], Iterable[LaneStretch]], about: str, csv: str
) -> Chart:
    """Return a chart of what holds from each tick until the next, those that are alike as one."""
    times: dict[LaneStretch, list[tuple[float, float]]] = {}
    for tick, until in zip(story.ticks, [*(tick.at for tick in story.ticks[1:]), story.end]):
        for each in stretches(tick):
            past = times.setdefault(each, [])
            start = past.pop()[0] if past and past[-1][1] == tick.at else tick.at
            past.append((start, until))
    lanes = list(dict.fromkeys(each.lane for each in times))
    spans = dict.fromkeys((each.lane, each.kind) for each in times)
    series = [
        _spans_of(
            kind, lanes.index(lane), sorted(t for e, past in times.items() if e[:2] == (lane, kind) for t in past)
        )
        for lane, kind in spans
    ]
    notes = [
        ChartNote(start, f"{each.text} from {start:.0f} s to {end:.0f} s", end)
        for each, past in times.items()
        for start, end in past
    ]
    return over_time(title, series, about, kind="lanes", names=lanes, notes=notes, csv=csv)


def _spans_of(kind: str, lane: int, times: Iterable[tuple[float, float]]) -> Series:
    at: list[float] = []
    values: list[float | None] = []
    for start, end in times:
        if at and at[-1] < start:
            at.append((at[-1] + start) / 2)
            values.append(None)
        if not at or at[-1] < start:
            at.append(start)
            values.append(lane)
        at.append(end)
        values.append(lane)
    return Series(kind, at, values, "spans", COLOURS[kind])


def _of_pool(story: PlannerAnalysis, pool: str, name: str) -> list[tuple[float, float]]:
    return [(tick.at, getattr(tick.pools[pool], name)) for tick in story.ticks if pool in tick.pools]


def _known_points(series: PlannerSeries) -> list[tuple[float, float]]:
    return [(at, value) for at, value in zip(series.times, series.values) if value is not None]


def _window_levels(windows: Sequence[AttainedShare]) -> Iterator[tuple[float, float | None]]:
    """Yield a level from the begin of each window; where nothing was judged after it, None."""
    for window, after in zip(windows, [*windows[1:], None]):
        yield window.at, window.share
        if after is None or after.at > window.until:
            yield window.until, window.share if after is None else None


def _change_text(decision: PlannerDecision, pool: str) -> str:
    old, new = decision.changes[pool]
    return f"{pool} {old} -> {new}, because {decision.whys[pool].removeprefix(f'{pool} {old} -> {new}: ')}"


def _mu_text(story: PlannerAnalysis) -> str:
    rates = ", ".join(f"{model} {mu:.2f}" for model, mu in story.mu.items())
    return (
        f" The perfect bound, which nobody reaches, is for requests/s of one GPU of {rates}, {story.mu_from}."
        if rates
        else ""
    )


def _slo_text(story: PlannerAnalysis) -> str:
    ttft, itl = story.slo.ttft, story.slo.itl
    limits = [f"TTFT {ttft * 1e3:g} ms"] if ttft is not None else []
    limits += [f"mean ITL {itl * 1e3:g} ms"] if itl is not None else []
    return ", ".join(limits) or "as the frontends judged"


class _ItlGaps(msgspec.Struct):
    mean: float


class _Request(msgspec.Struct):
    """Fields of a request that are needed here: a long run has millions."""

    arrival: float
    outcome: RecordOutcome
    ttft: float | None = None
    itl: _ItlGaps | None = None
    service_class: str | None = msgspec.field(default=None, name="class")

    def within(self, slo: Slo) -> bool:
        # The one definition of "within the service level"; it reads no more than these fields.
        return RequestRecord.within(self, slo)  # type: ignore[arg-type]


def _requests_of(folder: Path, bytes_max: int | None) -> Iterator[_Request]:
    path = folder / "requests.jsonl"
    if bytes_max is not None and segments.size(path) > bytes_max:
        return
    decode = msgspec.json.Decoder(_Request).decode
    for number, line in enumerate(lines(path, needed=False), 1):
        try:
            yield decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}, line {number}, is not a record of a request: {error}") from error


def _number_text(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"


_write = partial(write_csv, digits=9)


def write_tables(folder: Path, story: PlannerAnalysis) -> None:
    """Write the CSV files.

    Raises:
        ConfigError: the folder can't be written.
    """
    _write(
        folder / "planner-attainment.csv",
        ("from_s", "until_s", "judged", "in_slo", "share"),
        ((w.at, w.until, w.judged, w.in_slo, w.share) for w in story.attained),
    )
    _write(
        folder / "planner-models.csv",
        ("at_s", "tick", "model", "health", "requests_per_s", "isl", "osl", "hit_rate", "ttft_s", "itl_s", "judged",
         "in_slo", "queued"),
        (
            (t.at, t.tick, name, m.health, m.rate, m.shape.isl, m.shape.osl, m.shape.hit_rate, m.ttft, m.itl, m.judged,
             m.in_slo, m.queued)
            for t in story.ticks
            for name, m in t.models.items()
        ),
    )  # fmt: skip
    _write(
        folder / "planner-forecast.csv",
        ("model", "made_s", "at_s", "q50", "low", "q90", "high", "actual", "idle"),
        (
            (model, *forecast[:-1], int(forecast.idle))
            for model, forecasts in story.forecasts.items()
            for forecast in forecasts
        ),
    )
    _write(
        folder / "planner-pools.csv",
        ("at_s", "tick", "pool", "desired", "proposed", "target", "ready", "starting", "draining", "failed",
         "given_up", "gpus_each"),
        (
            (t.at, t.tick, name, p.desired, p.proposed, p.target, p.ready, p.starting, p.draining, p.failed,
             p.given_up, p.gpus)
            for t in story.ticks
            for name, p in t.pools.items()
        ),
    )  # fmt: skip
    bound = dict(zip(story.bound.times, story.bound.values))
    perfect = dict(zip(story.bound_cost.times, story.bound_cost.values))
    gpus = dict(zip(story.gpus.times, story.gpus.values))
    _write(
        folder / "planner-cost.csv",
        ("at_s", "gpus", "gpu_hours", "perfect_gpus", "perfect_gpu_hours"),
        (
            (at, gpus.get(at), paid, bound.get(at), perfect.get(at))
            for at, paid in zip(story.cost.times, story.cost.values)
        ),
    )
    _write(
        folder / "planner-decisions.csv",
        ("at_s", "tick", "outcome", "pool", "from", "to", "why"),
        (
            (d.at, d.tick, d.outcome, pool, old, new, d.whys[pool])
            for d in story.decisions
            for pool, (old, new) in d.changes.items()
        ),
    )
    _write(
        folder / "planner-plugins.csv",
        ("at_s", "tick", "plugin", "stage", "result", "targets", "why"),
        (
            (t.at, t.tick, result.id, result.stage, result.result,
             " ".join(f"{pool}={count}" for pool, count in result.targets.items()),
             " | ".join(b.text for b in result.reasons))
            for t in story.ticks
            for result in t.plugin_results
        ),
    )  # fmt: skip

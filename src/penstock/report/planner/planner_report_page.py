"""Draws planner-report.html from a run folder alone, with its numbers as CSV beside it.

Reads planner.jsonl, and requests.jsonl and config.yaml where they exist. All lanes share one axis of time; every
decision can be clicked and shows its reason.
"""

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.kernel.errors import ConfigError
from penstock.kernel.request_record import RecordOutcome, RequestRecord
from penstock.kernel.values import Slo
from penstock.planner.tick_record import TickRecord
from penstock.report.planner.planner_analysis import TARGET, PlannerAnalysis, PlannerDecision, PlannerSeries, analyse
from penstock.report.planner.planner_tables import write_tables
from penstock.report.planner.timeline_svg import Lane, LaneBand, LaneFlag, LaneSpan, LaneTrace, draw_lanes
from penstock.report.run.chart_svg import SvgAxis
from penstock.report.run.judged_slo import slo_of
from penstock.report.run.page_frame import page, table
from penstock.report.run.run_files import json_of, lines
from penstock.runtime.planning.planner_report import RECORDS
from penstock.runtime.records import segments

PAGE = "planner-report.html"
DECISIONS_SHOWN = 400
"""Most decisions of a run on the page; planner-decisions.csv has them all."""
ROWS = 1200
"""Most moments whose numbers the page shows under the pointer."""


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
    story = analyse(ticks, _requests(folder, requests_max), slo=own, target=TARGET if target is None else target, mu=mu)
    path = folder / PAGE
    try:
        write_tables(folder, story)
        # Whole or not at all: the earlier page may be open in a browser.
        fresh = path.with_suffix(".new")
        fresh.write_text(draw(story, folder.name, json_of(folder / "run.json")))
        fresh.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}") from error
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
            raise ConfigError(f"{path}, line {number}, is no planner's record: {error}") from error
    if not ticks:
        raise ConfigError(f"{folder / RECORDS} has no tick yet", hint="the first one comes after planner.load_interval")
    return sorted(ticks, key=lambda tick: tick.at)


def draw(story: PlannerAnalysis, name: str, run: Mapping[str, Any]) -> str:
    """Return the page."""
    policy = ", ".join(dict.fromkeys(tick.policy for tick in story.ticks))
    about = f"policy {policy}, {len(story.ticks):,} ticks of {story.base:g} s"
    if "penstock" in run:
        about = f"penstock {run['penstock']}, {about}"
    unit: Any = "s" if story.hours < 0.1 else "min" if story.hours < 3 else "h"
    chart = draw_lanes("The planner's run", story.begin, story.end, lanes_of(story), unit)
    sections = [
        _EXTRA,
        _numbers(story),
        f'<section class="wide"><h2>The run</h2><div id="stage">{chart}<p id="under" class="data">'
        "Point at a moment to read its numbers; click a decision to see why.</p></div></section>",
        _decisions(story),
        _data(story),
        f'<script type="application/json" id="rows">{_rows(story, unit)}</script><script>{_SCRIPT}</script>',
    ]
    return page(f"Planner: {name}", about, sections)


def lanes_of(story: PlannerAnalysis) -> list[Lane]:
    """Return the lanes of the page, the most important first."""
    lanes = [
        Lane(
            SvgAxis("share in SLO", least=0.0, most=1.0, percent=True),
            [
                LaneTrace("attainment", _stairs([(w.at, w.until, w.share) for w in story.attained])),
                LaneTrace("predicted", [(p.at, p.share) for p in story.predicted if p.at <= story.end], dashed=True),
            ],
            limits=[(f"target {story.target:.0%}", story.target)],
            title=f"Requests within the service level ({_slo_text(story)})",
            data="planner-attainment.csv",
        )
    ]
    for model in story.models:
        forecasts = [forecast for forecast in story.forecasts[model] if forecast.at <= story.end]
        ahead = sorted(forecast.at - forecast.made_at for forecast in forecasts)
        made = f"; forecast made {ahead[len(ahead) // 2]:.0f} s before" if ahead else ""
        lanes.append(
            Lane(
                SvgAxis("requests/s", least=0.0),
                [
                    LaneTrace("arrived", _points(story.rates[model])),
                    LaneTrace("forecast q50", [(f.at, f.q50) for f in forecasts], dashed=True, colour=1),
                ],
                bands=[
                    LaneBand(
                        "low to high quantile",
                        [(f.at, f.low, f.high) for f in forecasts if f.low is not None and f.high is not None],
                        colour=1,
                    )
                ],
                title=f"Demand of {model} (requests/s{made})",
                data="planner-forecast.csv",
            )
        )
    for pool in story.pools:
        lanes.append(
            Lane(
                SvgAxis("replicas", least=0.0),
                [
                    LaneTrace("wanted", _of_pool(story, pool, "target"), steps=True, colour=1),
                    LaneTrace("ready", _of_pool(story, pool, "ready"), steps=True, colour=0),
                    LaneTrace("starting", _of_pool(story, pool, "starting"), steps=True, colour=4),
                    LaneTrace("draining", _of_pool(story, pool, "draining"), steps=True, dashed=True, colour=5),
                ],
                title=f"Replicas of {pool}",
                data="planner-pools.csv",
            )
        )
    bound = _points(story.bound)
    lanes += [
        Lane(
            SvgAxis("GPUs", least=0.0),
            [
                LaneTrace("paid for", _points(story.gpus), steps=True),
                LaneTrace("perfect bound", bound, steps=True, colour=2),
            ],
            title="GPUs, those of starting and draining replicas included",
            data="planner-cost.csv",
        ),
        Lane(
            SvgAxis("GPU-hours", least=0.0),
            [
                LaneTrace("paid", _points(story.cost)),
                LaneTrace("perfect bound", _points(story.bound_cost), dashed=True, colour=2),
            ],
            title="GPU-hours up to then",
            data="planner-cost.csv",
        ),
        Lane(
            SvgAxis("requests", least=0.0),
            [LaneTrace(model, _points(series)) for model, series in story.queued.items()],
            title="Requests that wait in the router",
            data="planner-models.csv",
        ),
        Lane(
            SvgAxis(""),
            flags=[
                LaneFlag(each.at, f"{each.at:.0f} s: {_changed(each, pool)}", f"#tick-{each.tick}", pool)
                for each in story.decisions
                for pool in each.changes
            ],
            title="Decisions (click one)",
            data="planner-decisions.csv",
        ),
        Lane(SvgAxis(""), spans=_health(story), title="Sources: fresh, stale, broken", data="planner-models.csv"),
        Lane(SvgAxis(""), spans=_faults(story), title="Plugins that had no say", data="planner-plugins.csv"),
    ]
    return lanes


def _numbers(story: PlannerAnalysis) -> str:
    n = story.numbers()
    share = _percent(n["attainment"])
    facts = [
        f"{share} of {n['judged']:,} requests within the service level"
        + (f", where {_percent(n['attainment_predicted'])} were predicted" if story.predicted else "")
        + f"; {story.target:.0%} are asked for"
        + (f"; {_percent(n['worst_window'])} in the worst window." if n["worst_window"] is not None else "."),
        f"{n['gpu_hours']:.2f} GPU-hours in {n['hours']:.2f} h"
        + (
            f", {n['cost_over_perfect']:.2f} times the perfect bound of {n['perfect_gpu_hours']:.2f}"
            f" ({_mu_text(story)})."
            if n["cost_over_perfect"] is not None
            else "; the perfect bound needs windows that kept the target, or mu."
        ),
        f"{n['decisions']} decisions, {n['direction_changes_per_hour'] or 0.0:.1f} changes of direction an hour; "
        f"{n['plugin_errors']} failures of plugins; {n['ticks_without_sight']} ticks without sight.",
    ]
    rows = [
        ("attainment", share, f"over {story.attained_from}"),
        (
            "predicted attainment",
            _percent(n["attainment_predicted"]),
            "of the fleets that were chosen, when they serve",
        ),
        ("GPU-hours", f"{n['gpu_hours']:.2f}", "starting and draining included"),
        ("times the perfect bound", _number(n["cost_over_perfect"]), "1 is what nobody reaches"),
        ("actuals at or below q50", _percent(n["below_q50"]), "50% is calibrated"),
        ("actuals at or below q90", _percent(n["below_q90"]), "90% is calibrated"),
        ("error of the forecast", _percent(n["forecast_error"]), "sum of |q50 - actual| over sum of actuals"),
        ("changes of direction per hour", _number(n["direction_changes_per_hour"]), "2 or fewer is calm"),
        ("failures of plugins", str(n["plugin_errors"]), "errors and timeouts"),
        ("latest tick", f"{n['late_max']:.2f} s", "after its time"),
    ]
    return (
        f"<section><h2>Numbers</h2><p>{html.escape(' '.join(facts))}</p>"
        f"{table(('', 'value', 'what it is'), rows)}</section>"
    )


def _decisions(story: PlannerAnalysis) -> str:
    if not story.decisions:
        return "<section><h2>Decisions</h2><p>Nothing was changed in this run.</p></section>"
    shown = story.decisions[-DECISIONS_SHOWN:]
    left = len(story.decisions) - len(shown)
    parts = []
    for each in reversed(shown):
        reasons = [reason for reason in (*each.reasons, *each.bound) if reason.text not in each.whys.values()]
        more = "".join(f"<li>{html.escape(reason.text)}</li>" for reason in reasons)
        advice = " (advice only)" if each.outcome == "advise" else ""
        parts.append(
            f'<li id="tick-{each.tick}"><b>{each.at:,.0f} s</b>{advice} {html.escape(each.why)}'
            + (f"<ul>{more}</ul>" if more else "")
            + _candidates(each)
            + "</li>"
        )
    note = f"<p class='data'>{left} older ones are in planner-decisions.csv.</p>" if left else ""
    return f'<section><h2>Decisions</h2>{note}<ul class="decisions">{"".join(parts)}</ul></section>'


def _candidates(decision: PlannerDecision) -> str:
    """Return the candidates of a choice, where a plugin reported them as a list."""
    for plugin, evidence in decision.evidence.items():
        candidates = evidence.get("candidates") if isinstance(evidence, dict) else None
        if not isinstance(candidates, list) or not all(isinstance(one, dict) for one in candidates) or not candidates:
            continue
        chosen = evidence.get("chosen")
        rows = [("chosen", chosen)] if isinstance(chosen, dict) else []
        rows += [("", one) for one in candidates]
        head = list(dict.fromkeys(name for _, one in rows for name in one))
        cells = [(mark, *(_cell(one.get(name)) for name in head)) for mark, one in rows]
        body = table(("", *head), cells)
        return f"<details><summary>what {html.escape(plugin)} chose from</summary>{body}</details>"
    return ""


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {one}" for key, one in value.items())
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _data(story: PlannerAnalysis) -> str:
    files = dict.fromkeys(lane.data for lane in lanes_of(story) if lane.data)
    links = ", ".join(f'<a href="{file}">{file}</a>' for file in files)
    return f'<section><p class="data">Data as CSV: {links}; the records are {RECORDS}.</p></section>'


def _rows(story: PlannerAnalysis, unit: str) -> str:
    """Return the numbers under the pointer: a head, and rows whose first cell is the time."""
    scale = {"s": 1.0, "min": 60.0, "h": 3600.0}[unit]
    head = [f"time ({unit})"]
    head += [f"{model} requests/s" for model in story.models]
    head += [f"{pool} wanted / ready / starting" for pool in story.pools]
    head += ["GPUs", "perfect", "in queue", "why"]
    step = max(1, len(story.ticks) // ROWS)
    rows: list[list[Any]] = []
    for place in range(0, len(story.ticks), step):
        tick = story.ticks[place]
        row: list[Any] = [round(tick.at / scale, 4)]
        for model in story.models:
            each = tick.models.get(model)
            row.append(None if each is None or each.rate is None else round(each.rate, 3))
        for pool in story.pools:
            pool_tick = tick.pools.get(pool)
            row.append(None if pool_tick is None else f"{pool_tick.target} / {pool_tick.ready} / {pool_tick.starting}")
        row.append(tick.gpus)
        row.append(story.bound.values[place] if story.bound.values else None)
        waiting = [each.queued for each in tick.models.values() if each.queued is not None]
        row.append(sum(waiting) if waiting else None)
        row.append(tick.why[:160])
        rows.append(row)
    # "<" could end the script that contains the text.
    return json.dumps({"head": head, "rows": rows}, separators=(",", ":")).replace("<", "\\u003c")


def _health(story: PlannerAnalysis) -> list[LaneSpan]:
    spans: list[LaneSpan] = []
    for model in story.models:
        start, last = None, ""
        for tick in [*story.ticks, None]:
            each = None if tick is None else tick.models.get(model)
            now = "" if tick is None else "broken" if each is None else each.health
            at = story.end if tick is None else tick.at
            if now != last:
                if start is not None:
                    spans.append(
                        LaneSpan(model, start, at, last, f"{model} is {last} from {start:.0f} s to {at:.0f} s")
                    )
                start, last = at, now
    return spans


def _faults(story: PlannerAnalysis) -> list[LaneSpan]:
    return [
        LaneSpan(result.id, tick.at, tick.at + story.base, "broken", f"{result.id}: {result.reasons[0].text}")
        for tick in story.ticks
        for result in tick.plugin_results
        if result.result in ("error", "timeout") and result.reasons
    ]


def _of_pool(story: PlannerAnalysis, pool: str, name: str) -> list[tuple[float, float]]:
    return [(tick.at, getattr(tick.pools[pool], name)) for tick in story.ticks if pool in tick.pools]


def _points(series: PlannerSeries) -> list[tuple[float, float]]:
    return [(at, value) for at, value in zip(series.times, series.values) if value is not None]


def _stairs(windows: Sequence[tuple[float, float, float]]) -> list[tuple[float, float]]:
    """Return a line that is level over each window."""
    return [point for start, end, value in windows for point in ((start, value), (end, value))]


def _changed(decision: PlannerDecision, pool: str) -> str:
    old, new = decision.changes[pool]
    return f"{pool} {old} -> {new}, because {decision.whys[pool].removeprefix(f'{pool} {old} -> {new}: ')}"


def _mu_text(story: PlannerAnalysis) -> str:
    rates = ", ".join(f"{model} {mu:.2f}" for model, mu in story.mu.items())
    return f"requests/s of one GPU: {rates}, {story.mu_from}"


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


def _requests(folder: Path, bytes_max: int | None) -> Iterator[_Request]:
    path = folder / "requests.jsonl"
    if bytes_max is not None and segments.size(path) > bytes_max:
        return
    decode = msgspec.json.Decoder(_Request).decode
    for number, line in enumerate(lines(path, needed=False), 1):
        try:
            yield decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}, line {number}, is no record of a request: {error}") from error


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"


_EXTRA = """<style>
body { max-width: 62rem; } .lanes .band { opacity: .18; } .lanes rect.fresh { fill: var(--s2); opacity: .5; }
.lanes rect.stale { fill: var(--s4); } .lanes rect.broken { fill: var(--bad); } .lanes .flag { fill: var(--s1); }
.lanes .flag:hover { fill: var(--bad); } .lanes .hair { stroke: var(--ink); stroke-width: 1; pointer-events: none; }
#under { min-height: 3.2em; font-variant-numeric: tabular-nums; } .decisions li { margin: .3rem 0; }
.decisions li:target { outline: 2px solid var(--s1); outline-offset: .2rem; }
td + td, th + th { text-align: left; }
</style>"""

_SCRIPT = """
"use strict";
const told = JSON.parse(document.getElementById("rows").textContent);
const chart = document.querySelector("svg.lanes"), under = document.getElementById("under");
if (chart && told.rows.length) {
  const hair = chart.querySelector(".hair"), { left, right, begin, end } = chart.dataset;
  chart.addEventListener("pointermove", (event) => {
    const at = chart.createSVGPoint();
    at.x = event.clientX; at.y = event.clientY;
    const x = at.matrixTransform(chart.getScreenCTM().inverse()).x;
    if (x < +left || x > +right) return;
    const time = +begin + (x - left) / (right - left) * (end - begin);
    let low = 0, high = told.rows.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (told.rows[middle][0] <= time) low = middle; else high = middle - 1;
    }
    hair.setAttribute("x1", x); hair.setAttribute("x2", x); hair.setAttribute("visibility", "visible");
    under.textContent = told.head.map((name, place) => {
      const value = told.rows[low][place];
      return `${name}: ${value === null ? "unknown" : value}`;
    }).join("   ");
  });
  chart.addEventListener("pointerleave", () => hair.setAttribute("visibility", "hidden"));
}
"""

"""Page of a study: fronts, ratios and ties, as a page of its own and as Markdown for the docs."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import structs

from bench.planner_study.cells import BESIDE, CLAIRVOYANT, STATIC, StudyRow
from bench.planner_study.contenders import BY_NAME, CONTENDERS
from bench.planner_study.scenario import GPUS_MAX, ITL, TTFT, StudyResult
from bench.planner_study.traffic import ALL
from penstock.page.page_schema import Axis, Chart, Colour, Page, PageNote, Section, Series, table_section
from penstock_lab.report.markdown import as_markdown

GOAL = 0.99
COLOURS: tuple[Colour, ...] = ("s0", "s1", "s2", "s3", "s4", "s5", "good", "bad")


class FrontPoint(NamedTuple):
    """GPU-hours and the share of requests that missed."""

    gpu_hours: float
    missed: float


Place = tuple[str, str, float]
"""(traffic, layout, start-up)"""
PLACE = ["traffic", "layout", "start-up s"]


def write(sections: Sequence[Section], *, missing: int) -> str:
    """Return the sections as Markdown."""
    parts = [
        "Attainment is the share of *all* submitted requests that were answered in full with TTFT "
        f"within {TTFT:g} s and mean ITL within {ITL * 1e3:g} ms; GPU-hours are of every worker from its start to its "
        f"end, starting and draining included; the ceiling is {GPUS_MAX} GPUs. The cluster is simulated: Llama-3.1-8B "
        "on A100, the production router and the planner itself. Every run begins with the fleet that is cheapest at "
        "its first minute's rate. How it is done: [planner.md](../concepts/planner.md#how-policies-are-compared).",
        "Made by `python bench/planner_study/run.py --docs docs/bench/planner-study.md`"
        + (f"; {missing} runs of it were not done." if missing else "."),
    ]
    return as_markdown(parts, sections)


def study_page(done: Sequence[StudyRow], sections: Sequence[Section], *, missing: int) -> Page:
    """Return the page: the fronts of every place, and what the sections say of them."""
    plain = [structs.replace(each, text=[text.replace("`", "") for text in each.text]) for each in sections]
    return Page(
        title="Planner study",
        about=f"{len(done)} runs on a simulated cluster of at most {GPUS_MAX} GPUs; in SLO: answered in full with TTFT "
        f"within {TTFT:g} s and mean ITL within {ITL * 1e3:g} ms",
        notes=[PageNote("info", f"{missing} runs of it were not done.")] if missing else [],
        sections=[_front_charts([each for each in done if not each.cell.fault]), *plain],
    )


def sections_of(done: Sequence[StudyRow]) -> list[Section]:
    """Return what is said of a study's runs."""
    plain = [each for each in done if not each.cell.fault]
    parts = (_against_clairvoyant(plain), _against_field(plain), _defaults(plain), _grid(plain), _fault_table(done))
    return [part for part in parts if part is not None]


# --- parts ---------------------------------------------------------------------------------------------------------


def _against_clairvoyant(done: Sequence[StudyRow]) -> Section | None:
    rows = []
    for place in _places(done):
        ours = fronts(done, place, "slo")
        oracle, static = fronts(done, place, CLAIRVOYANT), fronts(done, place, STATIC)
        if not ours or not oracle:
            continue
        ratios, above, best = [], [], []
        for seed, mine in ours.items():
            if seed not in oracle:
                continue
            known = front([*oracle[seed], *static.get(seed, ())])  # a fleet that never changes is a schedule, too
            wanted = max(1.0 - GOAL, min(point.missed for point in mine), min(point.missed for point in known))
            cost, least = cost_at(mine, wanted), cost_at(known, wanted)
            if cost is not None and least:
                ratios.append(cost / least)
                best.append(1.0 - wanted)
            if seed in static:
                flat = cost_at(static[seed], wanted)
                if flat is not None and cost is not None:
                    above.append(flat / cost)
        tuned = "tuned on" if ALL[place[0]].tuning else ""
        spans = [form(values, "{:.2f}") for values in (ratios, above) for form in (_median, _range)]
        rows.append([*_named(place), tuned, _median(best, "{:.2%}"), *spans])
    if not rows:
        return None
    spans = ["GPU-hours / clairvoyant's", "over seeds", "static's / ours", "over seeds"]
    head = [*PLACE, "", "at attainment", *spans]
    text = (
        "GPU-hours of `slo` at 99 % (or at the most that both reach), "
        "over those of the clairvoyant's cheapest schedule there, static fleets among them; and those of static fleets "
        "over ours. Lines between the points of each front, knobs swept."
    )
    return table_section("Against a planner that knows the arrivals", text, head, rows)


def _against_field(done: Sequence[StudyRow]) -> Section | None:
    rows = []
    for place in _places(done):
        ours = fronts(done, place, "slo")
        if not ours:
            continue
        for contender in CONTENDERS:
            if contender.name == "slo":
                continue
            theirs = fronts(done, place, contender.name)
            fewer = []
            for seed in ours.keys() & theirs.keys():
                pairs = [(missed_at(ours[seed], p.gpu_hours), p.missed) for p in theirs[seed]]
                fewer += [1.0 - mine / other for mine, other in pairs if mine is not None and other > 0.0]
            if len(fewer) > 1 or (fewer and place[1] == "aggregated"):
                lean = min((p.missed for front in theirs.values() for p in front), default=1.0)
                spans = [form(fewer, "{:.0%}") for form in (_median, _range)]
                rows.append([*_named(place), contender.name, f"{1.0 - lean:.1%}", *spans])
    if not rows:
        return None
    head = [*PLACE, "policy", "its best attainment", "fewer misses of slo", "over its knob"]
    text = (
        "For each value of the other policy's knob: how many fewer "
        "requests `slo` misses at the same GPU-hours (its own front, lines between points). Where it begins above them "
        "the value is left out, where it ends below them its last point counts. Negative is more."
    )
    return table_section("Against Dynamo's policies, at equal GPU-hours", text, head, rows)


def _defaults(done: Sequence[StudyRow]) -> Section | None:
    rows = []
    for contender in CONTENDERS:
        for place in _places(done):
            results = [
                each.results[0]
                for each in done
                if _place(each) == place
                and each.cell.contender == contender.name
                and each.cell.knob == contender.default
            ]
            if results:
                kept = [_median([r.attainment for r in results], "{:.2%}")]
                kept += [_median([r.gpu_hours for r in results], "{:.2f}")]
                kept += [_median([r.worst for r in results], "{:.0%}")]
                turns = _median([r.direction_changes for r in results], "{:.1f}")
                harmed, tick_ms = str(sum(r.harmed for r in results)), _median([r.tick_ms for r in results], "{:.1f}")
                rows.append([contender.name, *_named(place), *kept, turns, harmed, tick_ms])
    if not rows:
        return None
    head = ["policy", *PLACE, "attainment", "GPU-hours", "worst 5 min", "turns/h", "harmed", "tick ms"]
    text = "; ".join(f"{c.name}: {c.knob} {c.default:g}" for c in CONTENDERS)
    return table_section(
        "Everybody at the default knob",
        "Medians over seeds. Turns are changes of direction per hour; harmed are "
        f"requests that failed or began anew. Knobs: {text}.",
        head,
        rows,
    )


def _grid(done: Sequence[StudyRow]) -> Section | None:
    ties, wins, losses = 0, 0, 0
    for place in _places(done):
        mine = _results(done, place, "slo")
        for name in BESIDE:
            other = _results(done, place, name)
            pairs = [(mine[seed], other[seed]) for seed in mine.keys() & other.keys()]
            if not pairs:
                continue
            better = [m.attainment >= o.attainment and m.gpu_hours <= o.gpu_hours for m, o in pairs]
            worse = [m.attainment <= o.attainment and m.gpu_hours >= o.gpu_hours for m, o in pairs]
            wins, losses = wins + all(better), losses + all(worse)
            ties += not all(better) and not all(worse)
    if not wins + losses + ties:
        return None
    text = (
        "At default knobs, over traffic, start-up times and "
        f"layouts: `slo` keeps more requests at fewer GPU-hours in {wins} comparisons, the other does in {losses}, and "
        f"in {ties} one is cheaper and the other keeps more; for those the fronts above decide."
    )
    return Section("Ours and the two best beside it on the grid", [text])


def _fault_table(done: Iterable[StudyRow]) -> Section | None:
    rows = []
    for each in done:
        if each.cell.fault:
            result = each.results[0]
            alarms = ", ".join(f"{code} {count}" for code, count in sorted(result.alarms.items())) or "none"
            figures = [f"{result.attainment:.2%}", f"{result.gpu_hours:.2f}"]
            rows.append([each.cell.fault, each.cell.contender, *figures, alarms])
    if not rows:
        return None
    head = ["fault", "policy", "attainment", "GPU-hours", "alarms"]
    return table_section("Faults of the metrics, one at a time", "", head, sorted(rows))


def _front_charts(done: Sequence[StudyRow]) -> Section:
    """Return a chart for each place where policies can be compared: their fronts over the first seed that each has."""
    charts = []
    for place in _places(done):
        known = {name: fronts(done, place, name) for name in (*BY_NAME, STATIC, CLAIRVOYANT)}
        first = {name: by_seed[min(by_seed)] for name, by_seed in known.items() if by_seed}
        if len(first) < 2:
            continue
        series = [
            # More policies than colours: the second round of them is drawn as points.
            Series(
                name,
                [point.gpu_hours for point in points],
                [1.0 - point.missed for point in points],
                "line" if number < len(COLOURS) else "points",
                COLOURS[number % len(COLOURS)],
            )
            for number, (name, points) in enumerate(first.items())
        ]
        title = f"{place[0]}, {place[1]}, start-up {place[2]:g} s"
        charts.append(Chart(title, series, about="requests in SLO", x=Axis("GPU-hours", "hours"), y=Axis(unit="share")))
    text = "Each policy's front over its knob: what it keeps at a cost. Upwards and to the left is better."
    return Section("Fronts", [text], charts, files=["cells.csv"])


# --- fronts --------------------------------------------------------------------------------------------------------


def fronts(done: Iterable[StudyRow], place: Place, contender: str) -> dict[int, list[FrontPoint]]:
    """Return per seed the points that no other point of the same policy beats, by rising GPU-hours."""
    by_seed: dict[int, list[FrontPoint]] = defaultdict(list)
    for each in done:
        if _place(each) == place and each.cell.contender == contender:
            by_seed[each.cell.seed] += [FrontPoint(r.gpu_hours, 1.0 - r.attainment) for r in each.results]
    return {seed: front(points) for seed, points in by_seed.items()}


def front(points: Iterable[FrontPoint]) -> list[FrontPoint]:
    """Return the points that are not beaten in both, by rising GPU-hours and falling misses."""
    unbeaten: list[FrontPoint] = []
    for point in sorted(points):
        if not unbeaten or point.missed < unbeaten[-1].missed:
            unbeaten.append(point)
    return unbeaten


def cost_at(points: Sequence[FrontPoint], missed: float) -> float | None:
    """Return the GPU-hours at which a front misses no more than a share; None where it never reaches that."""
    before: FrontPoint | None = None
    for point in points:
        if point.missed <= missed + 1e-9:
            if before is None or before.missed == point.missed:
                return point.gpu_hours
            part = (before.missed - missed) / (before.missed - point.missed)
            return before.gpu_hours + part * (point.gpu_hours - before.gpu_hours)
        before = point
    return None


def missed_at(points: Sequence[FrontPoint], gpu_hours: float) -> float | None:
    """Return the share that a front misses at so many GPU-hours; None below its first point."""
    before: FrontPoint | None = None
    for point in points:
        if point.gpu_hours >= gpu_hours:
            if before is None:
                return point.missed if point.gpu_hours == gpu_hours else None
            part = (gpu_hours - before.gpu_hours) / (point.gpu_hours - before.gpu_hours)
            return before.missed + part * (point.missed - before.missed)
        before = point
    return None if before is None else before.missed


# --- helpers -------------------------------------------------------------------------------------------------------


def _place(each: StudyRow) -> Place:
    return (each.cell.traffic, each.cell.layout, each.cell.start_up)


def _named(place: Place) -> list[str]:
    return [place[0], place[1], f"{place[2]:g}"]


def _places(done: Iterable[StudyRow]) -> list[Place]:
    names = list(ALL)
    return sorted({_place(each) for each in done}, key=lambda place: (place[1], names.index(place[0]), place[2]))


def _results(done: Iterable[StudyRow], place: Place, contender: str) -> dict[int, StudyResult]:
    """Return a policy's results at its default knob, by seed."""
    return {
        each.cell.seed: each.results[0]
        for each in done
        if _place(each) == place and each.cell.contender == contender and each.cell.knob == BY_NAME[contender].default
    }


def _median(values: Sequence[float], form: str) -> str:
    return form.format(statistics.median(values)) if values else "-"


def _range(values: Sequence[float], form: str) -> str:
    return f"{form.format(min(values))} to {form.format(max(values))}" if len(values) > 1 else ""

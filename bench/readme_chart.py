"""The README's chart: attainment against GPU-hours beside Dynamo's planner, and hit rates beside round robin.

usage: python bench/readme_chart.py

Reads the CSV beside docs/bench/planner-referee.md and docs/bench/routing.md; writes docs/pictures/beside-others.svg
and a CSV with every number that is drawn. A test fails when either is stale.
"""

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PLACES = {
    "Waves, aggregated, start-up 120 s": "Demand in waves: Penstock is ahead",
    "Bursts, aggregated, start-up 120 s": "Bursts: static fleets are ahead",
}
CACHE = "8,192 blocks per engine"
MODES = {"kv": "kv", "round_robin": "round robin", "least_loaded": "least loaded"}
HOURS, SHARES = (3.0, 8.0), (40.0, 100.0)
"""What the axes show: GPU-hours, per cent of requests in SLO."""
WIDTH, HEIGHT = 960, 352
TOP, BOTTOM = 62.0, 290.0
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #1f2328 } .title { font-weight: 600; font-size: 13px }
  .card { fill: #ffffff } .axis { stroke: #8c959f } .grid { stroke: #d8dee4 } .note { fill: #59636e }
  .ours { fill: #2f6fde; stroke: #2f6fde } .dynamo { fill: #d9711c; stroke: #d9711c }
  .static { fill: #7d8590; stroke: #7d8590 }
  path { fill: none !important; stroke-width: 2 } .swept { fill-opacity: 0.15 } rect { stroke: none }
  .range { stroke: #1f2328 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .card { fill: #0d1117 } .axis { stroke: #7d8590 } .grid { stroke: #30363d }
    .note { fill: #9198a1 }
    .ours { fill: #6ea8fe; stroke: #6ea8fe } .dynamo { fill: #f0a05a; stroke: #f0a05a } .range { stroke: #e6edf3 }
  }
"""


class Point(NamedTuple):
    """A planner's run: whose it is, its knob, GPU-hours, per cent of requests in SLO."""

    place: str
    who: str
    knob: str
    gpu_hours: float
    in_slo: float


class Bar(NamedTuple):
    """Hit rate of a routing mode on a trace in per cent, median and range of its repeats, and its mean TTFT in ms."""

    trace: str
    mode: str
    hit_rate: float
    low: float
    high: float
    ttft_ms: float


def rows(page: str, *words: str) -> list[dict[str, str]]:
    """Return the rows of the one CSV file beside a measured page whose name has these words."""
    slugs = [re.sub(r"[^a-z0-9]+", "-", each.lower()).strip("-") for each in words]
    (file,) = (path for path in (DOCS / "bench" / page).glob("*.csv") if all(slug in path.name for slug in slugs))
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def points() -> list[Point]:
    return [
        Point(
            place,
            row["who"].replace("ours: slo", "Penstock: slo"),
            row["knob"],
            float(row["GPU-h"]),
            float(row["in SLO"].rstrip("%")),
        )
        for place in PLACES
        for row in rows("planner-referee", place)
    ]


def bars() -> list[Bar]:
    found = []
    for trace in ("Conversation", "Synthetic"):
        for row in rows("routing", f"{trace} trace", CACHE):
            if row["mode"] in MODES:
                middle, low, high = (float(text) for text in re.findall(r"(\d+\.\d)%", row["hit rate"]))
                ttft = float(row["TTFT mean"].split()[0])
                found.append(Bar(trace.lower(), MODES[row["mode"]], middle, low, high, ttft))
    return found


def as_csv(planners: Iterable[Point], routers: Iterable[Bar]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for kind, found in ((Point, planners), (Bar, routers)):
        writer.writerow(kind._fields)
        writer.writerows(found)
    return out.getvalue()


# --- drawing ---------------------------------------------------------------------------------------------------------


def svg(planners: Sequence[Point], routers: Sequence[Bar]) -> str:
    parts = [f'<rect class="card" width="{WIDTH}" height="{HEIGHT}" rx="8"/>']
    for number, (place, title) in enumerate(PLACES.items()):
        parts += panel(56.0 + 325.0 * number, title, [point for point in planners if point.place == place])
    parts += bar_panel(706.0, routers)
    parts += legend()
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    name = "Attainment against GPU-hours beside Dynamo's planner and static fleets, and hit rates beside round robin"
    return "\n".join([f'{head} role="img">', f"<title>{name}</title>", f"<style>{STYLE}</style>", *parts, "</svg>", ""])


def panel(left: float, title: str, found: Sequence[Point], width: float = 255.0) -> Iterator[str]:
    """Draw every run of a place within the axes, and the line between those of ours and of static fleets."""

    def x(hours: float) -> float:
        return left + width * (hours - HOURS[0]) / (HOURS[1] - HOURS[0])

    def y(share: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (share - SHARES[0]) / (SHARES[1] - SHARES[0])

    yield text(left - 34, 24, title, "title")
    yield text(left - 34, 46, "requests in SLO, %", "note")
    for share in range(int(SHARES[0]), int(SHARES[1]) + 1, 20):
        yield line(left, y(share), left + width, y(share), "grid")
        yield text(left - 8, y(share) + 4, str(share), "note", "end")
    yield line(left, BOTTOM, left + width, BOTTOM, "axis")
    for hours in range(int(HOURS[0]), int(HOURS[1]) + 1):
        yield text(x(hours), BOTTOM + 17, str(hours), "note", "middle")
    yield text(left + width, BOTTOM + 34, "GPU-hours for one hour of traffic", "note", "end")
    shown = [p for p in found if HOURS[0] <= p.gpu_hours <= HOURS[1] and SHARES[0] <= p.in_slo <= SHARES[1]]
    for who, style in (("static", "static"), ("Penstock", "ours")):
        mine = sorted((p for p in shown if p.who.startswith(who)), key=lambda p: (p.gpu_hours, p.in_slo))
        yield f'<path class="{style}" d="M' + " L".join(f"{x(p.gpu_hours):.1f},{y(p.in_slo):.1f}" for p in mine) + '"/>'
    for p in sorted(shown, key=lambda p: "sDP".index(p.who[0])):
        style = {"s": "static", "P": "ours", "D": "dynamo"}[p.who[0]]
        swept = " swept" if style == "dynamo" and p.knob != "default" else ""
        tip = f"<title>{p.who}, {p.knob}: {p.in_slo:g} % for {p.gpu_hours:g} GPU-hours</title>"
        yield f'<circle class="{style}{swept}" cx="{x(p.gpu_hours):.1f}" cy="{y(p.in_slo):.1f}" r="4">{tip}</circle>'


def bar_panel(left: float, found: Sequence[Bar], width: float = 236.0) -> Iterator[str]:
    """Draw hit rates with their range over the repeats, and mean TTFT under each."""
    yield text(left - 34, 24, "Routing on the Mooncake traces", "title")
    yield text(left - 34, 46, "prompt tokens from cache, %", "note")

    def y(share: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * share / 60.0

    for share in (0, 20, 40, 60):
        yield line(left, y(share), left + width, y(share), "grid" if share else "axis")
        yield text(left - 8, y(share) + 4, str(share), "note", "end")
    for number, bar in enumerate(found):
        group = number // len(MODES)
        at = left + 10 + 38 * (number % len(MODES)) + 118 * group
        style = {"kv": "ours", "round robin": "static", "least loaded": "static swept"}[bar.mode]
        tip = f"<title>{bar.trace}, {bar.mode}: {bar.hit_rate:g} % ({bar.low:g} to {bar.high:g})</title>"
        box = f'x="{at:.1f}" y="{y(bar.hit_rate):.1f}" width="30" height="{BOTTOM - y(bar.hit_rate):.1f}"'
        yield f'<rect class="{style}" {box}>{tip}</rect>'
        yield line(at + 15, y(bar.low), at + 15, y(bar.high), "range")
        yield text(at + 15, BOTTOM + 17, f"{bar.ttft_ms:g}", "note", "middle")
        if number % len(MODES) == 1:
            yield text(at + 15, BOTTOM + 34, bar.trace, "note", "middle")
    yield text(left - 8, BOTTOM + 17, "TTFT ms", "note", "end")


def legend() -> Iterator[str]:
    at = 22.0
    for style, words in (
        ("ours", "Penstock"),
        ("dynamo", "Dynamo 1.6.1, defaults of its modes"),
        ("dynamo swept", "its other knobs"),
        ("static", "static fleets; round robin"),
        ("static swept", "least loaded"),
    ):
        yield f'<circle class="{style}" cx="{at:.0f}" cy="{HEIGHT - 12}" r="4"/>'
        yield text(at + 9, HEIGHT - 8, words)
        at += 34 + 6.4 * len(words)


def text(x: float, y: float, words: str, style: str = "", anchor: str = "start") -> str:
    words = words.replace("&", "&amp;")
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'


def line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def made() -> dict[str, str]:
    """Return what the pictures' folder should hold, by name."""
    planners, routers = points(), bars()
    return {"beside-others.svg": svg(planners, routers), "beside-others.csv": as_csv(planners, routers)}


if __name__ == "__main__":
    for name, content in made().items():
        (DOCS / "pictures" / name).write_text(content)

"""How do the measurements become tables? Medians over the repeats, and ratios within the run."""

from statistics import median
from typing import Any

HEADLINES = (
    "unary w100 new c1",
    "unary w100 new c16",
    "stream w100 new c16",
    "unary w2000 new c16",
    "unary w2000 cold c16",
)
"""Cells that a reader looks for first."""


def tables(results: dict[str, Any]) -> str:
    """Return the page's part between its markers."""
    runs = results["runs"]
    names = list(dict.fromkeys(run["gateway"] for run in runs))
    lines = heading(results)
    cells = [cell for cell in dict.fromkeys(run["cell"] for run in runs) if cell != "hold"]
    shown = [(cell, "cpu_ms") for cell in HEADLINES if cell in cells]
    lines += block("CPU per request in brief, ms", names, shown, runs, skip=("direct",))
    lines += block("CPU per request, ms", names, [(cell, "cpu_ms") for cell in cells], runs, skip=("direct",))
    lines += block("Median latency, ms (streams: first token)", names, [(c, p50(c)) for c in cells], runs)
    lines += block("99th percentile, ms (streams: first token)", names, [(c, p99(c)) for c in cells], runs)
    rest = [(cell, "cpu_us_per_event") for cell in cells if cell.startswith("paced")]
    lines += block("CPU per paced chunk, us", names, rest, runs, skip=("direct",))
    lines += block(
        "Memory per idle connection, bytes", names, [("hold", "bytes_per_connection")], runs, skip=("direct",)
    )
    lines += block("Requests that failed", names, [(cell, "errors") for cell in cells], runs, zeros=False)
    return "\n".join([*lines, "", *goals(runs)])


def heading(results: dict[str, Any]) -> list[str]:
    """Return the lines that say where and how often was measured, and what was left out."""
    machine, runs = results["machine"], results["runs"]
    loads = [run["load"] for run in runs if "load" in run]
    repeats = 1 + max((run["repeat"] for run in runs), default=0)
    return [
        f"{machine['date']}, {machine['cpu']}, {machine['cores']} cores, Python {machine['python']}; medians of "
        f"{repeats} alternating runs of {results['seconds']:g} s; load average {min(loads, default=0):.1f} to "
        f"{max(loads, default=0):.1f}.",
        *(f"Left out: {name} ({why})." for name, why in results["skipped"].items()),
    ]


def block(
    title: str,
    names: list[str],
    rows: list[tuple[str, str]],
    runs: list[dict[str, Any]],
    skip: tuple[str, ...] = (),
    zeros: bool = True,
) -> list[str]:
    shown = [name for name in names if name not in skip]
    made = []
    for cell, key in rows:
        values = [value(runs, name, cell, key) for name in shown]
        if any(found is not None and (zeros or found) for found in values):
            made.append(f"| {cell} | " + " | ".join(number(found) for found in values) + " |")
    if not made:
        return []
    return ["", f"**{title}**", "", "| | " + " | ".join(shown) + " |", "|---|" + "---:|" * len(shown), *made]


def goals(runs: list[dict[str, Any]]) -> list[str]:
    """Return a line per goal: ours over theirs, and whether that is enough."""
    found: list[tuple[str, float | None, float]] = []

    def ratio(text: str, ours: str, theirs: str, cell: str, key: str, most: float, other: str | None = None) -> None:
        mine, other_value = value(runs, ours, cell, key), value(runs, theirs, other or cell, key)
        found.append((text, mine / other_value if mine and other_value else None, most))

    for theirs in ("sglang-router", "smg"):
        for cell in ("unary w100 new c16", "stream w100 new c16", "unary w2000 new c16", "stream w2000 new c16"):
            ratio(f"pass-through CPU over {theirs}'s, {cell}", "ours", theirs, cell, "cpu_ms", 1.5)
        for cell in ("unary w100 new c1", "stream w100 new c1", "unary w2000 new c1"):
            ratio(f"pass-through p50 over {theirs}'s, {cell}", "ours", theirs, cell, p50(cell), 1.5)
        paced = "paced w100 c64"
        ratio(f"CPU per paced chunk over {theirs}'s", "ours", theirs, paced, "cpu_us_per_event", 1.5)
        ratio(f"paced first token over {theirs}'s, p50", "ours", theirs, paced, p50(paced), 2.0)
    for cell, most in (("unary w100 cold c16", 1 / 3), ("stream w100 new c16", 1 / 3), ("unary w2000 cold c16", 1.0)):
        ratio(f"full CPU over Dynamo's, {cell}", "ours-full", "dynamo", cell, "cpu_ms", most)
    cold = "unary w2000 cold c16"
    for cell in ("unary w2000 repeated c16", "unary w2000 turns c16"):
        ratio(f"full CPU over cold, {cell}", "ours-full", "ours-full", cell, "cpu_ms", 0.1, cold)
    ratio("CPU of two processes over one", "ours-two", "ours", "unary w100 new c16", "cpu_ms", 1.1)
    for name in ("ours", "ours-full"):
        for cell in ("unary w100 new c1", "stream w100 new c1"):
            mine, bare = value(runs, name, cell, p50(cell)), value(runs, "direct", cell, p50(cell))
            added = mine - bare if mine is not None and bare is not None else None
            found.append((f"added p50 in ms, {name}, {cell}", added, 0.2))
        for cell in ("unary w100 new 100/s", "stream w100 new 100/s"):
            found.append((f"p99 in ms, {name}, {cell}", value(runs, name, cell, p99(cell)), 3.0))
        for cell in ("unary w100 stall c1", "stream w100 stall c1"):
            found.append((f"p50 in ms without QUICKACK, {name}, {cell}", value(runs, name, cell, "p50_ms"), 20.0))
        memory = value(runs, name, "hold", "bytes_per_connection")
        found.append((f"KiB per idle connection, {name}", None if memory is None else memory / 1024, 20.0))
    lines = ["**Goals**", "", "| | measured | at most | |", "|---|---:|---:|---|"]
    for text, got, most in found:
        if got is not None:
            lines.append(f"| {text} | {number(got)} | {number(most)} | {'reached' if got <= most else '**missed**'} |")
    return lines


def p50(cell: str) -> str:
    return "p50_ms" if cell.startswith("unary") else "ttft_p50_ms"


def p99(cell: str) -> str:
    return "p99_ms" if cell.startswith("unary") else "ttft_p99_ms"


def value(runs: list[dict[str, Any]], gateway: str, cell: str, key: str) -> float | None:
    found = [
        run["found"][key]
        for run in runs
        if run["gateway"] == gateway and run["cell"] == cell and run["found"].get(key) is not None
    ]
    return median(found) if found else None


def number(found: float | None) -> str:
    if found is None:
        return ""
    return (
        f"{found:,.0f}"
        if found >= 100
        else f"{found:.1f}"
        if found >= 10
        else f"{found:.2f}"
        if found >= 0.1
        else f"{found:.3f}"
    )

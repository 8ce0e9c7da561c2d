"""The table of the transfer bench, and its place in the page."""

from typing import Any

TITLES = {
    "memcpy": ("Within one process", "one copy"),
    "shm": ("Shared memory between two processes", "one copy"),
    "tcp": ("TCP between two processes", "bare socket"),
    "peer": ("Another worker's blocks", "bare socket"),
    "disk": ("Disk", "direct calls"),
    "gpu": ("Between a GPU and its host", "one copy"),
}
GOALS = {"memcpy": (0.85, 256 << 10), "shm": (0.80, 0), "tcp": (0.80, 0), "disk": (0.85, 0)}
"""Ratio that is wanted, from which block size on."""


def table(results: dict[str, Any]) -> str:
    """Return the tables of one run as Markdown: GB/s (ratio to the raw limit by wall time; by CPU time), medians."""
    low, high = min(results["load"]), max(results["load"])
    lines = [
        f"{results['date']}, {results['machine']}; load average {low:.1f} to {high:.1f};"
        f" medians of {results['rounds']} rounds.",
        "",
    ]
    for section, (title, raw) in TITLES.items():
        rows = [row for row in results["rows"] if row["section"] == section]
        if not rows:
            continue
        ways = list(dict.fromkeys(row["way"] for row in rows))
        ways.sort(key=lambda way: way != raw)
        short = short_of(section, rows)
        lines += [
            f"**{title}** ({short})" if short else f"**{title}**",
            "",
            "| block | direction | " + " | ".join(f"{way} GB/s" for way in ways) + " |",
            "|---|---|" + "---:|" * len(ways),
        ]
        for block, direction in dict.fromkeys((row["block"], row["direction"]) for row in rows):
            cells = [cell(rows, block, direction, way, raw) for way in ways]
            lines.append(f"| {block >> 10} KiB | {direction} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def short_of(section: str, rows: list[dict[str, Any]]) -> str:
    """Say how many ratios of ours reach the goal."""
    if section not in GOALS:
        return ""
    goal, least = GOALS[section]
    ours = [row for row in rows if row.get("ratio", 1) != 1 and row["block"] >= least]
    reached = sum(row["ratio"] >= goal for row in ours)
    cheap = sum(row["cpu_ratio"] >= goal for row in ours)
    blocks = f" from {least >> 10} KiB on" if least else ""
    counts = f"of {len(ours)} ratios, {reached} reach it by wall time, {cheap} by CPU time"
    return f"goal: {goal:.2f} of the raw limit{blocks}; {counts}"


def cell(rows: list[dict[str, Any]], block: int, direction: str, way: str, raw: str) -> str:
    found = [row for row in rows if (row["block"], row["direction"], row["way"]) == (block, direction, way)]
    if not found:
        return ""
    row = found[0]
    return (
        f"{row['rate']:.2f}"
        if way == raw or "ratio" not in row
        else f"{row['rate']:.2f} ({row['ratio']:.2f}; {row['cpu_ratio']:.2f})"
    )

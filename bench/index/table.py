"""How do the measured numbers become a table?"""

from typing import Any

from workload import middle

ROWS = [
    ("apply_256", "apply 256 blocks", "us"),
    ("apply_1", "apply 1 block", "us"),
    ("remove_192", "remove 192 blocks", "us"),
    ("find_8_hit", "find 8, hit", "us"),
    ("find_64_hit", "find 64, hit", "us"),
    ("find_256_hit", "find 256, hit", "us"),
    ("find_2000_hit", "find 2000, hit", "us"),
    ("find_8_miss", "find 8, miss", "us"),
    ("find_256_miss", "find 256, miss", "us"),
    ("find_2000_miss", "find 2000, miss", "us"),
    ("find_256_hit_named", "find 256, hit, with worker names", "us"),
    ("remove_worker_ms", "remove a worker", "ms"),
    ("apply_longest_ms", "longest apply", "ms"),
    ("bytes_per_pair", "bytes per pair", "B"),
]


def table(results: dict[str, Any]) -> str:
    """Return one Markdown table per size: of ours the median run, of the peer the best.

    A call into the peer's binding waits for a background thread to wake, which takes it 5 or 60 us in one run or
    another of the same machine; its best run is what it can do.
    """
    machine = results["machine"]
    loads = [run["load"] for run in results["runs"]]
    lines = [
        f"{machine['date']}, {machine['cpu']}, {machine['cores']} cores, Python {machine['python']}; "
        f"load average {min(loads):.1f} to {max(loads):.1f} when the measurements began.",
    ]
    for pairs, workers in dict.fromkeys((run["pairs"], run["workers"]) for run in results["runs"]):
        runs = [run for run in results["runs"] if (run["pairs"], run["workers"]) == (pairs, workers)]
        ours = sum(run["kind"] == "own" for run in runs)
        peers = sum(run["kind"] == "peer" for run in runs)
        lines += [
            "",
            f"**{pairs:,} pairs, {workers:,} workers** (runs: {ours} of ours, {peers} of RadixTree)",
            "",
            "| | unit | own hash | RadixTree (best) | ratio | translated | ratio |",
            "|---|---|---:|---:|---:|---:|---:|",
        ]
        for name, label, unit in ROWS:
            own, theirs, translated = (value(runs, kind, name) for kind in ("own", "peer", "translated"))
            lines.append(
                f"| {label} | {unit} | {shown(own)} | {shown(theirs)} | {ratio(own, theirs)} "
                f"| {shown(translated)} | {ratio(translated, theirs)} |"
            )
        hashing, theirs = value(runs, "peer", "hash_256"), value(runs, "peer", "apply_256")
        if hashing is not None and theirs is not None:
            both = hashing + theirs
            translated = value(runs, "translated", "apply_256")
            lines.append(
                f"| hash the tokens of 256 blocks and apply | us | | {shown(both)} | | {shown(translated)} "
                f"| {ratio(translated, both)} |"
            )
    return "\n".join(lines)


def value(runs: list[dict[str, Any]], kind: str, name: str) -> float | None:
    found = [run["found"][name] for run in runs if run["kind"] == kind and name in run["found"]]
    if not found:
        return None
    return min(found) if kind == "peer" else middle(found)


def shown(number: float | None) -> str:
    if number is None:
        return ""
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def ratio(ours: float | None, theirs: float | None) -> str:
    return "" if ours is None or not theirs else f"{ours / theirs:.2f}"

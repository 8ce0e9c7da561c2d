"""What came out? Medians with their range per trace, cache size and mode, and whether the order held."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from plan import MODES, SPEED_UP

FIGURES = ("hit_rate", "ttft_mean_s")
Run = dict[str, Any]
"""One line of results.jsonl: trace, blocks, mode, repeat, bench (what ``penstock bench --json`` printed)."""


def tables(runs: Sequence[Run]) -> str:
    """Return Markdown: every cell's medians in one table, a table per cell, then the checks of the order."""
    parts = [summary(runs)]
    for trace in _values(runs, "trace"):
        parts.append(f"### {trace.capitalize()} trace\n")
        for blocks in _values(runs, "blocks"):
            cell = [run for run in runs if run["trace"] == trace and run["blocks"] == blocks]
            if cell:
                parts.append(_table(cell, blocks))
    parts.append("### Does the order hold?\n")
    parts.append("\n".join(f"- {line}" for line in order(runs)) + "\n")
    return "\n".join(parts)


def summary(runs: Sequence[Run]) -> str:
    """Return hit rate and mean TTFT of each mode in each cell."""
    lines = [f"| trace, blocks per engine | {' | '.join(MODES)} |", "|---|" + "---:|" * len(MODES)]
    for trace in _values(runs, "trace"):
        for blocks in _values(runs, "blocks"):
            cells = []
            for mode in MODES:
                cell = [
                    run["bench"] for run in runs if (run["trace"], run["blocks"], run["mode"]) == (trace, blocks, mode)
                ]
                valid = [found for found in cell if found["valid"]]
                middle = {key: statistics.median(found[key] for found in valid) for key in FIGURES if valid}
                cells.append(", ".join(_shown(key, middle) for key in middle) or "-")
            lines.append(f"| {trace}, {blocks:,} | {' | '.join(cells)} |")
    return "### Hit rate and mean TTFT\n\n" + "\n".join(lines) + "\n"


def order(runs: Sequence[Run]) -> list[str]:
    """Say for every trace, size and repeat whether kv has the best hit rate and the best mean TTFT."""
    held = broken = unknown = 0
    lines: list[str] = []
    for trace in _values(runs, "trace"):
        for blocks in _values(runs, "blocks"):
            for repeat in _values(runs, "repeat"):
                cell = {
                    run["mode"]: run["bench"]
                    for run in runs
                    if (run["trace"], run["blocks"], run["repeat"]) == (trace, blocks, repeat) and run["bench"]["valid"]
                }
                if "kv" not in cell or len(cell) < 2:
                    unknown += 1
                    continue
                for figure, better in (("hit_rate", max), ("ttft_mean_s", min)):
                    best = better(cell, key=lambda mode: cell[mode][figure])
                    if best == "kv":
                        held += 1
                        continue
                    broken += 1
                    name = "hit rate" if figure == "hit_rate" else "mean TTFT"
                    lines.append(
                        f"{trace}, {blocks:,} blocks, repeat {repeat}: best {name} is {best} "
                        f"({_shown(figure, cell[best])}), kv has {_shown(figure, cell['kv'])}"
                    )
    first = f"kv is best in {held} of {held + broken} comparisons (hit rate and mean TTFT, per repeat)"
    if unknown:
        first += f"; {unknown} repeats could not be compared for want of valid runs"
    return [first, *(lines or ["no exception" if held else "nothing was compared"])]


def _table(cell: Sequence[Run], blocks: int) -> str:
    bounds = sorted({round(run["bench"]["hit_rate_bound"], 3) for run in cell})
    span = f"{bounds[0]:.1%}" if len(bounds) == 1 else f"{bounds[0]:.1%} to {bounds[-1]:.1%}"
    lines = [
        f"**{blocks:,} blocks per engine** (infinite cache: {span} of prompt tokens)\n",
        "| mode | hit rate | of the bound | TTFT mean | p50 | p90 | p99 | ITL mean | p99 | goodput | rejected "
        "| failed | runs |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for mode in MODES:
        mine = [run["bench"] for run in cell if run["mode"] == mode]
        if not mine:
            continue
        valid = [bench for bench in mine if bench["valid"]]
        invalid = len(mine) - len(valid)
        count = f"{len(valid)}" + (f" ({invalid} invalid)" if invalid else "")
        cells = [
            _range(valid, lambda bench: bench["hit_rate"], _percent),
            _range(valid, lambda bench: bench["hit_rate_share_of_bound"], _percent),
            *(_range(valid, _time(f"ttft_{point}_s"), _ms) for point in ("mean", "p50", "p90", "p99")),
            *(_range(valid, _time(f"itl_{point}_s"), _ms1) for point in ("mean", "p99")),
            _range(valid, lambda bench: bench["goodput_share"], _percent),
            _range(valid, lambda bench: bench["requests"]["rejected"], _whole),
            _range(valid, lambda bench: bench["requests"]["failed"] + bench["requests"]["expired"], _whole),
        ]
        lines.append(f"| {mode} | {' | '.join(cells)} | {count} |")
    return "\n".join(lines) + "\n"


def _values(runs: Sequence[Run], key: str) -> list[Any]:
    return list(dict.fromkeys(run[key] for run in sorted(runs, key=lambda run: run[key])))


def _time(key: str) -> Callable[[Run], float | None]:
    """Read a measured time as the engine's own."""
    return lambda bench: None if bench[key] is None else bench[key] * SPEED_UP


def _range(benches: Sequence[Run], read: Callable[[Run], Any], show: Callable[[float], str]) -> str:
    values = [value for value in (read(bench) for bench in benches) if value is not None]
    if not values:
        return "-"
    middle, low, high = show(statistics.median(values)), show(min(values)), show(max(values))
    return middle if low == high else f"{middle} ({low}..{high})"


def _shown(figure: str, bench: Run) -> str:
    value = bench[figure]
    return _percent(value) if figure == "hit_rate" else f"{_ms(value * SPEED_UP)} ms"


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _ms(value: float) -> str:
    return f"{value * 1e3:,.0f}"


def _ms1(value: float) -> str:
    return f"{value * 1e3:.1f}"


def _whole(value: float) -> str:
    return f"{value:.0f}"

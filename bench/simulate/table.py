"""How do the measurements become the page's tables?"""

from collections.abc import Sequence
from statistics import median

Figures = dict[str, float]
"""wall: seconds of computing; requests; ttft, itl, e2e: means in seconds; reuse: share; peak: MiB."""
Cells = dict[tuple[str, int], dict[str, list[Figures]]]
"""(mode, tokens per block) -> runs of each build of ours, and of the peer."""


def against_peer(cells: Cells) -> str:
    """Set our replay of the trace beside the peer's."""
    lines = [
        "### The Mooncake conversation trace over four engines",
        "",
        "| mode, tokens per block | | requests/s of computing | times the peer's | mean TTFT ms | mean ITL ms "
        "| mean end to end ms | hit rate |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for (mode, size), runs in cells.items():
        peer = middle(runs.get("peer", []))
        for who in runs:
            mine = middle(runs[who])
            assert mine is not None
            ratio = "" if peer is None or who == "peer" else f"{peer['wall'] / mine['wall']:.2f}"
            lines.append(
                f"| {mode}, {size} | {who} | {mine['requests'] / mine['wall']:,.0f} | {ratio} "
                f"| {mine['ttft'] * 1e3:,.1f} | {mine['itl'] * 1e3:.2f} | {mine['e2e'] * 1e3:,.0f} "
                f"| {mine['reuse']:.4f} |"
            )
    return "\n".join(lines)


def by_size(rows: Sequence[tuple[int, int, str, dict[str, Figures]]]) -> str:
    """Show what a request costs as runs and fleets grow."""
    lines = [
        "### Chats, two requests a second for each worker",
        "",
        "| requests | workers | mode | | seconds of computing | us per request | peak memory MiB |",
        "|---:|---:|---|---|---:|---:|---:|",
    ]
    for requests, workers, mode, builds in rows:
        lines += [
            f"| {requests:,} | {workers} | {mode} | {who} | {mine['wall']:.1f} | {mine['wall'] / requests * 1e6:.0f} "
            f"| {mine['peak']:,.0f} |"
            for who, mine in builds.items()
        ]
    return "\n".join(lines)


def by_length(rows: Sequence[tuple[int, Figures]]) -> str:
    """Show what a request costs as answers grow."""
    lines = [
        "### Answers of a fixed length, 1,000 tokens of prompt, four workers, round robin, 10,000 requests",
        "",
        "| output tokens | us per request |",
        "|---:|---:|",
    ]
    lines += [f"| {length:,} | {mine['wall'] / mine['requests'] * 1e6:.0f} |" for length, mine in rows]
    return "\n".join(lines)


def middle(runs: Sequence[Figures]) -> Figures | None:
    """Return the median of each figure."""
    return {name: median(run[name] for run in runs) for name in runs[0]} if runs else None

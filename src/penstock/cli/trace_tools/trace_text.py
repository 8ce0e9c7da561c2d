"""Summary of a trace in words and tables, as ``penstock trace info`` prints it."""

from collections.abc import Sequence
from typing import Any

from penstock.cli.shared.output import percent, seconds_text, table
from penstock.kernel.plurals import counted
from penstock.traffic.formats.servegen import WINDOW, ServegenClient, rate_over_time
from penstock.traffic.trace_summary import TraceSpread, TraceSummary

KINDS = 8
"""Most kinds of requests shown, the most frequent first."""


def summary_text(summary: TraceSummary) -> list[str]:
    """Return the end of the first sentence, and then, where there are requests, paragraphs and tables."""
    first = f"{counted(summary.requests, 'request')}{_pace(summary)}"
    return [first, _lengths(summary), _sharing(summary), _rates(summary)] if summary.requests else [first]


def archive_facts(clients: Sequence[ServegenClient]) -> dict[str, Any]:
    """Return the content of a ServeGen archive, as ``--json`` has it."""
    rates = rate_over_time(clients)
    end = rates[-1][0]
    total = sum(client.rate.expected(end) for client in clients)
    return {
        "format": "servegen",
        "clients": len(clients),
        "clients_with_lengths": sum(bool(client.spans) for client in clients),
        "span_s": end,
        "expected_requests": total,
        "requests_per_s": total / end,
        "window_s": WINDOW,
        "peak_per_s": max(rate for _, rate in rates),
    }


def archive_text(facts: dict[str, Any]) -> str:
    """Return the same facts as sentences."""
    return (
        f"{facts['file']}: ServeGen rates of {counted(facts['clients'], 'client')} "
        f"({facts['clients_with_lengths']:,} with lengths) over {seconds_text(facts['span_s'])}: "
        f"about {facts['expected_requests']:,.0f} requests, {facts['requests_per_s']:,.2f} per second, "
        f"{facts['peak_per_s']:,.2f} in the busiest {seconds_text(facts['window_s'])}.\n"
        "'penstock trace convert' draws requests from it."
    )


def _pace(summary: TraceSummary) -> str:
    if summary.requests_per_s is None or summary.peak_per_s is None:
        return ""
    return (
        f" over {seconds_text(summary.span_s)}: {summary.requests_per_s:,.2f} per second, "
        f"{summary.peak_per_s:,.2f} in the busiest {seconds_text(summary.window_s)}"
    )


def _lengths(summary: TraceSummary) -> str:
    rows = [_spread("prompt tokens", summary.prompts), _spread("output tokens", summary.outputs)]
    if summary.think_s is not None:
        rows.append(_spread("think time, s", summary.think_s))
    return table(("", "MEAN", "P50", "P90", "P99", "MAX", "TOTAL"), rows)


def _spread(name: str, spread: TraceSpread | None) -> list[Any]:
    if spread is None:
        return [name, *[None] * 6]
    return [
        name,
        *(float(f"{value:.6g}") for value in (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)),
        spread.total,
    ]


def _sharing(summary: TraceSummary) -> str:
    lines = []
    if summary.bound is None:
        lines.append("The trace says nothing of shared prefixes: its prompts count as sharing nothing.")
    else:
        named = "" if summary.named_share == 1.0 else f" (hash ids cover {percent(summary.named_share)} of them)"
        lines.append(
            f"One infinite cache with blocks of {summary.block_size} would hit {percent(summary.bound)} "
            f"of the prompt tokens{named}."
        )
    if summary.sessions:
        lines.append(f"{counted(summary.sessions, 'session')} with {summary.turns_per_session:,.2f} turns on average.")
    if summary.kinds:
        shown = sorted(summary.kinds.items(), key=lambda item: (-item[1], item[0]))[:KINDS]
        lines.append("Kinds: " + ", ".join(f"{name} {count:,}" for name, count in shown) + ".")
    return "\n".join(lines)


def _rates(summary: TraceSummary) -> str:
    rows = [
        [seconds_text(window.start_s), window.requests, window.requests_per_s, window.prompt_tokens_per_s]
        for window in summary.windows
    ]
    return table(("FROM", "REQUESTS", "PER SECOND", "PROMPT TOKENS/S"), rows)

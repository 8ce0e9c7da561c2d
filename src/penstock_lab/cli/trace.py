"""Command ``penstock trace``: summarises a trace, converts it, cuts a part out of it, changes its rate."""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from penstock.cli.shared.option_values import SECONDS, Amount
from penstock.cli.shared.output import json_option, percent, print_json, seconds_text, table
from penstock.kernel.errors import ConfigError
from penstock.kernel.plurals import counted
from penstock_lab.cli.traffic_flags import FORMATS, trace_options
from penstock_lab.report.trace_files import RateTally, is_archive, load_archive, save
from penstock_lab.report.traffic_options import opened
from penstock_lab.traffic import trace_slices
from penstock_lab.traffic.formats.servegen import WINDOW, RateRows, ServegenClient, draw, rate_over_time
from penstock_lab.traffic.formats.trace_format import Written
from penstock_lab.traffic.formats.trace_rows import TraceRequests
from penstock_lab.traffic.trace_summary import TraceSpread, TraceSummary, mean_rate, summarise
from penstock_lab.traffic.traffic_request import TrafficRequest

F = TypeVar("F", bound=Callable[..., Any])
WRITTEN = ("mooncake", "records")

EPILOG = """\b
Examples:
  penstock trace info conversation_trace.jsonl
  penstock trace convert AzureLLMInferenceTrace_conv.csv azure.jsonl --to mooncake
  penstock trace slice conversation_trace.jsonl ten-minutes.jsonl --start 10m --end 20m --spread-ties
  penstock trace scale conversation_trace.jsonl busier.jsonl --target-rate 8

Formats: Mooncake JSON lines, Qwen-Bailian chats, Azure LLM inference CSV, BurstGPT CSV, Dynamo request traces, exports
of AIPerf and GenAI-Perf, results of 'vllm bench serve' and GuideLLM, OpenTelemetry GenAI spans (OTLP JSON), ShareGPT,
CSV and JSON lines with named columns, and the requests.jsonl of a run folder; info and convert take ServeGen's archives
too.
"""

_FILE = click.Path(exists=True, path_type=Path)
_OUT = click.Path(dir_okay=False, path_type=Path)


def reading_options(command: F) -> F:
    """Add the options for reading a trace."""
    for option in (
        click.option("--skip-bad", is_flag=True, help="Leave bad rows out, and count them."),
        trace_options(""),
        click.option(
            "--format", "format_name", type=click.Choice(FORMATS), help="Of FILE; unset looks at its first lines."
        ),
    ):
        command = option(command)
    return command


to_option = click.option(
    "--to", type=click.Choice(WRITTEN), default="mooncake", show_default=True, help="Format of OUT."
)


@click.group("trace", epilog=EPILOG, short_help="Inspect, convert, cut and scale traces of requests.")
def command() -> None:
    """Inspect, convert, cut and scale traces of requests."""


@command.command("info", epilog="\b\nExample:\n  penstock trace info conversation_trace.jsonl --block-size 16")
@click.argument("file", type=_FILE)
@click.option(
    "--block-size",
    "engine_block_size",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="Of an engine, for what it could hit.",
)
@reading_options
@json_option
def info(file: Path, engine_block_size: int, as_json: bool, **reading: Any) -> int:
    """Say how many requests FILE has, how fast they come, how long they are, and what a cache could hit of them."""
    if reading["format_name"] is None and is_archive(file):
        clients, read = load_archive(file, skip_bad=reading["skip_bad"])
        facts = {"file": str(file), **archive_facts(clients), "skipped": sum(rows.skipped for rows in read)}
        if as_json:
            print_json(facts)
        else:
            click.echo(archive_text(facts))
            _say_left_out(read, 0, err=False)
        return 0
    with opened(file, **reading) as trace:
        summary = summarise(trace, block_size=engine_block_size)
    if as_json:
        counts = {"rows": trace.rows, "skipped": trace.skipped, "unanswered": trace.unanswered}
        errors = {"errors": [str(error) for error in trace.errors]}
        times = {"timed": trace.timed, "clock": trace.clock or None, "notes": trace.notes}
        print_json(
            {"file": str(file), "format": trace.format, **counts, **errors, **times, **msgspec.to_builtins(summary)}
        )
        return 0
    first, *rest = summary_text(summary)
    click.echo(f"{file}: {trace.format}, {counted(trace.rows, 'row')}, {first}.")
    if not trace.timed:
        click.echo("It says no times: 'penstock trace convert' gives it some with --target-rate.")
    if trace.clock and not any(trace.clock in note for note in trace.notes):
        click.echo(f"Times are in {trace.clock}.")
    _say_left_out([trace], trace.unanswered, err=False)
    for part in rest:
        click.echo(f"\n{part}")
    return 0


@command.command("convert", epilog="\b\nExample:\n  penstock trace convert runs/RUN/requests.jsonl again.jsonl")
@click.argument("file", type=_FILE)
@click.argument("out", type=_OUT)
@to_option
@reading_options
@click.option("--start", type=SECONDS, help="ServeGen: second of the archive's clock to begin at; unset is 0.")
@click.option("--end", type=SECONDS, help="ServeGen: second of the archive's clock to end at.")
@click.option("--target-rate", type=Amount("1/s"), help="ServeGen, or rows without times: mean requests per second.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of these: same seed, same requests.")
def convert(
    file: Path,
    out: Path,
    to: Written,
    start: float | None,
    end: float | None,
    target_rate: float | None,
    seed: int,
    **reading: Any,
) -> int:
    """Write FILE's requests to OUT in another format; of a ServeGen archive, requests drawn from its rates."""
    if reading["format_name"] is None and is_archive(file):
        if end is None:
            raise click.UsageError("say with --end how much of the archive to draw; it is days long")
        clients, rows = load_archive(file, skip_bad=reading["skip_bad"])
        _say_left_out(rows, 0)
        return _write_trace(out, to, _drawn_requests(clients, start or 0.0, end, target_rate, seed))
    if start is not None or end is not None:
        raise click.UsageError("--start and --end are of archives; see 'penstock trace slice'")
    with opened(file, **reading) as trace:
        requests = iter(trace)
        first = list(itertools.islice(requests, 1))  # which shows whether there are times
        if trace.timed and target_rate is not None:
            raise click.UsageError(
                "--target-rate is of archives, and of traces without times; see 'penstock trace scale'"
            )
        requests = itertools.chain(first, requests)
        if not trace.timed:
            requests = trace_slices.paced(requests, _rate_of(file, target_rate), random.Random(seed))
        _write_trace(out, to, requests)
    _say_left_out([trace], trace.unanswered)
    return 0


def _rate_of(file: Path, target_rate: float | None) -> float:
    if target_rate is None or not target_rate > 0.0:
        raise ConfigError(f"{file} has no times", hint="say with --target-rate how many requests come per second")
    return target_rate


@command.command("slice", epilog="\b\nExample:\n  penstock trace slice conversation_trace.jsonl part.jsonl --count 500")
@click.argument("file", type=_FILE)
@click.argument("out", type=_OUT)
@click.option(
    "--start", type=SECONDS, default=0.0, show_default=True, help="From this second of the trace, which is 0."
)
@click.option("--end", type=SECONDS, help="To before this second of the trace.")
@click.option("--count", type=click.IntRange(1), help="Not more than so many requests.")
@click.option("--spread-ties", is_flag=True, help="Spread requests of one timestamp up to the next one.")
@to_option
@reading_options
def slice_(
    file: Path,
    out: Path,
    start: float,
    end: float | None,
    count: int | None,
    spread_ties: bool,
    to: Written,
    **reading: Any,
) -> int:
    """Write a part of FILE to OUT; its times count from --start."""
    with opened(file, **reading) as trace:
        chosen = list(_timed_requests(trace, trace_slices.by_time(trace, start, end)))
    shifted = trace_slices.rebase(chosen, start)
    if spread_ties:
        shifted = trace_slices.spread_ties(shifted)
    _write_trace(out, to, trace_slices.by_count(shifted, count))
    _say_left_out([trace], trace.unanswered)
    return 0


@command.command(
    "scale", epilog="\b\nExample:\n  penstock trace scale conversation_trace.jsonl fast.jsonl --rate-factor 4"
)
@click.argument("file", type=_FILE)
@click.argument("out", type=_OUT)
@click.option("--rate-factor", type=click.FloatRange(0, min_open=True), help="Everything comes so many times as fast.")
@click.option("--target-rate", type=Amount("1/s"), help="Mean requests per second, instead of a factor.")
@to_option
@reading_options
def scale(
    file: Path, out: Path, rate_factor: float | None, target_rate: float | None, to: Written, **reading: Any
) -> int:
    """Write FILE to OUT with its times, and pauses between turns, stretched or shrunk."""
    if (rate_factor is None) == (target_rate is None):
        raise click.UsageError("give either --rate-factor or --target-rate")
    if target_rate is not None:
        rate_factor = _rate_factor(file, target_rate, reading)
    with opened(file, **reading) as trace:
        _write_trace(out, to, trace_slices.scale_rate(_timed_requests(trace, trace), rate_factor or 1.0))
    _say_left_out([trace], trace.unanswered)
    return 0


def _timed_requests(trace: TraceRequests, requests: Iterable[TrafficRequest]) -> Iterator[TrafficRequest]:
    """Yield the requests of a trace that has times.

    Raises:
        ConfigError: it has none.
    """
    for request in requests:
        if not trace.timed:
            raise ConfigError(
                f"{trace.name} has no times", hint="'penstock trace convert' gives it some with --target-rate"
            )
        yield request


def _rate_factor(file: Path, target_rate: float, reading: dict[str, Any]) -> float:
    """Read the trace for its mean rate, and return the factor for it."""
    if not target_rate > 0.0:
        raise click.UsageError(f"--target-rate must be above 0, not {target_rate:g}")
    tally = RateTally()
    with opened(file, **reading) as trace:
        for _ in tally.watch(trace):
            pass
    rate = mean_rate(tally.count, tally.span)
    if rate is None:
        raise ConfigError("the trace has no rate: all its requests come at once", hint="use --rate-factor")
    return target_rate / rate


def _drawn_requests(
    clients: Sequence[ServegenClient], start: float, end: float, target_rate: float | None, seed: int
) -> Iterator[TrafficRequest]:
    expected = (
        sum(client.rate.expected(end) - client.rate.expected(start) for client in clients) if end > start else 0.0
    )
    if not expected:
        raise ConfigError(
            f"the archive has no request between second {start:g} and {end:g}", hint="see penstock trace info"
        )
    factor = 1.0 if target_rate is None else target_rate * (end - start) / expected
    return draw(clients, random.Random(seed), start=start, end=end, factor=factor)


def _write_trace(out: Path, to: Written, requests: Iterable[TrafficRequest]) -> int:
    tally = save(out, to, requests)
    rate = mean_rate(tally.count, tally.span)
    pace = "" if rate is None else f", {rate:,.2f} per second"
    click.echo(f"Wrote {counted(tally.count, 'request')} over {seconds_text(tally.span)}{pace} to {out} ({to}).")
    return 0


def _say_left_out(read: Sequence[TraceRequests | RateRows], unanswered: int, *, err: bool = True) -> None:
    """Print what was taken for granted, and what was left out."""
    for note in [note for rows in read if not isinstance(rows, RateRows) for note in rows.notes]:
        click.echo(f"Note: {note}.", err=err)
    skipped = sum(rows.skipped for rows in read)
    if unanswered:
        click.echo(f"Left out: {counted(unanswered, 'request')} without an answer, whose length is unknown.", err=err)
    if skipped:
        click.echo(f"Left out: {counted(skipped, 'bad row')}, such as:", err=err)
        for error in [error for rows in read for error in rows.errors][:3]:
            click.echo(f"  {error.message}", err=err)


KINDS = 8
"""Most kinds of requests shown, the most frequent first."""


def summary_text(summary: TraceSummary) -> list[str]:
    """Return the end of the first sentence, and then, where there are requests, paragraphs and tables."""
    first = f"{counted(summary.requests, 'request')}{_pace_text(summary)}"
    return [first, _length_rows(summary), _sharing_text(summary), _rate_rows(summary)] if summary.requests else [first]


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


def _pace_text(summary: TraceSummary) -> str:
    if summary.requests_per_s is None or summary.peak_per_s is None:
        return ""
    return (
        f" over {seconds_text(summary.span_s)}: {summary.requests_per_s:,.2f} per second, "
        f"{summary.peak_per_s:,.2f} in the busiest {seconds_text(summary.window_s)}"
    )


def _length_rows(summary: TraceSummary) -> str:
    rows = [_spread_row("prompt tokens", summary.prompts), _spread_row("output tokens", summary.outputs)]
    if summary.think_s is not None:
        rows.append(_spread_row("think time, s", summary.think_s))
    return table(("", "MEAN", "P50", "P90", "P99", "MAX", "TOTAL"), rows)


def _spread_row(name: str, spread: TraceSpread | None) -> list[Any]:
    if spread is None:
        return [name, *[None] * 6]
    return [
        name,
        *(float(f"{value:.6g}") for value in (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)),
        spread.total,
    ]


def _sharing_text(summary: TraceSummary) -> str:
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


def _rate_rows(summary: TraceSummary) -> str:
    rows = [
        [seconds_text(window.start_s), window.requests, window.requests_per_s, window.prompt_tokens_per_s]
        for window in summary.windows
    ]
    return table(("FROM", "REQUESTS", "PER SECOND", "PROMPT TOKENS/S"), rows)

"""Flags that describe the traffic to send, the same for the load generator and the simulator."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from penstock.cli.shared.option_values import SECONDS, Amount

F = TypeVar("F", bound=Callable[..., Any])

WORKLOADS = ("chat", "rag", "agent", "coding", "fixed", "tenants", "images")
FORMATS = (
    *("mooncake", "azure", "burstgpt", "dynamo", "records", "bailian", "aiperf", "genai-perf", "vllm", "guidellm"),
    *("otel", "sharegpt", "jsonl", "csv"),
)
TIME_UNITS = ("s", "ms", "us", "ns")

html_option = click.option("--html/--no-html", default=True, show_default=True, help="Write report.html.")


def trace_options(prefix: str) -> Callable[[F], F]:
    """Return the flags for what the rows of a trace don't say; ``prefix``: of the parameters' names."""
    options = (
        click.option(
            "--trace-block-size",
            f"{prefix}block_size",
            type=click.IntRange(1),
            help="Tokens per hash id, where the rows don't say.",
        ),
        click.option(
            "--trace-time-unit",
            f"{prefix}time_unit",
            type=click.Choice(TIME_UNITS),
            help="Unit of the trace's times; unset is what columns or rows show.",
        ),
        click.option(
            "--trace-columns",
            f"{prefix}columns",
            metavar="WHAT=NAME,...",
            help="Columns of a CSV or JSONL trace: at, prompt, answer, session, end, lasted, id, parent, kind.",
        ),
    )

    def added(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return added


def traffic_options(command: F) -> F:
    """Add the flags of bench and simulate; `penstock_lab.report.traffic_options.TrafficOptions` explains them."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


_OPTIONS = (
    click.option(
        "--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="File of requests; may be .gz."
    ),
    click.option("--workload", type=click.Choice(WORKLOADS), help="Made-up requests, instead of a trace."),
    click.option(
        "--rate", type=Amount("1/s"), default=4.0, show_default=True, help="Of a workload, or a trace without times."
    ),
    click.option(
        "--arrivals",
        default="poisson",
        show_default=True,
        metavar="KIND[:NAME=VALUE,...]",
        help="How they are spaced: poisson, gamma, constant, bursts, sinusoid, ramp, step, spike or weekly.",
    ),
    click.option(
        "--prompt", metavar="LENGTHS", help="Prompts of the workload fixed, such as 1k or lognormal:median=800."
    ),
    click.option("--answer", metavar="LENGTHS", help="Its answers, in the same way."),
    click.option("--requests", type=click.IntRange(1), help="End after so many requests."),
    click.option(
        "--images",
        metavar="FIELD=VALUE,...",
        help="Images of the workload images, such as count=2,side=1024,repeats=0.5; side 0 is a mixture.",
    ),
    click.option("--duration", type=SECONDS, help="End after so long; a workload without either end has 60 s."),
    click.option(
        "--speed-up", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True, help="Time factor."
    ),
    click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same requests."),
    click.option("--trace-format", type=click.Choice(FORMATS), help="Of the trace; unset looks at its first lines."),
    trace_options("trace_"),
    click.option("--trace-start", type=SECONDS, default=0.0, show_default=True, help="Slice of the trace: from."),
    click.option("--trace-end", type=SECONDS, help="Slice of the trace: to."),
    click.option("--spread-ties", is_flag=True, help="Spread a trace's requests of one timestamp up to the next one."),
    click.option("--skip-bad", is_flag=True, help="Leave bad rows of the trace out, and count them."),
)


def check_traffic(options: dict[str, Any]) -> None:
    """Raise a usage error unless there is either a trace or a workload."""
    if (options["trace"] is None) == (options["workload"] is None):
        raise click.UsageError(f"give either --trace FILE or --workload {'|'.join(WORKLOADS)}")

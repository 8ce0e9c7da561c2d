"""What does ``penstock bench`` take? The flags of the load generator; the work is in `penstock.report.bench`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.client import DEFAULT_URL, api_key_option
from penstock.cli.output import json_option

EPILOG = """\b
Examples:
  penstock bench --workload chat --rate 8 --requests 100
  penstock bench http://127.0.0.1:8000 --workload rag --rate 2 --duration 2m --json
  penstock bench http://127.0.0.1:8000 --trace conversation_trace.jsonl --trace-end 10m --speed-up 4

Requests are sent when they are due, however slow the answers are. The run folder has every request and a report.html;
exit status 1 says that the run is invalid, because the machine or the generator was saturated.
"""


if TYPE_CHECKING:
    _FloatType = click.ParamType[float]  # newer versions of click type it so; older ones can't subscript it
else:
    _FloatType = click.ParamType


class Amount(_FloatType):
    """A number with a unit, such as ``2m``, in the base unit."""

    def __init__(self, unit: Any) -> None:
        self.unit = unit
        self.name = "duration" if unit == "s" else "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        from penstock.config.units import UnreadableNumber, parse_number

        try:
            return float(parse_number(value, self.unit))
        except UnreadableNumber as error:
            self.fail(f"{value!r} {error}", param, ctx)


SECONDS = Amount("s")


@click.command("bench", epilog=EPILOG, short_help="Load a server and measure it.")
@click.argument("url", required=False, envvar="PENSTOCK_URL", default=DEFAULT_URL)
@click.option("--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Mooncake JSON lines.")
@click.option("--workload", type=click.Choice(["chat", "rag", "agent"]), help="Made-up requests, instead of a trace.")
@click.option("--rate", type=Amount("1/s"), default=4.0, show_default=True, help="Requests per second of a workload.")
@click.option(
    "--arrivals",
    type=click.Choice(["poisson", "gamma", "constant", "bursts"]),
    default="poisson",
    show_default=True,
    help="How a workload's requests are spaced.",
)
@click.option("--requests", type=click.IntRange(1), help="End after so many requests.")
@click.option("--duration", type=SECONDS, help="End after so long; a workload without either end runs for 60 s.")
@click.option(
    "--speed-up", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True, help="Time factor."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same requests.")
@click.option("--model", help="Model to load; unset where the server has only one.")
@click.option("--form", type=click.Choice(["tokens", "text"]), default="tokens", show_default=True, help="Prompts as.")
@click.option("--max-inflight", type=click.IntRange(1), default=2048, show_default=True, help="Most at a time.")
@click.option("--slo-ttft", type=SECONDS, default=2.0, show_default=True, help="TTFT that counts as good.")
@click.option("--slo-itl", type=SECONDS, default=0.025, show_default=True, help="Mean ITL that counts as good.")
@click.option("--timeout", type=SECONDS, default=600.0, show_default=True, help="Give a request up after so long.")
@click.option("--trace-start", type=SECONDS, default=0.0, show_default=True, help="Slice of the trace: from.")
@click.option("--trace-end", type=SECONDS, help="Slice of the trace: to.")
@click.option("--spread-ties", is_flag=True, help="Spread a trace's requests of one timestamp up to the next one.")
@click.option("--skip-bad", is_flag=True, help="Leave bad rows of the trace out, and count them.")
@click.option("--block-size", type=click.IntRange(1), help="Of the engine, for the bound; unset asks the server.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Folder of run folders."
)
@click.option("--html/--no-html", default=True, show_default=True, help="Write report.html.")
@api_key_option
@json_option
def command(as_json: bool, **options: Any) -> int:
    """Load the server at URL, open loop, and measure TTFT, ITL, hit rate and goodput."""
    if (options["trace"] is None) == (options["workload"] is None):
        raise click.UsageError("give either --trace FILE or --workload chat|rag|agent")
    from penstock.report.bench import BenchOptions, main

    return main(BenchOptions(json=as_json, **options))

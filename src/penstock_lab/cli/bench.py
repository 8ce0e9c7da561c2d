"""Command ``penstock bench``: the flags of the load generator, which is `penstock_lab.report.bench.bench_run`."""

from typing import Any

import click

from penstock.cli.shared.admin_client import DEFAULT_URL, api_key_option
from penstock.cli.shared.cluster_names import models
from penstock.cli.shared.cluster_tls import cluster_tls, tls_options
from penstock.cli.shared.option_values import SECONDS, out_option
from penstock.cli.shared.output import json_option
from penstock_lab.cli.traffic_flags import check_traffic, html_option, traffic_options

EPILOG = """\b
Examples:
  penstock bench --workload chat --rate 8 --requests 100
  penstock bench http://127.0.0.1:8000 --workload rag --rate 2 --duration 2m --json
  penstock bench http://127.0.0.1:8000 --trace conversation_trace.jsonl --trace-end 10m --speed-up 4

Requests are sent when they are due, however slow the answers are. The run folder has every request and a report.html;
where the machine or the generator was at its limit it says so, and with --strict ends with status 1.
"""


@click.command("bench", epilog=EPILOG, short_help="Load a server and measure it.")
@click.argument("url", required=False, envvar="PENSTOCK_URL", default=DEFAULT_URL)
@traffic_options
@click.option("--model", shell_complete=models, help="Model to load; unset where the server has only one.")
@click.option("--form", type=click.Choice(["tokens", "text"]), default="tokens", show_default=True, help="Prompts as.")
@click.option("--max-inflight", type=click.IntRange(1), default=2048, show_default=True, help="Most at a time.")
@click.option("--slo-ttft", type=SECONDS, default=2.0, show_default=True, help="TTFT that counts as good.")
@click.option("--slo-itl", type=SECONDS, default=0.025, show_default=True, help="Mean ITL that counts as good.")
@click.option("--timeout", type=SECONDS, default=600.0, show_default=True, help="Give a request up after so long.")
@click.option("--block-size", type=click.IntRange(1), help="Of the engine, for the bound; unset asks the server.")
@out_option
@html_option
@click.option("--strict", is_flag=True, help="Exit status 1 where machine or generator were at their limit.")
@api_key_option
@tls_options
@json_option
def command(as_json: bool, **options: Any) -> int:
    """Load the server at URL, open loop, and measure TTFT, ITL, hit rate and goodput."""
    check_traffic(options)
    from penstock_lab.report.bench.bench_run import BenchOptions, main

    return main(BenchOptions(json=as_json, **options), cluster_tls())

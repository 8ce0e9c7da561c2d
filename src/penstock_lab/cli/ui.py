"""Command ``penstock ui``: shows a finished run, live or simulated, in the page of a live cluster."""

import asyncio
from pathlib import Path

import click

from penstock.cli.shared.option_values import SECONDS

EPILOG = """\b
Examples:
  penstock ui runs/RUN                 and open the address that it prints
  penstock ui runs/RUN --port 9000 --slo-ttft 1s

A running cluster serves its own page under /ui; 'penstock up' prints the address.
"""

PORT = 8765


@click.command("ui", epilog=EPILOG, short_help="Look at a run that is over in a browser.")
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="RUN_FOLDER")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="Loopback port; 0 takes a free one."
)
@click.option("--slo-ttft", type=SECONDS, help="TTFT that counts as good, instead of the run's own.")
@click.option("--slo-itl", type=SECONDS, help="Mean ITL that counts as good, instead of the run's own.")
def command(run: Path, port: int, slo_ttft: float | None, slo_itl: float | None) -> int:
    """Serve the page over RUN_FOLDER on this machine alone, until Ctrl-C. Time can be played, fast or slow."""
    from penstock.adapters.process_life import stop_event
    from penstock.frontend.http_server import bound_sockets, url_of
    from penstock_lab.report.run.recorded_run_server import serve
    from penstock_lab.report.run.recording import Recording

    sockets = bound_sockets("127.0.0.1", port, hint="--port 0 takes any free port")
    click.echo(f"Reading {run} ...", err=True)
    recording = Recording(run, slo_ttft, slo_itl)

    async def main() -> None:
        stop = stop_event()
        click.echo(f"{url_of(sockets[0], None)}/ui  (Ctrl-C stops)")
        await serve(recording, sockets, stop)

    asyncio.run(main())
    return 0

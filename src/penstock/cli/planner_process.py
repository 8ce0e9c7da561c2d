"""Planner process of a cluster: ``python -m penstock.cli.planner_process --run DIR``, started by ``penstock up``."""

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.config.reading.load import load_resolved
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.frontend import logs
from penstock.kernel.errors import ConfigError
from penstock.report.planner.planner_diagnostics import PlannerDiagnostics
from penstock.runtime.planning.planner_node import PlannerNode, serve


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM; return the exit status. The first line on standard output reports readiness, as JSON."""
    parser = argparse.ArgumentParser(prog="penstock planner", description="Run the planner process of a cluster.")
    parser.add_argument("--run", type=Path, required=True, help="the cluster's run folder")
    arguments = parser.parse_args(argv)
    try:
        settings = load_resolved(arguments.run / "config.yaml", os.environ)
        logs.setup(settings.logs.format, settings.logs.level)
        asyncio.run(_serve(settings, arguments.run))
    except ConfigError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 2
    return 0


async def _serve(settings: ClusterSettings, run: Path) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    diagnostics = PlannerDiagnostics(settings.planner, run)

    def ready(node: PlannerNode) -> None:
        sys.stdout.write(json.dumps({"pid": os.getpid(), "metrics": node.metrics_url}) + "\n")
        sys.stdout.flush()

    try:
        await serve(settings, run, stopping, ready, listeners=diagnostics.watchers)
    finally:
        await diagnostics.close()


if __name__ == "__main__":
    sys.exit(main())

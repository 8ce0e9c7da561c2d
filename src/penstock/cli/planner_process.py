"""Planner process of a cluster: ``python -m penstock.cli.planner_process --run DIR``, started by ``penstock up``."""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.adapters.process_life import report_ready, stop_event
from penstock.config.reading.load import load_resolved
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.frontend import logs
from penstock.kernel.errors import ConfigError
from penstock.runtime.planning.planner_node import PlannerNode, serve
from penstock.runtime.planning.tick_log import PlannerDiagnostics
from penstock.runtime.records.pod_run_folder import run_folder_in_pod


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM; return the exit status. The first line on standard output reports readiness, as JSON."""
    parser = argparse.ArgumentParser(prog="penstock planner", description="Run the planner process of a cluster.")
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--run", type=Path, help="the cluster's run folder")
    place.add_argument("--config", type=Path, help="the config to make a run folder of its own from, as in a pod")
    arguments = parser.parse_args(argv)
    try:
        run = arguments.run or run_folder_in_pod(arguments.config)
        settings = load_resolved(run / "config.yaml", os.environ)
        logs.setup(settings.logs.format, settings.logs.level)
        asyncio.run(_serve_planner(settings, run))
    except ConfigError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 2
    return 0


async def _serve_planner(settings: ClusterSettings, run: Path) -> None:
    stopping = stop_event()
    diagnostics = PlannerDiagnostics(settings.planner, run)

    def ready(node: PlannerNode) -> None:
        report_ready(pid=os.getpid(), metrics=node.metrics_url)

    try:
        await serve(settings, run, stopping, ready, listeners=diagnostics.watchers)
    finally:
        await diagnostics.close()


if __name__ == "__main__":
    sys.exit(main())

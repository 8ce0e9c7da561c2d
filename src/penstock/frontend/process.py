"""What does one frontend process do from its start to its end? ``penstock frontend --run DIR --index N``."""

import argparse
import asyncio
import gc
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop

from penstock.adapters.engines.openai import EngineClient
from penstock.adapters.telemetry.otel import Tracer
from penstock.adapters.telemetry.prometheus import Metrics
from penstock.config.cluster import ClusterSettings
from penstock.config.load import load_resolved
from penstock.frontend import logs
from penstock.frontend.cluster import NodeCluster
from penstock.frontend.records import CsvRows, keep_writing
from penstock.frontend.scrape import csv_row
from penstock.frontend.server import Server
from penstock.frontend.service import Service, load_tokenizers
from penstock.kernel.errors import ConfigError
from penstock.kernel.machine import Nanos
from penstock.runtime.node import Node, open_node
from penstock.runtime.run_folder import RunFolder

log = logging.getLogger("penstock.frontend")

SWITCH_INTERVAL = 0.001
"""Seconds after which a tokenising thread gives the event loop its turn; the interpreter's own 5 ms is our budget."""
GC_THRESHOLD = (10_000, 20, 20)
"""New objects before a collection: a request makes a few hundred, nearly all of them freed without the collector."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or Ctrl-C; return the exit status.

    Its first line on standard output is ``{"url": ..., "admin_url": ...}``, written when it accepts requests.
    """
    parser = argparse.ArgumentParser(prog="penstock frontend", description="Run one frontend process of a cluster.")
    parser.add_argument("--run", type=Path, required=True, help="the cluster's run folder")
    parser.add_argument("--index", type=int, default=0, help="which of the cluster's frontends this is")
    arguments = parser.parse_args(argv)
    try:
        settings = load_resolved(arguments.run / "config.yaml", os.environ)
        lines = logs.setup(settings.logs.format, settings.logs.level, batch=True)
        sys.setswitchinterval(SWITCH_INTERVAL)
        gc.set_threshold(*GC_THRESHOLD)
        uvloop.run(_serve(settings, arguments.run, arguments.index, lines))
    except ConfigError as error:
        print(f"penstock: {error}", file=sys.stderr)  # noqa: T201 - the supervisor shows the end of this log
        return 2
    return 0


async def _serve(settings: ClusterSettings, run: Path, index: int, lines: logs.BatchingHandler) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    tokenizers = await asyncio.to_thread(load_tokenizers, settings)
    node = await open_node(settings, run, index)
    upstream = settings.frontend.upstream
    folder = RunFolder(run)
    requests, decisions = folder.writer("requests.jsonl"), folder.writer("decisions.jsonl")
    service = Service(
        settings=settings,
        cluster=NodeCluster(node),
        tickets=node.tickets,
        engines=EngineClient(connect_timeout=upstream.connect_timeout, connections_max=upstream.connections_max),
        tokenizers=tokenizers,
        metrics=Metrics(node.name, settings.frontend.context_types_max),
        tracer=Tracer(settings.frontend.otlp_endpoint),
        records=requests,
        decisions=decisions,
        run=str(run),
        run_offset=_offset(node, run),
    )
    node.loop_monitor.observe = service.metrics.loop_delay.of().observe
    rows = CsvRows(run / ("metrics.csv" if index == 0 else f"metrics-{index}.csv"))

    def row() -> dict[str, float | None]:
        found = csv_row(service)
        node.loop_monitor.take_recent()
        return found

    server = Server(service)
    writing = asyncio.create_task(keep_writing([requests, decisions, lines], rows, row), name="records")
    try:
        await server.start()
        await node.announce(server.url, server.admin_url)
        said = {"url": server.url, "admin_url": server.admin_url, "pid": os.getpid()}
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()
        # What stands now stays: the collector need not walk it again while streams wait.
        gc.collect()
        gc.freeze()
        log.info("serving %s", server.url, extra={"fields": {"admin": server.admin_url, "router": node.name}})
        lines.flush()
        await stopping.wait()
        log.info("draining %d requests", service.inflight)
        await server.drain(settings.frontend.drain_timeout)
    finally:
        await server.close()
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        await node.close()
        await service.close()
        for writer in (requests, decisions):
            await asyncio.to_thread(writer.flush)


def _offset(node: Node, run: Path) -> Nanos:
    """Return how long after the run's start the router's time 0 lies; 0 where run.json does not tell."""
    mine = time.monotonic_ns() - node.live.now()
    try:
        anchor = json.loads((run / "run.json").read_text())["clock_anchor"]["monotonic_ns"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("run.json has no clock anchor, so records count from this process's start: %s", error)
        return 0
    return int(mine - anchor)


if __name__ == "__main__":
    sys.exit(main())

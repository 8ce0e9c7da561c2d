"""Frontend process from start to end: ``penstock frontend --run DIR --index N``."""

import argparse
import asyncio
import gc
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import uvloop

from penstock.adapters.engines.http.http1_client import Http1Client
from penstock.adapters.telemetry.frontend_metrics import FrontendMetrics
from penstock.adapters.telemetry.otel_tracer import OtelTracer
from penstock.config.reading.load import load_resolved
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.frontend import logs
from penstock.frontend.admin.metrics_route import csv_row
from penstock.frontend.counter_ledger import CounterLedger
from penstock.frontend.http_server import HttpServer
from penstock.frontend.live_settings import tune
from penstock.frontend.node_cluster import NodeCluster
from penstock.frontend.prompt.model_catalog import load_tokenizers
from penstock.frontend.record_writer import BackgroundWriter, keep_writing
from penstock.frontend.service import Service
from penstock.kernel.errors import ConfigError
from penstock.kernel.machine import Nanos
from penstock.runtime.node.router_node import RouterNode, open_node
from penstock.runtime.records.run_folder import Cap, CsvRows, RunFolder
from penstock.runtime.records.settings_changes import FILE as changes_file
from penstock.runtime.supervision.frontend_processes import RETIRE

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
    parser.add_argument("--listen", default="", help="descriptors of bound sockets, with commas between them")
    parser.add_argument("--listen-admin", default="", help="the same for frontend.admin_port")
    arguments = parser.parse_args(argv)
    try:
        settings = load_resolved(arguments.run / "config.yaml", os.environ)
        lines = logs.setup(settings.logs.format, settings.logs.level, batch=True)
        sys.setswitchinterval(SWITCH_INTERVAL)
        gc.set_threshold(*GC_THRESHOLD)
        sockets = _inherited(arguments.listen), _inherited(arguments.listen_admin)
        uvloop.run(_serve(settings, arguments.run, arguments.index, lines, *sockets))
    except ConfigError as error:
        print(f"penstock: {error}", file=sys.stderr)  # noqa: T201 - the supervisor shows the end of this log
        return 2
    return 0


def _inherited(descriptors: str) -> list[socket.socket]:
    return [socket.socket(fileno=int(descriptor)) for descriptor in descriptors.split(",") if descriptor]


async def _serve(
    settings: ClusterSettings,
    run: Path,
    index: int,
    lines: logs.BatchingHandler,
    sockets: Sequence[socket.socket],
    admin_sockets: Sequence[socket.socket],
) -> None:
    stopping, retiring = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    loop.add_signal_handler(RETIRE, retiring.set)
    tokenizers = await asyncio.to_thread(load_tokenizers, settings)
    node = await open_node(settings, run, index)
    folder = RunFolder(run)
    cap = Cap.of(settings.runs)
    requests, decisions = folder.writer("requests.jsonl", cap), folder.writer("decisions.jsonl", cap)
    changes = folder.writer(changes_file)
    service = Service(
        settings=settings,
        cluster=NodeCluster(node),
        tickets=node.tickets,
        engines=Http1Client(connect_timeout=settings.frontend.upstream.connect_timeout),
        tokenizers=tokenizers,
        metrics=FrontendMetrics(node.name, settings.router.migration.limit),
        tracer=OtelTracer(settings.frontend.otlp_endpoint),
        records=requests,
        decisions=decisions,
        changes=changes,
        run=str(run),
        ledger=CounterLedger(run, node.name),
        secret=node.secret,
        run_offset=_offset(node, run),
    )
    ledger = service.ledger
    assert ledger is not None
    node.on_settings = partial(tune, service)
    tune(service, node.settings)  # some knobs may have been changed before this process started
    node.loop_monitor.observe = service.metrics.loop_delay.of().observe
    rows = CsvRows(run / ("metrics.csv" if index == 0 else f"metrics-{index}.csv"))

    def row() -> dict[str, float | None]:
        columns = csv_row(service)
        ledger.write(service.cluster.status())
        node.loop_monitor.take_recent()
        return columns

    def enter() -> None:
        service.bookkeeping.enter()
        if node.journal is not None:
            node.journal.encode()

    server = HttpServer(service, sockets, admin_sockets)
    files: list[BackgroundWriter] = [requests, decisions, changes, *([] if node.journal is None else [node.journal])]
    entering = keep_writing(enter, [*files, lines], rows, row)
    writing = asyncio.create_task(entering, name="records")
    try:
        # The workers are known before the first connection is accepted: the process before may just have handed over.
        await node.settled()
        await server.start()
        await node.announce(server.url, server.admin_url, server.own_url)
        report = {"url": server.url, "admin_url": server.own_url, "pid": os.getpid()}
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()
        # Objects from the start stay: the collector need not walk them again while streams wait.
        gc.collect()
        gc.freeze()
        log.info("serving %s", server.url, extra={"fields": {"admin": server.admin_url, "router": node.name}})
        lines.flush()
        await first_of(stopping, retiring)
        if not stopping.is_set():
            log.info("a successor takes the new connections; finishing %d requests", service.gate.inflight)
            retired = asyncio.create_task(server.retire(service.settings.router.request_timeout))
            stopped = asyncio.create_task(stopping.wait())
            await asyncio.wait({retired, stopped}, return_when=asyncio.FIRST_COMPLETED)
            for task in (retired, stopped):
                task.cancel()
            await asyncio.gather(retired, stopped, return_exceptions=True)
        log.info("draining %d requests", service.gate.inflight)
        await server.drain(service.settings.supervise.drain_timeout)
    finally:
        await server.close()
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        await asyncio.to_thread(ledger.write, service.cluster.status())  # before others notice that this one is gone
        await node.close()
        await service.close()
        enter()
        for writer in files:
            await asyncio.to_thread(writer.flush)


async def first_of(*events: asyncio.Event) -> None:
    """Wait until one of some events is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


def _offset(node: RouterNode, run: Path) -> Nanos:
    """Return how long after the run's start the router's time 0 is; 0 where run.json does not have it."""
    mine = time.monotonic_ns() - node.live.now()
    try:
        anchor = json.loads((run / "run.json").read_text())["clock_anchor"]["monotonic_ns"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("run.json has no clock anchor, so records count from this process's start: %s", error)
        return 0
    return int(mine - anchor)


if __name__ == "__main__":
    sys.exit(main())

"""Frontend process from start to end: ``penstock frontend --run DIR --index N``."""

import argparse
import asyncio
import gc
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import uvloop

from penstock import extension
from penstock.adapters.engines.http.http1_client import Http1Client
from penstock.adapters.process_life import allow_files, report_ready, stop_event
from penstock.adapters.telemetry.frontend_metrics import FrontendMetrics
from penstock.adapters.telemetry.request_span import NoTracer, Tracer
from penstock.config.reading.load import load_resolved
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.frontend import logs
from penstock.frontend.admin.metrics_route import csv_row
from penstock.frontend.answer_filters import RequestAudit
from penstock.frontend.cluster_view import ClusterView
from penstock.frontend.counter_ledger import CounterLedger
from penstock.frontend.dialects.response_reach import hand_over
from penstock.frontend.http_server import HttpServer
from penstock.frontend.prompt.model_catalog import load_tokenizers
from penstock.frontend.record_writer import BackgroundWriter, keep_writing
from penstock.frontend.service import Service
from penstock.kernel.errors import ConfigError
from penstock.kernel.machine import Nanos
from penstock.runtime.backends import open_lasting_store
from penstock.runtime.node.router_node import RouterNode, open_node
from penstock.runtime.records.change_log import FILE as changes_file
from penstock.runtime.records.pod_run_folder import run_folder_in_pod
from penstock.runtime.records.run_folder import Cap, CsvRows, RunFolder
from penstock.runtime.supervision.frontend_processes import RETIRE

log = logging.getLogger("penstock.frontend")

SWITCH_INTERVAL = 0.001
"""Seconds after which a tokenising thread gives the event loop its turn; the interpreter's own 5 ms is our budget."""
GC_THRESHOLD = (10_000, 20, 20)
"""New objects before a collection: a request makes a few hundred, nearly all of them freed without the collector."""


class Listener(Protocol):
    """One more listener of a frontend process, beside HTTP: of a gateway's questions, or of another protocol."""

    async def start(self, index: int) -> None:
        """Listen.

        Raises:
            ConfigError: the address can't be bound, or the settings can't be honoured.
        """
        ...

    async def stop_accepting(self) -> None:
        """Take no new connections; those that are open go elsewhere as soon as the gateway notices."""
        ...

    async def close(self) -> None:
        """End what is left."""
        ...


def main(argv: Sequence[str] | None = None, beside: Callable[[Service], Listener] | None = None) -> int:
    """Run until SIGTERM or Ctrl-C; return the exit status.

    Args:
        beside: makes one more listener.

    Its first line on standard output is ``{"url": ..., "admin_url": ...}``, written when it accepts requests.
    """
    parser = argparse.ArgumentParser(prog="penstock frontend", description="Run one frontend process of a cluster.")
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--run", type=Path, help="the cluster's run folder")
    place.add_argument("--config", type=Path, help="the config to make a run folder of its own from, as in a pod")
    parser.add_argument("--index", type=int, default=0, help="which of the cluster's frontends this is")
    parser.add_argument("--listen", default="", help="descriptors of bound sockets, with commas between them")
    parser.add_argument("--listen-admin", default="", help="the same for frontend.admin_port")
    arguments = parser.parse_args(argv)
    try:
        run = arguments.run or run_folder_in_pod(arguments.config)
        settings = load_resolved(run / "config.yaml", os.environ)
        lines = logs.setup(settings.logs.format, settings.logs.level, batch=True)
        sys.setswitchinterval(SWITCH_INTERVAL)
        gc.set_threshold(*GC_THRESHOLD)
        allow_files()
        sockets = _inherited(arguments.listen), _inherited(arguments.listen_admin)
        uvloop.run(_serve_frontend(settings, run, arguments.index, lines, *sockets, beside))
    except ConfigError as error:
        print(f"penstock: {error}", file=sys.stderr)  # noqa: T201 - the supervisor shows the end of this log
        return 2
    return 0


def _tracer(endpoint: str | None) -> Tracer:
    """Return what makes spans of requests, where a collector takes them.

    Raises:
        ConfigError: what sends them is not installed.
    """
    if endpoint is None:
        return NoTracer()
    tracer: Tracer = extension.entry("telemetry", "otlp", "frontend.otlp_endpoint")(endpoint)
    return tracer


def _inherited(descriptors: str) -> list[socket.socket]:
    return [socket.socket(fileno=int(descriptor)) for descriptor in descriptors.split(",") if descriptor]


async def _serve_frontend(
    settings: ClusterSettings,
    run: Path,
    index: int,
    lines: logs.BatchingHandler,
    sockets: Sequence[socket.socket],
    admin_sockets: Sequence[socket.socket],
    beside: Callable[[Service], Listener] | None,
) -> None:
    stopping, retiring = stop_event(), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(RETIRE, retiring.set)
    tokenizers = await asyncio.to_thread(load_tokenizers, settings)
    node = await open_node(settings, run, index)
    folder = RunFolder(run)
    cap = Cap.of(settings.runs)
    requests, decisions = folder.writer("requests.jsonl", cap), folder.writer("decisions.jsonl", cap)
    changes, shadows = folder.writer(changes_file), folder.writer("shadow.jsonl", cap)
    copies = folder.writer("copies.jsonl", cap)
    audit = open_audit(settings, node.name)
    budgets = open_lasting_store(settings, node.store)
    service = Service(
        settings=settings,
        cluster=ClusterView(node),
        tickets=node.tickets,
        engines=Http1Client(connect_timeout=settings.frontend.upstream.connect_timeout, access=node.accesses.at),
        access=node.accesses.at,
        tokenizers=tokenizers,
        metrics=FrontendMetrics(node.name, settings.router.migration.limit),
        tracer=_tracer(settings.frontend.otlp_endpoint),
        records=requests,
        decisions=decisions,
        changes=changes,
        shadow_records=shadows,
        copies=copies,
        run=str(run),
        ledger=CounterLedger(run, node.name),
        secret=node.secret,
        audit=audit,
        budget_store=budgets,
        run_offset=_offset(node, run),
    )
    ledger = service.ledger
    assert ledger is not None
    node.on_settings = partial(tune, service)
    tune(service, node.settings)  # some knobs may have been changed before this process started
    node.loop_monitor.observe = service.metrics.loop_delay.of().observe
    rows = CsvRows(run / ("metrics.csv" if index == 0 else f"metrics-{index}.csv"))

    def row() -> dict[str, float | None]:
        status = service.cluster.status()
        columns = csv_row(service, status)
        ledger.write(status)
        node.loop_monitor.take_recent()
        return columns

    def enter() -> None:
        service.bookkeeping.enter()
        if node.journal is not None:
            node.journal.encode()

    server = HttpServer(service, sockets, admin_sockets)
    listeners: list[Listener] = [] if beside is None else [beside(service)]
    if settings.frontend.grpc_port is not None:
        listeners.append(extension.entry("listener", "open-inference", "frontend.grpc_port")(service))
    files: list[BackgroundWriter] = [requests, decisions, shadows, copies, changes]
    files += [each for each in (node.journal, audit) if each is not None]
    entering = keep_writing(enter, [*files, lines], rows, row)
    writing = asyncio.create_task(entering, name="records")
    try:
        # The workers are known before the first connection is accepted: the process before may just have handed over.
        await node.settled()
        await server.start()
        for listener in listeners:
            await listener.start(index)
        await node.announce(server.url, server.admin_url, server.own_url)
        report_ready(url=server.url, admin_url=server.own_url, pid=os.getpid())
        # Objects from the start stay: the collector need not walk them again while streams wait.
        gc.collect()
        gc.freeze()
        log.info("serving %s", server.url, extra={"fields": {"admin": server.admin_url, "router": node.name}})
        lines.flush()
        await first_of(stopping, retiring)
        for listener in listeners:
            await listener.stop_accepting()
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
        await hand_over(service)
        for listener in listeners:
            await listener.close()
        await server.close()
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        await asyncio.to_thread(ledger.write, service.cluster.status())  # before others notice that this one is gone
        await node.close()
        if budgets is not None and budgets is not node.store:
            await budgets.close()
        await service.close()
        enter()
        for writer in files:
            await asyncio.to_thread(writer.flush)
        if audit is not None:
            await asyncio.to_thread(audit.close)


def tune(service: Service, settings: ClusterSettings) -> None:
    """Use other settings from now on; running requests keep the decisions made for them."""
    before, service.settings = service.settings, settings
    service.exchanges.settings = settings
    service.gate.use(settings.frontend)
    service.catalog.use(settings)
    if settings.logs.level != before.logs.level:
        logs.set_level(settings.logs.level)


def open_audit(settings: ClusterSettings, process: str) -> RequestAudit | None:
    """Return the log of prompts and answers, where the settings want one.

    Raises:
        ConfigError: its key can't be read, or the package for it is missing.
    """
    if settings.audit.folder is None or settings.audit.key_file is None:
        return None
    open_log = extension.entry("answer filter", "audit", "audit", install="pip install 'penstock[audit]'")
    audit: RequestAudit | None = open_log(settings, process)
    return audit


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

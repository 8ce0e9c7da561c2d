"""Gateway listener: where nginx and HAProxy ask which engine takes a request, and report how requests ended.

Both are sockets on this host. A question is the client's request itself, over HTTP; the answer names the engine in
headers and has no body. Every other route of a frontend is answered in full.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from urllib.parse import urlsplit

from aiohttp import web

from penstock.frontend.app import public_app, routed_handlers
from penstock.frontend.http.error_responses import send_error
from penstock.frontend.http.http1_listener import Http1Listener
from penstock.frontend.http.http1_server import ListenerState
from penstock.frontend.http.http_exchange import HttpExchange
from penstock.frontend.http.request_gate import Handler, RequestGate, internal
from penstock.kernel.errors import PenstockError
from penstock.kernel.values import RequestId
from penstock_kubernetes.picker.clipped_body import closed
from penstock_kubernetes.picker.end_report import EndReport, ReportReader
from penstock_kubernetes.picker.gateway_configs import GatewayFolder, workers_file
from penstock_kubernetes.picker.picked_request import GatewayRequest, PickedRequest
from penstock_kubernetes.picker.picker import Picker
from penstock_kubernetes.picker_settings import GatewayKind

log = logging.getLogger("penstock.picker")

BACKLOG = 1024
REPORTS_BUFFER = 1 << 20
"""Bytes of reports that wait in a socket: some thousand. A gateway drops what does not fit."""
REPORTS_AT_ONCE = 64
"""Reports that are read before requests get their turn."""
LOOK = 0.5
"""Seconds between looks at the workers, for the file that the gateway reads them from."""
LIMITS = "a gateway in front carries the answers: no migration in mid-stream, no hedging, no check of usage"


class GatewayListener:
    """One process's sockets for a gateway on this host."""

    def __init__(self, picker: Picker, kind: GatewayKind) -> None:
        self._picker, self._kind = picker, kind
        self._service = picker.service
        self._folder = GatewayFolder(picker.service.settings)
        self._count = picker.service.metrics.picker_events.add
        self._reader = ReportReader(kind)
        self._name = picker.service.cluster.name
        self._series = self._name.rpartition("-")[0]
        """What the name of this process and of those before and after it in its place begin with."""
        self._reports: list[socket.socket] = []
        self._http: Http1Listener | None = None
        self._runner: web.AppRunner | None = None
        self._writing: asyncio.Task[None] | None = None

    async def start(self, index: int) -> None:
        """Listen.

        Raises:
            ConfigError: a socket can't be made.
        """
        folder, service, loop = self._folder, self._service, asyncio.get_running_loop()
        folder.make()
        self._runner = web.AppRunner(public_app(service, with_admin=False), handler_cancellation=True, access_log=None)
        await self._runner.setup()
        assert self._runner.server is not None
        state = ListenerState(service.gate, routed_handlers(service), self._runner.server, loop, self._serve)
        self._http = Http1Listener(state)
        questions = folder.bind(folder.questions(index), socket.SOCK_STREAM)
        await self._http.start([questions], tls=None, backlog=BACKLOG)
        for name in (self._name, index):
            reports = folder.bind(folder.reports(name), socket.SOCK_DGRAM)
            reports.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, REPORTS_BUFFER)
            loop.add_reader(reports, self._receive, reports)
            self._reports.append(reports)
        if index == 0:
            self._writing = asyncio.create_task(self._write_workers(), name="workers-file")
        log.info("%s asks at %s; %s", self._kind, folder.questions(index), LIMITS)

    async def stop_accepting(self) -> None:
        """Take no new questions; reports are taken until the end, for what is still carried."""
        if self._http is not None:
            self._http.drain()

    async def close(self) -> None:
        """End what is left."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
        if self._http is not None:
            await self._http.close()
        while self._reports:
            reports = self._reports.pop()
            asyncio.get_running_loop().remove_reader(reports)
            reports.close()
        self._folder.reports(self._name).unlink(missing_ok=True)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    # --- questions --------------------------------------------------------------------------------------------------

    async def _serve(self, gate: RequestGate, caller: HttpExchange, handler: Handler) -> None:
        """Answer a question: the engine, or what the client is told in its place."""
        started = time.monotonic()
        request = GatewayRequest(caller.method, caller.path, caller.headers, b"", caller.headers.get("x-real-ip"))
        try:
            request = request._replace(body=await caller.body())
            failed = self._picker.open.get(RequestId(caller.headers.get("x-penstock-failed", "")))
            if failed is not None:
                return await self._again(caller, failed)
            if int(caller.headers.get("x-penstock-length", "0")) > len(request.body):
                request = self._completed(request)
            await self._answer(caller, await self._picker.pick(request))
        except PenstockError as error:
            await send_error(caller, self._picker.refused(request, error, started))
        except ConnectionResetError:
            raise
        except Exception:  # supervision boundary: one request's bug must not leak its details nor end the process
            log.exception("request %s failed by a bug of ours", caller.id)
            await send_error(caller, internal())

    async def _again(self, caller: HttpExchange, picked: PickedRequest) -> None:
        try:
            await picked.retry("the gateway got no answer from it")
        except BaseException:
            picked.abandoned()
            raise
        await self._answer(caller, picked)

    async def _answer(self, caller: HttpExchange, picked: PickedRequest) -> None:
        refusal = picked.refusal
        if refusal is not None:
            return await send_error(caller, refusal)
        assert picked.speaker is not None
        if picked.body is not None:
            self._count("body_not_changed")
        scheme = urlsplit(picked.speaker.card.url).scheme
        caller.id = picked.id
        headers = {
            **picked.headers,
            "x-accel-redirect": "@penstock_engine",
            "x-penstock-engine": f"{scheme}://{picked.endpoint}",
            "x-penstock-picker": self._name,
        }
        headers.pop("x-request-id", None)  # every answer has it
        await caller.send(200, b"", headers)

    def _completed(self, request: GatewayRequest) -> GatewayRequest:
        """Make a request of the part of a body that fitted into the gateway's buffer."""
        self._count("clipped")
        models = {card.model for card in self._service.cluster.cards()}
        body = closed(request.body)
        named = b'"model"' in body
        return request._replace(body=body, model=None if named or len(models) != 1 else models.pop())

    # --- reports ----------------------------------------------------------------------------------------------------

    def _receive(self, reports: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            for _ in range(REPORTS_AT_ONCE):
                self._take(reports.recv(65536))

    def _take(self, line: bytes) -> None:
        try:
            report = self._reader.read(line)
        except ValueError as error:
            self._count("unreadable")
            log.debug("unreadable report: %s", error)
            return
        if report is None:
            return
        if report.by == self._name:
            self._enter(report)
        elif report.by.rpartition("-")[0] == self._series:
            self._pass_on(line, report.by)

    def _pass_on(self, line: bytes, by: str) -> None:
        """Give a report to the process that this one has taken over from, which still ends its requests."""
        try:
            self._reports[0].sendto(line, os.fspath(self._folder.reports(by)))
        except OSError:
            self._count("late")  # that process has ended

    def _enter(self, report: EndReport) -> None:
        picked = self._picker.open.get(RequestId(report.id))
        if picked is None:
            return self._count("late")
        self._count("taken")
        if report.endpoint:
            picked.served(report.endpoint)
        picked.head(report.status, "")
        if report.tail is not None and report.status < 400 and picked.job.streamed:
            picked.first_token(time.monotonic() - report.tail)
        if report.outcome == "client":
            picked.abandoned()
        elif report.outcome == "engine":
            picked.broken("its answer broke off")
        else:
            picked.ended()

    # --- workers ----------------------------------------------------------------------------------------------------

    async def _write_workers(self) -> None:
        """Write the workers into the file that the gateway includes, whenever they change, until cancelled."""
        seen = -1
        while True:
            changes = self._service.cluster.changes()
            if changes != seen:
                seen = changes
                name, text = workers_file(self._kind, [card.url for card in self._service.cluster.cards()])
                try:
                    if await asyncio.to_thread(self._folder.write, name, text):
                        log.info("%s names the workers; reload %s when it suits", self._folder.path / name, self._kind)
                except OSError as error:
                    log.warning("the file %s can't be written: %s", self._folder.path / name, error)
            await asyncio.sleep(LOOK)

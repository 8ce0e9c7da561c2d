"""HTTP endpoint of a frontend process: listening sockets, TLS, and a drain that lets streams finish."""

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import time
from collections.abc import Sequence

from aiohttp import web

from penstock.adapters.listen_address import bind
from penstock.adapters.task_cancel import cancel_all
from penstock.config.settings.frontend_settings import FrontendSettings
from penstock.frontend.app import admin_app, parts_of, peers_app, public_app, routed_handlers
from penstock.frontend.extension_routes import FrontendRoutes
from penstock.frontend.http.api_keys import check_binding
from penstock.frontend.http.http1_listener import Http1Listener
from penstock.frontend.http.http1_server import ListenerState
from penstock.frontend.http.request_context import KEEP_ALIVE, LINGER
from penstock.frontend.service import Service
from penstock.kernel.errors import ConfigError, bind_hint
from penstock.runtime.records.pod_run_folder import POD_ENV

log = logging.getLogger("penstock.frontend")

BACKLOG = 1024
LULL = 2.0
"""Seconds of silence after which a retiring process closes the connections that are left."""
LOOK = 0.05
"""Seconds between its checks."""


class HttpServer:
    """The public site and, where it has its own, the admin site of one frontend process.

    Args:
        sockets, admin_sockets: bound, and held open by the supervisor as well, so that no connection is lost when one
            process takes over from another; without them the addresses of the settings are bound here.
    """

    def __init__(
        self,
        service: Service,
        sockets: Sequence[socket.socket] = (),
        admin_sockets: Sequence[socket.socket] = (),
    ) -> None:
        self.service = service
        self.url = ""
        self.admin_url = ""
        """URL of the admin routes for people."""
        self.own_url = ""
        """URL for the cluster's other processes, which reaches this process alone."""
        self._given, self._given_admin = list(sockets), list(admin_sockets)
        self._public: list[socket.socket] = []
        self._tls: ssl.SSLContext | None = None
        self._runners: list[web.AppRunner] = []
        self._sites: list[web.SockSite] = []
        self._listener: Http1Listener | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._parts: Sequence[FrontendRoutes] = ()
        self._beside: list[asyncio.Task[None]] = []
        """What extensions run as long as this process takes new requests."""

    async def start(self) -> None:
        """Listen. The URLs are set when this returns.

        Raises:
            ConfigError: the address is not allowed, can't be bound, or TLS files are wrong.
        """
        frontend = self.service.settings.frontend
        check_binding(frontend.host, self.service.gate.keys.needed, frontend.security.insecure)
        tls = tls_context(frontend)
        await self.service.budgets.sync()
        self._parts = parts_of(self.service)
        public = public_app(self.service, with_admin=frontend.admin_port is None, parts=self._parts)
        sockets = self._given or bound_sockets(frontend.host, frontend.port, shared=frontend.processes > 1)
        # In pods the others have other addresses; whoever reaches it signs, or has an admin key.
        peers = self.service.settings.discovery.host if POD_ENV in os.environ else "127.0.0.1"
        self._tls, self._public = tls, sockets
        self.url = await self._listen_public(public, sockets, tls)
        self.own_url = await self._listen(peers_app(self.service), bound_sockets(peers, 0))
        self._sites.pop()  # peers read this process until the end: its counts must not be missing
        self.admin_url = self.url
        if frontend.admin_port is not None:
            admin = self._given_admin or bound_sockets("127.0.0.1", frontend.admin_port)
            self.admin_url = await self._listen(admin_app(self.service), admin)
        self.service.urls = {"endpoint": self.url, "admin": self.admin_url}
        service = self.service
        watching = service.exchanges.attempts.watch(
            service.cluster, lambda: service.settings.frontend.upstream.quiet_timeout
        )
        self._tasks.append(asyncio.create_task(watching, name="watch"))
        sampling = service.timeline_store.run(lambda: service.settings.slo)
        self._tasks.append(asyncio.create_task(sampling, name="timeline"))
        self._tasks.append(asyncio.create_task(service.budgets.run(), name="budgets"))
        self._beside = [
            asyncio.create_task(part.run(), name="extension") for part in self._parts if part.run is not None
        ]

    async def drain(self, timeout: float) -> bool:
        """Take no new requests and let running ones finish; return whether all did within ``timeout`` seconds."""
        self.service.gate.draining = True
        await self._stop_beside()
        # Load balancers that still hold a connection get 503; new connections are refused.
        if self._listener is not None:
            self._listener.drain()
        await self._stop_accepting()
        try:
            await asyncio.wait_for(self.service.gate.idle.wait(), timeout)
        except TimeoutError:
            log.warning("%d requests did not finish within %g s and are cut off", self.service.gate.inflight, timeout)
            return False
        return True

    async def retire(self, timeout: float) -> bool:
        """Leave new connections to a successor, and answer requests on those that are open here.

        Every answer from now on ends its connection, so clients move to the successor; a connection without a request
        for `LULL` seconds is closed. Then drain.

        Returns: whether all requests finished within ``timeout`` seconds.
        """
        self.service.gate.retiring = True
        spares = [bound.dup() for bound in self._public]
        await self._stop_accepting()  # first: what is half accepted in another turn of the loop is counted nowhere
        await self._accept_rest(spares)
        await self._stop_beside()
        end = busy = time.monotonic()
        end += timeout
        while (now := time.monotonic()) < end and self._open:
            if self.service.gate.inflight:
                busy = now
            if now - busy > LULL:
                break
            await asyncio.sleep(LOOK)
        return await self.drain(max(0.0, end - time.monotonic()))

    async def _accept_rest(self, spares: Sequence[socket.socket]) -> None:
        """Accept the waiting connections, and close the sockets.

        Where a supervisor holds them too, nothing would be lost. But one of several frontends that is drained for good
        is the last to hold its own, and closing it would refuse all connections that wait there.
        """
        waiting: list[socket.socket] = []
        for bound in spares:
            with contextlib.suppress(OSError):  # BlockingIOError: none is left
                while True:
                    waiting.append(bound.accept()[0])
            bound.close()
        loop = asyncio.get_running_loop()
        assert self._listener is not None
        for connection in waiting:
            connection.setblocking(False)
            try:
                await loop.connect_accepted_socket(self._listener.connection, connection, ssl=self._tls)
            except OSError as error:
                log.info("a client that waited is gone: %s", error)

    @property
    def _open(self) -> int:
        """Connections of clients."""
        count = len(self._listener.connections) if self._listener is not None else 0
        return count + sum(len(runner.server.connections) for runner in self._runners if runner.server is not None)

    async def _stop_beside(self) -> None:
        """Leave batches and the like to another process: what is at engines is sent again there."""
        await cancel_all(self._beside)

    async def _stop_accepting(self) -> None:
        if self._listener is not None:
            self._listener.stop_accepting()
        for site in self._sites:
            await site.stop()
        self._sites.clear()

    async def close(self) -> None:
        """Cut the remaining connections and release everything."""
        await self._stop_beside()
        await cancel_all(self._tasks)
        await self.service.budgets.sync()
        if self._listener is not None:
            await self._listener.close()
        for runner in self._runners:
            await runner.cleanup()
        self._runners.clear()

    async def _listen(self, app: web.Application, sockets: Sequence[socket.socket]) -> str:
        runner = await self._runner(app)
        for bound in sockets:
            site = web.SockSite(runner, bound, backlog=BACKLOG)
            await site.start()
            self._sites.append(site)
        return url_of(sockets[0], None)

    async def _listen_public(
        self, app: web.Application, sockets: Sequence[socket.socket], tls: ssl.SSLContext | None
    ) -> str:
        """Listen with the hand-written server; aiohttp's is behind it without an address of its own."""
        runner = await self._runner(app)
        assert runner.server is not None
        loop = asyncio.get_running_loop()
        state = ListenerState(self.service.gate, routed_handlers(self.service, self._parts), runner.server, loop)
        self._listener = Http1Listener(state)
        await self._listener.start(sockets, tls=tls, backlog=BACKLOG)
        return url_of(sockets[0], tls)

    async def _runner(self, app: web.Application) -> web.AppRunner:
        runner = web.AppRunner(
            app,
            # A client that hangs up cancels its handler, which closes the engine's connection at once.
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=KEEP_ALIVE,
            shutdown_timeout=0.5,
            lingering_time=LINGER,
        )
        await runner.setup()
        self._runners.append(runner)
        return runner


def bound_sockets(
    host: str, port: int, *, shared: bool = False, hint: str = "frontend.port=0 takes any free port"
) -> list[socket.socket]:
    """Bind an address.

    Raises:
        ConfigError: it can't be bound.
    """
    try:
        return bind(host, port, shared=shared)
    except OSError as error:
        raise ConfigError(
            f"{host}:{port} can't be listened on: {error.strerror or error}",
            hint=bind_hint(error, hint),
        ) from error


def url_of(bound: socket.socket, tls: ssl.SSLContext | None) -> str:
    """Return the URL of a listening socket for this machine."""
    name, port = bound.getsockname()[:2]
    shown = "127.0.0.1" if name in ("0.0.0.0", "") else ("[::1]" if name == "::" else name)
    if ":" in shown and not shown.startswith("["):
        shown = f"[{shown}]"
    return f"{'https' if tls else 'http'}://{shown}:{port}"


def tls_context(frontend: FrontendSettings) -> ssl.SSLContext | None:
    """Load certificate and key, or return None where none are set.

    Raises:
        ConfigError: only one of them is set, or they can't be loaded.
    """
    cert, key = frontend.security.tls_cert, frontend.security.tls_key
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise ConfigError("security.tls_cert and security.tls_key belong together", hint="set both, or neither")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"TLS certificate {cert} with key {key} can't be loaded: {error}") from error
    return context

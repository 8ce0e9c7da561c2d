"""How does the endpoint listen, and how does it stop? Sockets, TLS, and a drain that lets streams finish."""

import asyncio
import logging
import ssl

from aiohttp import web

from penstock.config.frontend import FrontendSettings
from penstock.frontend.access import check_binding
from penstock.frontend.app import LINGER, admin_app, public_app
from penstock.frontend.service import Service
from penstock.frontend.watch import Watch
from penstock.kernel.errors import ConfigError

log = logging.getLogger("penstock.frontend")

BACKLOG = 1024


class Server:
    """The public site and, where it has its own, the admin site of one frontend process."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.url = ""
        self.admin_url = ""
        self._runners: list[web.AppRunner] = []
        self._sites: list[web.TCPSite] = []
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen. ``url`` and ``admin_url`` are set when this returns.

        Raises:
            ConfigError: the address is not allowed, can't be bound, or TLS files are wrong.
        """
        frontend = self.service.settings.frontend
        check_binding(frontend.host, frontend.security.api_keys, frontend.security.insecure)
        tls = tls_context(frontend)
        shared = frontend.processes > 1
        # Each of several processes needs an address of its own, by which the others find it.
        own_admin = frontend.admin_port is not None or shared
        public = public_app(self.service, with_admin=frontend.admin_port is None)
        self.url = await self._listen(public, frontend.host, frontend.port, tls=tls, shared=shared)
        self.admin_url = self.url
        if own_admin:
            port = 0 if shared else frontend.admin_port or 0
            self.admin_url = await self._listen(admin_app(self.service), "127.0.0.1", port)
        if shared and frontend.admin_port:
            await self._listen(admin_app(self.service), "127.0.0.1", frontend.admin_port, shared=True)
        self.service.urls = {"endpoint": self.url, "admin": self.admin_url}
        self._watch = asyncio.create_task(Watch(self.service.watched).run(), name="watch")

    async def drain(self, timeout: float) -> bool:
        """Take no new requests and let those that run finish; return whether all did within ``timeout`` seconds."""
        self.service.draining = True
        # Load balancers that still hold a connection see 503; new connections find nobody.
        for site in self._sites:
            await site.stop()
        self._sites.clear()
        try:
            await asyncio.wait_for(self.service.idle.wait(), timeout)
        except TimeoutError:
            log.warning("%d requests did not finish within %g s and are cut off", self.service.inflight, timeout)
            return False
        return True

    async def close(self) -> None:
        """Cut off what is left and let go of everything."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        for runner in self._runners:
            await runner.cleanup()
        self._runners.clear()

    async def _listen(
        self, app: web.Application, host: str, port: int, *, tls: ssl.SSLContext | None = None, shared: bool = False
    ) -> str:
        runner = web.AppRunner(
            app,
            # A client that hangs up cancels its handler, which closes the engine's connection at once.
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=self.service.settings.frontend.keep_alive,
            shutdown_timeout=0.5,
            lingering_time=LINGER,
        )
        await runner.setup()
        self._runners.append(runner)
        site = web.TCPSite(runner, host, port, ssl_context=tls, backlog=BACKLOG, reuse_port=shared or None)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(
                f"{host}:{port} can't be listened on: {error.strerror or error}",
                hint="another server has it; frontend.port=0 takes any free port",
            ) from error
        self._sites.append(site)
        name, bound = runner.addresses[0][:2]
        shown = "127.0.0.1" if name in ("0.0.0.0", "") else ("[::1]" if name == "::" else name)
        if ":" in shown and not shown.startswith("["):
            shown = f"[{shown}]"
        return f"{'https' if tls else 'http'}://{shown}:{bound}"


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

"""ext_proc listener: the gRPC server that Envoy asks, with the health service that Kubernetes probes."""

import asyncio
import logging
import shutil
import ssl
import subprocess
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from penstock.adapters.task_cancel import cancel_all
from penstock.frontend.http_server import bound_sockets, tls_context
from penstock.kernel.errors import ConfigError
from penstock_kubernetes.picker.ext_proc_stream import ExtProcStream
from penstock_kubernetes.picker.http2_connection import GrpcStream, Http2Connection, StreamHandler
from penstock_kubernetes.picker.objectives import GROUPS, Objectives, follow_objectives, pool_of
from penstock_kubernetes.picker.picker import Picker

log = logging.getLogger("penstock.picker")

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"
CHUNK_MAX = 4 << 20
"""Longest piece of a body that a gateway sends in one message, whatever the limit of the whole: grpc's own default."""
SPARE = 1 << 16
"""Bytes of a message beside the body in it."""


class HealthCall:
    """One call of the health service: liveness is always well, everything else until the process drains."""

    def __init__(self, stream: GrpcStream, picker: Picker, *, watch: bool) -> None:
        self._stream, self._picker, self._watch = stream, picker, watch

    def message(self, data: bytes) -> None:
        """Answer for the service that the message names."""
        draining = self._picker.service.gate.draining or self._picker.service.gate.retiring
        self._stream.send(NOT_SERVING if draining and not data.endswith(b"liveness") else SERVING)

    def half_closed(self) -> None:
        if not self._watch:
            self._stream.finish()

    def reset(self) -> None:
        return None


class ExtProcListener:
    """The server of one picker process."""

    def __init__(self, picker: Picker) -> None:
        self.picker = picker
        self.objectives = Objectives(pool_of(picker.service.settings))
        self.address = ""
        """``host:port`` once it listens."""
        self.connections: set[Http2Connection] = set()
        self._servers: Sequence[asyncio.Server] = ()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, index: int) -> None:
        """Listen; process ``index`` of several has a port of its own, because Envoy opens few connections."""
        settings = self.picker.service.settings
        port = settings.picker.listen_port
        port = port + index if port else 0
        # Shared, because the successor of a restart listens before this process stops.
        hint = "picker.listen_port=0 takes any free one"
        sockets = bound_sockets(settings.frontend.host, port, shared=True, hint=hint)
        context = await asyncio.to_thread(_tls_context, self.picker) if settings.picker.tls else None
        limit = max(settings.frontend.limits.body_max, CHUNK_MAX) + SPARE
        loop = asyncio.get_running_loop()
        make = partial(Http2Connection, self._open, limit, self.connections)
        self._servers = [await loop.create_server(make, sock=bound, ssl=context) for bound in sockets]
        if self.objectives.pool is not None:
            for group in GROUPS:
                self._tasks.add(asyncio.create_task(follow_objectives(settings, self.objectives, group), name=group))
        host, port = sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"
        log.info("choosing engines for Envoy at %s", self.address, extra={"fields": {"tls": settings.picker.tls}})

    async def stop_accepting(self) -> None:
        """Take no new connections, and ask Envoy to open its next streams elsewhere."""
        for server in self._servers:
            server.close()
        for connection in list(self.connections):
            connection.leave()

    async def close(self) -> None:
        """End what is left."""
        await self.stop_accepting()
        await cancel_all(self._tasks)
        for connection in list(self.connections):
            connection.close()

    def _open(self, path: str, stream: GrpcStream) -> StreamHandler | None:
        if path == PROCESS:
            return ExtProcStream(stream, self.picker, self.objectives, self._tasks)
        if path in (CHECK, WATCH):
            return HealthCall(stream, self.picker, watch=path == WATCH)
        return None


def _tls_context(picker: Picker) -> ssl.SSLContext:
    """Return the context of the frontend's own certificate, or of one that is made now.

    Gateways of the extension do not check the picker's certificate, so one that nobody signed serves them.
    """
    context = tls_context(picker.service.settings.frontend)
    if context is None:
        openssl = shutil.which("openssl")
        if openssl is None:
            raise ConfigError(
                "picker.tls needs a certificate, and there is no openssl command to make one with",
                hint="set frontend.security.tls_cert and tls_key, or picker.tls=false",
            )
        with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
            key, cert = Path(folder) / "key.pem", Path(folder) / "cert.pem"
            words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 -subj /CN=penstock"
            done = subprocess.run(
                [openssl, *words.split(), "-keyout", str(key), "-out", str(cert)],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise ConfigError(f"openssl can't make a certificate for picker.tls: {done.stderr.strip()[-300:]}")
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.load_cert_chain(cert, key)  # read now, so that the files may go
    context.set_alpn_protocols(["h2"])
    return context

"""Inference listener: the gRPC server of the Open Inference Protocol in a frontend process."""

import asyncio
import logging
from pathlib import Path
from typing import Any

from penstock.adapters.listen_address import listen_hint
from penstock.frontend.http.api_keys import check_binding
from penstock.frontend.service import Service
from penstock.kernel.errors import ConfigError
from penstock_extras.open_inference.inference_service import InferenceService
from penstock_extras.plugins.protobuf_messages import need_grpc

log = logging.getLogger("penstock.frontend")

CALLS_MAX = 4096
"""Calls that are open at the same time, idle streams among them; gRPC refuses the next one with RESOURCE_EXHAUSTED."""

UNTIL_CLOSED = 1e9
"""Seconds that open calls have: `InferenceListener.close` ends them. Of two stops, one whose time runs out ends the
process with SIGSEGV where the other has just freed gRPC's server; without a time there is no such moment."""


class InferenceListener:
    """The server of one process; all processes of a cluster share the port."""

    def __init__(self, service: Service) -> None:
        self.address = ""
        """``host:port`` once it listens."""
        self._service = service
        self._server: Any = None
        self._stopping: asyncio.Task[None] | None = None

    async def start(self, index: int) -> None:
        """Listen.

        Raises:
            ConfigError: gRPC is not installed, or the address is not allowed or can't be bound.
        """
        grpc = need_grpc()
        frontend = self._service.settings.frontend
        check_binding(frontend.host, self._service.gate.keys.needed, frontend.security.insecure)
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", frontend.limits.body_max),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 1),  # the successor of a restart listens before this process stops
            ],
            maximum_concurrent_rpcs=CALLS_MAX,
        )
        self._server.add_generic_rpc_handlers((InferenceService(self._service).handler(),))
        host = f"[{frontend.host}]" if ":" in frontend.host else frontend.host
        wanted = f"{host}:{frontend.grpc_port or 0}"
        try:
            credentials = await asyncio.to_thread(self._credentials, grpc)
            bind = self._server.add_insecure_port if credentials is None else self._server.add_secure_port
            port = bind(wanted, *(() if credentials is None else (credentials,)))
        except (RuntimeError, OSError) as error:
            hint = listen_hint(wanted, "frontend.grpc_port=0 takes any free port")
            raise ConfigError(f"{wanted} can't be listened on: {error}", hint=hint) from error
        await self._server.start()
        self.address = f"{host}:{port}"
        log.info("serving the Open Inference Protocol at %s", self.address)

    async def stop_accepting(self) -> None:
        """Take no new calls; those that are open may end."""
        if self._server is not None and self._stopping is None:
            self._stopping = asyncio.create_task(self._server.stop(UNTIL_CLOSED), name="grpc")

    async def close(self) -> None:
        """End what is left."""
        await self.stop_accepting()
        if self._stopping is not None:
            await self._server.stop(None)
            await self._stopping

    def _credentials(self, grpc: Any) -> Any:
        security = self._service.settings.frontend.security
        if security.tls_cert is None or security.tls_key is None:
            return None
        return grpc.ssl_server_credentials(
            [(Path(security.tls_key).read_bytes(), Path(security.tls_cert).read_bytes())]
        )

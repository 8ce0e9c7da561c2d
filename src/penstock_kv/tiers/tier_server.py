"""`TierServer`: listens on the unix socket, and hands each connection to the engines' side or to the operator's."""

import asyncio
import logging
import os
import socket
from pathlib import Path

import msgspec

from penstock.kernel.errors import ConfigError
from penstock_kv.inside.tier_protocol import TierHello, TierWelcome
from penstock_kv.tiers.tier_admin import TierAdmin
from penstock_kv.tiers.tier_admin_protocol import AdminAsk
from penstock_kv.tiers.tier_frames import FrameError, FrameStream
from penstock_kv.tiers.tier_node import TierNode

log = logging.getLogger("penstock.kv_tiers")

FIRST_FRAME = 10.0
"""Seconds that a connection may take to say what it is."""
CONNECTIONS_MAX = 64
"""Engines and operators together; each may have `UNREAD_MAX` bytes waiting."""
PATH_MAX = 107
"""Bytes of a unix socket's path: a limit of the kernel."""

_decode = msgspec.msgpack.Decoder(TierHello | AdminAsk).decode


class TierServer:
    """The socket of a tier process: `start`, then `close`."""

    def __init__(self, node: TierNode, path: Path) -> None:
        self._node = node
        self._admin = TierAdmin(node)
        self._path = path
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: another process listens there, or the path can't be a socket.
        """
        if len(os.fsencode(self._path)) > PATH_MAX:
            raise ConfigError(
                f"the socket's path {self._path} has more than {PATH_MAX} bytes", hint="take a shorter folder"
            )
        if _answers(self._path):
            raise ConfigError(
                f"another tier process listens at {self._path}", hint="end it, or take another path with --socket"
            )
        mask = os.umask(0o177)  # only this user: a region's path comes in by this socket
        try:
            self._server = await asyncio.start_unix_server(self._connected, self._path)
        except OSError as error:
            raise ConfigError(f"{self._path} can't be a socket: {error.strerror or error}") from error
        finally:
            os.umask(mask)

    async def close(self) -> None:
        """Take no more connections, and end those there are, without touching any engine's rows afterwards."""
        if self._server is not None:
            self._server.close()
        await self._node.close()
        for task in self._connections:
            if task.get_name() == "admin":
                task.cancel()
        if self._connections:
            await asyncio.wait(self._connections, timeout=FIRST_FRAME)
        self._path.unlink(missing_ok=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        stream = FrameStream(reader, writer)
        try:
            await self._serve(stream, task)
        except Exception:  # the boundary of one connection: its end is what the other side sees
            log.exception("a connection ended by a bug of ours")
        finally:
            self._connections.discard(task)
            await stream.close()

    async def _serve(self, stream: FrameStream, task: "asyncio.Task[None]") -> None:
        if len(self._connections) > CONNECTIONS_MAX:
            stream.send(TierWelcome(error=f"{CONNECTIONS_MAX} connections are open already"))
            return
        task.set_name("admin")
        try:
            raw = await asyncio.wait_for(stream.read(), FIRST_FRAME)
            first = None if raw is None else _decode(raw)
        except (TimeoutError, FrameError, msgspec.DecodeError) as error:
            stream.send(TierWelcome(error=f"the first frame is not part of this protocol: {error}"))
            return
        if isinstance(first, TierHello):
            task.set_name("engine")
            await self._node.serve(first, stream)
        elif first is not None:
            try:
                await self._admin.serve(first, stream)
            except (FrameError, msgspec.DecodeError) as error:
                log.warning("an operator's connection sent something that is not a frame: %s", error)


def _answers(path: Path) -> bool:
    """Return whether a process listens at a path."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True

"""Client of a tier process for an operator's command: asks over its unix socket, and finds the sockets of this user."""

import asyncio
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from penstock.adapters.connectors.state_file import state_folder
from penstock.adapters.telemetry.prometheus_text import labelled, merge
from penstock.kernel.errors import ConfigError, PenstockError
from penstock_kv.tiers.tier_admin_protocol import (
    AdminAnswer,
    AdminAsk,
    AskMetrics,
    AskRefused,
    MetricsPage,
)
from penstock_kv.tiers.tier_frames import LENGTH, frame, frame_length
from penstock_kv.tiers.tier_metrics import tier_families

PATIENCE = 60.0
"""Seconds until a tier process that does not answer is given up: a part of a verification at a low rate takes long."""
SUFFIX = ".tiers"

A = TypeVar("A", bound=msgspec.Struct)


class TierAdminClient:
    """A connection to a tier process.

    Raises:
        ConfigError: nobody listens there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(PATIENCE)
        try:
            self._socket.connect(str(path))
        except OSError as error:
            self._socket.close()
            raise ConfigError(
                f"no tier process answers at {path}: {error.strerror or error}",
                hint="a pool with cache.host has one for each engine; --socket names another",
            ) from error

    def ask(self, ask: AdminAsk, answer: type[A]) -> A:
        """Return the answer.

        Raises:
            PenstockError: it was refused, or the process went away.
        """
        try:
            self._socket.sendall(frame(ask))
            raw = self._read(frame_length(self._read(LENGTH)))
        except OSError as error:
            raise PenstockError(f"the tier process at {self.path} gave no answer: {error}") from error
        got = msgspec.msgpack.decode(raw, type=AdminAnswer)
        if isinstance(got, AskRefused):
            raise PenstockError(got.reason)
        if not isinstance(got, answer):
            raise PenstockError(f"the tier process at {self.path} answered with {type(got).__name__}")
        return got

    def close(self) -> None:
        self._socket.close()

    def _read(self, size: int) -> bytes:
        raw = b""
        while len(raw) < size:
            more = self._socket.recv(size - len(raw))
            if not more:
                raise ConnectionResetError("it closed the connection")
            raw += more
        return raw


async def metrics_page(path: Path) -> str:
    """Return what a tier process has for Prometheus, without a limit of time.

    Raises:
        OSError, PenstockError, msgspec.MsgspecError: nobody listens there, or the answer is something else.
    """
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(frame(AskMetrics()))
        raw = await reader.readexactly(frame_length(await reader.readexactly(LENGTH)))
    except EOFError as error:
        raise PenstockError(f"the tier process at {path} gave no answer") from error
    finally:
        writer.close()
    return msgspec.msgpack.decode(raw, type=MetricsPage).text


def socket_of(folder: Path, namespace: str, worker: str) -> Path:
    """Return the socket of an engine's tier process: it stays the same when a supervisor takes the engine over."""
    return folder / f"{namespace}{SUFFIX}" / f"{worker}.sock"


def sockets(env: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the sockets of this user's tier processes, those of killed ones among them."""
    folder, _ = state_folder(env)
    return sorted(folder.glob(f"*{SUFFIX}/*.sock"))


async def tier_text(socket: Path, worker: str) -> str:
    """Ask a tier process for its metrics; return their text.

    Raises:
        OSError: it does not answer, or is on another machine.
    """
    return merge([labelled(tier_families(await metrics_page(socket)), "worker", worker)])

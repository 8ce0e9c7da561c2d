"""`NixlAgent`: the calls of the package ``nixl`` that our backends make, with its errors as `PieceFailed`."""

import asyncio
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.kernel.errors import ConfigError
from penstock_kv.transfer.transfer_backend import Direction
from penstock_kv.transfer.transfer_status import PieceFailed, TransferStatus

STATUSES = {
    "nixlNotPostedError": TransferStatus.NOT_POSTED,
    "nixlInvalidParamError": TransferStatus.INVALID,
    "nixlBackendError": TransferStatus.BACKEND,
    "nixlNotFoundError": TransferStatus.NOT_FOUND,
    "nixlMismatchError": TransferStatus.MISMATCH,
    "nixlNotAllowedError": TransferStatus.NOT_ALLOWED,
    "nixlRepostActiveError": TransferStatus.REPOST_ACTIVE,
    "nixlUnknownError": TransferStatus.UNKNOWN,
    "nixlNotSupportedError": TransferStatus.NOT_SUPPORTED,
    "nixlRemoteDisconnectError": TransferStatus.DISCONNECTED,
    "nixlCancelledError": TransferStatus.CANCELLED,
}
"""NIXL's exceptions; they have no common base."""
SPINS = 20
"""Looks at a transfer with nothing but other tasks in between: small ones end within them."""
LOOK_SECONDS = 0.0001

MemoryType = str
"""``DRAM`` or ``FILE``: how NIXL calls a kind of memory."""
NixlDescriptor = tuple[int, int, int]
"""Address or offset, length, device or open file."""


def load_nixl() -> Any:
    """Return the module of NIXL's Python API.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("nixl._api")
    except ImportError as error:
        raise ConfigError(
            f"the NIXL backend needs the package nixl: {error}",
            hint="pip install --no-deps nixl==1.5.0 nixl-cu12==1.5.0 (for CUDA 13: nixl-cu13)",
        ) from error


class NixlAgent:
    """An agent of NIXL with one plug-in. One thread uses it.

    Args:
        name: within NIXL.
        plugin: ``UCX`` or ``POSIX``.
        options: of the plug-in.
    """

    def __init__(self, name: str, plugin: str, options: dict[str, str] | None = None) -> None:
        api = load_nixl()
        self.name = name
        self._plugin = plugin
        self._regions: dict[tuple[str, int], Any] = {}
        with _errors():
            self._nixl: Any = api.nixl_agent(name, api.nixl_agent_config(backends=[]))
            self._nixl.create_backend(plugin, options or {})

    def register(self, region: int, kind: MemoryType, address: int, size: int, device: int) -> None:
        """Register memory, or an open file from offset ``address`` on."""
        with _errors():
            self._regions[kind, region] = self._nixl.register_memory(
                [(address, size, device, "")], kind, backends=[self._plugin]
            )

    def deregister(self, region: int, kind: MemoryType = "DRAM") -> None:
        """Undo `register`; an unknown region is no error."""
        registered = self._regions.pop((kind, region), None)
        if registered is not None:
            with _errors():
                self._nixl.deregister_memory(registered, backends=[self._plugin])

    def metadata(self) -> bytes:
        """Return what a peer's `load` takes: connections and registered regions."""
        with _errors():
            return bytes(self._nixl.get_agent_metadata())

    def load(self, metadata: bytes) -> None:
        """Get to know a peer, or its newer regions."""
        with _errors():
            self._nixl.add_remote_agent(metadata)

    def forget(self, name: str) -> None:
        """Disconnect from a peer."""
        with _errors():
            self._nixl.remove_remote_agent(name)

    def send(self, name: str, data: bytes) -> None:
        """Send a notification of its own."""
        with _errors():
            self._nixl.send_notif(name, data)  # with a plug-in's name, nixl 1.5.0 raises TypeError

    def notifications(self) -> list[tuple[str, bytes]]:
        """Return the notifications that came since the last call, with their senders."""
        with _errors():
            news = self._nixl.get_new_notifs(backends=[self._plugin])
        return [(sender, data) for sender, each in news.items() for data in each]

    async def move(
        self,
        direction: Direction,
        here_kind: MemoryType,
        here: Sequence[NixlDescriptor],
        there_kind: MemoryType,
        there: Sequence[NixlDescriptor],
        peer: str,
    ) -> None:
        """Carry out one transfer of NIXL; returns when nothing touches the memory any more, also when cancelled.

        Raises:
            PieceFailed: with NIXL's status; it holds for all descriptors.
        """
        nixl = self._nixl
        with _errors():
            handle = nixl.initialize_xfer(
                direction.upper(),
                nixl.get_xfer_descs(list(here), here_kind),
                nixl.get_xfer_descs(list(there), there_kind),
                peer,
                b"",
                backends=[self._plugin],
            )
            state = nixl.transfer(handle)
        cancelled = False
        looks = 0
        try:
            while state == "PROC":
                try:
                    await asyncio.sleep(0 if looks < SPINS else LOOK_SECONDS)
                except asyncio.CancelledError:
                    cancelled = True  # NIXL can't take a transfer back while it runs
                looks += 1
                with _errors():
                    state = nixl.check_xfer_state(handle)
        finally:
            with _errors():
                nixl.release_xfer_handle(handle)
        if cancelled:
            raise asyncio.CancelledError
        if state != "DONE":
            raise PieceFailed(TransferStatus.BACKEND, f"NIXL's {self._plugin} says {state}")

    def close(self) -> None:
        """Give everything back to NIXL."""
        for kind, region in list(self._regions):
            self.deregister(region, kind)
        self._nixl = None  # its destructor ends the plug-in's threads


@contextmanager
def _errors() -> Iterator[None]:
    """Turn errors of NIXL into ours; others pass."""
    try:
        yield
    except Exception as error:
        status = STATUSES.get(type(error).__name__)
        if status is None:
            raise
        raise PieceFailed(status, f"NIXL: {error}") from error

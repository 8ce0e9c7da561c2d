"""The contract suite of transfers over `TcpBackend`."""

import contextlib
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from penstock.kernel.secret import ClusterSecret
from penstock_kv.transfer.backends.tcp_backend import TcpBackend
from penstock_kv.transfer.tcp.tcp_stream import TcpStream
from tests.kv.transfer.memory_harness import MemoryHarness
from tests.kv.transfer.transfer_contract import *  # noqa: F403 - the suite


class TcpHarness(MemoryHarness):
    """Agents of this process that meet over sockets."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(lambda: TcpBackend(ClusterSecret("the secret of this cluster")), patch)

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        """Let owners send and take no payload."""
        gate = threading.Event()
        send, take = TcpStream.send_payload, TcpStream.take_payload

        def slow_send(stream: TcpStream, payload: memoryview, *, check: bool = True) -> int:
            gate.wait()
            return send(stream, payload, check=check)

        def slow_take(stream: TcpStream, payload: memoryview) -> int:
            # Only the owner's side of a write: a reader waits in the kernel, where a cancel reaches it.
            if threading.current_thread().name == "tcp serve":
                gate.wait()
            return take(stream, payload)

        with self._patch.context() as patch:
            patch.setattr(TcpStream, "send_payload", slow_send)
            patch.setattr(TcpStream, "take_payload", slow_take)
            try:
                yield
            finally:
                gate.set()


@pytest.fixture
async def transfers(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TcpHarness]:
    harness = TcpHarness(monkeypatch)
    yield harness
    await harness.close()

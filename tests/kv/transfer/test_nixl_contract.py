"""The contract suite of transfers over `NixlBackend`, the real package on memory of this host."""

import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest

from penstock_kv.transfer.backends.nixl_backend import NixlBackend, RegionsLent
from tests.kv.transfer.memory_harness import MemoryHarness
from tests.kv.transfer.nixl_setup import needs_nixl
from tests.kv.transfer.transfer_contract import *  # noqa: F403 - the suite


class NixlHarness(MemoryHarness):
    """Agents of this process that meet over UCX."""

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        """Let owners answer nobody; they do it after the block."""
        answers: list[tuple[NixlBackend, str, bytes, RegionsLent]] = []

        def hold(backend: NixlBackend, sender: str, metadata: bytes, message: RegionsLent) -> None:
            answers.append((backend, sender, metadata, message))

        with self._patch.context() as patch:
            patch.setattr(NixlBackend, "_answer", hold)
            try:
                yield
            finally:
                patch.undo()
                for backend, *answer in answers:
                    backend._answer(*answer)


@pytest.fixture
async def transfers(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[NixlHarness]:
    needs_nixl()
    harness = NixlHarness(NixlBackend, monkeypatch)
    yield harness
    await harness.close()

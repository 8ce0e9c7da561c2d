"""Which outside things can be exchanged? The seams, as small Protocols.

Each has one contract suite in tests/contracts that every adapter of it passes unchanged.
"""

from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple, Protocol

from penstock.kernel.errors import PenstockError
from penstock.kernel.values import KvEvent


class StoreUnavailable(PenstockError):
    """The store can't be read or written at present; membership stays as last seen."""


class Change(NamedTuple):
    """One change that a `Store.watch` reports; ``value`` is None where the key went away."""

    key: str
    value: bytes | None


class Store(Protocol):
    """Discovery: small values under keys, each held by a lease that its owner keeps alive.

    Keys are path-like, such as ``workers/sim-0``. Losing the store freezes membership; it never stops traffic.
    """

    async def put(self, key: str, value: bytes, *, ttl: float | None = None) -> None:
        """Write a value; with ``ttl`` (seconds) it goes away unless this process keeps running and `close`s."""
        ...

    async def delete(self, key: str) -> None:
        """Take a key out; one that is absent is no error."""
        ...

    async def list(self, prefix: str) -> dict[str, bytes]:
        """Return what is alive under a prefix."""
        ...

    def watch(self, prefix: str) -> AsyncIterator[Sequence[Change]]:
        """Yield first everything alive under ``prefix``, then batches of changes as they are seen.

        Raises:
            StoreUnavailable: from the iterator, when the store can't be read; call again to resume.
        """
        ...

    async def close(self) -> None:
        """Revoke this process's leases and stop keeping them alive."""
        ...


class Message(NamedTuple):
    """One message of an event plane; ``sequence`` counts up by one per publisher and topic."""

    publisher: str
    topic: str
    sequence: int
    payload: bytes


class EventPlane(Protocol):
    """Publish and subscribe between our own processes; best effort, gaps visible by ``sequence``."""

    async def publish(self, topic: str, payload: bytes) -> None:
        """Send to all who listen at present."""
        ...

    def subscribe(self, topic: str) -> AsyncIterator[Message]:
        """Yield the messages of others on a topic."""
        ...

    async def close(self) -> None:
        """Release sockets and tasks."""
        ...


class KvBatch(NamedTuple):
    """KV events of one engine step, as its publisher numbered them."""

    sequence: int
    rank: int
    events: list[KvEvent]

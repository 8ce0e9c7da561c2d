"""Seams: the Protocols `Store`, `EventPlane` and `Connector`, behind which outside systems can be exchanged.

Each has one contract suite in tests/contracts that every one of its adapters passes unchanged.
"""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from penstock.kernel.errors import PenstockError
from penstock.kernel.values import KvEvent, Pool


class StoreUnavailable(PenstockError):
    """The store can't be read or written at present; membership stays as last read."""


class StoreChange(NamedTuple):
    """One change that a `Store.watch` reports; ``value`` is None where the key went away."""

    key: str
    value: bytes | None


def changes_between(before: Mapping[str, bytes], now: Mapping[str, bytes]) -> list[StoreChange]:
    """Return the changes from one state of a store to another: keys that are gone, then the others in their order."""
    gone = [StoreChange(key, None) for key in before if key not in now]
    return gone + sorted(StoreChange(key, value) for key, value in now.items() if before.get(key) != value)


class Store(Protocol):
    """Discovery: small values under keys, each held by a lease that its owner keeps alive.

    Keys are path-like, such as ``workers/sim-0``. Losing the store freezes membership; it never stops traffic.
    """

    async def put(self, key: str, value: bytes, *, ttl: float | None = None) -> None:
        """Write a value; with ``ttl`` (seconds) it goes away unless this process keeps running and `close`s."""
        ...

    async def delete(self, key: str) -> None:
        """Delete a key; an absent one is no error."""
        ...

    async def list(self, prefix: str) -> dict[str, bytes]:
        """Return what is alive under a prefix."""
        ...

    def watch(self, prefix: str) -> AsyncIterator[Sequence[StoreChange]]:
        """Yield first everything alive under ``prefix``, then batches of changes as they are detected.

        Raises:
            StoreUnavailable: from the iterator, when the store can't be read; call again to resume.
        """
        ...

    async def close(self) -> None:
        """Revoke this process's leases and stop keeping them alive."""
        ...


class PlaneMessage(NamedTuple):
    """One message of an event plane; ``sequence`` counts up by one per publisher and topic."""

    publisher: str
    topic: str
    sequence: int
    payload: bytes


class EventPlane(Protocol):
    """Publish and subscribe between our own processes; best effort, gaps visible by ``sequence``."""

    async def publish(self, topic: str, payload: bytes) -> None:
        """Send to all present subscribers."""
        ...

    def subscribe(self, topic: str) -> AsyncIterator[PlaneMessage]:
        """Yield the messages of others on a topic."""
        ...

    async def close(self) -> None:
        """Release sockets and tasks."""
        ...


class KvBatch(NamedTuple):
    """KV events of one engine step, as its publisher numbered them.

    ``whole``: they are everything that was held after that step, and earlier ones do not matter.
    """

    sequence: int
    rank: int
    events: list[KvEvent]
    whole: bool = False


class ConnectorError(PenstockError):
    """A connector can't accept a desired state: no such pool, or more replicas than there can be."""


class Connector(Protocol):
    """Changes how many replicas a pool has.

    Level-triggered: `scale` sets the desired state, returns at once, and may be called often; the connector works
    towards the newest desired state. A replica that fails is started again; one that is removed is drained first.
    """

    async def pools(self) -> Mapping[str, Pool]:
        """Return every pool as it is now."""
        ...

    async def scale(self, pool: str, replicas: int, *, without: Collection[str] = ()) -> None:
        """Set the desired replicas; those named in ``without`` are removed first and do not count.

        Raises:
            ConnectorError: there is no such pool, or there can't be so many; nothing changed.
        """
        ...

    def watch(self) -> AsyncIterator[Mapping[str, Pool]]:
        """Yield all pools as they are, and again after changes; a slow reader sees only the newest."""
        ...

    async def close(self) -> None:
        """Stop reconciling. Replicas that would outlive this process are ended where it alone owns them."""
        ...

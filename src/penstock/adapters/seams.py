"""Which outside things can be exchanged? The seams, as small Protocols.

Each has one contract suite in tests/contracts that every adapter of it passes unchanged.
"""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

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
    """KV events of one engine step, as its publisher numbered them.

    ``whole``: they are everything that was held after that step, and earlier ones do not matter.
    """

    sequence: int
    rank: int
    events: list[KvEvent]
    whole: bool = False


class ConnectorError(PenstockError):
    """A connector can't want what it was asked to want: no such pool, or more replicas than there can be."""


ReplicaState = Literal["starting", "ready", "draining", "stopping", "failed"]


class Replica(NamedTuple):
    """One replica of a pool. ``reason``: why it does not serve, where there is something to say; ``gpus``: its own."""

    id: str
    state: ReplicaState
    reason: str | None = None
    pid: int | None = None
    gpus: tuple[int, ...] = ()


class PoolScale(NamedTuple):
    """How many replicas a pool should have and which it has, those on their way in and out included.

    ``limit``: the most that can be wanted, or None where only an attempt would tell.
    """

    desired: int
    replicas: tuple[Replica, ...]
    limit: int | None = None

    @property
    def ready(self) -> int:
        return sum(replica.state == "ready" for replica in self.replicas)

    @property
    def settled(self) -> bool:
        """True where nothing is left to do."""
        return self.ready == self.desired == len(self.replicas)


class Connector(Protocol):
    """Who can change how many replicas a pool has.

    Level-triggered: `scale` says what should be, at once and as often as one likes, and the connector works towards
    the newest word until it is so. A replica that fails is started again; one that goes is drained first.
    """

    async def pools(self) -> Mapping[str, PoolScale]:
        """Return every pool as it is now."""
        ...

    async def scale(self, pool: str, replicas: int, *, without: Collection[str] = ()) -> None:
        """Want so many replicas; those named in ``without`` go first and do not count, wanted or not.

        Raises:
            ConnectorError: there is no such pool, or there can't be so many; nothing changed.
        """
        ...

    def watch(self) -> AsyncIterator[Mapping[str, PoolScale]]:
        """Yield all pools as they are, and again after changes; a slow reader sees only the newest."""
        ...

    async def close(self) -> None:
        """Stop working towards anything. Replicas that would outlive us are ended where they are ours alone."""
        ...

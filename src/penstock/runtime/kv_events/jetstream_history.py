"""JetStream history of KV events: keeps events and index snapshots for routers that start late.

Every relayed batch is also in a stream; from time to time a relay writes everything that is held, as one batch, into an
object store, with the position in the stream after which newer batches are. A router that starts late reads both.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.adapters.nats_link import TIMEOUT, NatsLink
from penstock.kernel.secret import ClusterSecret
from penstock.runtime.kv_events.kv_relay_messages import SnapshotPart, encode

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.js import JetStreamContext

log = logging.getLogger("penstock.relay")

EVENTS_MAX = 100_000
"""Events of each worker that the stream keeps: what bridges the time between two snapshots, and costs disk."""
SNAPSHOT_EVERY = 2_000
"""Batches of a worker's KV events between two snapshots of its index: fewer let late routers start sooner."""
FETCHED = 256
"""Messages fetched at a time."""
SNAPSHOT_READS = 5
"""Times that a snapshot is read which a newer one replaces meanwhile; then the relay is asked."""


class IndexSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot in the object store: messages of one batch, and the last stream position that they cover."""

    version: int = 1
    place: int
    messages: list[bytes]


class JetStreamHistory:
    """The stream and the object store of one cluster.

    Args:
        prefix: of the subjects; the names of both derive from it.
    """

    def __init__(self, link: NatsLink, prefix: str, secret: ClusterSecret | None) -> None:
        self.snapshots = 0
        """Snapshots that were written."""
        self.failures = 0
        self._link = link
        self._secret = secret
        self._subjects = f"{prefix}.kv.>"
        name = "".join(c if c.isalnum() else "_" for c in prefix)
        self._stream, self._bucket = f"{name}_kv", f"{name}_index"
        self._made_for: Client | None = None
        self._written: dict[str, int] = {}
        self._due: set[str] = set()
        """Subjects for which the stream lacks messages."""

    async def ready(self) -> None:
        """Make sure that the stream exists before messages for it are published."""
        from nats.errors import Error

        try:
            await self._made()
        except (Error, OSError, TimeoutError) as error:
            self._log_failure("made", error)

    async def published(
        self, where: str, sequence: int, whole: Callable[[], list[SnapshotPart]], *, lost: bool = False
    ) -> None:
        """Batches up to a number were published on a subject, or ``lost``: write a snapshot where one is due."""
        from nats.errors import Error

        if lost:
            self._due.add(where)
        try:
            js = await self._made()
            passed = sequence - self._written.get(where, -1)
            if js is None or sequence < 0 or (where not in self._due and passed < SNAPSHOT_EVERY):
                return
            self._written[where] = sequence
            self._due.discard(where)
            await self._write(js, where, whole)
        except (Error, OSError, TimeoutError) as error:
            self._due.add(where)
            self._log_failure("written", error)

    async def forget(self, where: str) -> None:
        """A worker is gone for good: drop the history of its subject."""
        from nats.errors import Error

        try:
            js = await self._made()
            if js is not None:
                await js.purge_stream(self._stream, subject=where)
                await (await js.object_store(self._bucket)).delete(where)
        except (Error, OSError, TimeoutError) as error:
            log.debug("what JetStream keeps of %s stays: %s", where, error)

    async def past(self, where: str, epoch: int, read: Callable[[bytes], SnapshotPart | None]) -> list[SnapshotPart]:
        """Return the broker's history of an epoch: a batch with everything, where there is one, and those after it.

        The result is empty where the broker does not answer; the relay then sends everything.
        """
        from nats.errors import Error

        try:
            js = await self._made()
            if js is None:
                return []
            snapshot = await self._snapshot(js, where)
            before = [part for raw in snapshot.messages if (part := read(raw)) is not None]
            if not before or before[0].epoch != epoch:
                snapshot, before = IndexSnapshot(place=0, messages=[]), []
            after = [
                part
                for raw in await self._messages(js, self._stream, where, snapshot.place)
                if (part := read(raw)) is not None
            ]
        except (Error, OSError, TimeoutError, msgspec.DecodeError) as error:
            log.info("the past of %s can't be had from JetStream: %s", where, error)
            return []
        newest = before[0].sequence if before else -1
        return [*before, *(part for part in after if part.epoch == epoch and part.sequence > newest)]

    def _log_failure(self, what: str, error: Exception) -> None:
        self.failures += 1
        if self.failures & (self.failures - 1) == 0:  # the 1st, 2nd, 4th...: one comes with every batch
            log.warning("JetStream's copy of KV events can't be %s: %s", what, error)

    async def _made(self) -> "JetStreamContext | None":
        """Return JetStream with our stream and store in it; None without a connection."""
        client = self._link.client
        if client is None:
            return None
        js = client.jetstream(timeout=TIMEOUT)
        if client is not self._made_for:
            from nats.js.api import DiscardPolicy, ObjectStoreConfig, StreamConfig
            from nats.js.errors import BadRequestError, BucketNotFoundError, NotFoundError

            wanted = StreamConfig(
                name=self._stream,
                subjects=[self._subjects],
                max_msgs_per_subject=EVENTS_MAX,
                discard=DiscardPolicy.OLD,
            )
            try:
                await js.add_stream(wanted)
            except BadRequestError:  # it exists with other limits
                await js.update_stream(wanted)
            try:
                await js.object_store(self._bucket)
            except (BucketNotFoundError, NotFoundError):
                await js.create_object_store(self._bucket, ObjectStoreConfig())
            self._due |= self._written.keys()  # the broker may have lost its data
            self._made_for = client
        return js

    async def _write(self, js: "JetStreamContext", where: str, whole: Callable[[], list[SnapshotPart]]) -> None:
        from nats.js.errors import NotFoundError

        # First the position, then the held blocks: a batch between the two is in both, and its number shows that.
        try:
            place = (await js.get_last_msg(self._stream, where)).seq or 0
        except NotFoundError:
            place = 0
        messages = [encode(part, where, self._secret) for part in whole()]
        store = await js.object_store(self._bucket)
        await store.put(where, msgspec.msgpack.encode(IndexSnapshot(place=place, messages=messages)))
        self.snapshots += 1

    async def _snapshot(self, js: "JetStreamContext", where: str) -> IndexSnapshot:
        """Return the newest snapshot of a subject, an empty one where there is none.

        The chunks are read here, not by the library: its reader waits for ever for chunks that a newer snapshot
        replaced after it had read their name.
        """
        from nats.js.errors import NotFoundError

        store = await js.object_store(self._bucket)
        for _ in range(SNAPSHOT_READS):
            try:
                info = await store.get_info(where)
            except NotFoundError:
                return IndexSnapshot(place=0, messages=[])
            chunks = await self._messages(js, f"OBJ_{self._bucket}", f"$O.{self._bucket}.C.{info.nuid}")
            raw = b"".join(chunks)
            if len(raw) == info.size:
                return msgspec.msgpack.decode(raw, type=IndexSnapshot)
        raise TimeoutError(f"it was replaced {SNAPSHOT_READS} times while it was read")

    async def _messages(self, js: "JetStreamContext", stream: str, where: str, place: int = 0) -> list[bytes]:
        """Return what a stream has on a subject now, after a position."""
        from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

        start: dict[str, Any] = {"deliver_policy": DeliverPolicy.ALL}
        if place:
            start = {"deliver_policy": DeliverPolicy.BY_START_SEQUENCE, "opt_start_seq": place + 1}
        config = ConsumerConfig(ack_policy=AckPolicy.NONE, inactive_threshold=30.0, **start)
        consumer = await js.pull_subscribe(where, stream=stream, config=config)
        messages: list[bytes] = []
        try:
            left = pending = (await consumer.consumer_info()).num_pending or 0
            while pending and len(messages) < left:
                got = await consumer.fetch(min(FETCHED, pending, left - len(messages)), timeout=TIMEOUT)
                messages += [message.data for message in got]
                pending = (await consumer.consumer_info()).num_pending or 0  # a full stream drops its oldest meanwhile
        finally:
            await consumer.unsubscribe()
        return messages

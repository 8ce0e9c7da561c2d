"""How does a router that starts late learn the past from the broker? JetStream keeps events, and snapshots of indexes.

Every relayed batch is also in a stream; from time to time a relay writes everything that is held, as one batch, into an
object store, with the place in the stream from which on newer batches stand. Who starts late reads both.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.adapters.nats_link import NatsLink
from penstock.config.discovery import NatsSettings
from penstock.kernel.secret import ClusterSecret
from penstock.runtime.relay_wire import Part, encode

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.js import JetStreamContext

log = logging.getLogger("penstock.relay")

FETCHED = 256
"""Messages asked for at a time."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in the object store: messages of one batch, and the last place in the stream that they cover."""

    version: int = 1
    place: int
    messages: list[bytes]


class Durable:
    """The stream and the object store of one cluster.

    Args:
        prefix: of the subjects; the names of both are made of it.
        settings: how much is kept.
    """

    def __init__(self, link: NatsLink, prefix: str, settings: NatsSettings, secret: ClusterSecret | None) -> None:
        self.snapshots = 0
        """Snapshots that were written."""
        self.failures = 0
        self._link = link
        self._settings = settings
        self._secret = secret
        self._subjects = f"{prefix}.kv.>"
        name = "".join(c if c.isalnum() else "_" for c in prefix)
        self._stream, self._bucket = f"{name}_kv", f"{name}_index"
        self._made_for: Client | None = None
        self._written: dict[str, int] = {}
        self._due: set[str] = set()
        """Subjects of which the stream lacks something."""

    async def ready(self) -> None:
        """See that the stream is there before something is published that it should keep."""
        from nats.errors import Error

        try:
            await self._made()
        except (Error, OSError, TimeoutError) as error:
            self._tell("made", error)

    async def told(self, where: str, sequence: int, whole: Callable[[], list[Part]], *, lost: bool = False) -> None:
        """Batches up to a number were published on a subject, or ``lost``: write a snapshot where one is due."""
        from nats.errors import Error

        if lost:
            self._due.add(where)
        try:
            js = await self._made()
            passed = sequence - self._written.get(where, -1)
            if js is None or sequence < 0 or (where not in self._due and passed < self._settings.snapshot_every):
                return
            self._written[where] = sequence
            self._due.discard(where)
            await self._write(js, where, whole)
        except (Error, OSError, TimeoutError) as error:
            self._due.add(where)
            self._tell("written", error)

    async def forget(self, where: str) -> None:
        """A worker is gone for good: drop what is kept of its subject."""
        from nats.errors import Error

        try:
            js = await self._made()
            if js is not None:
                await js.purge_stream(self._stream, subject=where)
                await (await js.object_store(self._bucket)).delete(where)
        except (Error, OSError, TimeoutError) as error:
            log.debug("what JetStream keeps of %s stays: %s", where, error)

    async def past(self, where: str, epoch: int, read: Callable[[bytes], Part | None]) -> list[Part]:
        """Return what the broker has of an epoch: a batch with everything, where there is one, and those after it.

        Nothing is returned where the broker can't be asked; the relay then tells everything.
        """
        from nats.errors import Error

        try:
            js = await self._made()
            if js is None:
                return []
            snapshot = await self._snapshot(js, where)
            before = [part for raw in snapshot.messages if (part := read(raw)) is not None]
            if not before or before[0].epoch != epoch:
                snapshot, before = Snapshot(place=0, messages=[]), []
            after = [part for raw in await self._after(js, where, snapshot.place) if (part := read(raw)) is not None]
        except (Error, OSError, TimeoutError, msgspec.DecodeError) as error:
            log.info("the past of %s can't be had from JetStream: %s", where, error)
            return []
        newest = before[0].sequence if before else -1
        return [*before, *(part for part in after if part.epoch == epoch and part.sequence > newest)]

    def _tell(self, what: str, error: Exception) -> None:
        self.failures += 1
        if self.failures & (self.failures - 1) == 0:  # the 1st, 2nd, 4th...: one comes with every batch
            log.warning("JetStream's copy of KV events can't be %s: %s", what, error)

    async def _made(self) -> "JetStreamContext | None":
        """Return JetStream with our stream and store in it; None without a connection."""
        client = self._link.client
        if client is None:
            return None
        js = client.jetstream(timeout=self._settings.timeout)
        if client is not self._made_for:
            from nats.js.api import DiscardPolicy, ObjectStoreConfig, StreamConfig
            from nats.js.errors import BadRequestError, BucketNotFoundError, NotFoundError

            wanted = StreamConfig(
                name=self._stream,
                subjects=[self._subjects],
                max_msgs_per_subject=self._settings.events_max,
                discard=DiscardPolicy.OLD,
            )
            try:
                await js.add_stream(wanted)
            except BadRequestError:  # it is there with other limits
                await js.update_stream(wanted)
            try:
                await js.object_store(self._bucket)
            except (BucketNotFoundError, NotFoundError):
                await js.create_object_store(self._bucket, ObjectStoreConfig())
            self._due |= self._written.keys()  # the broker may have lost what it had
            self._made_for = client
        return js

    async def _write(self, js: "JetStreamContext", where: str, whole: Callable[[], list[Part]]) -> None:
        from nats.js.errors import NotFoundError

        # First the place, then what is held: a batch between the two is in both, and its number tells.
        try:
            place = (await js.get_last_msg(self._stream, where)).seq or 0
        except NotFoundError:
            place = 0
        messages = [encode(part, where, self._secret) for part in whole()]
        store = await js.object_store(self._bucket)
        await store.put(where, msgspec.msgpack.encode(Snapshot(place=place, messages=messages)))
        self.snapshots += 1

    async def _snapshot(self, js: "JetStreamContext", where: str) -> Snapshot:
        from nats.js.errors import NotFoundError

        store = await js.object_store(self._bucket)
        try:
            found = await store.get(where)
        except NotFoundError:
            return Snapshot(place=0, messages=[])
        return msgspec.msgpack.decode(found.data or b"", type=Snapshot)

    async def _after(self, js: "JetStreamContext", where: str, place: int) -> list[bytes]:
        """Return the stream's messages on a subject behind a place."""
        from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

        start: dict[str, Any] = {"deliver_policy": DeliverPolicy.ALL}
        if place:
            start = {"deliver_policy": DeliverPolicy.BY_START_SEQUENCE, "opt_start_seq": place + 1}
        config = ConsumerConfig(ack_policy=AckPolicy.NONE, inactive_threshold=30.0, **start)
        consumer = await js.pull_subscribe(where, stream=self._stream, config=config)
        found: list[bytes] = []
        try:
            left = (await consumer.consumer_info()).num_pending or 0
            while len(found) < left:
                got = await consumer.fetch(min(FETCHED, left - len(found)), timeout=self._settings.timeout)
                found += [message.data for message in got]
        finally:
            await consumer.unsubscribe()
        return found

"""KV relay messages between a relay of KV events and the routers: their shape, subjects and signatures.

    <prefix>.kv.<worker>.<rank>     batches, numbered from 0 for each epoch of the worker's card
    <prefix>.beat.<worker>.<rank>   the highest number so far, every second: a loss at the end shows too
    <prefix>.ask.<worker>.<rank>    a router's request for the batches from a number on; the answers go to its inbox

A message is msgpack, behind a 64-character signature over subject and message where the cluster has a secret.
"""

from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from penstock.adapters.nats_link import subject_of
from penstock.adapters.seams import KvBatch
from penstock.kernel.errors import PenstockError
from penstock.kernel.message_version import VersionedDecoder
from penstock.kernel.secret import ClusterSecret
from penstock.kernel.values import KvEvent, Target, WorkerCard

SCHEME = "nats:"
"""Prefix of an event endpoint in a card whose events come by a relay."""
PART_MAX = 256 << 10
"""Bytes of a message above which a batch is sent in parts; servers take 1 MiB by default."""
_CODE = 64
_PURPOSE = "kv relay"

T = TypeVar("T")


class SnapshotPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A batch of KV events, or a part of one.

    ``whole``: the events are everything that is held after batch ``sequence``. ``beat``: no batch, only its number.
    ``last``: the answer to a request ends here.
    """

    version: int = 1
    epoch: int
    sequence: int
    events: list[KvEvent] = []
    part: int = 0
    parts: int = 1
    whole: bool = False
    beat: bool = False
    last: bool = False


class ReplayQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """Requests the batches of an epoch from ``first`` on."""

    version: int = 1
    epoch: int
    first: int


class ForeignMessage(PenstockError):
    """A message that was not written by a process that knows the cluster's secret."""


_DECODERS: dict[Any, VersionedDecoder] = {
    SnapshotPart: VersionedDecoder(SnapshotPart, "a relayed batch of KV events", binary=True),
    ReplayQuestion: VersionedDecoder(ReplayQuestion, "a question for KV events", binary=True),
}
_encode = msgspec.msgpack.Encoder().encode


def endpoint(card: WorkerCard, rank: int) -> str:
    """Return the event endpoint of a relayed worker: its name, and the epoch of its relay's numbers."""
    return f"{SCHEME}{card.id}/{rank}@{card.epoch}"


def epoch_of(endpoint: str) -> int:
    """Return the epoch of a relay's numbers, from the endpoint in the card; -1 where it has none."""
    number = endpoint.rpartition("@")[2]
    return int(number) if number.isdigit() else -1


def subject(prefix: str, kind: str, target: Target) -> str:
    """Return the subject of a kind (``kv``, ``beat`` or ``ask``) for one rank of a worker."""
    return f"{prefix}.{kind}.{subject_of(target.worker, str(target.rank))}"


def encode(message: SnapshotPart | ReplayQuestion, where: str, secret: ClusterSecret | None) -> bytes:
    """Return the bytes of a message on a subject, signed where there is a secret."""
    raw = _encode(message)
    return raw if secret is None else secret.sign(_PURPOSE, where.encode(), raw).encode() + raw


def decode(kind: type[T], raw: bytes, where: str, secret: ClusterSecret | None) -> T:
    """Read a message.

    Raises:
        ForeignMessage: there is a secret, and the message is not signed with it.
        NewerVersion: a newer release wrote it.
        msgspec.DecodeError: it is no such message.
    """
    if secret is not None:
        code, raw = raw[:_CODE], raw[_CODE:]
        if not secret.verify(code.decode("ascii", "replace"), _PURPOSE, where.encode(), raw):
            raise ForeignMessage(f"a message on {where} is not signed with this cluster's secret")
    message: T = _DECODERS[kind].decode(raw)
    return message


def parts_of(epoch: int, sequence: int, events: list[KvEvent], *, whole: bool = False) -> list[SnapshotPart]:
    """Return a batch as one message, or as several where it is large."""
    groups = list(_grouped(events)) or [[]]
    return [
        SnapshotPart(epoch=epoch, sequence=sequence, events=group, part=number, parts=len(groups), whole=whole)
        for number, group in enumerate(groups)
    ]


def _grouped(events: list[KvEvent]) -> Iterator[list[KvEvent]]:
    group: list[KvEvent] = []
    size = 0
    for event in events:
        length = len(_encode(event))
        if group and size + length > PART_MAX:
            yield group
            group, size = [], 0
        group.append(event)
        size += length
    if group:
        yield group


class Assembler:
    """Puts the parts of one publisher's batches together; a batch that lost a part is left out, and is a gap."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._parts: list[SnapshotPart] = []

    def add(self, part: SnapshotPart) -> KvBatch | None:
        """Take a part in the order of arrival; return the batch that it completes."""
        begun = self._parts[-1] if self._parts else None
        if begun is not None:
            due = begun.epoch, begun.sequence, begun.part + 1
            if (part.epoch, part.sequence, part.part) != due:
                self._parts = []
        if not self._parts and part.part:
            return None
        self._parts.append(part)
        if part.part + 1 < part.parts:
            return None
        events = [event for one in self._parts for event in one.events]
        self._parts = []
        return KvBatch(part.sequence, self._rank, events, part.whole)

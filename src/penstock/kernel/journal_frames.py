"""Frames of a journal on disk: length, checksum and payload; a frame that is cut off or damaged ends the reading.

A segment is a file of frames: first a header with the machine's whole state at that moment, then one record for each
event that it took. So every segment can be replayed by itself, and dropping the oldest segments bounds a journal.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from struct import Struct
from typing import Any

import msgspec
import xxhash

from penstock.kernel.machine import Effect, Event, Machine, Nanos, Snapshot
from penstock.kernel.values import plain

VERSION = 2
FRAME_MAX = 1 << 31
"""Bytes of the largest payload; a length beyond it is damage."""
_HEAD = Struct("<II")

Placed = list[tuple[str, int, str, int]]
"""What a record says was decided: see `Record`; other machines put their own into the four places."""


def _array_content(value: object) -> list[Any]:
    """Return what a value that keeps its parts in arrays consists of, without making any of them."""
    content: list[Any] | None = getattr(value, "content", None)
    return plain(value) if content is None else content


_encode = msgspec.msgpack.Encoder(enc_hook=plain).encode
_digested = msgspec.msgpack.Encoder(enc_hook=_array_content).encode_into


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """First frame of a segment. ``wall_ns``: wall clock at time 0 of the run; ``made``: how the machine is made."""

    version: int = VERSION
    machine: str
    kind: str
    sequence: int
    """Sequence number of the segment's first record."""
    now: Nanos
    wall_ns: int
    made: dict[str, Any]
    snapshot: dict[str, Any]


class Record(msgspec.Struct, frozen=True, array_like=True):
    """One event that a machine took. ``digest``: of its effects; ``placed``: the requests that they dispatch."""

    sequence: int
    now: Nanos
    machine: str
    event: msgspec.Raw
    digest: int
    placed: Placed = []
    """(request, attempt, worker, rank)"""


def packed(value: object) -> bytes:
    """Return a struct or plain data as msgpack."""
    return _encode(value)


def digest_of(effects: object, buffer: bytearray | None = None) -> int:
    """Return a 64-bit digest of a machine's effects: equal effects have equal digests.

    Args:
        buffer: is written over; one that is used again and again stays in the processor's cache.
    """
    written = bytearray() if buffer is None else buffer
    _digested(effects, written)
    return xxhash.xxh3_64_intdigest(written)


class MachineBook:
    """Encodes one machine's journal.

    Args:
        kind: of the machine.
        placed: returns what its effects decide, as `Record` has it.
        name: of this machine; by default its kind.
        made: returns how it is made.
        seconds: returns about how long `header` takes: of most machines hardly any time.
    """

    def __init__(
        self,
        machine: Machine,
        kind: str,
        placed: Callable[[Sequence[Effect]], Placed],
        *,
        name: str = "",
        made: Callable[[], Snapshot] = dict,
        seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._machine, self._kind, self._placed, self._name = machine, kind, placed, name or kind
        self._made = made
        self.seconds = seconds
        self._buffer = bytearray()

    def header(self, *, sequence: int, now: Nanos, wall_ns: int) -> bytes:
        """Return the machine's whole state as a header. Cost: walks everything that it keeps."""
        return packed(
            Header(
                machine=self._name,
                kind=self._kind,
                sequence=sequence,
                now=now,
                wall_ns=wall_ns,
                made=self._made(),
                snapshot=self._machine.snapshot(),
            )
        )

    def record(self, sequence: int, now: Nanos, event: Event, effects: Sequence[Effect]) -> bytes:
        """Return one event with its effects as a record."""
        digest = digest_of(effects, self._buffer)
        return packed(Record(sequence, now, self._name, msgspec.Raw(packed(event)), digest, self._placed(effects)))


def frame(payload: bytes) -> bytes:
    """Return a payload as it stands in a segment."""
    return _HEAD.pack(len(payload), zlib.crc32(payload)) + payload


_decode_header = msgspec.msgpack.Decoder(Header).decode
_decode_record = msgspec.msgpack.Decoder(Record).decode


def read_header(payload: bytes) -> Header:
    """Read the first frame of a segment.

    Raises:
        ValueError: it is no header, or one of another version.
    """
    header = _decode_header(payload)
    if header.version != VERSION:
        raise ValueError(f"a journal of version {header.version}, not {VERSION}")
    return header


def read_record(payload: bytes) -> Record:
    """Read any other frame of a segment.

    Raises:
        ValueError: it is no record.
    """
    return _decode_record(payload)


class Frames:
    """The payloads of a segment, as far as they can be read.

    Args:
        data: the file's bytes.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.problem: str | None = None
        """Why the reading ended before the end of the data, and at which byte; None where it did not."""

    def __iter__(self) -> Iterator[bytes]:
        data, at = self._data, 0
        self.problem = None
        while at < len(data):
            if at + _HEAD.size > len(data):
                self.problem = f"it is cut off at byte {at}, in the head of a frame"
                return
            length, crc = _HEAD.unpack_from(data, at)
            start = at + _HEAD.size
            if length > FRAME_MAX:
                self.problem = f"it is damaged at byte {at}: no frame has {length} bytes"
                return
            if start + length > len(data):
                self.problem = f"it is cut off at byte {at}: {start + length - len(data)} bytes of a frame are missing"
                return
            payload = data[start : start + length]
            if zlib.crc32(payload) != crc:
                self.problem = f"it is damaged at byte {at}: the checksum of a frame does not fit"
                return
            yield payload
            at = start + length

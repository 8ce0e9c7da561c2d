"""Frames of the TCP mover: what its two ends send each other, beside the payload bytes.

A frame is u32le length, then msgpack of one struct, then, once both ends are known, 16 bytes of authentication code.
Payload follows its frame as it is: neither encrypted nor encoded, and covered by the checksum of a later frame.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from penstock_kv.transfer.storage.block_store import Outcome

VERSION = 2
FRAME_MAX = 1 << 20
"""Bytes of the longest frame that is read; a longer one ends the connection."""
GROUP_BYTES = 4 << 20
"""Payload that one frame announces: 1 ms of a fast connection, and so long beside the cost of a frame."""
GROUP_ITEMS = 256
"""Payloads that one frame announces."""
ITEMS_MAX = 8192
"""Spans of one request; a caller splits longer ones."""

MoveOutcome = Outcome | Literal["denied"]
"""``denied``: outside of a region, or of one that does not allow it."""


class Frame(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all frames."""


class CallerHello(Frame, frozen=True, tag="hello"):
    """First frame of a caller. ``epoch``: number of its life; another one after each restart."""

    version: int
    name: str
    epoch: int
    nonce: bytes


class Challenge(Frame, frozen=True, tag="challenge"):
    """Answer to `CallerHello`: who listens, and the proof that it has the secret."""

    name: str
    epoch: int
    nonce: bytes
    proof: bytes


class Proof(Frame, frozen=True, tag="proof"):
    """The caller's proof. From now on every frame has an authentication code."""

    proof: bytes


class Ready(Frame, frozen=True, tag="ready"):
    """The listener takes requests."""


class CallRefusal(Frame, frozen=True, tag="refusal"):
    """Why the other end closes the connection."""

    reason: str


class RegionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of a registered region."""

    region: int
    offset: int
    length: int


class ReadSpans(Frame, frozen=True, tag="read"):
    """Send these spans, in order, within ``seconds``. Answered by `Part` frames.

    Args:
        sums_known: the caller knows the checksums, and needs none of the bytes that are sent now.
    """

    id: int
    seconds: float
    spans: list[RegionSpan]
    sums_known: bool = False


class Part(Frame, frozen=True, tag="part"):
    """Some payloads of an answer, and what came of those that the frame before announced.

    Args:
        ended: outcome and checksum of each payload of the frame before.
        lengths: bytes of each payload that follows this frame, 0 where there is none; empty in the last frame.
    """

    id: int
    ended: list[tuple[MoveOutcome, int]]
    lengths: list[int]


class WriteSpans(Frame, frozen=True, tag="write"):
    """Payloads for these spans follow, then their `Checksums`. Answered by a `Wrote`."""

    id: int
    seconds: float
    spans: list[RegionSpan]


class Checksums(Frame, frozen=True, tag="sums"):
    """XXH3-64 of the payloads that were just sent."""

    sums: list[int]


class Wrote(Frame, frozen=True, tag="wrote"):
    """What came of each span of a `WriteSpans`."""

    id: int
    outcomes: list[MoveOutcome]


class Notice(Frame, frozen=True, tag="notice"):
    """A message for the listener's owner, after everything that was sent before it. Answered by `Wrote`."""

    id: int
    body: bytes


class Question(Frame, frozen=True, tag="question"):
    """A question to the listener's owner about one of its topics. Answered by an `Answer`."""

    id: int
    topic: str
    body: bytes


class Answer(Frame, frozen=True, tag="answer"):
    """What the owner says to a `Question`."""

    id: int
    body: bytes


ToListener = CallerHello | Proof | ReadSpans | WriteSpans | Checksums | Notice | Question
ToCaller = Challenge | Ready | CallRefusal | Part | Wrote | Answer


def span_groups(spans: Sequence[RegionSpan]) -> Iterator[list[RegionSpan]]:
    """Yield spans in groups of at most `GROUP_ITEMS`, and of `GROUP_BYTES` where one span is not longer itself."""
    group: list[RegionSpan] = []
    size = 0
    for span in spans:
        if group and (len(group) == GROUP_ITEMS or size + span.length > GROUP_BYTES):
            yield group
            group, size = [], 0
        group.append(span)
        size += span.length
    if group:
        yield group

"""`TransferStatus` and the states of a handle: how a transfer stands, as a whole and per descriptor."""

from collections.abc import Iterator
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple

import msgspec

from penstock.kernel.errors import ConfigError, TransferError
from penstock.kernel.message_version import NewerVersion, VersionedDecoder


class TransferStatus(IntEnum):
    """What came of a descriptor, or why a call was refused. The numbers are NIXL's; `LATE` is ours."""

    IN_PROGRESS = 1
    SUCCESS = 0
    NOT_POSTED = -1
    INVALID = -2
    BACKEND = -3
    NOT_FOUND = -4
    MISMATCH = -5
    NOT_ALLOWED = -6
    REPOST_ACTIVE = -7
    UNKNOWN = -8
    NOT_SUPPORTED = -9
    DISCONNECTED = -10
    CANCELLED = -11
    LATE = -100


class TransferState(StrEnum):
    """Of a handle."""

    NEW = "new"
    POSTED = "posted"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    RELEASED = "released"


class StateChange(NamedTuple):
    """One row of the table of `STATE_CHANGES`. ``check``: what else must be so."""

    before: TransferState
    trigger: str
    after: TransferState
    check: str = ""


NEW, POSTED, DONE, FAILED, CANCELLED, RELEASED = TransferState
STATE_CHANGES = (
    StateChange(NEW, "post", POSTED, "the peer's epoch is the one that the handle was prepared for"),
    StateChange(DONE, "post", POSTED, "the same"),
    StateChange(FAILED, "post", POSTED, "the same, and the backend has let go of the memory"),
    StateChange(CANCELLED, "post", POSTED, "the same, and the backend has let go of the memory"),
    StateChange(POSTED, "succeed", DONE, "every descriptor succeeded, and the notification is sent"),
    StateChange(POSTED, "fail", FAILED, "a descriptor failed, the deadline passed or the peer went away"),
    StateChange(POSTED, "cancel", CANCELLED),
    *(StateChange(state, "release", RELEASED) for state in (NEW, DONE, FAILED, CANCELLED)),
    StateChange(POSTED, "release", RELEASED, "it is cancelled; the memory is busy until the backend lets go"),
)
STEPS = {(change.before, change.trigger): change.after for change in STATE_CHANGES}


class TransferRefused(TransferError):
    """A transfer that can't begin, or an agent that can't be added: nothing has moved. ``status``: why."""

    def __init__(self, status: TransferStatus, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.status = status


class TransferFailed(TransferError):
    """Descriptors that did not arrive; the bytes of their targets are undefined. ``__cause__`` has the first cause.

    Args:
        results: of all descriptors, in order.
    """

    def __init__(self, message: str, results: "list[DescriptorResult]") -> None:
        super().__init__(message)
        self.results = results


class PieceFailed(TransferError):
    """One descriptor that a backend could not move; raised and reported by backends."""

    def __init__(self, status: TransferStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class DescriptorResult(NamedTuple):
    """What came of one descriptor. ``cause``: of a failure, with the causes below it."""

    status: TransferStatus
    cause: str = ""


def causes(error: BaseException) -> Iterator[str]:
    """Yield an error in words, then each error below it."""
    current: BaseException | None = error
    while current is not None:
        text = str(current)
        kind = type(current).__name__
        yield text if isinstance(current, TransferError) else f"{kind}: {text}" if text else kind
        current = current.__cause__ or current.__context__


def decode_message(decoder: VersionedDecoder, data: bytes, what: str) -> Any:
    """Return a peer's message.

    Raises:
        TransferRefused: it is damaged, or of a newer version.
    """
    try:
        return decoder.decode(data)
    except NewerVersion as error:
        raise TransferRefused(TransferStatus.MISMATCH, error.message, hint=error.hint) from error
    except (msgspec.MsgspecError, ConfigError) as error:
        raise TransferRefused(TransferStatus.INVALID, f"{what} can't be read") from error

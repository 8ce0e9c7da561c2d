"""Batch answers: files, batches and their lines as OpenAI's clients read them."""

from typing import Literal

import msgspec

BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
ENDED: frozenset[str] = frozenset({"failed", "completed", "expired", "cancelled"})
"""Statuses after which a batch does not change."""


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file. ``owner``: name of the API key that it belongs to; it is not shown."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed", "error"] = "processed"
    """``error``: it lies at an engine that does not answer."""
    owner: str | msgspec.UnsetType = ""


class FileList(msgspec.Struct, frozen=True, kw_only=True):
    """Files, the newest first."""

    object: Literal["list"] = "list"
    data: list[StoredFile]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is deleted."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with a line of a batch's input, or why a line has no answer."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class LineErrors(msgspec.Struct, frozen=True, kw_only=True):
    """The first errors of an input file."""

    object: Literal["list"] = "list"
    data: list[LineError]


class LineCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of a batch, by what came of them."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """One batch. ``owner``: as of a file. Times are seconds since 1970."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    input_file_id: str
    completion_window: str
    status: BatchStatus = "validating"
    created_at: int
    expires_at: int
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: LineErrors | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: LineCounts = LineCounts()
    metadata: dict[str, str] | None = None
    owner: str | msgspec.UnsetType = ""


class BatchList(msgspec.Struct, frozen=True, kw_only=True):
    """Batches, the newest first."""

    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class LineResponse(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's answer to one line."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class LineResult(msgspec.Struct, frozen=True, kw_only=True):
    """One line of an output or error file."""

    id: str
    custom_id: str
    response: LineResponse | None
    error: LineError | None = None

    @property
    def succeeded(self) -> bool:
        return self.response is not None and self.response.status_code < 400

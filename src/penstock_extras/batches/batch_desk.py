"""Batch desk: what the routes of files and batches share: the folder, the runner to wake, who asks, and pages."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
from aiohttp import web

from penstock.frontend.http.error_responses import rejected
from penstock.frontend.http.request_context import CALLER, gate_of
from penstock_extras.batches.batch_answers import Batch, StoredFile
from penstock_extras.batches.batch_folder import BatchFolder
from penstock_extras.batches.batch_runner import BatchRunner

_Owned = TypeVar("_Owned", StoredFile, Batch)


@dataclass(frozen=True, slots=True)
class UploadedForm:
    """A form with a file, which lies in ``path`` meanwhile. ``fields``: the form's others, each below 64 KiB."""

    path: Path
    filename: str | None
    content_type: str
    fields: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class BatchDesk:
    """The folder, and the runner of this process.

    Args:
        endpoints: paths whose requests a batch may have.
        elsewhere: takes uploads for other purposes than batches.
    """

    folder: BatchFolder
    runner: BatchRunner
    endpoints: frozenset[str]
    elsewhere: Callable[[web.Request, UploadedForm], Awaitable[web.Response]]


DESK: web.AppKey[BatchDesk] = web.AppKey("batch_desk", BatchDesk)


def desk_of(request: web.Request) -> BatchDesk:
    """Return the desk of a route.

    Raises:
        ClientError: 404: this frontend has no folder for files.
    """
    desk = request.app.get(DESK)
    if desk is None:
        raise rejected("files and batches are not served here; set frontend.batch_folder", code="not_found", status=404)
    return desk


def owner_of(request: web.Request) -> str:
    """Return whose files a request may see: its key's; all are one owner's where no keys are set."""
    return str(request[CALLER]) if gate_of(request).keys.needed else ""


def shown(owned: _Owned) -> _Owned:
    """Return a document without its owner, which names a key."""
    return msgspec.structs.replace(owned, owner=msgspec.UNSET)


def answered(data: msgspec.Struct) -> web.Response:
    """Return an answer as JSON."""
    return web.Response(body=msgspec.json.encode(data), content_type="application/json")

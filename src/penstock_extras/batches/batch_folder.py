"""Batch folder: files, batches and the results of unfinished ones on disk; every write is whole or absent.

Several frontend processes share it. A file never changes. A batch is written by the process that runs it; who cancels
one leaves a mark beside it, so that two processes never write the same file. These functions wait for the disk: call
them in a thread.
"""

import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from penstock_extras.batches.batch_answers import ENDED, Batch, LineResult, StoredFile

_ID = re.compile(r"(file|batch)-[0-9a-f]{24}(-output|-error)?\Z")
_Document = TypeVar("_Document", StoredFile, Batch)
_json = msgspec.json.Encoder()


class BatchFolder:
    """The files and batches below one folder."""

    def __init__(self, folder: Path) -> None:
        self._files = folder / "files"
        self._batches = folder / "batches"

    # --- files --------------------------------------------------------------------------------------------------------

    def new_upload(self) -> Path:
        """Return where the bytes of an upload go until `add_file`."""
        self._files.mkdir(parents=True, exist_ok=True)
        return self._files / f"upload-{secrets.token_hex(12)}.part"

    def add_file(
        self, upload: Path, filename: str, purpose: str, owner: str | msgspec.UnsetType, id: str | None = None
    ) -> StoredFile:
        """Make an upload a file."""
        id = id or f"file-{secrets.token_hex(12)}"
        size, now = upload.stat().st_size, int(time.time())
        file = StoredFile(id=id, bytes=size, created_at=now, filename=filename, purpose=purpose, owner=owner)
        upload.replace(self.content(id))
        _replace_file(self._files / f"{id}.json", _json.encode(file))
        return file

    def content(self, id: str) -> Path:
        """Return the path of a file's bytes."""
        return self._files / f"{id}.jsonl"

    def file(self, id: str) -> StoredFile | None:
        return _read_document(self._files, id, StoredFile)

    def files(self) -> list[StoredFile]:
        """Return all files, the newest first."""
        return _all(self._files, StoredFile)

    def remove_file(self, id: str) -> None:
        (self._files / f"{id}.json").unlink(missing_ok=True)
        self.content(id).unlink(missing_ok=True)

    # --- batches ------------------------------------------------------------------------------------------------------

    def save(self, batch: Batch) -> None:
        """Write a batch as it is now."""
        self._batches.mkdir(parents=True, exist_ok=True)
        _replace_file(self._batches / f"{batch.id}.json", _json.encode(batch))

    def batch(self, id: str) -> Batch | None:
        batch = _read_document(self._batches, id, Batch)
        return None if batch is None else self._marked(batch)

    def batches(self) -> list[Batch]:
        """Return all batches, the newest first."""
        return [self._marked(batch) for batch in _all(self._batches, Batch)]

    def cancel(self, id: str) -> None:
        """Ask whoever runs a batch to cancel it."""
        (self._batches / f"{id}.cancel").touch()

    def cancelled_at(self, id: str) -> int | None:
        """Return when somebody asked for a batch's end."""
        try:
            return int((self._batches / f"{id}.cancel").stat().st_mtime)
        except FileNotFoundError:
            return None

    def _marked(self, batch: Batch) -> Batch:
        at = None if batch.status in ENDED else self.cancelled_at(batch.id)
        return batch if at is None else msgspec.structs.replace(batch, status="cancelling", cancelling_at=at)

    # --- results ------------------------------------------------------------------------------------------------------

    def results(self, id: str) -> Iterator[LineResult]:
        """Yield the results of a batch so far, each custom_id once; a line that a killed process tore is cut off."""
        path = self._results(id)
        if not path.exists():
            return
        decoder = msgspec.json.Decoder(LineResult)
        custom_ids: set[str] = set()
        with path.open("r+b") as lines:
            whole = 0
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                result = decoder.decode(line)
                if result.custom_id not in custom_ids:
                    custom_ids.add(result.custom_id)
                    yield result
            lines.truncate(whole)

    def append(self, id: str, results: Iterable[LineResult]) -> None:
        """Write results, so that they outlive this process and its machine."""
        with self._results(id).open("ab") as lines:
            lines.write(b"".join(_json.encode(result) + b"\n" for result in results))
            lines.flush()
            os.fsync(lines.fileno())

    def finish(self, batch: Batch) -> tuple[str | None, str | None]:
        """Make the output and the error file of a batch; return their ids, None where one has no line.

        Their ids follow from the batch's: to do it again after a crash leads to the same files.
        """
        wanted = {f"{batch.id.replace('batch', 'file')}-{kind}": kind == "output" for kind in ("output", "error")}
        ids: list[str | None] = []
        for id, succeeded in wanted.items():
            upload = self.new_upload()
            with upload.open("wb") as lines:
                for result in self.results(batch.id):
                    if result.succeeded is succeeded:
                        lines.write(_json.encode(result) + b"\n")
            if upload.stat().st_size:
                self.add_file(upload, f"{id}.jsonl", "batch_output", batch.owner, id)
                ids.append(id)
            else:
                upload.unlink()
                ids.append(None)
        return ids[0], ids[1]

    def forget_results(self, id: str) -> None:
        """Remove what only an unfinished batch needs."""
        self._results(id).unlink(missing_ok=True)
        (self._batches / f"{id}.cancel").unlink(missing_ok=True)

    def _results(self, id: str) -> Path:
        return self._batches / f"{id}.results"


def _replace_file(path: Path, data: bytes) -> None:
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _read_document(folder: Path, id: str, kind: type[_Document]) -> _Document | None:
    if not _ID.match(id):
        return None  # an id of a client must not lead to another file
    try:
        return msgspec.json.decode((folder / f"{id}.json").read_bytes(), type=kind)
    except FileNotFoundError:
        return None


def _all(folder: Path, kind: type[_Document]) -> list[_Document]:
    documents = [_read_document(folder, path.stem, kind) for path in folder.glob("*.json")]
    present = [document for document in documents if document is not None]
    return sorted(present, key=lambda document: (document.created_at, document.id), reverse=True)

"""Embedding folder: encoded media of several engines, one file for each content, within a number of bytes.

The layout is that of vLLM's ECExampleConnector: ``NAME/encoder_cache.safetensors``. A file appears whole. A reader
makes a hard link before it says that the file is there: what a writer deletes meanwhile is still there for it.
"""

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

FILE = "encoder_cache.safetensors"
PINS = ".pins"
PIN_SECONDS = 120.0
"""How long a link stays: an engine reads an embedding in the pass after it was found, or never."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}\Z")
"""Names that are files here: content ids, and vLLM's own hashes. A client's own name never is one."""


class EmbeddingFolder:
    """One engine's view of the folder.

    Args:
        bytes_max: of all files; a writer deletes those that were used least lately. None leaves them.
        engine: names the links of this engine.
    """

    def __init__(self, folder: Path, bytes_max: int | None, engine: str) -> None:
        self.folder = folder
        self.bytes_max = bytes_max
        self._pins = folder / PINS / engine
        self._pins.mkdir(parents=True, exist_ok=True)
        self._written = 0
        self._counted: int | None = None
        self._swept = time.monotonic()

    def write(self, name: str, save: Callable[[Path], None]) -> bool:
        """Let ``save`` write a file, which then appears under a name; False where the name is not to be a file."""
        if not _NAME.match(name):
            return False
        place = self.folder / name
        place.mkdir(parents=True, exist_ok=True)
        part = self._pins / f"{name}.part"
        save(part)
        self._written += part.stat().st_size
        part.replace(place / FILE)
        self._make_room()
        return True

    def pin(self, name: str) -> bool:
        """Return whether a file is there, and keep it for this engine until it has read it."""
        if not _NAME.match(name):
            return False
        pinned = self.pinned(name)
        with contextlib.suppress(OSError):
            os.utime(self.folder / name / FILE)  # it was used: others go first
        try:
            os.link(self.folder / name / FILE, pinned)
        except FileExistsError:
            with contextlib.suppress(OSError):
                os.utime(pinned)
        except OSError:
            return False
        self._unpin()
        return True

    def pinned(self, name: str) -> Path:
        """Return where a file lies that `pin` has found."""
        return self._pins / f"{name}.safetensors"

    def _make_room(self) -> None:
        """Delete what was used least lately, once so much was written that the limit may be passed."""
        if self.bytes_max is None:
            return
        if self._counted is not None and self._counted + self._written <= self.bytes_max:
            return
        files = []
        for file in self.folder.glob(f"*/{FILE}"):
            with contextlib.suppress(OSError):  # another writer has deleted it
                stat = file.stat()
                files.append((stat.st_mtime, stat.st_size, file))
        total = sum(size for _, size, _ in files)
        for _, size, file in sorted(files):
            if total <= self.bytes_max:
                break
            shutil.rmtree(file.parent, ignore_errors=True)
            total -= size
        self._counted, self._written = total, 0

    def _unpin(self) -> None:
        """Delete links that are no longer needed, also those of engines that have ended."""
        now = time.monotonic()
        if now - self._swept < PIN_SECONDS / 4:
            return
        self._swept = now
        for pin in self._pins.parent.glob("*/*"):
            with contextlib.suppress(OSError):
                if time.time() - pin.stat().st_mtime > PIN_SECONDS:
                    pin.unlink()

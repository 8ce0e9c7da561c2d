"""Checks, for tests, that each block which a tier restores was stored; off unless `RESTORED_ENV` names a file."""

import os
from pathlib import Path

from penstock_kv.inside.block_checksum import checksum

RESTORED_ENV = "PENSTOCK_RESTORED_BLOCKS"


class RestoredBlocks:
    """Sums of what this process stored. Each restored block adds a line to the file: ``right``, ``wrong`` or ``new``.

    A block may be stored twice with bytes that differ in their last bits, so all its sums count. ``new``: stored
    before this process.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._sums: dict[bytes, set[int]] = {}

    def stored(self, key: bytes, data: memoryview) -> None:
        """A block goes to the tiers."""
        self._sums.setdefault(key, set()).add(checksum(data))

    def restored(self, key: bytes, data: memoryview) -> None:
        """A block has come back."""
        known = self._sums.get(key)
        word = "new" if known is None else "right" if checksum(data) in known else "wrong"
        with self._path.open("a") as file:
            file.write(f"{word}\n")


def restored_blocks() -> RestoredBlocks | None:
    """Return the check where it is switched on."""
    path = os.environ.get(RESTORED_ENV)
    return RestoredBlocks(path) if path else None

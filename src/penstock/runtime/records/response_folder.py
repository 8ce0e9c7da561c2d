"""Response folder: where in a machine's shared memory the frontends of a run keep stored responses.

These are conversations, which must not be on a disk; files in ``/dev/shm`` outlive processes and no machine.
"""

import contextlib
import hashlib
import os
import shutil
import time
from pathlib import Path

SHARED = Path("/dev/shm")
RESPONSE_TTL = 3600.0
"""Seconds since its last use that a response stays: as long as a user thinks about the next turn, and tools run."""


def response_folder(run: Path) -> Path:
    """Return a run's folder, which may not exist."""
    return _root() / hashlib.sha256(os.fsencode(run.resolve())).hexdigest()[:24]


def make_response_folder(run: Path) -> Path:
    """Return a run's folder, which only this user can enter.

    Raises:
        OSError: there is no shared memory, or another user's folder stands there.
    """
    root, folder = _root(), response_folder(run)
    root.mkdir(mode=0o700, exist_ok=True)
    status = root.lstat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(f"{root} is not a folder of this user alone")
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def take_over_responses(before: Path | None, run: Path) -> None:
    """Give a run what the frontends of a killed supervisor's run stored, and delete what nobody can want any more."""
    with contextlib.suppress(OSError):
        if before is not None:
            response_folder(before).rename(response_folder(run))
        for folder in _root().iterdir():
            if max((file.stat().st_mtime for file in folder.iterdir()), default=0.0) < time.time() - RESPONSE_TTL:
                shutil.rmtree(folder, ignore_errors=True)


def drop_responses(run: Path) -> None:
    """Delete the responses of a run that has ended."""
    shutil.rmtree(response_folder(run), ignore_errors=True)


def _root() -> Path:
    return SHARED / f"penstock-responses-{os.geteuid()}"

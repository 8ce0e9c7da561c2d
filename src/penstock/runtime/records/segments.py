"""Segments of a file of records, such as ``requests.jsonl``: how they begin, and how they are read as one file.

Records are appended to ``x.jsonl``. Once that is full it becomes ``x.1.jsonl``, the next time ``x.2.jsonl`` and so on:
a higher number is newer and ``x.jsonl`` the newest; the oldest are deleted. Several processes may append at once.
"""

import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

SEGMENTS = 4
"""Kept of a file of records, and of a journal: a quarter is deleted at a time."""
TAIL = 1 << 18
"""Bytes that are read at a time from a file's end."""
SCANNED_MAX = 64 << 20
"""Bytes from the newest on that are searched for lines."""


def segment(path: Path, number: int) -> Path:
    """Return where a segment is that was full: ``x.3.jsonl`` of ``x.jsonl``."""
    return path.with_name(f"{path.stem}.{number}{path.suffix}")


def numbers(path: Path) -> list[int]:
    """Return the numbers of the segments that were full and are still there, the oldest first."""
    name = re.compile(rf"{re.escape(path.stem)}\.(\d+){re.escape(path.suffix)}\Z")
    try:
        return sorted(int(match[1]) for each in path.parent.iterdir() if (match := name.match(each.name)))
    except FileNotFoundError:
        return []


def there(path: Path) -> bool:
    """Return whether there is any segment."""
    return path.exists() or bool(numbers(path))


def size(path: Path) -> int:
    """Return the bytes of all segments."""
    return sum(os.fstat(file.fileno()).st_size for file in opened(path))


def dropped(path: Path) -> int:
    """Return how many segments were deleted since the first one."""
    existing = numbers(path)
    return existing[0] - 1 if existing else 0


def rotate(path: Path, bytes_max: int, segments_max: int) -> None:
    """Begin a new segment where the newest one has ``bytes_max`` or more; blocks.

    Of several processes that find it full at once, one rotates it: it holds a lock on the file that it renames. Lines
    that another process then writes to its open file go to the end of the renamed segment, and are not lost.

    Args:
        segments_max: segments that there are at most, the newest included.
    Raises:
        OSError: it can't be renamed, or an old one can't be deleted.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        if os.fstat(file.fileno()).st_size < bytes_max:
            return
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            if not os.path.samestat(path.stat(), os.fstat(file.fileno())):
                return  # another process was faster
        except FileNotFoundError:
            return
        existing = numbers(path)
        path.rename(segment(path, existing[-1] + 1 if existing else 1))
        for old in existing[: max(0, len(existing) + 2 - segments_max)]:
            segment(path, old).unlink(missing_ok=True)


def opened(path: Path) -> Iterator[BinaryIO]:
    """Open every segment, the oldest first; each is closed when the next one is requested.

    A segment that begins meanwhile is not missed: the newest one is read only when there is none between.
    """
    number = next(iter(numbers(path)), 1)
    while True:
        newest: BinaryIO | None = None
        try:
            file = segment(path, number).open("rb")
        except FileNotFoundError:
            try:
                newest = path.open("rb")
            except FileNotFoundError:
                newest = None
            later = [other for other in numbers(path) if other >= number]
            if later:  # the newest was renamed meanwhile, or the oldest were deleted
                if newest is not None:
                    newest.close()
                number = later[0]
                continue
            if newest is not None:
                with newest:
                    yield newest
            return
        with file:
            yield file
        number += 1


def opened_newest(path: Path) -> Iterator[BinaryIO]:
    """Open every segment, the newest first; one that is renamed meanwhile is not given twice."""
    before: os.stat_result | None = None
    try:
        with path.open("rb") as file:
            before = os.fstat(file.fileno())
            yield file
    except FileNotFoundError:
        pass
    for number in reversed(numbers(path)):
        try:
            file = segment(path, number).open("rb")
        except FileNotFoundError:
            return  # deleted, as will be all that are older
        with file:
            if before is None or not os.path.samestat(before, os.fstat(file.fileno())):
                yield file


def lines(path: Path) -> Iterator[bytes]:
    """Yield the whole lines of all segments, the oldest first; what a crash cut off is left out."""
    for file in opened(path):
        for line in file:
            if line.endswith(b"\n"):
                yield line


def newest(
    path: Path, limit: int, *, mark: bytes = b"", without: bytes | None = None, scanned_max: int = SCANNED_MAX
) -> list[bytes]:
    """Return the last whole lines, the newest first, without their ends. Blocks.

    Args:
        mark: only those that hold it. without: only those that do not hold it.
        scanned_max: bytes that are read at most.
    Returns:
        None for a missing file.
    """
    lines: list[bytes] = []
    left = scanned_max
    for file in opened_newest(path):
        end, rest = file.seek(0, os.SEEK_END), b""
        whole = False
        """Whether what is read ends at the end of a line: the last one may still be being written."""
        while end > 0 and left > 0 and len(lines) < limit:
            start = max(0, end - TAIL)
            file.seek(start)
            data = file.read(end - start) + rest
            left -= end - start
            end = start
            if start:
                rest, cut, data = data.partition(b"\n")
                if not cut:
                    continue  # one line that is longer than what is read at a time
            if not whole:
                data, whole = data[: data.rfind(b"\n") + 1], True
            if mark in data:
                lines += [
                    line
                    for line in reversed(data.split(b"\n"))
                    if line and mark in line and (without is None or without not in line)
                ]
        if left <= 0 or len(lines) >= limit:
            break
    return lines[:limit]

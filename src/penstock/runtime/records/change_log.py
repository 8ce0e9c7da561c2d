"""Change log of a run: what operators, the planner and the supervisor did, a line of ``changes.jsonl`` for each.

Frontends write what operators request through them; the supervisor writes the rest.
"""

import os
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

FILE = "changes.jsonl"
SHOWN_BYTES = 64 * 1024
"""Bytes of the log's end that a page shows: some three hundred changes."""
CRASH = "crash"
"""First word of the key of a process that ended by itself."""
SUPERVISOR = "supervisor"
"""``by`` of what the supervisor did, or met."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One line.

    Args:
        time: UTC, as ISO 8601 has it.
        key: a knob, or what was done to what, such as ``scale main``.
        old, new: before and after, as plain data.
        by: name of the admin key, ``local`` for a caller of this machine without one, ``SIGHUP``, ``planner`` or
            `SUPERVISOR`.
    """

    time: str
    key: str
    old: Any
    new: Any
    by: str

    @property
    def text(self) -> str:
        """What happened, in words."""
        what, _, name = self.key.partition(" ")
        words = _WORDS.get(what)
        if words is None:
            return f"{self.key}: {value_text(self.old)} -> {value_text(self.new)}{self._by}"
        text = words[bool(self.new)].format(name=name, old=value_text(self.old), new=value_text(self.new))
        return text + ("" if self.by == SUPERVISOR else self._by)

    @property
    def wall(self) -> float:
        """When, in seconds since 1970."""
        return datetime.fromisoformat(self.time).timestamp()

    @property
    def _by(self) -> str:
        return f", by {'an operator' if self.by in ('', 'local') else self.by}"


_WORDS = {
    "scale": ("pool {name}: {old} -> {new} replicas",) * 2,
    "drain": ("{name} is let in again", "{name} is to be drained"),
    "drained": ("{name} is drained {new}",) * 2,
    CRASH: ("{name} {new}",) * 2,
    "restart": ("every engine and frontend is replaced",) * 2,
    "restarted": ("the restart is over: {new}",) * 2,
    "start": ("cluster {name} starts: {new}",) * 2,
    "stop": ("cluster {name} stops", "cluster {name} stops: {new}"),
    "flip": ("{name} becomes {new}",) * 2,
}
"""First word of a key -> what it means where ``new`` is false, and where it is true."""


def change_of(key: str, old: Any, new: Any, by: str) -> Change:
    """Return a change of this moment."""
    now = time.time()
    text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
    return Change(time=text, key=key, old=old, new=new, by=by)


def changes_in(run: Path, bytes_max: int | None = None) -> Iterator[Change]:
    """Yield the changes of a run's folder, the oldest first: all, or those in so many bytes at the log's end."""
    try:
        with (run / FILE).open("rb") as file:
            if bytes_max is not None and file.seek(0, os.SEEK_END) > bytes_max:
                file.seek(-bytes_max, os.SEEK_END)
            else:
                file.seek(0)
            lines = file.read().splitlines()
    except OSError:
        return  # nothing has happened yet, or the folder is another machine's
    yield from filter(None, map(change_in, lines))


def change_in(line: bytes | str) -> Change | None:
    """Return the change of a line; None where it is cut off, as by a crash."""
    try:
        return msgspec.json.decode(line, type=Change)
    except msgspec.DecodeError:
        return None


def value_text(value: Any) -> str:
    """Write one value of a setting; one that is not set is unset."""
    if value is None:
        return "unset"
    return str(value).lower() if isinstance(value, bool) else str(value)

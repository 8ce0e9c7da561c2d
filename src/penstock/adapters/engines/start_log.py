"""Start log: reads where the seconds of an engine's start go out of what it prints, one reader per kind of engine.

A stock engine tells some durations, and for others when they were over. What it does not tell is unknown, never 0.
"""

import json
import re
from typing import Protocol

PHASES = ("import", "weights", "compile", "warm-up", "probe")
"""Of an engine, in order: until its arguments are read and its modules loaded; its weights; their compilation; the rest
of its preparation; and until a probe finds that it serves."""

_INITIALIZING = re.compile(r"Initializing a V1 LLM engine")
_EAGER = "enforce_eager=True"
_WEIGHTS = re.compile(r"Loading weights took ([\d.]+) seconds")
_COMPILED = re.compile(r"torch\.compile took ([\d.]+) s in total")
_PREPARED = re.compile(r"init engine \(.*?\) took ([\d.]+) s(?:econds)?(?: \(compilation: ([\d.]+) s)?")


class StartLog(Protocol):
    """What one start prints: `read` every line as it comes, then `phases`. Times in seconds of one clock."""

    def read(self, line: str, at: float) -> None:
        """Take a line that was read ``at`` this time, which is a little after it was written."""
        ...

    def phases(self, born: float, served: float) -> dict[str, float | None]:
        """Return the seconds of each of `PHASES`.

        Args:
            born: when the process began.
            served: when a probe first found that it serves.
        """
        ...


class UntoldStart:
    """The start of an engine that tells nothing that we can read."""

    def read(self, line: str, at: float) -> None:
        """Ignore a line."""

    def phases(self, born: float, served: float) -> dict[str, float | None]:
        return dict.fromkeys(PHASES)


class VllmStart:
    """The start of a vLLM server (0.32). Where several ranks tell a duration, the longest counts.

    A compilation that it does not count is part of warm-up.
    """

    def __init__(self) -> None:
        self._initializing: float | None = None
        self._prepared_at: float | None = None
        self._seconds: dict[str, float] = {}

    def read(self, line: str, at: float) -> None:
        if self._initializing is None and _INITIALIZING.search(line):
            self._initializing = at
            if _EAGER in line:
                self._longest("compile", "0")
        elif match := _WEIGHTS.search(line):
            self._longest("weights", match.group(1))
        elif match := _COMPILED.search(line):
            self._longest("compile", match.group(1))
        elif match := _PREPARED.search(line):
            self._prepared_at = at
            self._longest("prepare", match.group(1))
            if match.group(2) is not None:  # the CPU build compiles without counting it
                self._longest("compile", match.group(2))

    def phases(self, born: float, served: float) -> dict[str, float | None]:
        prepare, compiled = self._seconds.get("prepare"), self._seconds.get("compile")
        return {
            "import": None if self._initializing is None else max(0.0, self._initializing - born),
            "weights": self._seconds.get("weights"),
            "compile": compiled,
            "warm-up": None if prepare is None else max(0.0, prepare - (compiled or 0.0)),
            "probe": None if self._prepared_at is None else max(0.0, served - self._prepared_at),
        }

    def _longest(self, phase: str, text: str) -> None:
        self._seconds[phase] = max(self._seconds.get(phase, 0.0), float(text))


class SimulatedStart:
    """The start of a simulated engine, which prints its phases as JSON."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._printed_at: float | None = None

    def read(self, line: str, at: float) -> None:
        if not line.startswith("{"):
            return
        try:
            told = json.loads(line).get("start")
        except ValueError:
            return
        if isinstance(told, dict):
            self._printed_at = at
            self._seconds = {phase: float(spent) for phase, spent in told.items() if phase in PHASES}

    def phases(self, born: float, served: float) -> dict[str, float | None]:
        probe = None if self._printed_at is None else max(0.0, served - self._printed_at)
        return {**dict.fromkeys(PHASES), **self._seconds, "probe": probe}


_READERS: dict[str, type[StartLog]] = {"vllm": VllmStart, "sim": SimulatedStart}


def start_log_of(engine: str) -> StartLog:
    """Return a reader of one start of an engine of this kind."""
    return _READERS.get(engine, UntoldStart)()

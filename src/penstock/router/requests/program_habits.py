"""Program habits: how long the answers of a program are, and how long its sessions pause between two requests."""

import math
from typing import Any

from penstock.kernel.machine import SECOND, Nanos
from penstock.kernel.values import WorkerId

PROGRAMS_MAX = 4096
"""Most programs that a model's router remembers, and most sessions whose next request it waits for; the longest
unused goes. Some 200 bytes each."""
LEAST = 3
"""Observations before an estimate counts."""
WEIGHT = 0.1
"""Of a new observation, once there are ten: what a program did an hour ago says little."""
PAUSE_MIN = 5.0
"""Seconds: a pause below is over before the blocks have left an engine's memory."""
LEAD = 2.0
"""Seconds before the expected request at which its blocks are brought up: 14 GB from one NVMe drive."""


class ProgramHabits:
    """What was learnt of programs; of a session that belongs to none, by itself."""

    def __init__(self) -> None:
        self._outputs: dict[str, tuple[float, int]] = {}
        """program -> (mean output tokens, observations)"""
        self._pauses: dict[str, tuple[float, int]] = {}
        """program -> (mean logarithm of a pause in seconds, observations)"""
        self._ended: dict[str, Nanos] = {}
        """session -> when its last answer ended"""
        self._awaited: dict[str, WorkerId] = {}
        """session -> worker whose tiers were told of its next request"""
        self.awaited = {"home": 0, "elsewhere": 0}
        """Next requests of such sessions that came to that worker, and that went to another one."""

    def answered(self, program: str, tokens: int) -> None:
        """An answer had so many tokens."""
        _learn(self._outputs, program, float(tokens))

    def ended(self, session: str, now: Nanos) -> None:
        """A session has its answer; it pauses now."""
        self._ended.pop(session, None)
        self._ended[session] = now
        _bound(self._ended)

    def returned(self, session: str, program: str, now: Nanos) -> None:
        """A session has another request: learn how long it paused."""
        ended = self._ended.pop(session, None)
        if ended is not None:
            _learn(self._pauses, program, math.log(max(1e-3, (now - ended) / SECOND)))

    def awaits(self, session: str, worker: WorkerId) -> None:
        """A worker's tiers bring a session's blocks up when its next request is likely."""
        self._awaited.pop(session, None)
        self._awaited[session] = worker
        _bound(self._awaited)

    def placed(self, session: str, worker: WorkerId) -> WorkerId | None:
        """A session's next request goes to a worker: return the other one that was told of it in vain, if any."""
        home = self._awaited.pop(session, None)
        if home is None:
            return None
        self.awaited["home" if home == worker else "elsewhere"] += 1
        return None if home == worker else home

    def output(self, program: str) -> float | None:
        """Return the mean output tokens of a program, or None where little is known."""
        mean, count = self._outputs.get(program, (0.0, 0))
        return mean if count >= LEAST else None

    def pause(self, program: str) -> float | None:
        """Return the typical pause in seconds (the geometric mean), or None where little is known."""
        mean, count = self._pauses.get(program, (0.0, 0))
        return math.exp(mean) if count >= LEAST else None

    def snapshot(self) -> list[Any]:
        tables: list[dict[str, tuple[float, int]]] = [self._outputs, self._pauses]
        lists = [list(table.items()) for table in (self._ended, self._awaited, self.awaited)]
        return [[[name, *value] for name, value in table.items()] for table in tables] + lists

    def restore(self, state: list[Any]) -> None:
        outputs, pauses, ended, waiting, awaited = state
        self._outputs = {name: (mean, count) for name, mean, count in outputs}
        self._pauses = {name: (mean, count) for name, mean, count in pauses}
        self._ended = dict(ended)
        self._awaited, self.awaited = dict(waiting), dict(awaited)


def prefetch_after(pause: float) -> float | None:
    """Return how many seconds after an answer to bring its blocks up; None where the pause is too short for that."""
    return None if pause < PAUSE_MIN else max(0.0, pause - LEAD)


def _learn(table: dict[str, tuple[float, int]], name: str, value: float) -> None:
    mean, count = table.pop(name, (0.0, 0))
    count += 1
    table[name] = (mean + max(1.0 / count, WEIGHT) * (value - mean), count)
    _bound(table)


def _bound(table: dict[str, Any]) -> None:
    if len(table) > PROGRAMS_MAX:
        del table[next(iter(table))]

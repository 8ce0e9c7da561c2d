"""Program habits: how long the answers of a program are, and how long its sessions pause between two requests."""

import math

import msgspec

from penstock.kernel.bounded_table import BoundedTable
from penstock.kernel.machine import SECOND, Nanos, state_of, take_state
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


Mean = tuple[float, int]
"""(mean, observations)"""


class HabitsState(msgspec.Struct):
    """State of `ProgramHabits`."""

    _outputs: list[tuple[str, Mean]]
    _pauses: list[tuple[str, Mean]]
    _ended: list[tuple[str, Nanos]]
    _awaited: list[tuple[str, WorkerId]]
    awaited: dict[str, int]


class ProgramHabits:
    """What was learnt of programs; of a session that belongs to none, by itself."""

    def __init__(self) -> None:
        self._outputs: BoundedTable[str, Mean] = BoundedTable(PROGRAMS_MAX)
        """program -> output tokens"""
        self._pauses: BoundedTable[str, Mean] = BoundedTable(PROGRAMS_MAX)
        """program -> logarithm of a pause in seconds"""
        self._ended: BoundedTable[str, Nanos] = BoundedTable(PROGRAMS_MAX)
        """session -> when its last answer ended"""
        self._awaited: BoundedTable[str, WorkerId] = BoundedTable(PROGRAMS_MAX)
        """session -> worker whose tiers were told of its next request"""
        self.awaited = {"home": 0, "elsewhere": 0}
        """Next requests of such sessions that came to that worker, and that went to another one."""

    def answered(self, program: str, tokens: int) -> None:
        """An answer had so many tokens."""
        _learn(self._outputs, program, float(tokens))

    def ended(self, session: str, now: Nanos) -> None:
        """A session has its answer; it pauses now."""
        self._ended.put(session, now)

    def returned(self, session: str, program: str, now: Nanos) -> None:
        """A session has another request: learn how long it paused."""
        ended = self._ended.pop(session)
        if ended is not None:
            _learn(self._pauses, program, math.log(max(1e-3, (now - ended) / SECOND)))

    def awaits(self, session: str, worker: WorkerId) -> None:
        """A worker's tiers bring a session's blocks up when its next request is likely."""
        self._awaited.put(session, worker)

    def placed(self, session: str, worker: WorkerId) -> WorkerId | None:
        """A session's next request goes to a worker: return the other one that was told of it in vain, if any."""
        home = self._awaited.pop(session)
        if home is None:
            return None
        self.awaited["home" if home == worker else "elsewhere"] += 1
        return None if home == worker else home

    def output(self, program: str) -> float | None:
        """Return the mean output tokens of a program, or None where little is known."""
        mean, count = self._outputs.get(program) or (0.0, 0)
        return mean if count >= LEAST else None

    def pause(self, program: str) -> float | None:
        """Return the typical pause in seconds (the geometric mean), or None where little is known."""
        mean, count = self._pauses.get(program) or (0.0, 0)
        return math.exp(mean) if count >= LEAST else None

    def snapshot(self) -> HabitsState:
        return state_of(self, HabitsState)

    def restore(self, state: HabitsState) -> None:
        take_state(self, state)


def prefetch_after(pause: float) -> float | None:
    """Return how many seconds after an answer to bring its blocks up; None where the pause is too short for that."""
    return None if pause < PAUSE_MIN else max(0.0, pause - LEAD)


def _learn(table: BoundedTable[str, Mean], name: str, value: float) -> None:
    mean, count = table.get(name) or (0.0, 0)
    count += 1
    table.put(name, (mean + max(1.0 / count, WEIGHT) * (value - mean), count))

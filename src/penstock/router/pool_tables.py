"""What a model's pool remembers of sessions, programs and media, in bounded tables.

Sessions stay with their worker; of programs it is learnt how long their answers are and how long they pause; media that
have been encoded are in the store that encode workers share.
"""

import math
from collections.abc import Sequence

from penstock.kernel.bounded_table import BoundedTable
from penstock.kernel.errors import InvariantError
from penstock.kernel.machine import SECOND, Nanos, nanos
from penstock.kernel.values import MediaItem, Target, WorkerId
from penstock.router.settings import AffinitySettings

SESSIONS_MAX = 65_536
"""Most sessions that a model's router remembers; the longest idle one goes."""


class SessionAffinity(BoundedTable[str, tuple[Target, Nanos]]):
    """Sessions by id: where each was served last, and when."""

    def __init__(self, settings: AffinitySettings) -> None:
        super().__init__(SESSIONS_MAX)
        self.ttl = nanos(settings.ttl)

    def target(self, session: str, now: Nanos) -> Target | None:
        """Return where the session is at home, or None where that is unknown or too long ago."""
        home = self.get(session)
        if home is None:
            return None
        if now - home[1] > self.ttl:
            self.pop(session)
            return None
        return home[0]

    def bind(self, session: str, target: Target, now: Nanos) -> None:
        """Remember that the session was served there now; the longest idle goes when there are too many."""
        self.put(session, (target, now))

    def drop_worker(self, worker: WorkerId) -> None:
        """A worker is gone: its sessions are free to go anywhere."""
        self.drop(lambda session, home: home[0].worker == worker)

    def check(self) -> None:
        super().check()
        times = [at for _, (_, at) in self.snapshot()]
        if times != sorted(times):
            raise InvariantError("sessions are not in the order of their last use")


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


HabitsState = tuple[
    list[tuple[str, Mean]], list[tuple[str, Mean]], list[tuple[str, Nanos]], list[tuple[str, WorkerId]], dict[str, int]
]
"""State of `ProgramHabits`: outputs, pauses, ended, awaited, and counts."""


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
        _learn_mean(self._outputs, program, float(tokens))

    def ended(self, session: str, now: Nanos) -> None:
        """A session has its answer; it pauses now."""
        self._ended.put(session, now)

    def returned(self, session: str, program: str, now: Nanos) -> None:
        """A session has another request: learn how long it paused."""
        ended = self._ended.pop(session)
        if ended is not None:
            _learn_mean(self._pauses, program, math.log(max(1e-3, (now - ended) / SECOND)))

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
        tables = self._outputs.snapshot(), self._pauses.snapshot(), self._ended.snapshot(), self._awaited.snapshot()
        return *tables, self.awaited

    def restore(self, state: HabitsState) -> None:
        outputs, pauses, ended, awaited, self.awaited = state
        self._outputs.restore(outputs)
        self._pauses.restore(pauses)
        self._ended.restore(ended)
        self._awaited.restore(awaited)


def prefetch_after(pause: float) -> float | None:
    """Return how many seconds after an answer to bring its blocks up; None where the pause is too short for that."""
    return None if pause < PAUSE_MIN else max(0.0, pause - LEAD)


def _learn_mean(table: BoundedTable[str, Mean], name: str, value: float) -> None:
    mean, count = table.get(name) or (0.0, 0)
    count += 1
    table.put(name, (mean + max(1.0 / count, WEIGHT) * (value - mean), count))


EMBEDDING_BYTES = 8192
"""Bytes of one embedding: 4,096 numbers of 16 bits, as models of 7 to 9 billion parameters have them."""
TOKENS_USUAL = 1024
"""Tokens that a medium counts as until an engine's own events have said how many it takes."""


class EmbeddingTable(BoundedTable[str, int]):
    """The embeddings of one model, the latest ones, within a number of bytes: what each takes by its content's id."""

    def __init__(self, bytes_max: int) -> None:
        super().__init__(bytes_max=bytes_max, bytes_of=_bytes_of)

    def missing(self, items: Sequence[MediaItem]) -> list[int]:
        """Return the places of the items to encode; what comes twice is encoded once."""
        found: list[int] = []
        seen: set[str] = set()
        for place, item in enumerate(items):
            if item.id is not None:
                if item.id in seen:
                    continue
                seen.add(item.id)
                if self.use(item.id) is not None:
                    continue
            found.append(place)
        return found

    def add(self, items: Sequence[MediaItem]) -> None:
        """These have been encoded."""
        for item in items:
            if item.id is not None:
                self.put(item.id, (item.tokens or TOKENS_USUAL) * EMBEDDING_BYTES)


def _bytes_of(id: str, size: int) -> int:
    return size

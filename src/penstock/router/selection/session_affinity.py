"""Session affinity: a bounded memory of session -> target, forgotten when idle."""

from penstock.kernel.bounded_table import BoundedTable
from penstock.kernel.errors import InvariantError
from penstock.kernel.machine import Nanos, nanos
from penstock.kernel.values import Target, WorkerId
from penstock.router.settings import AffinitySettings

SESSIONS_MAX = 65_536
"""Most sessions that a model's router remembers; the longest idle one goes."""


class SessionAffinity:
    """Sessions by id, least recently used first."""

    def __init__(self, settings: AffinitySettings) -> None:
        self.ttl = nanos(settings.ttl)
        self._sessions: BoundedTable[str, tuple[Target, Nanos]] = BoundedTable(SESSIONS_MAX)

    def __len__(self) -> int:
        return len(self._sessions)

    def target(self, session: str, now: Nanos) -> Target | None:
        """Return where the session is at home, or None where that is unknown or too long ago."""
        home = self._sessions.get(session)
        if home is None:
            return None
        if now - home[1] > self.ttl:
            self._sessions.pop(session)
            return None
        return home[0]

    def bind(self, session: str, target: Target, now: Nanos) -> None:
        """Remember that the session was served there now; the longest idle goes when there are too many."""
        self._sessions.put(session, (target, now))

    def drop_worker(self, worker: WorkerId) -> None:
        """A worker is gone: its sessions are free to go anywhere."""
        self._sessions.drop(lambda session, home: home[0].worker == worker)

    def snapshot(self) -> list[tuple[str, tuple[Target, Nanos]]]:
        return self._sessions.snapshot()

    def restore(self, state: list[tuple[str, tuple[Target, Nanos]]]) -> None:
        self._sessions.restore(state)

    def check(self) -> None:
        times = [at for _, (_, at) in self._sessions.snapshot()]
        if times != sorted(times):
            raise InvariantError("sessions are not in the order of their last use")

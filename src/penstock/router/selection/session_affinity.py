"""Session affinity: a bounded memory of session -> target, forgotten when idle."""

from collections.abc import Mapping
from typing import Any

from penstock.kernel.machine import Nanos, nanos
from penstock.kernel.values import Target, WorkerId
from penstock.router.settings import AffinitySettings

SESSIONS_MAX = 65_536
"""Most sessions that a model's router remembers; the longest idle one goes."""


class SessionAffinity:
    """Sessions by id, least recently used first."""

    def __init__(self, settings: AffinitySettings) -> None:
        self._ttl = nanos(settings.ttl)
        self._sessions: dict[str, tuple[Target, Nanos]] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def target(self, session: str, now: Nanos) -> Target | None:
        """Return where the session is at home, or None where that is unknown or too long ago."""
        found = self._sessions.get(session)
        if found is None:
            return None
        if now - found[1] > self._ttl:
            del self._sessions[session]
            return None
        return found[0]

    def bind(self, session: str, target: Target, now: Nanos) -> None:
        """Remember that the session was served there now; the longest idle goes when there are too many."""
        self._sessions.pop(session, None)
        self._sessions[session] = (target, now)
        while len(self._sessions) > SESSIONS_MAX:
            del self._sessions[next(iter(self._sessions))]

    def drop_worker(self, worker: WorkerId) -> None:
        """A worker is gone: its sessions are free to go anywhere."""
        for session in [s for s, (target, _) in self._sessions.items() if target.worker == worker]:
            del self._sessions[session]

    def snapshot(self) -> list[Any]:
        return [[session, list(target), at] for session, (target, at) in self._sessions.items()]

    def restore(self, state: list[Any]) -> None:
        self._sessions = {s: (Target(*target), at) for s, target, at in state}

    def check(self) -> None:
        _ordered(self._sessions)


def _ordered(sessions: Mapping[str, tuple[Target, Nanos]]) -> None:
    times = [at for _, at in sessions.values()]
    assert times == sorted(times), "sessions are not in the order of their last use"

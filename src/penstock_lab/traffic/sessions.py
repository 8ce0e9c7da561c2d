"""`Sessions`: deals sessions out turn by turn, each after the answer to the turn before it (closed loop)."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from penstock_lab.traffic.traffic_request import TrafficRequest

GAP = 600.0
"""Seconds; see `Sessions`. The longest pause of our own workloads, thinking and answering, is 150 s."""
_DECIMALS = 9


class SessionTurns:
    """Count the turns of sessions, and measure the pauses between them, from rows in order of arrival."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, float | None]] = {}

    def next(self, session: str | None, at: float, end: float | None) -> tuple[int, float | None]:
        """Return the number of this turn and its think time in seconds; 0 and None without a session.

        Args:
            at, end: when it arrived and when its answer was there, in seconds; None where that is not known.
        """
        if session is None:
            return 0, None
        turn, before = self._last.get(session, (-1, None))
        self._last[session] = (turn + 1, end)
        return turn + 1, None if before is None else round(max(0.0, at - before), _DECIMALS)


@dataclass(slots=True)
class _Open:
    """A session that goes on: turns that were read but not dealt, and the planned time of the last one dealt."""

    planned: float
    turns: deque[TrafficRequest] = field(default_factory=deque)


class Sessions:
    """Deal a stream of requests out for closed-loop replay: each turn is due after the end of the one before.

    Iterate for what is due by the clock, in order of time: requests without a session, and first turns. Whenever a
    request of a session has ended, ask `next` for the turn that follows, and send that when it is due.

    Args:
        requests: in order of ``at``; may be endless. A session's turns are known by its name; a stream that begins
            amid a session begins it with the turn that comes first.
        gap: a turn that is planned more than so many seconds after the one before is due by the clock: at its own
            time, whatever its think time, but not before that one has ended.
    Memory: the turns not yet dealt of sessions that are open, and what arrives within ``gap`` seconds.
    """

    def __init__(self, requests: Iterable[TrafficRequest], *, gap: float = GAP) -> None:
        if not gap > 0.0:
            raise ValueError(f"the gap that ends a session is above 0 s, not {gap}")
        self._source = iter(requests)
        self._gap = gap
        self._open: dict[str, _Open] = {}
        self._starts: deque[TrafficRequest] = deque()
        self._read_to = 0.0

    def __iter__(self) -> Iterator[TrafficRequest]:
        while True:
            while not self._starts:
                if not self._read():
                    return
            yield self._starts.popleft()

    @property
    def open(self) -> int:
        """Sessions whose end is not known yet."""
        return len(self._open)

    def next(self, session: str, ended_at: float) -> TrafficRequest | None:
        """Return the turn that follows, with ``at`` the second at which it is due; None where the session is over.

        It is due its think time after ``ended_at``, or, where the trace has none, the planned time between the two.

        Args:
            ended_at: when the turn before ended, in seconds of the stream's clock.
        """
        opened = self._open.get(session)
        if opened is None:
            return None
        while not opened.turns and self._read_to <= opened.planned + self._gap:
            if not self._read():
                break
        if not opened.turns:
            del self._open[session]
            return None
        turn = opened.turns.popleft()
        planned = turn.at - opened.planned
        opened.planned = turn.at
        if planned > self._gap:
            return replace(turn, at=max(turn.at, ended_at))
        return replace(turn, at=ended_at + (planned if turn.think is None else turn.think))

    def _read(self) -> bool:
        """Take one request from the source; False at its end."""
        request = next(self._source, None)
        if request is None:
            return False
        self._read_to = request.at
        self._sort(request)
        return True

    def _sort(self, request: TrafficRequest) -> None:
        opened = None if request.session is None else self._open.get(request.session)
        if opened is not None:
            opened.turns.append(request)
            return
        if request.session is not None:
            self._open[request.session] = _Open(request.at)
        self._starts.append(request)

"""Do sessions come turn by turn, each after the end of the one before, in bounded memory?"""

import heapq
import itertools
import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_lab.traffic.sessions import Sessions, SessionTurns
from penstock_lab.traffic.traffic_request import TrafficRequest
from penstock_lab.traffic.workloads import workload


def turn(at: float, session: str | None = None, number: int = 0, think: float | None = None) -> TrafficRequest:
    return TrafficRequest(at=at, isl=1, osl=1, session=session, turn=number, think=think)


def replay(sessions: Sessions, took: float, until: float = float("inf")) -> list[TrafficRequest]:
    """Run a server that answers everything ``took`` seconds after it arrived; return arrivals in order."""
    found: list[TrafficRequest] = []
    starts = iter(sessions)
    upcoming = next(starts, None)
    due: list[tuple[float, int, TrafficRequest]] = []
    ends: list[tuple[float, int, str]] = []
    order = itertools.count()
    while upcoming is not None or due or ends:
        times = [upcoming.at if upcoming else float("inf"), *(queue[0][0] for queue in (due, ends) if queue)]
        now = min(times)
        if now >= until:
            break
        if ends and ends[0][0] == now:
            session = heapq.heappop(ends)[2]
            following = sessions.next(session, now)
            if following is not None:
                assert following.at >= now
                heapq.heappush(due, (following.at, next(order), following))
            continue
        if due and due[0][0] == now:
            request = heapq.heappop(due)[2]
        else:
            assert upcoming is not None
            request, upcoming = upcoming, next(starts, None)
        found.append(request)
        if request.session is not None:
            heapq.heappush(ends, (now + took, next(order), request.session))
    return found


def test_a_turn_is_due_its_think_time_after_the_end_of_the_one_before() -> None:
    sessions = Sessions([turn(0, "a"), turn(1), turn(2, "b"), turn(3, "a", 1, 0.5), turn(9, "a", 2)])
    assert [each.at for each in sessions] == [0, 1, 2]
    second = sessions.next("a", 40.0)
    assert second is not None
    assert (second.turn, second.at) == (1, 40.5)
    third = sessions.next("a", 41.0)
    assert third is not None
    assert (third.turn, third.at) == (2, 47.0)  # no think time: the planned 6 s
    assert sessions.next("a", 50.0) is None
    assert sessions.next("b", 50.0) is None
    assert sessions.next("never", 50.0) is None
    assert sessions.open == 0


def test_a_quick_answer_reads_on_for_the_next_turn() -> None:
    sessions = Sessions([turn(0, "a"), turn(5), turn(6, "b"), turn(7, "a", 1, 1.0), turn(8)])
    starts = iter(sessions)
    assert next(starts).session == "a"
    second = sessions.next("a", 0.1)
    assert second is not None
    assert second.at == 1.1
    assert [each.at for each in starts] == [5, 6, 8]  # what was read on the way is not lost


def test_after_a_long_gap_a_turn_is_due_by_the_clock() -> None:
    rows = [turn(0, "a"), turn(1000, "a", 1, 2.0), turn(1001, "a", 2, 3.0), turn(1002)]
    known = Sessions(rows, gap=100.0)
    assert len(list(known)) == 2  # read whole, so the later turns are known already
    assert [known.next("a", at).at for at in (4.0, 1003.0)] == [1000, 1006.0]  # type: ignore[union-attr]
    late = Sessions(rows, gap=100.0)
    list(late)
    assert late.next("a", 1500.0).at == 1500.0  # type: ignore[union-attr]
    unknown = Sessions([rows[0], turn(500), *rows[1:]], gap=100.0)
    starts = iter(unknown)
    next(starts)
    assert unknown.next("a", 4.0) is None  # nothing within 100 s: over
    assert [(each.at, each.turn) for each in (next(starts), next(starts))] == [(500, 0), (1000, 1)]
    assert unknown.next("a", 1005.0).at == 1008.0  # type: ignore[union-attr]


def test_the_gap_is_above_nothing() -> None:
    with pytest.raises(ValueError, match="gap"):
        Sessions([], gap=0.0)


@given(
    st.lists(
        st.tuples(st.integers(0, 300), st.sampled_from(["a", "b", "c", None]), st.none() | st.integers(0, 20)),
        max_size=25,
    ),
    st.sampled_from([0.0, 0.5, 30.0, 1000.0]),
)
def test_each_turn_comes_once_in_order_as_with_all_turns_known(
    rows: list[tuple[int, str | None, int | None]], took: float
) -> None:
    """The naive twin reads everything first and walks each session by itself."""
    requests: list[TrafficRequest] = []
    turns: dict[str | None, int] = {}
    for at, session, think in sorted(rows, key=lambda row: row[0]):
        number = turns.get(session, 0) if session else 0
        turns[session] = number + 1
        requests.append(turn(at, session, number, think if number else None))
    expected: list[tuple[float, str | None, int]] = []
    for session in {each.session for each in requests}:
        now, before = 0.0, None
        for each in (each for each in requests if each.session == session):
            if session is None or before is None:
                now = each.at
            else:
                pause = each.think if each.think is not None else each.at - before.at
                now += took + pause
            before = each
            expected.append((now, each.session, each.turn))
    found = [(each.at, each.session, each.turn) for each in replay(Sessions(requests), took)]
    by_all = [sorted(rows, key=lambda row: (row[0], str(row[1]), row[2])) for rows in (found, expected)]
    assert by_all[0] == by_all[1]
    assert [at for at, _, _ in found] == sorted(at for at, _, _ in found)


@pytest.mark.parametrize("took", [0.0, 20.0])
def test_an_endless_stream_is_replayed_in_bounded_memory(took: float) -> None:
    def counted(source: Iterable[TrafficRequest]) -> Iterable[TrafficRequest]:
        nonlocal read
        for each in source:
            read += 1
            yield each

    read = 0
    sessions = Sessions(counted(workload("chat", 5.0, random.Random(1))))
    found = replay(sessions, took, until=1500.0)
    seen: dict[str | None, int] = {}
    for each in found:
        assert each.turn == seen.get(each.session, each.turn - 1) + 1
        seen[each.session] = each.turn
    assert len(found) > 4000
    assert read - len(found) < 5.0 * 1200  # what arrives in the gap, and the turns of sessions that wait
    assert sessions.open < 2000


def test_turns_are_counted_and_pauses_measured() -> None:
    turns = SessionTurns()
    assert turns.next(None, 1.0, 2.0) == (0, None)
    assert turns.next("a", 1.0, 2.0) == (0, None)
    assert turns.next("a", 3.1, None) == (1, 1.1)
    assert turns.next("a", 4.0, 9.0) == (2, None)
    assert turns.next("a", 5.0, 9.0) == (3, 0.0)

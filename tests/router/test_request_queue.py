"""The order of waiting: policies, strict classes, ageing; driven beside a plain sorted list."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernel.machine import SECOND
from penstock.kernel.values import RequestId
from penstock.router.request_queue import POLICIES, QueuedRequest, RequestQueue
from penstock.router.settings import QueueSettings
from tests.depth import deep
from tests.router.written_states import written


def waiting(name: str, arrived: float = 0.0, **changes: int) -> QueuedRequest:
    fields = {"priority": 0, "strict": 0, "deadline": 10**12, "new_tokens": 100, **changes}
    return QueuedRequest(id=RequestId(name), arrived=round(arrived * SECOND), **fields)


def drain(queue: RequestQueue, now: float = 0.0) -> list[str]:
    order = []
    while (head := queue.peek(round(now * SECOND))) is not None:
        queue.take(head)
        order.append(head.id)
    return order


def filled(policy: str, *items: QueuedRequest, age_after: float = 1e6) -> RequestQueue:
    queue = RequestQueue(QueueSettings(policy=policy, age_after=age_after))  # type: ignore[arg-type]
    for item in items:
        queue.add(item)
    return queue


def test_fcfs_serves_by_arrival_and_priority_is_a_head_start_in_seconds() -> None:
    queue = filled("fcfs", waiting("a", 0), waiting("b", 1), waiting("c", 2, priority=5))
    assert drain(queue) == ["c", "a", "b"]


def test_lcfs_serves_the_newest_first() -> None:
    assert drain(filled("lcfs", waiting("a", 0), waiting("b", 1))) == ["b", "a"]


def test_wspt_serves_the_least_work_per_weight_first() -> None:
    queue = filled(
        "wspt",
        waiting("long", new_tokens=9000),
        waiting("short", new_tokens=10),
        waiting("vip", new_tokens=9000, priority=9999),
    )
    assert drain(queue) == ["vip", "short", "long"]


def test_edf_serves_the_earliest_deadline_first() -> None:
    queue = filled("edf", waiting("a", deadline=9 * SECOND), waiting("b", deadline=4 * SECOND))
    assert drain(queue) == ["b", "a"]


def test_a_strict_class_goes_before_all_lower_ones() -> None:
    queue = filled("fcfs", waiting("a", 0), waiting("b", 5, strict=2), waiting("c", 1, strict=1))
    assert drain(queue) == ["b", "c", "a"]


def test_who_has_starved_has_a_share_of_the_work_and_the_policy_the_rest() -> None:
    queue = filled("lcfs", waiting("old", 0), waiting("new", 9), age_after=10.0)
    assert drain(queue, now=9.5) == ["new", "old"]
    queue = filled("lcfs", *(waiting(f"{n:02}", n) for n in range(40)), age_after=10.0)
    served = drain(queue, now=60.0)
    by_age = [name for place, name in enumerate(served) if name != max(served[place:])]
    assert by_age == ["00", "01", "02", "03"]
    assert [served.index(name) for name in by_age] == [0, 10, 20, 30]


def served_alone(
    policy: str, work: list[tuple[float, int]], rate: float, age_after: float = 10.0
) -> list[tuple[int, float]]:
    """Serve (arrival s, tokens) one after the other at a rate in tokens/s; return (tokens, wait s) of each."""
    queue, now, came, waits = filled(policy, age_after=age_after), 0.0, 0, []
    while came < len(work) or len(queue):
        while came < len(work) and (not len(queue) or work[came][0] <= now):
            now = max(now, work[came][0]) if not len(queue) else now
            queue.add(waiting(str(came), work[came][0], new_tokens=work[came][1]))
            came += 1
        head = queue.peek(round(now * SECOND))
        assert head is not None
        queue.take(head)
        waits.append((head.new_tokens, now - head.arrived / SECOND))
        now += head.new_tokens / rate
    return waits


def test_ageing_leaves_a_policy_its_gain_in_an_overload() -> None:
    rng = random.Random(1)
    work = [(n * 0.05, rng.choice([50, 100, 200, 1600])) for n in range(4000)]

    def mean_wait(policy: str, age_after: float = 10.0) -> float:
        waits = [wait for _, wait in served_alone(policy, work, rate=6000, age_after=age_after)]
        return sum(waits) / len(waits)

    fcfs, aged, never = mean_wait("fcfs"), mean_wait("wspt"), mean_wait("wspt", 1e6)
    assert fcfs > 30, "the wait is far beyond age_after"
    assert fcfs - aged > 0.85 * (fcfs - never)


def test_the_starved_get_their_share_while_better_ones_come_for_ever() -> None:
    work = sorted([(n * 0.1, 1000) for n in range(50)] + [(n * 0.01, 100) for n in range(40_000)])
    waits = served_alone("wspt", work, rate=10_000)
    # 50 long ones hold 50,000 tokens: at a tenth of 10,000 a second they are done after 50 s and what ageing takes.
    assert max(wait for tokens, wait in waits if tokens == 1000) < 10 + 50 + 5
    never = served_alone("wspt", work, rate=10_000, age_after=1e6)
    assert max(wait for tokens, wait in never if tokens == 1000) > 300


items = st.lists(
    st.tuples(st.integers(0, 20), st.integers(-3, 3), st.integers(0, 2), st.integers(1, 50), st.booleans()), max_size=60
)


@given(st.sampled_from(sorted(POLICIES)), items)
@settings(max_examples=deep(150))
def test_it_serves_as_a_sorted_list_would(policy: str, rows: list[tuple[int, int, int, int, bool]]) -> None:
    rows.sort(key=lambda row: row[0])
    queue = filled(policy)
    kept = []
    for number, (arrived, priority, strict, tokens, stays) in enumerate(rows):
        item = waiting(f"r{number}", arrived, priority=priority, strict=strict, new_tokens=tokens)
        queue.add(item)
        if stays:
            kept.append((item, number))
        else:
            assert queue.remove(item.id)
    queue.check()
    score = POLICIES[policy]  # type: ignore[index]
    wanted = [item.id for item, _ in sorted(kept, key=lambda pair: (-pair[0].strict, -score(pair[0]), pair[1]))]
    restored = filled(policy)
    restored.restore(written(queue))
    assert set(drain(restored)) == set(wanted)
    assert drain(queue) == wanted


def test_removing_many_does_not_leave_their_ghosts_in_the_heap() -> None:
    queue = filled("fcfs", *(waiting(f"r{n}", n) for n in range(500)))
    for n in range(490):
        queue.remove(RequestId(f"r{n}"))
    assert len(queue._heaps[0]) < 100
    assert drain(queue) == [f"r{n}" for n in range(490, 500)]

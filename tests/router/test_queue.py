"""The order of waiting: policies, strict classes, ageing; driven beside a plain sorted list."""

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernel.machine import SECOND
from penstock.kernel.values import RequestId
from penstock.router.queue import POLICIES, RequestQueue, Waiting
from penstock.router.settings import QueueSettings
from tests.depth import deep


def waiting(name: str, arrived: float = 0.0, **changes: int) -> Waiting:
    fields = {"priority": 0, "strict": 0, "deadline": 10**12, "new_tokens": 100, **changes}
    return Waiting(id=RequestId(name), arrived=round(arrived * SECOND), **fields)


def drain(queue: RequestQueue, now: float = 0.0) -> list[str]:
    order = []
    while (head := queue.peek(round(now * SECOND))) is not None:
        queue.remove(head.id)
        order.append(head.id)
    return order


def filled(policy: str, *items: Waiting, age_after: float = 1e6) -> RequestQueue:
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


def test_who_has_waited_long_enough_goes_before_every_score_of_its_class() -> None:
    queue = filled("lcfs", waiting("old", 0), waiting("new", 9), age_after=10.0)
    assert drain(queue, now=9.5) == ["new", "old"]
    queue = filled("lcfs", waiting("old", 0), waiting("new", 9), age_after=10.0)
    assert drain(queue, now=10.0) == ["old", "new"]


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
    restored.restore(queue.snapshot())
    assert set(drain(restored)) == set(wanted)
    assert drain(queue) == wanted


def test_removing_many_does_not_leave_their_ghosts_in_the_heap() -> None:
    queue = filled("fcfs", *(waiting(f"r{n}", n) for n in range(500)))
    for n in range(490):
        queue.remove(RequestId(f"r{n}"))
    assert len(queue._heaps[0]) < 100
    assert drain(queue) == [f"r{n}" for n in range(490, 500)]

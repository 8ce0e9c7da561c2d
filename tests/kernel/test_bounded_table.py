"""Does a bounded table keep what was used last, within its bounds, over any course of calls?"""

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.bounded_table import BoundedTable

CALLS = st.lists(
    st.tuples(st.sampled_from(["put", "use", "get", "pop", "reload"]), st.integers(0, 6), st.integers(0, 5))
)


def table_of(entries_max: int | None, bytes_max: int | None) -> BoundedTable[int, int]:
    return BoundedTable(entries_max, bytes_max=bytes_max, bytes_of=lambda key, value: value)


@given(calls=CALLS, entries_max=st.none() | st.integers(0, 4), bytes_max=st.none() | st.integers(0, 9))
def test_what_was_used_last_stays(
    calls: list[tuple[str, int, int]], entries_max: int | None, bytes_max: int | None
) -> None:
    table, model = table_of(entries_max, bytes_max), OrderedDict[int, int]()
    for call, key, value in calls:
        if call == "put":
            table.put(key, value)
            model[key] = value
            model.move_to_end(key)
            while len(model) > (99 if entries_max is None else entries_max) or (
                bytes_max is not None and sum(model.values()) > bytes_max
            ):
                model.popitem(last=False)
        elif call == "reload":
            kept, table = table.snapshot(), table_of(entries_max, bytes_max)
            table.restore(kept)
        else:
            assert getattr(table, call)(key) == model.get(key)
            if call == "use" and key in model:
                model.move_to_end(key)
            elif call == "pop":
                model.pop(key, None)
        table.check()
        assert table.snapshot() == list(model.items()) and list(table) == list(model) and len(table) == len(model)
        assert table.bytes == sum(model.values()) and table.newest == next(reversed(model.values()), None)


def test_a_bound_that_is_lowered_counts_from_the_next_shrink() -> None:
    table = table_of(None, 10)
    for key in range(3):
        table.put(key, 3)
    table.bytes_max = 4
    table.shrink()
    assert table.snapshot() == [(2, 3)] and 0 not in table
    table.drop(lambda key, value: value == 3)
    assert not len(table) and table.bytes == 0

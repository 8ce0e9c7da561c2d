"""One registered plugin: when it is due, when it is left alone, and what it keeps over a restart."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.planner.plugins.plugin_registry import FAILURES_MAX, OPEN_SECONDS, PluginRegistry, PluginSlot, PluginSpec
from penstock.planner.plugins.proposals import Accept, Override, PoolTarget


def seat(**told) -> PluginSlot:
    made = {name: told.pop(name) for name in ("registered", "called") if name in told}
    return PluginSlot(PluginSpec(**{"id": "a", "stage": "propose", **told}), None, **{"registered": 0.0, **made})


@pytest.mark.parametrize(
    ("registered", "interval", "expected"),
    [
        (0.0, 0.0, [0, 5, 10, 15, 20]),
        (0.0, 10.0, [10, 20]),
        (12.0, 10.0, [20]),
        (14.99, 5.0, [15, 20]),
        (0.0, 180.0, []),
    ],
)
def test_it_is_due_one_interval_after_it_came_floored_to_the_base(registered, interval, expected):
    one = seat(registered=registered, interval=interval)
    found = []
    for at in range(0, 25, 5):
        if at >= registered and one.due(float(at), 5.0):
            found.append(at)
            one.succeeded(float(at), Accept())
    assert found == expected


def test_a_failure_is_no_call_so_it_is_due_again_at_once():
    one = seat(interval=10.0)
    one.failed(10.0)
    assert one.due(15.0, 5.0)


def test_after_five_failures_it_is_left_alone_then_gets_one_try():
    one = seat()
    for number in range(FAILURES_MAX):
        assert one.circuit(float(number)) == "closed"
        one.failed(float(number))
    opened = float(FAILURES_MAX - 1)
    assert one.circuit(opened + 1.0) == "open" and not one.due(opened + 1.0, 5.0)
    assert one.circuit(opened + OPEN_SECONDS) == "half_open" and one.due(opened + OPEN_SECONDS, 5.0)
    one.failed(opened + OPEN_SECONDS)
    assert one.circuit(opened + OPEN_SECONDS + 1.0) == "open"
    one.succeeded(opened + 2 * OPEN_SECONDS, Accept())
    assert one.circuit(opened + 2 * OPEN_SECONDS) == "closed" and one.failures == 0
    assert one.evaluations == {"error": FAILURES_MAX + 1, "accept": 1}


def test_only_targets_are_held_only_where_it_is_asked_for_and_never_as_a_last_word():
    said = Override(targets=(PoolTarget(pool="main", replicas=3),), final=True)
    idle, one = seat(), seat(hold="hold_last")
    idle.succeeded(0.0, said)
    one.succeeded(0.0, said)
    held = one.standing_override()
    assert idle.standing_override() is None and held is not None and held.targets == said.targets and not held.final
    one.succeeded(5.0, Accept())
    assert one.standing_override() is None


@given(
    st.lists(st.tuples(st.floats(0, 1e4), st.sampled_from(["override", "accept", "error", "timeout"])), max_size=20),
    st.sampled_from(["hold_last", "accept_when_idle"]),
)
def test_a_seat_that_is_kept_and_read_again_goes_on_as_it_was(events, hold):
    one = seat(hold=hold, interval=5.0)
    for at, kind in sorted(events):
        if kind == "override":
            one.succeeded(at, Override(targets=(PoolTarget(pool="main", replicas=3),)))
        elif kind == "accept":
            one.succeeded(at, Accept())
        else:
            one.failed(at, kind)
    twin = seat(hold=hold, interval=5.0)
    twin.restore(msgspec.json.decode(msgspec.json.encode(one.snapshot())))
    assert twin == one


def test_a_registry_knows_its_plugins_by_stage_in_the_order_in_which_they_came():
    registry = PluginRegistry()
    for id, stage in (("b", "propose"), ("a", "propose"), ("c", "constrain")):
        registry.add(PluginSpec(id=id, stage=stage), None, 0.0)
    assert [each.spec.id for each in registry.of("propose")] == ["b", "a"]
    assert registry.remove("b") and not registry.remove("b")
    assert [each.spec.id for each in registry.of("propose")] == ["a"]

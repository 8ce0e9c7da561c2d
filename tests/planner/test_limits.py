"""The last word on every tick: ceilings always hold, what runs goes before what is to come, nobody is made a donor."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.planner.limits.limits import project
from penstock.planner.observation import ModelState, Observation
from penstock.planner.settings import BudgetSettings, PoolLimits
from tests.planner.pool_states import pool_state


def seen(**pools) -> Observation:
    """Return one model "m" with pools, each (role, ready) or a mapping of what differs."""
    made = {}
    for name, told in pools.items():
        given_ = dict(told)
        ready = given_.pop("ready", 0)
        made[name] = pool_state(**{"role": "aggregated", "desired": ready, "ready": ready, **given_})
    return Observation(at=0.0, window=5.0, models={"m": ModelState(traffic=None, pools=made)})


def pair(prefill: int, decode: int, **more) -> Observation:
    return seen(
        p={"role": "prefill", "ready": prefill, **more.get("p", {})},
        d={"role": "decode", "ready": decode, **more.get("d", {})},
    )


def codes(found) -> list[str]:
    return [because.code for because in found.bound]


def test_what_fits_is_left_alone_and_nothing_is_said():
    found = project({"p": 3, "d": 5}, pair(2, 2), BudgetSettings(max_gpus=8), committed={"p": 2, "d": 2})
    assert found.targets == {"p": 3, "d": 5} and not found.bound


@pytest.mark.parametrize(
    ("wanted", "widths", "ceiling", "expected"),
    [
        ((8, 8), (1, 1), 8, (4, 4)),
        ((10, 2), (1, 1), 8, (6, 2)),
        ((10, 10), (2, 1), 12, (4, 4)),
        # The classic rule leaves three GPUs idle here and gives (1, 3); a second prefill replica fits and was wanted.
        ((2, 10), (1, 4), 16, (2, 3)),
        ((5, 5), (1, 1), 1, (0, 0)),
    ],
)
def test_an_empty_cluster_is_shared_in_proportion(wanted, widths, ceiling, expected):
    look = pair(0, 0, p={"gpus": widths[0]}, d={"gpus": widths[1]})
    found = project(
        {"p": wanted[0], "d": wanted[1]}, look, BudgetSettings(max_gpus=ceiling), committed={"p": 0, "d": 0}
    )
    assert found.targets == {"p": expected[0], "d": expected[1]}
    assert codes(found) == ["gpu_ceiling_hold", *(["ceiling_over_minimum"] if expected == (0, 0) else [])]


def test_an_increase_at_the_ceiling_is_held_and_makes_nobody_a_donor():
    found = project({"p": 6, "d": 4}, pair(4, 4), BudgetSettings(max_gpus=8), committed={"p": 4, "d": 4})
    assert found.targets == {"p": 4, "d": 4}
    assert codes(found) == ["gpu_ceiling_hold"] and "6" in found.bound[0].text


def test_room_for_some_increases_is_shared():
    found = project({"p": 8, "d": 8}, pair(4, 4), BudgetSettings(max_gpus=12), committed={"p": 4, "d": 4})
    assert found.targets == {"p": 6, "d": 6}


def test_a_named_donor_gives_and_the_taker_waits_until_it_has_left():
    budget = BudgetSettings(max_gpus=8)
    first = project({"p": 5, "d": 3}, pair(4, 4), budget, committed={"p": 4, "d": 4})
    assert first.targets == {"p": 4, "d": 3} and codes(first) == ["ceiling_staged"]
    leaving = pair(4, 3, d={"draining": 1})
    assert project({"p": 5, "d": 3}, leaving, budget, committed={"p": 4, "d": 3}).targets == {"p": 4, "d": 3}
    gone = project({"p": 5, "d": 3}, pair(4, 3), budget, committed={"p": 4, "d": 3})
    assert gone.targets == {"p": 5, "d": 3} and not gone.bound


def test_with_a_floor_an_exchange_is_one_move():
    budget = BudgetSettings(max_gpus=8, min_gpus=8)
    assert project({"p": 5, "d": 3}, pair(4, 4), budget, committed={"p": 4, "d": 4}).targets == {"p": 5, "d": 3}


def test_a_lowered_ceiling_takes_what_runs_and_wins_over_minima():
    budget = BudgetSettings(max_gpus=3, min_gpus=6, min_replicas=2)
    found = project({"p": 4, "d": 4}, pair(4, 4), budget, committed={"p": 4, "d": 4})
    assert found.targets == {"p": 1, "d": 1}
    assert "ceiling_over_minimum" in codes(found) and "gpu_floor_missed" in codes(found)


def test_priorities_decide_who_grows_and_who_is_cut():
    look = seen(a={"ready": 2}, b={"ready": 2})
    pools = {"a": PoolLimits(priority=1)}
    grow = project({"a": 6, "b": 6}, look, BudgetSettings(max_gpus=8, pools=pools), committed={"a": 2, "b": 2})
    assert grow.targets == {"a": 6, "b": 2}
    shrink = project({"a": 2, "b": 2}, look, BudgetSettings(max_gpus=3, pools=pools), committed={"a": 2, "b": 2})
    assert shrink.targets == {"a": 2, "b": 1}


def test_a_higher_priority_grows_only_into_free_gpus_but_gets_its_minimum():
    look = seen(a={"ready": 0}, b={"ready": 8})
    pools = {"a": PoolLimits(priority=1, min_replicas=2)}
    found = project({"a": 6, "b": 8}, look, BudgetSettings(max_gpus=8, pools=pools), committed={"a": 0, "b": 8})
    assert found.targets == {"a": 2, "b": 6}


def test_pool_bounds_and_what_the_machine_can_have():
    look = seen(a={"ready": 1, "limit": 3}, b={"ready": 1})
    budget = BudgetSettings(min_replicas=2, pools={"b": PoolLimits(max_replicas=4)})
    found = project({"a": 9, "b": 9}, look, budget, committed={})
    assert found.targets == {"a": 3, "b": 4} and codes(found) == ["pool_maximum", "pool_maximum"]
    assert project({"a": 0, "b": 0}, look, budget, committed={}).targets == {"a": 2, "b": 2}


def test_a_pool_nobody_named_stays_and_a_stranger_is_told():
    found = project({"x": 3}, seen(a={"ready": 4}), BudgetSettings(), committed={})
    assert found.targets == {"a": 4} and codes(found) == ["unknown_pool"]


def test_the_floor_raises_in_proportion_and_never_over_the_ceiling():
    found = project({"p": 2, "d": 1}, pair(2, 1), BudgetSettings(min_gpus=8), committed={"p": 2, "d": 1})
    assert found.targets == {"p": 6, "d": 2} and codes(found) == ["gpu_floor"]
    look = seen(a={"ready": 1, "gpus": 2})
    found = project({"a": 1}, look, BudgetSettings(min_gpus=5, max_gpus=5), committed={"a": 1})
    assert found.targets == {"a": 2} and codes(found) == ["gpu_floor", "gpu_floor_missed"]


def test_power_wins_over_gpus_and_floor():
    look = pair(2, 2, p={"watts": 700.0}, d={"watts": 300.0})
    budget = BudgetSettings(max_gpus=16, min_gpus=8, watts=3000.0)
    found = project({"p": 4, "d": 4}, look, budget, committed={"p": 2, "d": 2})
    assert found.targets["p"] * 700 + found.targets["d"] * 300 <= 3000
    assert codes(found) == ["power_ceiling_hold", "gpu_floor_missed"]
    unknown = project({"p": 4, "d": 4}, pair(2, 2), BudgetSettings(watts=1.0), committed={})
    assert unknown.targets == {"p": 4, "d": 4}


@st.composite
def situations(draw):
    models = {}
    wanted, committed, limits = {}, {}, {}
    for model in range(draw(st.integers(1, 3))):
        pools = {}
        roles = draw(st.sampled_from([("aggregated",), ("prefill", "decode"), ("aggregated", "prefill", "decode")]))
        for role in roles:
            name = f"m{model}-{role}"
            ready, starting = draw(st.integers(0, 12)), draw(st.integers(0, 3))
            pools[name] = pool_state(
                role=role,
                gpus=draw(st.integers(1, 8)),
                watts=draw(st.none() | st.floats(100.0, 2000.0)),
                desired=draw(st.integers(0, 12)),
                ready=ready,
                starting=(1.0,) * starting,
                draining=draw(st.integers(0, 2)),
                limit=draw(st.none() | st.integers(0, 20)),
            )
            if draw(st.booleans()):
                wanted[name] = draw(st.integers(-2, 30))
            committed[name] = ready + starting
            limits[name] = PoolLimits(
                min_replicas=draw(st.none() | st.integers(0, 4)),
                max_replicas=draw(st.none() | st.integers(0, 20)),
                priority=draw(st.integers(0, 2)),
            )
        models[f"m{model}"] = ModelState(traffic=None, pools=pools)
    ceiling = draw(st.none() | st.integers(0, 120))
    budget = BudgetSettings(
        max_gpus=ceiling,
        min_gpus=draw(st.none() | st.integers(0, 120)),
        min_replicas=draw(st.integers(0, 2)),
        watts=draw(st.none() | st.floats(100.0, 40_000.0)),
        pools=limits,
    )
    return Observation(at=0.0, window=5.0, models=models), wanted, committed, budget


@given(situations())
def test_the_limits_hold_whatever_is_wanted_and_hold_still(situation):
    look, wanted, committed, budget = situation
    found = project(wanted, look, budget, committed=committed)
    pools = {name: state.pool for _, name, state in look.pools()}
    assert set(found.targets) == set(pools)
    assert all(count >= 0 for count in found.targets.values())
    if budget.max_gpus is not None:
        assert sum(pools[name].gpus * count for name, count in found.targets.items()) <= budget.max_gpus
    if budget.watts is not None:
        watts = {name: state.watts or 0.0 for _, name, state in look.pools()}
        assert sum(watts[name] * n for name, n in found.targets.items()) <= budget.watts + 1e-3
    for name, count in found.targets.items():
        most = [b for b in (pools[name].limit, budget.pools[name].max_replicas) if b is not None]
        assert not most or count <= min(most)
    again = project(found.targets, look, budget, committed=committed)
    assert again.targets == found.targets


@given(situations())
def test_without_a_floor_nothing_is_above_what_was_wanted_or_its_minimum(situation):
    look, wanted, committed, budget = situation
    budget = BudgetSettings(
        max_gpus=budget.max_gpus, watts=budget.watts, min_replicas=budget.min_replicas, pools=budget.pools
    )
    found = project(wanted, look, budget, committed=committed)
    for _, name, state in look.pools():
        least = budget.pools[name].min_replicas
        minimum = budget.min_replicas if least is None else least
        assert found.targets[name] <= max(0, minimum, wanted.get(name, state.pool.desired))


@given(situations())
def test_what_runs_is_cut_only_where_what_runs_does_not_fit(situation):
    look, wanted, committed, budget = situation
    budget = BudgetSettings(max_gpus=budget.max_gpus, min_replicas=0)
    pools = {name: state.pool for _, name, state in look.pools()}
    want = {name: max(0, wanted.get(name, pool.desired)) for name, pool in pools.items()}
    capped = {n: w if pools[n].limit is None else min(w, pools[n].limit) for n, w in want.items()}
    kept = {name: min(capped[name], committed[name]) for name in pools}
    found = project(wanted, look, budget, committed=committed)
    if budget.max_gpus is None or sum(pools[n].gpus * c for n, c in kept.items()) <= budget.max_gpus:
        assert all(found.targets[name] >= kept[name] for name in pools)


# --- a fleet that keeps its limits ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "wanted", "floor", "ceiling", "expected"),
    [
        ((4, 4), (4, 3), 8, 8, (4, 4)),  # what the floor forbids of a decrease is given up, and makes nobody grow
        ((11, 24), (11, 10), 30, 40, (11, 19)),  # the floor is met, and not passed
        ((6, 6), (3, 3), 8, 12, (4, 4)),  # who gives up how much is in proportion
        ((4, 4), (6, 3), 8, 8, (5, 3)),  # what one gives another takes
    ],
)
def test_a_decrease_that_the_floor_forbids_is_given_up_in_part(now, wanted, floor, ceiling, expected):
    found = project(
        dict(zip("pd", wanted, strict=True)),
        pair(*now),
        BudgetSettings(min_gpus=floor, max_gpus=ceiling),
        committed=dict(zip("pd", now, strict=True)),
    )
    assert tuple(found.targets.values()) == expected


def test_wide_replicas_that_do_not_come_out_even_move_nobody_the_wrong_way():
    budget = BudgetSettings(min_gpus=8, max_gpus=8)
    look = pair(2, 4, p={"gpus": 2})
    # One prefill replica more and one decode replica fewer are 9 GPUs; decode alone would leave 7.
    assert project({"p": 3, "d": 3}, look, budget, committed={"p": 2, "d": 4}).targets == {"p": 2, "d": 4}
    # With the increase there is no room to give the decrease up, so that one is given up too.
    assert project({"p": 1, "d": 5}, look, budget, committed={"p": 2, "d": 4}).targets == {"p": 2, "d": 4}


def test_a_raised_floor_is_filled_by_those_who_want_more_and_then_by_those_nobody_moves():
    budget = BudgetSettings(min_gpus=12)
    assert project({"p": 4, "d": 5}, pair(4, 4), budget, committed={}).targets == {"p": 4, "d": 8}
    assert project({"p": 4, "d": 3}, pair(4, 4), budget, committed={}).targets == {"p": 8, "d": 4}


def test_what_is_ordered_goes_before_what_is_to_come_on_top():
    look = seen(a={"ready": 3, "desired": 5}, b={"ready": 3})
    found = project({"b": 6}, look, BudgetSettings(max_gpus=9), committed={"a": 3, "b": 3})
    assert found.targets == {"a": 5, "b": 4}


@st.composite
def fleets_within(draw):
    """Return a look at a settled fleet, wishes, and a budget that the fleet keeps."""
    roles = draw(st.sampled_from([("aggregated",), ("prefill", "decode"), ("aggregated", "prefill", "decode")]))
    pools = {
        role: {"role": role, "ready": draw(st.integers(1, 5)), "gpus": draw(st.sampled_from([1, 1, 2, 3]))}
        for role in roles
    }
    look = seen(**pools)
    wanted = {role: draw(st.integers(1, 7)) for role in roles if draw(st.booleans())}
    total = sum(pool["ready"] * pool["gpus"] for pool in pools.values())
    budget = BudgetSettings(
        max_gpus=draw(st.none() | st.integers(total, total + 6)), min_gpus=draw(st.none() | st.integers(0, total))
    )
    return look, wanted, budget


@given(fleets_within())
def test_within_its_limits_no_pool_moves_but_towards_what_is_wished_and_none_less_than_it_could(situation):
    look, wanted, budget = situation
    pools = {name: state.pool for _, name, state in look.pools()}
    now = {name: pool.desired for name, pool in pools.items()}
    goal = {**now, **wanted}
    found = project(wanted, look, budget, committed=now).targets

    def kept(state) -> bool:
        gpus = sum(pools[name].gpus * count for name, count in state.items())
        return (budget.min_gpus or 0) <= gpus <= (gpus if budget.max_gpus is None else budget.max_gpus)

    def between(one, other):
        return [range(min(one[name], other[name]), max(one[name], other[name]) + 1) for name in pools]

    assert kept(found)
    assert all(count in ways for count, ways in zip(found.values(), between(now, goal), strict=True))
    if budget.min_gpus is None:
        # What leaves is waited for: where that holds nothing back, the next look brings the rest.
        later = seen(**{name: {"role": p.role, "ready": found[name], "gpus": p.gpus} for name, p in pools.items()})
        found = project(goal, later, budget, committed=found).targets
    nearer = [
        state
        for counts in product(*between(found, goal))
        if kept(state := dict(zip(pools, counts, strict=True))) and state != found
    ]
    assert not nearer

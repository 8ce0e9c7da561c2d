"""What holds for every classic policy, whatever it sees: no error, no negative number, and restarts change nothing."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernel.errors import ConfigError
from penstock.kernel.values import EngineLimits, StepStats, Traffic
from penstock.planner.observation import Observation
from penstock.planner.policies import PolicyInputs, make, plugins_of
from penstock.planner.settings import BudgetSettings, PlannerSettings
from tests.depth import deep
from tests.dynamo.policies.test_fpm import INPUTS
from tests.planner.policies.looks import Ticks, look, pool, traffic

NAMES = ["thresholds", "load-classic", "sla-classic", "throughput-fpm", "load-fpm", "load-fpm-1.6", "hybrid", "static"]
told = st.none() | st.integers(0, 200_000)


@st.composite
def engines(draw):
    window = draw(st.booleans())
    passes = draw(st.integers(0, 50))
    return {
        "queued_prefill_tokens": draw(told),
        "decode_kv": draw(told),
        "queued_decode_kv": draw(told),
        "running": draw(st.none() | st.integers(0, 300)),
        "waiting": draw(st.none() | st.integers(0, 300)),
        "limits": EngineLimits(
            kv_tokens=draw(st.sampled_from([None, 0, 100_000])),
            max_model_len=draw(st.sampled_from([None, 8192])),
            max_num_batched_tokens=draw(st.sampled_from([None, 512, 8192])),
            max_num_seqs=draw(st.sampled_from([None, 1, 256])),
        ),
        "steps": StepStats(
            passes=passes,
            wall=draw(st.none() | st.floats(0, 10)),
            prefill_tokens=draw(told),
            decode_seqs=draw(st.none() | st.integers(0, 5000)),
            decode_kv=draw(told),
        )
        if window
        else None,
    }


@st.composite
def runs(draw):
    found: list[Observation] = []
    roles = draw(st.sampled_from([("aggregated",), ("prefill", "decode"), ("aggregated", "prefill", "decode"), ()]))
    for place in range(draw(st.integers(1, 12))):
        pools = {}
        for role in roles:
            more = {} if draw(st.booleans()) else {"desired": draw(st.integers(0, 6)), "starting": (2.0,)}
            pools[role] = pool(role, draw(st.lists(engines(), max_size=3)), gpus=draw(st.integers(1, 4)), **more)
        seen: Traffic | None = None
        if draw(st.integers(0, 4)):
            requests = draw(st.integers(0, 500))
            seen = traffic(requests, draw(st.integers(1, 5000)), draw(st.integers(1, 500)), seconds=30.0)
            if draw(st.booleans()):
                seen = msgspec.structs.replace(seen, answered=0, output_tokens=0)
        found.append(look(30.0 * (place + 1), pools, seen, window=30.0, queued=draw(st.integers(0, 5))))
    return found


@pytest.mark.parametrize("name", NAMES)
@given(looks=runs(), ceiling=st.none() | st.integers(0, 12))
@settings(max_examples=deep(25))
def test_it_answers_whatever_it_sees_and_a_restart_changes_nothing(name, looks, ceiling):
    options = PlannerSettings(policy=name, load_interval=30.0, throughput_interval=90.0)
    budget = BudgetSettings(max_gpus=ceiling)
    one, two = Ticks(make(name, options, INPUTS), budget), Ticks(make(name, options, INPUTS), budget)
    for seen in looks:
        first = one.tick(seen)
        assert all(count >= 0 for count in first.targets.values())
        state = msgspec.json.decode(msgspec.json.encode([plugin.snapshot() for plugin in two.plugins]))
        fresh = Ticks(make(name, options, INPUTS), budget)
        for plugin, told_ in zip(fresh.plugins, state, strict=True):
            if told_ is not None:
                plugin.restore(told_)
        fresh.looks, fresh._called, fresh._held = two.looks, two._called, two._held
        two = fresh
        second = two.tick(seen)
        assert second.targets == first.targets
        assert [each.text for each in second.reasons] == [each.text for each in first.reasons]


def test_the_optimisation_target_chooses_thresholds_instead_of_a_policy():
    assert plugins_of(PlannerSettings(policy="hybrid", optimization_target="latency"))[0].spec.id == "load_propose"
    assert [each.spec.stage for each in plugins_of(PlannerSettings(policy="hybrid"))] == [
        "predict",
        "propose",
        "propose",
    ]
    with pytest.raises(ConfigError, match="not shorter"):
        make("hybrid", PlannerSettings(policy="hybrid", load_interval=180.0))
    with pytest.raises(ConfigError, match="no planner policy"):
        make("magic", PlannerSettings())


def test_the_tick_follows_the_policy():
    assert PlannerSettings().base == 5.0
    assert PlannerSettings(policy="load-classic").base == 1.0
    assert PlannerSettings(policy="sla-classic").base == 5.0
    assert PlannerSettings(policy="load-classic", optimization_target="latency").base == 5.0
    assert PolicyInputs().of("x") == {}

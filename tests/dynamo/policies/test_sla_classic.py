"""The SLA planner: its formulas by their golden cases, and what it does with traffic that ends or can't be read."""

import msgspec
import pytest

from penstock.kernel.values import RequestShape
from penstock.planner.forecast.predictor import IntervalCounts
from penstock.planner.performance.speed_sources import KnownSpeeds, Profile
from penstock.planner.policies import PolicyInputs, make
from penstock.planner.settings import BudgetSettings, PlannerSettings
from penstock_dynamo.policies.sla_classic import corrected_itl, decode_replicas, prefill_replicas
from tests.planner.policies.looks import Ticks, look, pool, traffic


def test_golden_formulas():
    next_ = IntervalCounts(10, RequestShape(3000, 150))
    assert prefill_replicas(next_, 60.0, 40_000.0, 1) == 1
    busy = IntervalCounts(1000, RequestShape(3000, 150))
    assert prefill_replicas(busy, 60.0, 40_000.0, 1, 2.5) == prefill_replicas(busy, 60.0, 40_000.0, 1) == 2
    assert prefill_replicas(busy, 60.0, 40_000.0, 1, 0.5) == 1
    assert corrected_itl(0.05, 0.0) == corrected_itl(0.05, -1.0) == 0.05 and corrected_itl(0.05, 2.0) == 0.025
    assert decode_replicas(IntervalCounts(600, RequestShape(3000, 150)), 60.0, 500.0, 1) == 3
    assert decode_replicas(IntervalCounts(600, RequestShape(3000, 150)), 60.0, 500.0, 4) == 1


# TTFT of 0.1 ms per token; ITL from 10 ms in an empty cache to 60 ms in a full one, at any context.
PROFILE = Profile(
    prefill_isl=(1000, 4000),
    prefill_ttft=(0.1, 0.4),
    prefill_per_gpu=(10_000, 10_000),
    usage=(0.0, 1.0, 0.0, 1.0),
    context=(500, 500, 2000, 2000),
    itl=(0.010, 0.060, 0.010, 0.060),
    decode_per_gpu=(100, 1000, 100, 1000),
    kv_tokens=100_000,
)
INPUTS = PolicyInputs(speeds={"m": {"prefill": KnownSpeeds(profile=PROFILE), "decode": KnownSpeeds(profile=PROFILE)}})


def run(budget=None, **sla) -> Ticks:
    told = {"policy": "sla-classic", "classic": {"sla": sla, "forecast": {"predictor": "constant"}}}
    return Ticks(make("sla-classic", msgspec.convert(told, PlannerSettings), INPUTS), budget)


def after(run: Ticks, told, *, start: float = 0.0, prefill: int = 2, decode: int = 2, intervals: int = 1):
    said = None
    for place in range(1, 36 * intervals + 1):
        pools = {"p": pool("prefill", [{}] * prefill), "d": pool("decode", [{}] * decode)}
        said = run.tick(look(start + 5.0 * place, pools, told))
    return said


def busy(requests: int = 50, **told):
    return traffic(requests, isl=1000, osl=200, **told)


def test_replicas_follow_the_profile_and_the_corrected_itl():
    found = after(run(), busy())
    # 10 req/s of 1000 tokens are 10,000 tok/s: one engine; 2000 tok/s of output at the fill level of 50 ms: 820.
    assert found.targets == {"p": 1, "d": 3} and found.codes[0] == "forecast"
    slow = busy(itl_sum=50 * 0.02, itl_count=50, duration_sum=50 * 2.0, ttft_sum=50 * 0.2, ttft_count=50)
    corrected = after(run(), slow)
    assert corrected.reasons[0].facts["correction"]["prefill"] == pytest.approx(2.0)
    assert corrected.reasons[0].facts["correction"]["decode"] > 1.0
    trusted = after(run(no_correction=True), slow)
    assert trusted.reasons[0].facts["correction"] == {"prefill": 1.0, "decode": 1.0}


def test_an_itl_out_of_reach_plans_with_the_least_load():
    hopeless = busy(itl_sum=50 * 2.0, itl_count=50, duration_sum=50 * 0.1)
    assert "slo_out_of_reach" in after(run(), hopeless).codes


def test_traffic_that_ends_scales_down_and_unreadable_traffic_holds():
    planner = run()
    after(planner, busy())
    ended = after(planner, traffic(0), start=180.0)
    assert ended.targets == {"p": 1, "d": 1}
    lost = after(planner, None, start=360.0)
    assert lost.codes == ["no_traffic_data"] and not lost.named


def test_a_budget_shares_and_no_profile_says_what_to_set():
    found = after(run(BudgetSettings(max_gpus=3)), busy(200))
    assert sum(found.targets.values()) <= 3 and min(found.targets.values()) >= 1
    nothing = Ticks(make("sla-classic", PlannerSettings(policy="sla-classic")))
    assert after(nothing, busy()).codes == ["no_profile"]


def test_the_cache_is_on_the_way_from_one_process_to_the_next():
    one, two = run(), run()
    after(one, busy())
    two.plugins[0].restore(one.plugins[0].snapshot())
    two.looks, two._called = list(one.looks), dict(one._called)
    assert after(two, busy(100), start=180.0).targets == after(one, busy(100), start=180.0).targets

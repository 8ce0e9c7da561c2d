"""The loops over forward passes: SLA end to end by its golden case, both load loops, and the floor between them."""

import pytest

from penstock.kernel.values import Slo
from penstock.planner.performance.speed_sources import KnownSpeeds
from penstock.planner.policies import PolicyInputs, make
from penstock.planner.settings import BudgetSettings, PlannerSettings
from tests.planner.policies.looks import Ticks, look, pool, steps, traffic

# Prefill takes 1e-4 s a token and 5 ms, decode 1e-7 s a KV token, 2e-4 s a sequence and 4 ms.
METRICS = {
    "prefill": [{"tokens": tokens, "seconds": 1e-4 * tokens + 0.005} for tokens in (1, 500, 1000, 2000, 4000)],
    "decode": [
        {"batch": n, "kv_tokens": kv, "seconds": 1e-7 * kv + 2e-4 * n + 0.004}
        for n in (1, 64, 256)
        for kv in (0, 50_000, 100_000)
    ],
}
KNOWN = KnownSpeeds(metrics={"self-benchmark": METRICS})
SLO = Slo(ttft=0.5, itl=0.020)
INPUTS = PolicyInputs(slo=SLO, speeds={"": {"prefill": KNOWN, "decode": KNOWN, "aggregated": KNOWN}})


def settings(policy: str, **told) -> PlannerSettings:
    from penstock_dynamo.settings_classic import ClassicSettings, ForecastSettings

    classic = ClassicSettings(forecast=ForecastSettings(predictor="constant"))
    return PlannerSettings(policy=policy, classic=classic, **told)


def demand(run: Ticks, rate: float, *, prefill: int = 1, decode: int = 1, start: float = 0.0, told=None):
    said = None
    for place in range(1, 37):
        pools = {"p": pool("prefill", [{}] * prefill), "d": pool("decode", [{}] * decode)}
        seen = traffic(round(5 * rate), 1000, 200) if told is None else told
        said = run.tick(look(start + 5.0 * place, pools, seen))
    return said


@pytest.mark.parametrize(("rate", "expected"), [(5, (1, 1)), (20, (3, 2)), (60, (7, 5))])
def test_sla_end_to_end(rate, expected):
    found = demand(Ticks(make("throughput-fpm", settings("throughput-fpm"), INPUTS)), rate)
    assert (found.targets["p"], found.targets["d"]) == expected
    assert found.reasons[0].facts["rate"] == pytest.approx(9.7561, rel=1e-4)
    assert found.reasons[1].facts["rate"] == pytest.approx(12.8723, rel=1e-4)


def test_a_step_for_throughput_is_capped_in_both_directions():
    run = Ticks(make("throughput-fpm", settings("throughput-fpm"), INPUTS))
    assert demand(run, 1000).targets == {"p": 9, "d": 9}
    run = Ticks(make("throughput-fpm", settings("throughput-fpm"), INPUTS))
    assert demand(run, 1, prefill=24, decode=20).targets == {"p": 16, "d": 12}


@pytest.mark.parametrize(("now", "expected"), [((2, 5), (2, 5)), ((1, 1), (4, 3))])
def test_a_shortage_takes_increases_away_and_nothing_that_runs(now, expected):
    run = Ticks(make("throughput-fpm", settings("throughput-fpm"), INPUTS), BudgetSettings(max_gpus=7))
    found = demand(run, 60, prefill=now[0], decode=now[1])  # which takes 7 and 5
    assert (found.targets["p"], found.targets["d"]) == expected
    assert found.codes[0] in ("gpu_budget_guard_hold", "gpu_budget_fit")


def test_one_role_that_is_not_known_holds_both():
    inputs = PolicyInputs(slo=SLO, speeds={"": {"prefill": KNOWN}})
    found = demand(Ticks(make("throughput-fpm", settings("throughput-fpm"), inputs)), 50)
    assert not found.named and found.codes == ["model_not_ready", "partner_not_ready"]


def test_traffic_that_can_not_be_read_predicts_nothing():
    run = Ticks(make("throughput-fpm", settings("throughput-fpm"), INPUTS))
    pools = {"p": pool("prefill", [{}]), "d": pool("decode", [{}])}
    for place in range(1, 37):
        found = run.tick(look(5.0 * place, pools, None))
    assert not found.named and not found.reasons


def test_hits_and_accepted_tokens_are_inputs():
    run = Ticks(make("throughput-fpm", settings("throughput-fpm"), INPUTS))
    told = traffic(300, 1000, 200, cache_reported_tokens=300_000, cached_tokens=150_000, accept_length=2.0)
    found = demand(run, 60, told=told)
    plain = demand(Ticks(make("throughput-fpm", settings("throughput-fpm"), INPUTS)), 60)
    assert found.targets["p"] < plain.targets["p"] and found.targets["d"] < plain.targets["d"]


# --- the load loop ----------------------------------------------------------------------------------------------------


def loads(place: int):
    """Return what engines of both roles had to do in one of several windows, all different."""
    tokens = 200 + 150 * (place % 10)
    seqs = 5 + 9 * (place % 10)
    kv = seqs * (500 + 60 * (place % 7))
    return steps(tokens, 0, 0, 1e-4 * tokens + 0.005), steps(0, seqs, kv, 1e-7 * kv + 2e-4 * seqs + 0.004)


def warmed(policy: str, *, prefill: int = 2, decode: int = 2, queued: int = 0, kv: int = 20_000, running: int = 20,
           budget=None, ticks: int = 12, starting=()):  # fmt: skip
    """Let a load loop see some windows; return what it says in the end."""
    run = Ticks(make(policy, settings(policy), INPUTS), budget)
    said = None
    for place in range(1, ticks + 1):
        first, second = loads(place)
        calm = place < ticks - 2
        more = {"starting": starting, "desired": decode + len(starting)} if starting and not calm else {}
        pools = {
            "p": pool("prefill", [{"steps": first, "queued_prefill_tokens": 1500 if calm else queued}] * prefill),
            "d": pool(
                "decode",
                [{"steps": second, "decode_kv": 60_000 if calm else kv, "running": 45 if calm else running}] * decode,
                **more,
            ),
        }
        said = run.tick(look(5.0 * place, pools, traffic(20, 1000, 200)))
    return said


@pytest.mark.parametrize("policy", ["load-fpm", "load-fpm-1.6"])
def test_all_over_the_service_level_is_one_more(policy):
    found = warmed(policy, queued=6000, kv=95_000, running=70)
    assert found.targets == {"p": 3, "d": 3} and found.codes == ["scale_up", "scale_up"]


def test_the_two_generations_differ_in_how_they_give_back():
    assert warmed("load-fpm", queued=0, kv=10_000, running=10).targets == {"p": 1, "d": 1}
    assert warmed("load-fpm-1.6", queued=0, kv=10_000, running=10).targets == {"p": 1, "d": 1}
    # Some 14 ms now, under 16; shared by one engine fewer it would be 19.
    tight = {"queued": 1500, "kv": 24_000, "running": 25}
    assert warmed("load-fpm", **tight).targets["d"] == 1
    refused = warmed("load-fpm-1.6", **tight)
    assert refused.targets["d"] == 2 and "scale_down_refused_consolidation" in refused.codes


def test_one_hot_engine_is_no_reason_for_all():
    run = Ticks(make("load-fpm", settings("load-fpm"), INPUTS))
    for place in range(1, 13):
        first, second = loads(place)
        engines = [{"steps": first, "queued_prefill_tokens": 9000}, {"steps": first, "queued_prefill_tokens": 3500}]
        pools = {"p": pool("prefill", engines), "d": pool("decode", [{"steps": second, "decode_kv": 60_000}] * 2)}
        found = run.tick(look(5.0 * place, pools, traffic(20, 1000, 200)))
    assert found.targets["p"] == 2 and found.codes[0] == "within_band"


def test_before_enough_passes_nothing_is_said():
    assert "insufficient_data" in warmed("load-fpm", ticks=2).codes


def test_while_replicas_start_the_first_generation_waits_and_the_second_gives_back_after_an_interval():
    assert warmed("load-fpm", starting=(5.0,)).targets["d"] == 3
    found = warmed("load-fpm-1.6", starting=(5.0,), kv=10_000, running=5)
    assert found.targets["d"] == 2, "one of three, of which one starts, is not needed for a whole interval"


def test_a_step_at_the_ceiling_is_held_by_name():
    found = warmed("load-fpm", queued=6000, kv=95_000, running=70, budget=BudgetSettings(max_gpus=4))
    assert found.targets == {"p": 2, "d": 2} and "gpu_budget_guard_hold" in found.codes


def test_aggregated_engines_go_up_by_either_and_down_by_both():
    def run(queued: int, kv: int):
        plan = Ticks(make("load-fpm", settings("load-fpm"), INPUTS))
        for place in range(1, 14):
            tokens, load = 100 + 170 * (place % 8), 5000 + 9000 * (place % 5)
            window = steps(tokens, 20, load, 1e-4 * tokens / 10 + 1e-7 * load + 0.004)
            last = place > 11
            engines = [
                {
                    "steps": window,
                    "queued_prefill_tokens": queued if last else 3000,
                    "decode_kv": kv if last else 90_000,
                }
            ]
            found = plan.tick(look(5.0 * place, {"a": pool("aggregated", engines * 2)}, traffic(20, 1000, 200)))
        return found

    assert run(120_000, 1000).targets == {"a": 3}
    assert run(0, 1000).targets == {"a": 1}
    assert run(38_000, 1000).codes == ["within_band"]


def test_in_hybrid_the_load_loop_stays_above_the_floor():
    run = Ticks(make("hybrid", settings("hybrid"), INPUTS))
    for place in range(1, 41):
        first, second = loads(place)
        pools = {
            "p": pool("prefill", [{"steps": first}] * 3),
            "d": pool("decode", [{"steps": second, "decode_kv": 1000, "running": 1}] * 2),
        }
        if place < 36:
            pools["p"] = pool("prefill", [{"steps": first, "queued_prefill_tokens": 1500}] * 3)
            pools["d"] = pool("decode", [{"steps": second, "decode_kv": 60_000, "running": 45}] * 2)
        found = run.tick(look(5.0 * place, pools, traffic(100, 1000, 200)))
    assert found.targets == {"p": 3, "d": 2}
    assert found.codes.count("scale_down_capped_by_throughput") == 2

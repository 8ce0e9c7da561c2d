"""Static thresholds, by their golden cases: 2P2D, context 8192, room for 100k tokens, 16 GPUs."""

import msgspec
import pytest

from penstock.kernel.errors import ConfigError
from penstock.planner.policies import plugins_of
from penstock.planner.settings import BudgetSettings, PlannerSettings
from tests.planner.policies.looks import Ticks, look, pool


def said(queues, kv, target="throughput", budget=16, settings=None, **told):
    settings = settings or PlannerSettings(optimization_target=target)
    pools = {
        "p": pool("prefill", [{"queued_prefill_tokens": queue} for queue in queues], **told),
        "d": pool("decode", [{"decode_kv": each} for each in kv]),
    }
    return Ticks(plugins_of(settings), BudgetSettings(max_gpus=budget)).tick(look(5.0, pools))


@pytest.mark.parametrize(
    ("target", "queues", "kv", "expected"),
    [
        ("throughput", [8192, 0], [70_000, 70_000], (3, 2)),
        ("throughput", [8191, 0], [70_000, 70_000], (2, 2)),
        ("throughput", [0, 0], [49_000, 49_000], (1, 1)),
        ("latency", [820, 0], [20_000, 20_000], (3, 2)),
    ],
)
def test_golden_cases(target, queues, kv, expected):
    found = said(queues, kv, target)
    assert (found.targets["p"], found.targets["d"]) == expected


def test_decode_goes_up_only_above_its_threshold_and_refuses_what_would_come_back():
    at, over = said([4000, 0], [100_000, 0]), said([4000, 0], [100_001, 0])
    assert at.targets["d"] == 2 and over.targets["d"] == 3
    refused = said([4000, 0], [59_000, 59_000])
    assert refused.targets["d"] == 2 and "scale_down_refused_consolidation" in refused.codes


def test_what_is_not_told_holds_and_a_pool_that_is_scaled_waits():
    assert said([None, 0], [60_000, 70_000]).codes[0] == "insufficient_data"
    assert said([8192, 0], [60_000, 70_000], starting=(3.0,)).codes[0] == "scaling_in_progress"
    assert said([8192, 0], [60_000, 70_000], ready=3, desired=3).codes[0] == "worker_count_mismatch"
    assert said([], [60_000]).codes[0] == "no_fpm_data"


def test_a_reason_names_its_pool():
    found = said([0, 0], [120_000, 70_000])
    about = {because.code: because.pools for because in found.reasons}
    assert about["scale_up"] == ("d",) and set(about) == {"scale_up", "scale_down"} and about["scale_down"] == ("p",)


def test_at_the_gpu_ceiling_a_step_up_is_held():
    found = said([8192, 0], [70_000, 70_000], budget=4)
    assert found.targets == {"p": 2, "d": 2} and "gpu_budget_guard_hold" in found.codes


def test_target_load_takes_its_own_thresholds_and_wants_all_of_them():
    with pytest.raises(ConfigError, match="prefill_scale_up_queue_tokens"):
        plugins_of(PlannerSettings(optimization_target="load"))
    told = {
        "prefill_scale_up_queue_tokens": 1000,
        "prefill_scale_down_queue_tokens": 100,
        "decode_scale_up_kv_rate": 0.8,
        "decode_scale_down_kv_rate": 0.3,
    }
    settings = msgspec.convert({"optimization_target": "load", "classic": {"thresholds": told}}, PlannerSettings)
    found = said([1000, 0], [80_000, 0], settings=settings)
    assert found.targets == {"p": 3, "d": 3}
    found = said([100, 100], [30_000, 30_000], settings=settings)
    assert found.targets == {"p": 1, "d": 1}
    wrong = {**told, "decode_scale_down_kv_rate": 0.9}
    with pytest.raises(ConfigError, match="must be lower"):
        plugins_of(msgspec.convert({"optimization_target": "load", "classic": {"thresholds": wrong}}, PlannerSettings))


def test_an_aggregated_pool_counts_prompts_that_wait_and_a_mode_leaves_the_rest_alone():
    settings = PlannerSettings(optimization_target="throughput")
    pools = {"a": pool("aggregated", [{"decode_kv": 60_000, "queued_prefill_tokens": 50_000}] * 2)}
    assert Ticks(plugins_of(settings)).tick(look(5.0, pools)).targets == {"a": 3}
    other = PlannerSettings(optimization_target="throughput", mode="prefill")
    pools = {
        "p": pool("prefill", [{"queued_prefill_tokens": 9000}]),
        "d": pool("decode", [{"decode_kv": 200_000}]),
    }
    assert Ticks(plugins_of(other)).tick(look(5.0, pools)).named == {"p"}

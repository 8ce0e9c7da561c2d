"""Traffic of a plan: rates that requests meet, lengths, hits, and errors that name their option."""

import json
from pathlib import Path

import numpy as np
import pytest

from penstock.kernel.errors import ConfigError
from penstock_lab.profiler.deployment_plan.planned_traffic import REQUESTS_LEAST, traffic_of
from tests.lab.profiler.deployment_plan.questions import question


def write_trace(path: Path, rows: list[tuple[float, int, int, list[int]]]) -> str:
    lines = [
        json.dumps({"timestamp": round(1000 * at), "input_length": isl, "output_length": osl, "hash_ids": ids})
        for at, isl, osl, ids in rows
    ]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def busy_and_quiet(path: Path) -> str:
    """Two minutes: 300 requests in the first, 60 in the second."""
    first = [(0.2 * n, 1000, 100, [2 * n, 2 * n + 1]) for n in range(300)]
    second = [(60.0 + n, 1000, 100, [9000 + 2 * n, 9001 + 2 * n]) for n in range(61)]
    return write_trace(path, [*first, *second])


def test_made_traffic_has_its_rate_and_lengths_and_is_the_same_each_time() -> None:
    one, other = (traffic_of(question(rate=20.0, requests=None)) for _ in range(2))
    assert list(one.requests) == list(other.requests) and len(one.requests) >= REQUESTS_LEAST
    assert one.rate == 20.0 and one.prompt == pytest.approx(3000) and one.answer == pytest.approx(300)
    assert len(one.requests) / one.seconds == pytest.approx(20.0, rel=0.1)
    assert one.tokens_per_second(one.answer) == 20.0 * one.answer


def test_lengths_may_be_a_distribution() -> None:
    traffic = traffic_of(question(prompt="lognormal:median=1000,sigma=0.8,most=8k", answer="200"))
    assert len(traffic.mix.weight) > 5 and traffic.longest > 4000
    with pytest.raises(ConfigError, match="--isl"):
        traffic_of(question(prompt="lognormal:medium=3"))


def test_a_trace_counts_the_rates_that_its_requests_meet(tmp_path: Path) -> None:
    traffic = traffic_of(question(trace=busy_and_quiet(tmp_path / "trace.jsonl")))
    assert sorted(traffic.rates) == pytest.approx([1.0, 5.0], rel=0.05)
    assert traffic.weights.sum() == pytest.approx(1.0)
    assert traffic.rate == pytest.approx((300 * 5 + 61 * 1) / 361, rel=0.05), "most requests come in the busy minute"


def test_a_rate_beside_a_trace_scales_it(tmp_path: Path) -> None:
    path = busy_and_quiet(tmp_path / "trace.jsonl")
    asis, faster = traffic_of(question(trace=path)), traffic_of(question(trace=path, rate=30.0))
    assert len(faster.requests) / faster.seconds == pytest.approx(30.0, rel=0.02)
    assert [each.isl for each in faster.requests] == [each.isl for each in asis.requests]


def test_a_trace_without_times_comes_at_the_rate_and_one_of_an_unsure_unit_says_it(tmp_path: Path) -> None:
    result = {"input_lens": [100 + n for n in range(200)], "output_lens": [20] * 200}
    path = tmp_path / "vllm.json"
    path.write_text(json.dumps(result))
    with pytest.raises(ConfigError, match=r"has no times \(say with --rate"):
        traffic_of(question(trace=str(path)))
    traffic = traffic_of(question(trace=str(path), rate=5.0))
    assert len(traffic.requests) / traffic.seconds == pytest.approx(5.0, rel=0.02)
    assert any("the trace has no times" in note for note in traffic.notes)
    rows = "".join(f"{n * 0.2:.1f},100,20\n" for n in range(100))
    (tmp_path / "t.csv").write_text(f"timestamp,prompt_tokens,output_tokens\n{rows}")
    traffic = traffic_of(question(trace=str(tmp_path / "t.csv")))
    assert traffic.rate == pytest.approx(5.0, rel=0.05)
    assert any("times are read as seconds" in note for note in traffic.notes)


def test_prefixes_that_come_again_count_half(tmp_path: Path) -> None:
    rows = [(float(n), 5120, 100, [1, 2, 3, 4, 5, 6, 7, 8, 9, 100 + n]) for n in range(200)]
    traffic = traffic_of(question(trace=write_trace(tmp_path / "trace.jsonl", rows)))
    assert traffic.mix.mean(traffic.mix.fresh) / traffic.prompt == pytest.approx(0.55, abs=0.07)
    assert any("from cache" in note for note in traffic.notes)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model": ""}, "no model"),
        ({"gpus": ()}, "no GPU"),
        ({"itl": None}, "needs ttft and itl"),
        ({"prompt": None}, "traffic is not known"),
        ({"rate": None}, "rate is not known"),
        ({"trace": "x", "prompt": "3"}, "without a trace"),
        ({"attainment": 95.0}, "attainment is 95"),
        ({"prices": {"h100": 2.0}}, "h100, which --gpu does not name"),
        ({"prices": {"h200": -2.0}}, "above 0"),
        ({"profiles": {"l40s:1": "x"}}, "no GPU of the plan"),
    ],
)
def test_a_request_that_contradicts_itself_names_its_field(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        question(**fields)  # type: ignore[arg-type]


def test_windows_without_requests_are_no_rate() -> None:
    traffic = traffic_of(question())
    assert np.all(traffic.rates > 0) and np.all(traffic.at(2.0).rates == 2 * traffic.rates)

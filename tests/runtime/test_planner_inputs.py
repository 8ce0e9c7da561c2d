"""What policies are given beside what they see: benchmarks of simulated engines, what describes real ones, profiles."""

import json

import msgspec
import pytest

from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.kernel.errors import ConfigError
from penstock.planner.performance.speed_sources import pick
from penstock_lab.config.described_speeds import inputs_of

SHAPE = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}


def cluster(pool: dict, planner: dict | None = None) -> ClusterSettings:
    told = {"models": {"m": {"pools": {"main": pool}}}, "planner": planner or {}}
    return msgspec.convert(told, ClusterSettings)


def test_a_simulated_engine_measures_itself():
    known = inputs_of(cluster({"engine": "sim"})).of("m")["aggregated"]
    assert pick(known).source == "self-benchmark"


def test_a_real_engine_that_is_described_has_a_roofline_and_says_what_it_lacks(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    timing = {"kind": "roofline", "gpu": "h100", "model": str(tmp_path)}
    pool = {"engine": "vllm", "urls": ["http://127.0.0.1:1"], "sim": {"timing": timing}}
    found = pick(inputs_of(cluster(pool)).of("m")["aggregated"])
    assert found.source == "roofline" and "self-benchmark: vllm measures nothing of itself" in found.passed
    plain = inputs_of(cluster({"engine": "vllm", "urls": ["http://127.0.0.1:1"]})).of("m")["aggregated"]
    assert pick(plain) is None


def test_a_profile_folder_goes_before_a_roofline_and_a_missing_one_is_an_error(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    timing = {"kind": "roofline", "gpu": "h100", "model": str(tmp_path)}
    pool = {"engine": "vllm", "urls": ["http://127.0.0.1:1"], "sim": {"timing": timing}}
    told = {"prefill_isl": [100, 1000], "prefill_ttft": [10.0, 50.0], "prefill_thpt_per_gpu": [10_000, 20_000]}
    (tmp_path / "prefill_raw_data.json").write_text(json.dumps(told))
    settings = cluster(pool, {"classic": {"profile": str(tmp_path)}})
    known = inputs_of(settings).of("m")["aggregated"]
    assert pick(known, role="prefill").source == "profile"
    both = pick(known, role="aggregated")
    assert both.source == "roofline" and "profile: it says nothing of decode" in both.passed
    with pytest.raises(ConfigError, match="has no profile"):
        inputs_of(cluster(pool, {"classic": {"profile": str(tmp_path / "none")}}))


def test_a_warm_up_trace_says_what_it_lacks_and_one_without_times_is_refused(tmp_path, caplog):
    rows = "".join(f"{n * 0.4:.1f},50,5\n" for n in range(30))
    (tmp_path / "t.csv").write_text(f"timestamp,prompt_tokens,output_tokens\n{rows}12,many,5\n")
    forecast = {"classic": {"forecast": {"warm_up_trace": str(tmp_path / "t.csv")}}}
    known = inputs_of(cluster({"engine": "sim"}, forecast))
    assert len(known.traces[""]) == 30
    assert "times are read as seconds" in caplog.text
    assert "has bad rows (1), such as" in caplog.text and "line 32, field prompt_tokens" in caplog.text
    (tmp_path / "t.csv").write_text("prompt_tokens,output_tokens\n5,5\n")
    with pytest.raises(ConfigError, match="has no times, and so no rate"):
        inputs_of(cluster({"engine": "sim"}, forecast))

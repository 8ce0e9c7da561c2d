"""Do aiconfigurator's predictions become a profile that gives them back, and does its absence say what to do?"""

import builtins
import importlib.util
from typing import Any

import msgspec
import pytest

from penstock.kernel.errors import ConfigError
from penstock_lab.config.aiconfigurator_timing import Predictions, predicted_profile, profile_of
from penstock_lab.config.timing_files import load_timing
from penstock_lab.engine.settings import SimSettings, TimingSettings, checked
from penstock_lab.engine.timing.timing_model import timing_of

SETTINGS = TimingSettings(kind="aiconfigurator", model="Qwen/Qwen3-32B", gpu="h200", tensor_parallel_size=2)
installed = pytest.mark.skipif(
    importlib.util.find_spec("aiconfigurator_core") is None, reason="aiconfigurator-core is not installed"
)


def test_a_grid_of_predictions_gives_them_back_in_between() -> None:
    parts = Predictions(
        shared=lambda tokens: 5.0 + 0.02 * tokens,
        prompt=lambda new, past: 0.1 + 1e-6 * new * (past + new / 2),
        decode=lambda seqs, read: 0.2 + 4e-6 * seqs * read,
    )
    timing = timing_of(SETTINGS, 1000, profile_of(parts))
    for seqs, read in ((1, 100), (8, 1500), (60, 700), (200, 3000), (16, 50_000)):
        whole = parts.shared(seqs) + parts.decode(seqs, read)
        assert timing.decode(seqs * read, seqs) == pytest.approx(whole * 1e6, rel=1e-6)
        mixed = parts.shared(512 + seqs) + parts.prompt(512, 8192) + parts.decode(seqs, read)
        assert timing.mixed(512, iter([(8192, 512)]), seqs * read, seqs) == pytest.approx(mixed * 1e6, rel=1e-2)
    assert timing.extrapolated == 0


def test_without_it_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("aiconfigurator_core"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match="pip install aiconfigurator-core"):
        predicted_profile(SETTINGS)


def test_it_needs_a_model_and_a_gpu() -> None:
    with pytest.raises(ConfigError, match=r"timing\.gpu"):
        checked(SimSettings(timing=TimingSettings(kind="aiconfigurator", model="a/b")))
    with pytest.raises(ConfigError, match=r"timing\.model"):
        checked(SimSettings(timing=TimingSettings(kind="aiconfigurator", gpu="h100")))


@installed
def test_its_own_predictions_are_what_the_engine_s_passes_take() -> None:
    from aiconfigurator_core.sdk.engine import EngineHandle

    handle = EngineHandle.compile("Qwen/Qwen3-32B", "h200_sxm", "vllm", tp_size=2, moe_tp_size=2, moe_ep_size=1)
    timing = timing_of(SETTINGS, 1000, load_timing(SETTINGS))
    for seqs, read in ((1, 300), (8, 1500), (60, 700), (200, 3000)):
        theirs = handle.predict_decode_latency(seqs, read) * 1e6
        assert timing.decode(seqs * read, seqs) == pytest.approx(theirs, rel=0.05)
        theirs = handle.mixed_step_latency(2048, seqs, 2048, 2) * 1e6
        assert timing.mixed(2048, iter([(0, 2048)]), 2048 * seqs, seqs) == pytest.approx(theirs, rel=0.05)
    for tokens in (512, 3000, 8192):
        assert timing.prefill(tokens) == pytest.approx(handle.predict_prefill_latency(1, tokens) * 1e6, rel=0.05)


@installed
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"gpu": "h900"}, "no timing of Qwen/Qwen3-32B on 2 h900"),
        ({"weight_dtype": "mxfp4"}, "weight_dtype is mxfp4"),
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype is fp4"),
    ],
)
def test_what_it_has_no_data_on_is_named(fields: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        predicted_profile(msgspec.structs.replace(SETTINGS, **fields))

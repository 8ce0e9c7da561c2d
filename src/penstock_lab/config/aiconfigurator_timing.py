"""Timing predictions of aiconfigurator for a model on a GPU, as the tables of an operator profile.

aiconfigurator is no dependency: ``pip install aiconfigurator-core`` (some 800 MB of measured kernels) where it is
wanted. It is called once, for a grid; passes are then composed like those of any profile, collectives included.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from penstock.kernel.errors import ConfigError
from penstock_lab.engine.settings import TimingSettings
from penstock_lab.engine.timing.weight_types import Dtype

SYSTEMS = {
    "a100": "a100_sxm",
    "h100": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "b300": "b300_sxm",
    "gb200": "gb200",
    "gb300": "gb300",
    "l40s": "l40s",
    "rtxpro6000": "rtx_pro_6000_server",
}
"""aiconfigurator's names of our GPUs. Other names are passed on unchanged."""
ENGINE = "vllm"
"""Kernels that are taken: the simulated engine plans its passes as vLLM does."""
MODES: dict[Dtype, str] = {"bf16": "bfloat16", "fp8": "fp8", "fp4": "nvfp4", "int8": "int8_wo", "int4": "int4_wo"}
KV_MODES: dict[Dtype, str] = {"bf16": "bfloat16", "fp8": "fp8", "int8": "int8"}
TOKENS = [2**power for power in range(18)]
CHUNKS = [2**power for power in range(4, 18)]
PAST = [0, *(2**power for power in range(9, 18))]
SEQUENCES = [2**power for power in range(10)]
READS = [2**power for power in range(4, 18)]


class Predictions(NamedTuple):
    """Milliseconds of the parts of a pass."""

    shared: Callable[[int], float]
    """All parts but attention, for so many tokens."""
    prompt: Callable[[int, int], float]
    """Attention of a prompt's chunk of (new tokens, tokens before)."""
    decode: Callable[[int, int], float]
    """Attention of (sequences, tokens that each reads)."""


def predicted_profile(settings: TimingSettings) -> Mapping[str, Any]:
    """Return the tables that `penstock_lab.engine.timing.operators.OperatorTiming` takes, of the whole model.

    Raises:
        ConfigError: aiconfigurator is not installed, or has no data on this model, GPU, engine and data types.
    Cost: 2 s, of which 0.1 s for 300 predictions.
    """
    return profile_of(_predictions(settings))


def profile_of(predictions: Predictions) -> Mapping[str, Any]:
    """Return the predictions over the grid."""
    prompts = [(0, 0, 0.0), *((new, past, predictions.prompt(new, past)) for new in CHUNKS for past in PAST)]
    decodes = [(0, 0, 0.0), *((seqs, read, predictions.decode(seqs, read)) for seqs in SEQUENCES for read in READS)]
    both = [
        (new, past, seqs, read, 1000.0 * (first + second))
        for new, past, first in prompts
        for seqs, read, second in decodes
        if new or seqs
    ]
    new, past, seqs, read, time = zip(*both, strict=True)
    return {
        "dense": {
            "layer": ["pass"] * len(TOKENS),
            "tokens": TOKENS,
            "time_us": [1000.0 * predictions.shared(tokens) for tokens in TOKENS],
        },
        "per_sequence": {"layer": ["pass"] * 2, "sequences": [1, TOKENS[-1]], "time_us": [0.0, 0.0]},
        "attention": {"prefill_chunk": new, "kv_prefill": past, "n_decode": seqs, "kv_decode": read, "time_us": time},
    }


def _predictions(settings: TimingSettings) -> Predictions:
    try:
        from aiconfigurator_core.sdk.engine import EngineHandle  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise ConfigError(
            "timing.kind is aiconfigurator, which is not installed", hint="pip install aiconfigurator-core"
        ) from error
    tensor, expert = settings.tensor_parallel_size, settings.expert_parallel_size
    system = SYSTEMS.get((settings.gpu or "").lower(), settings.gpu)
    try:
        handle = EngineHandle.compile(
            settings.model,
            system,
            ENGINE,
            tp_size=tensor,
            attention_dp_size=max(1, expert // tensor),
            moe_tp_size=max(1, tensor // expert),
            moe_ep_size=expert,
            gemm_quant_mode=_mode("weight_dtype", settings.weight_dtype, MODES),
            moe_quant_mode=_mode("weight_dtype", settings.weight_dtype, MODES),
            kvcache_quant_mode=_mode("kv_cache_dtype", settings.kv_cache_dtype, KV_MODES),
        )
        handle.predict_decode_latency(1, 1024)
    except ConfigError:
        raise
    except Exception as error:  # its errors have no common base; the operator must know their origin
        raise ConfigError(
            f"aiconfigurator has no timing of {settings.model} on {tensor} {system} with "
            f"{ENGINE}: {type(error).__name__}: {error}",
            hint="take another GPU or data type, or timing.kind roofline",
        ) from error
    parts = handle.mixed_step_breakdown  # (prompt tokens, sequences, prompt length, 2) -> all, shared, prompt, decode
    return Predictions(
        shared=lambda tokens: float(parts(tokens, 0, tokens, 2)[1]),
        prompt=lambda new, past: float(parts(new, 0, past + new, 2, past)[2]),
        decode=lambda seqs, read: float(parts(0, seqs, read, 2)[3]),
    )


def _mode(knob: str, dtype: Dtype | None, modes: Mapping[Dtype, str]) -> str | None:
    if dtype is None:
        return None
    if dtype not in modes:
        raise ConfigError(
            f"timing.{knob} is {dtype}, which aiconfigurator does not have", hint=f"take {', '.join(modes)}"
        )
    return modes[dtype]

"""Shapes of well-known models by name: the fields of their published ``config.json`` that time and memory depend on.

Names are those of Hugging Face without the owner, and case does not count. What a name adds for its tuning
("-Instruct", "-Chat", "-it") or for a data type of its weights ("-FP8", "-NVFP4") is looked at last, so that
``meta-llama/Llama-3.1-8B-Instruct-FP8`` is found too.
"""

import re
from collections.abc import Mapping
from typing import Any

from penstock.kernel.errors import ConfigError

_Config = dict[str, Any]

_TUNED = re.compile(r"-(instruct|chat|it|base|hf|thinking|fp8|nvfp4|fp4|bf16|w4afp8|dynamic|v\d\.\d|\d{4})$")
"""Endings of names that leave the shape as it is."""
_WEIGHTS = {"fp8": {"quant_method": "fp8"}, "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
_FP8: _Config = {"quantization_config": _WEIGHTS["fp8"]}
_MXFP4: _Config = {"quantization_config": {"quant_method": "mxfp4"}}


def _dense(
    kind: str,
    layers: int,
    hidden: int,
    wide: int,
    heads: tuple[int, int],
    vocabulary: int,
    *,
    tied: bool = False,
    **more: Any,
) -> _Config:
    """Return a config: ``wide`` columns of an MLP, ``heads`` of queries and of the KV cache."""
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        **more,
    }


def _experts(config: _Config, experts: int, per_token: int, width: int, **more: Any) -> _Config:
    """Return a config whose layers have experts of ``width`` columns."""
    count = {"num_experts": experts, "num_experts_per_tok": per_token, "moe_intermediate_size": width}
    return {**config, **count, **more}


def _latent(layers: int, hidden: int, wide: int, heads: int, experts: tuple[int, int, int], **more: Any) -> _Config:
    """Return a config with latent attention as DeepSeek-V3 has it; ``experts``: how many, per token, shared."""
    config = _dense("deepseek_v3", layers, hidden, wide, (heads, heads), 129280)
    return {
        **config,
        "n_routed_experts": experts[0],
        "num_experts_per_tok": experts[1],
        "n_shared_experts": experts[2],
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        **more,
    }


_R1 = _latent(61, 7168, 18432, 128, (256, 8, 1), **_FP8)
_OSS: _Config = {"head_dim": 64, "attention_bias": True, "sliding_window": 128}
_QWEN3: _Config = {"head_dim": 128, "attention_bias": False}

MODELS: Mapping[str, _Config] = {
    "Llama-3.1-8B": _dense("llama", 32, 4096, 14336, (32, 8), 128256),
    "Llama-3.1-70B": _dense("llama", 80, 8192, 28672, (64, 8), 128256),
    "Llama-3.3-70B": _dense("llama", 80, 8192, 28672, (64, 8), 128256),
    "Llama-3.1-405B": _dense("llama", 126, 16384, 53248, (128, 8), 128256),
    "Llama-3.2-1B": _dense("llama", 16, 2048, 8192, (32, 8), 128256, tied=True, head_dim=64),
    "Llama-3.2-3B": _dense("llama", 28, 3072, 8192, (24, 8), 128256, tied=True, head_dim=128),
    "Llama-2-7b": _dense("llama", 32, 4096, 11008, (32, 32), 32000),
    "Llama-2-70b": _dense("llama", 80, 8192, 28672, (64, 8), 32000),
    "Mistral-7B-v0.3": _dense("mistral", 32, 4096, 14336, (32, 8), 32768),
    "Mistral-Small-24B": _dense("mistral", 40, 5120, 32768, (32, 8), 131072, head_dim=128),
    "Mixtral-8x7B": _dense("mixtral", 32, 4096, 14336, (32, 8), 32000, num_local_experts=8, num_experts_per_tok=2),
    "Mixtral-8x22B": _dense("mixtral", 56, 6144, 16384, (48, 8), 32768, num_local_experts=8, num_experts_per_tok=2),
    "Phi-3.5-MoE": _dense("phimoe", 32, 4096, 6400, (32, 8), 32064, num_local_experts=16, num_experts_per_tok=2),
    "Phi-4": _dense("phi3", 40, 5120, 17920, (40, 10), 100352),
    "Qwen2.5-7B": _dense("qwen2", 28, 3584, 18944, (28, 4), 152064),
    "Qwen2.5-14B": _dense("qwen2", 48, 5120, 13824, (40, 8), 152064),
    "Qwen2.5-32B": _dense("qwen2", 64, 5120, 27648, (40, 8), 152064),
    "Qwen2.5-72B": _dense("qwen2", 80, 8192, 29568, (64, 8), 152064),
    "Qwen3-0.6B": _dense("qwen3", 28, 1024, 3072, (16, 8), 151936, tied=True, **_QWEN3),
    "Qwen3-1.7B": _dense("qwen3", 28, 2048, 6144, (16, 8), 151936, tied=True, **_QWEN3),
    "Qwen3-4B": _dense("qwen3", 36, 2560, 9728, (32, 8), 151936, tied=True, **_QWEN3),
    "Qwen3-8B": _dense("qwen3", 36, 4096, 12288, (32, 8), 151936, **_QWEN3),
    "Qwen3-14B": _dense("qwen3", 40, 5120, 17408, (40, 8), 151936, **_QWEN3),
    "Qwen3-32B": _dense("qwen3", 64, 5120, 25600, (64, 8), 151936, **_QWEN3),
    "Qwen3-30B-A3B": _experts(_dense("qwen3_moe", 48, 2048, 6144, (32, 4), 151936, **_QWEN3), 128, 8, 768),
    "Qwen3-235B-A22B": _experts(_dense("qwen3_moe", 94, 4096, 12288, (64, 4), 151936, **_QWEN3), 128, 8, 1536),
    "gemma-2-9b": _dense("gemma2", 42, 3584, 14336, (16, 8), 256000, tied=True, head_dim=256, sliding_window=4096),
    "gemma-2-27b": _dense("gemma2", 46, 4608, 36864, (32, 16), 256000, tied=True, head_dim=128, sliding_window=4096),
    "gpt-oss-20b": _dense(
        "gpt_oss", 24, 2880, 2880, (64, 8), 201088, num_local_experts=32, num_experts_per_tok=4,
        layer_types=["sliding_attention", "full_attention"] * 12, **_OSS, **_MXFP4,
    ),
    "gpt-oss-120b": _dense(
        "gpt_oss", 36, 2880, 2880, (64, 8), 201088, num_local_experts=128, num_experts_per_tok=4,
        layer_types=["sliding_attention", "full_attention"] * 18, **_OSS, **_MXFP4,
    ),
    "GLM-4.5": _experts(
        _dense("glm4_moe", 92, 5120, 12288, (96, 8), 151552, head_dim=128, attention_bias=True), 160, 8, 1536,
        n_shared_experts=1, first_k_dense_replace=3,
    ),
    "GLM-4.5-Air": _experts(
        _dense("glm4_moe", 46, 4096, 10944, (96, 8), 151552, head_dim=128, attention_bias=True), 128, 8, 1408,
        n_shared_experts=1, first_k_dense_replace=1,
    ),
    "MiniMax-M2": _experts(
        _dense("minimax_m2", 62, 3072, 1536, (48, 8), 200064, head_dim=128), 256, 8, 1536, **_FP8
    ),
    "DeepSeek-V3": _R1,
    "DeepSeek-V3.1": _R1,
    "DeepSeek-V3.2": {**_R1, "model_type": "deepseek_v32", "index_topk": 2048},
    "DeepSeek-R1": _R1,
    "Kimi-K2.5": _latent(61, 7168, 18432, 64, (384, 8, 1), vocab_size=163840, first_k_dense_replace=1, **_FP8),
    "Kimi-K2": _latent(61, 7168, 18432, 64, (384, 8, 1), vocab_size=163840, first_k_dense_replace=1, **_FP8),
}  # fmt: skip
_BY_NAME = {name.lower(): config for name, config in MODELS.items()}


def known_model(name: str) -> Mapping[str, Any] | None:
    """Return the config of a model by its name, with or without its owner; None where it is not in the table.

    A name that ends in -FP8 or -NVFP4 has its linear layers in that type.
    """
    rest, weights = name.rsplit("/", 1)[-1].lower().removeprefix("meta-"), None
    while True:
        config = _BY_NAME.get(rest)
        if config is not None:
            return config if weights is None else {**config, "quantization_config": _WEIGHTS[weights]}
        ending = _TUNED.search(rest)
        if ending is None:
            return None
        weights = ending.group(1) if ending.group(1) in _WEIGHTS else weights
        rest = rest[: ending.start()]


def model_named(name: str) -> Mapping[str, Any]:
    """Return the config of a model by its name.

    Raises:
        ConfigError: the table has none of that name.
    """
    config = known_model(name)
    if config is None:
        raise ConfigError(
            f"no model {name!r} is known here", hint=f"there are {', '.join(MODELS)}; or name a config.json"
        )
    return config

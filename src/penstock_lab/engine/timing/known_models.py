"""Shapes of well-known models by their repositories: fields of their published ``config.json``.

Names are those of Hugging Face, with or without the owner, and case does not count. What a name adds for its tuning
("-Instruct", "-Chat", "-it") or for a data type of its weights ("-FP8", "-NVFP4", "-AWQ") is looked at last, so that
``RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8`` is found too.
"""

import re
from collections.abc import Mapping
from typing import Any

from penstock.kernel.errors import ConfigError

_Config = dict[str, Any]

_FP8: _Config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
_MXFP4: _Config = {"quantization_config": {"quant_method": "mxfp4"}}
_INT4_EXPERTS: _Config = {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"type": "int", "num_bits": 4}}},
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            "re:.*mlp\\.gate$",
        ],
    }
}
_INT4: _Config = {"quant_method": "gptq", "bits": 4}
_INT8: _Config = {"quant_method": "gptq", "bits": 8}
_WEIGHTS: Mapping[str, _Config] = {
    "fp8": {"quant_method": "fp8"},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "fp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "mxfp4": _MXFP4["quantization_config"],
    "awq": {"quant_method": "awq", "bits": 4},
    "gptq": _INT4,
    "int4": _INT4,
    "w4a16": _INT4,
    "int8": _INT8,
    "w8a16": _INT8,
    "w8a8": _INT8,
    "w4afp8": {"quant_method": "w4afp8"},
}
"""Words of a name that say the data type of its weights; the last of several counts, as in ``GPTQ-Int8``."""
_PLAIN_WORDS = ("bf16", "dynamic", "quantized", "meta")
_TUNED_WORDS = ("instruct", "chat", "it", "base", "hf", "thinking", "exp")
"""Words of a name that leave the shape as it is."""
_VERSION = re.compile(r"v\d\.\d|\d{4}")


def _dense(
    kind: str,
    layers: int,
    hidden: int,
    wide: int,
    heads: tuple[int, int],
    vocabulary: int,
    *,
    context: int,
    tied: bool = False,
    **more: Any,
) -> _Config:
    """Return a config: ``wide`` columns of an MLP, ``heads`` of queries and of the KV cache; ``context`` tokens."""
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
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
    config = _dense("deepseek_v3", layers, hidden, wide, (heads, heads), 129280, context=163840)
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


def _embedder(kind: str, layers: int, hidden: int, wide: int, heads: tuple[int, int], **more: Any) -> _Config:
    """Return a config of a model that makes no tokens."""
    given = {"architectures": [f"{kind}ForSequenceClassification"], **more}
    return _dense("qwen3", layers, hidden, wide, heads, 151669, tied=True, **_QWEN3, **given)


_R1 = _latent(61, 7168, 18432, 128, (256, 8, 1), **_FP8)
_V32: _Config = {"model_type": "deepseek_v32", "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64}
_KIMI: _Config = {"vocab_size": 163840, "first_k_dense_replace": 1}
_OSS: _Config = {"head_dim": 64, "attention_bias": True, "sliding_window": 128, "context": 131072}
_QWEN3: _Config = {"head_dim": 128, "attention_bias": False, "context": 40960}
_LONG: _Config = {**_QWEN3, "context": 262144}
_GEMMA3: _Config = {"tied": True, "context": 131072, "sliding_window": 1024}
_DELTA: _Config = {
    "head_dim": 256,
    "context": 262144,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_XLM: _Config = {
    "model_type": "xlm-roberta",
    "num_hidden_layers": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "vocab_size": 250002,
    "type_vocab_size": 1,
    "max_position_embeddings": 8194,
    "torch_dtype": "float32",
}
_K128: _Config = {"context": 131072}

MODELS: Mapping[str, _Config] = {
    "meta-llama/Llama-3.1-8B": _dense("llama", 32, 4096, 14336, (32, 8), 128256, **_K128),
    "meta-llama/Llama-3.1-70B": _dense("llama", 80, 8192, 28672, (64, 8), 128256, **_K128),
    "meta-llama/Llama-3.1-405B": _dense("llama", 126, 16384, 53248, (128, 8), 128256, **_K128),
    "meta-llama/Llama-3.3-70B-Instruct": _dense("llama", 80, 8192, 28672, (64, 8), 128256, **_K128),
    "meta-llama/Llama-3.2-1B": _dense("llama", 16, 2048, 8192, (32, 8), 128256, tied=True, head_dim=64, **_K128),
    "meta-llama/Llama-3.2-3B": _dense("llama", 28, 3072, 8192, (24, 8), 128256, tied=True, head_dim=128, **_K128),
    "meta-llama/Llama-2-7b-hf": _dense("llama", 32, 4096, 11008, (32, 32), 32000, context=4096),
    "meta-llama/Llama-2-70b-hf": _dense("llama", 80, 8192, 28672, (64, 8), 32000, context=4096),
    "mistralai/Mistral-7B-v0.3": _dense("mistral", 32, 4096, 14336, (32, 8), 32768, context=32768),
    "mistralai/Mistral-Small-24B-Instruct-2501": _dense(
        "mistral", 40, 5120, 32768, (32, 8), 131072, head_dim=128, context=32768
    ),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": _dense(
        "mixtral", 32, 4096, 14336, (32, 8), 32000, num_local_experts=8, num_experts_per_tok=2, context=32768
    ),
    "mistralai/Mixtral-8x22B-Instruct-v0.1": _dense(
        "mixtral", 56, 6144, 16384, (48, 8), 32768, num_local_experts=8, num_experts_per_tok=2, context=65536
    ),
    "microsoft/Phi-3.5-MoE-instruct": _dense(
        "phimoe", 32, 4096, 6400, (32, 8), 32064, num_local_experts=16, num_experts_per_tok=2, **_K128
    ),
    "microsoft/phi-4": _dense("phi3", 40, 5120, 17920, (40, 10), 100352, context=16384),
    "Qwen/Qwen2.5-7B": _dense("qwen2", 28, 3584, 18944, (28, 4), 152064, **_K128),
    "Qwen/Qwen2.5-14B": _dense("qwen2", 48, 5120, 13824, (40, 8), 152064, **_K128),
    "Qwen/Qwen2.5-32B": _dense("qwen2", 64, 5120, 27648, (40, 8), 152064, **_K128),
    "Qwen/Qwen2.5-72B": _dense("qwen2", 80, 8192, 29568, (64, 8), 152064, **_K128),
    "Qwen/Qwen2.5-7B-Instruct": _dense("qwen2", 28, 3584, 18944, (28, 4), 152064, context=32768),
    "Qwen/Qwen2.5-14B-Instruct": _dense("qwen2", 48, 5120, 13824, (40, 8), 152064, context=32768),
    "Qwen/Qwen2.5-32B-Instruct": _dense("qwen2", 64, 5120, 27648, (40, 8), 152064, context=32768),
    "Qwen/Qwen2.5-72B-Instruct": _dense("qwen2", 80, 8192, 29568, (64, 8), 152064, context=32768),
    "Qwen/Qwen3-0.6B": _dense("qwen3", 28, 1024, 3072, (16, 8), 151936, tied=True, **_QWEN3),
    "Qwen/Qwen3-1.7B": _dense("qwen3", 28, 2048, 6144, (16, 8), 151936, tied=True, **_QWEN3),
    "Qwen/Qwen3-4B": _dense("qwen3", 36, 2560, 9728, (32, 8), 151936, tied=True, **_QWEN3),
    "Qwen/Qwen3-4B-Instruct-2507": _dense("qwen3", 36, 2560, 9728, (32, 8), 151936, tied=True, **_LONG),
    "Qwen/Qwen3-8B": _dense("qwen3", 36, 4096, 12288, (32, 8), 151936, **_QWEN3),
    "Qwen/Qwen3-14B": _dense("qwen3", 40, 5120, 17408, (40, 8), 151936, **_QWEN3),
    "Qwen/Qwen3-32B": _dense("qwen3", 64, 5120, 25600, (64, 8), 151936, **_QWEN3),
    "Qwen/Qwen3-30B-A3B": _experts(_dense("qwen3_moe", 48, 2048, 6144, (32, 4), 151936, **_QWEN3), 128, 8, 768),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": _experts(
        _dense("qwen3_moe", 48, 2048, 6144, (32, 4), 151936, **_LONG), 128, 8, 768
    ),
    "Qwen/Qwen3-235B-A22B": _experts(_dense("qwen3_moe", 94, 4096, 12288, (64, 4), 151936, **_QWEN3), 128, 8, 1536),
    "Qwen/Qwen3-235B-A22B-Instruct-2507": _experts(
        _dense("qwen3_moe", 94, 4096, 12288, (64, 4), 151936, **_LONG), 128, 8, 1536
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": _experts(
        _dense("qwen3_next", 48, 2048, 5120, (16, 2), 151936, **_DELTA), 512, 10, 512,
        shared_expert_intermediate_size=512, decoder_sparse_step=1,
    ),
    "Qwen/Qwen3.5-35B-A3B": _experts(
        _dense("qwen3_5_moe_text", 40, 2048, 0, (16, 2), 248320, **_DELTA, mamba_ssm_dtype="float32"), 256, 8, 512,
        shared_expert_intermediate_size=512,
    ),
    "Qwen/Qwen3-Embedding-0.6B": _embedder("Qwen3", 28, 1024, 3072, (16, 8)),
    "Qwen/Qwen3-Embedding-4B": _embedder("Qwen3", 36, 2560, 9728, (32, 8)),
    "Qwen/Qwen3-Embedding-8B": _embedder("Qwen3", 36, 4096, 12288, (32, 8)),
    "Qwen/Qwen3-Reranker-0.6B": _embedder("Qwen3", 28, 1024, 3072, (16, 8)),
    "Qwen/Qwen3-Reranker-4B": _embedder("Qwen3", 36, 2560, 9728, (32, 8)),
    "Qwen/Qwen3-Reranker-8B": _embedder("Qwen3", 36, 4096, 12288, (32, 8)),
    "BAAI/bge-m3": {**_XLM, "architectures": ["XLMRobertaModel"]},
    "BAAI/bge-reranker-v2-m3": {**_XLM, "architectures": ["XLMRobertaForSequenceClassification"]},
    "google/gemma-2-9b": _dense(
        "gemma2", 42, 3584, 14336, (16, 8), 256000, tied=True, head_dim=256, sliding_window=4096, context=8192
    ),
    "google/gemma-2-27b": _dense(
        "gemma2", 46, 4608, 36864, (32, 16), 256000, tied=True, head_dim=128, sliding_window=4096, context=8192
    ),
    "google/gemma-3-4b-it": _dense("gemma3_text", 34, 2560, 10240, (8, 4), 262208, head_dim=256, **_GEMMA3),
    "google/gemma-3-12b-it": _dense("gemma3_text", 48, 3840, 15360, (16, 8), 262208, head_dim=256, **_GEMMA3),
    "google/gemma-3-27b-it": _dense("gemma3_text", 62, 5376, 21504, (32, 16), 262208, head_dim=128, **_GEMMA3),
    "openai/gpt-oss-20b": _dense(
        "gpt_oss", 24, 2880, 2880, (64, 8), 201088, num_local_experts=32, num_experts_per_tok=4,
        layer_types=["sliding_attention", "full_attention"] * 12, **_OSS, **_MXFP4,
    ),
    "openai/gpt-oss-120b": _dense(
        "gpt_oss", 36, 2880, 2880, (64, 8), 201088, num_local_experts=128, num_experts_per_tok=4,
        layer_types=["sliding_attention", "full_attention"] * 18, **_OSS, **_MXFP4,
    ),
    "zai-org/GLM-4.5": _experts(
        _dense("glm4_moe", 92, 5120, 12288, (96, 8), 151552, head_dim=128, attention_bias=True, **_K128), 160, 8, 1536,
        n_shared_experts=1, first_k_dense_replace=3,
    ),
    "zai-org/GLM-4.5-Air": _experts(
        _dense("glm4_moe", 46, 4096, 10944, (96, 8), 151552, head_dim=128, attention_bias=True, **_K128), 128, 8, 1408,
        n_shared_experts=1, first_k_dense_replace=1,
    ),
    "MiniMaxAI/MiniMax-M2": _experts(
        _dense("minimax_m2", 62, 3072, 1536, (48, 8), 200064, head_dim=128, context=196608), 256, 8, 1536, **_FP8
    ),
    "deepseek-ai/DeepSeek-V3": _R1,
    "deepseek-ai/DeepSeek-V3.1": _R1,
    "deepseek-ai/DeepSeek-V3.2": {**_R1, **_V32},
    "deepseek-ai/DeepSeek-R1": _R1,
    "moonshotai/Kimi-K2-Instruct": _latent(
        61, 7168, 18432, 64, (384, 8, 1), max_position_embeddings=131072, **_KIMI, **_FP8
    ),
    "moonshotai/Kimi-K2-Instruct-0905": _latent(
        61, 7168, 18432, 64, (384, 8, 1), max_position_embeddings=262144, **_KIMI, **_FP8
    ),
    "moonshotai/Kimi-K2-Thinking": _latent(
        61, 7168, 18432, 64, (384, 8, 1), max_position_embeddings=262144, **_KIMI, **_INT4_EXPERTS
    ),
    "moonshotai/Kimi-K2.5": _latent(
        61, 7168, 18432, 64, (384, 8, 1), max_position_embeddings=262144, **_KIMI, **_INT4_EXPERTS
    ),
}  # fmt: skip
"""By repository, each in the precision that its owner publishes it in."""
_OWNERS_TOO: Mapping[str, tuple[str, ...]] = {
    "Qwen": ("fp8", "awq", "gptq", "int4", "int8"),
    "zai-org": ("fp8",),
}
"""Data types in which owners publish their models again, under names with that ending."""


def known_model(name: str) -> Mapping[str, Any] | None:
    """Return the config of a model by its name, with or without its owner; None where it is not in the table.

    A name with a word such as FP8, NVFP4 or AWQ has its linear layers in that type.
    """
    repository = _repository_for(name)
    if repository is None:
        return None
    weights = _weights(name)
    config = MODELS[repository]
    if weights == "fp8" and repository.startswith("Qwen/"):
        return {**config, **_FP8}  # of others it is a scale per row
    return config if weights is None else {**config, "quantization_config": _WEIGHTS[weights]}


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


def repository_of(name: str) -> str:
    """Return the whole name under which engines find a model: with its owner, where it is of the table.

    Raises:
        ConfigError: its owner publishes it in another data type only, so that somebody else's is meant.
    """
    found = _repository_for(name)
    if "/" in name or found is None:
        return name
    owner, _, own = found.partition("/")
    weights = _weights(name)
    if weights is not None and weights not in _OWNERS_TOO.get(owner, ()):
        raise ConfigError(
            f"{owner} is not known to publish {own} as {name}", hint=f"give the repository whole, such as OWNER/{name}"
        )
    return found if weights is None and _KEYS.get(name.lower()) == found else f"{owner}/{name}"


def _words_of_name(name: str, left_out: tuple[str, ...] = (), *, versions: bool = True) -> str:
    words = name.rsplit("/", 1)[-1].lower().replace("quantized.", "quantized-").split("-")
    kept = [word for word in words if word not in left_out and (versions or not _VERSION.fullmatch(word))]
    return "-".join(kept)


def _weights(name: str) -> str | None:
    """Return the word of a name that says its data type, where that is none of the model's own name."""
    own = _repository_for(name)
    words = [word for word in _words_of_name(name).split("-") if word in _WEIGHTS]
    return words[-1] if words and own is not None and words[-1] not in _words_of_name(own).split("-") else None


_LEFT_OUT = (
    ((), True),
    (_PLAIN_WORDS, True),
    ((*_WEIGHTS, *_PLAIN_WORDS), True),
    ((*_WEIGHTS, *_PLAIN_WORDS, *_TUNED_WORDS), True),
    ((*_WEIGHTS, *_PLAIN_WORDS, *_TUNED_WORDS), False),
)
"""What of a name is left out before it is looked up, one after another."""
_KEYS: dict[str, str] = {}
for _left, _kept in _LEFT_OUT:
    for _repository in MODELS:
        _KEYS.setdefault(_words_of_name(_repository, _left, versions=_kept), _repository)


def _repository_for(name: str) -> str | None:
    """Return the repository of a name."""
    keys = (_words_of_name(name, left, versions=versions) for left, versions in _LEFT_OUT)
    return next((_KEYS[key] for key in keys if key in _KEYS), None)

"""Which models do tests compute with? Their published dimensions, and a tiny one with windows and experts."""

from typing import Any

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LLAMA_70B = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
QWEN3_32B = {
    **LLAMA_8B,
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "head_dim": 128,
    "vocab_size": 151936,
    "use_sliding_window": False,
    "sliding_window": None,
}
QWEN2_7B = {
    **LLAMA_8B,
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "use_sliding_window": False,
    "sliding_window": 131072,
}
MISTRAL_7B = {
    **LLAMA_8B,
    "model_type": "mistral",
    "vocab_size": 32000,
    "sliding_window": 4096,
}
GEMMA2_9B = {
    "model_type": "gemma2",
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "num_hidden_layers": 42,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "vocab_size": 256000,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
}
MIXTRAL_8X7B = {
    **LLAMA_8B,
    "model_type": "mixtral",
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
QWEN3_30B_A3B = {
    **QWEN3_32B,
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8"},
}
GPT_OSS_120B = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "attention_bias": True,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "mxfp4"},
}
TINY = {
    **GPT_OSS_120B,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 500,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
TINY_DENSE = {
    **LLAMA_8B,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 500,
}
SLOW = {
    "name": "slow",
    "bf16_tflops": 0.00005,
    "memory_gib": 1.0,
    "memory_tb_per_s": 0.00002,
    "link_gb_per_s": 0.1,
    "network_gb_per_s": 0.05,
}
"""A GPU so slow that every term of a tiny model's pass is seen."""


def profile(chunks: tuple[int, ...] = (0, 8, 32), seqs: tuple[int, ...] = (0, 1, 4, 8)) -> dict[str, Any]:
    """Return a small profile whose attention is no plane: lines between its points differ from the formula."""
    reads = (0, 16, 64, 256)
    attention: dict[str, list[float]] = {
        name: [] for name in ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
    }
    for chunk in chunks:
        for past in (0, 16, 128) if chunk else (0,):
            for count in seqs:
                for read in reads[1:] if count else (0,):
                    if not chunk and not count:
                        continue
                    time = 3.0 + chunk * (past + chunk) / 40 + count**0.9 * read / 9 + count / 3
                    for name, value in zip(attention, (chunk, past, count, read, time), strict=True):
                        attention[name].append(float(value))
    tokens = (1, 4, 16, 64)
    operators = {"embedding": 2.0, "layernorm": 1.0, "qkv_proj": 5.0, "down_proj": 9.0, "final_layernorm": 1.5}
    return {
        "model": TINY_DENSE,
        "dense": {
            "layer": [name for name in operators for _ in tokens],
            "tokens": [float(count) for _ in operators for count in tokens],
            "time_us": [base + count * base / 20 for base in operators.values() for count in tokens],
        },
        "per_sequence": {
            "layer": ["lm_head"] * 3 + ["sampler"] * 3,
            "sequences": [1.0, 4.0, 16.0] * 2,
            "time_us": [700.0, 710.0, 760.0, 20.0, 22.0, 30.0],
        },
        "attention": attention,
    }


def profile_with_experts() -> dict[str, Any]:
    """Return a small profile of the tiny model with experts: no layer has an MLP of its own."""
    rows = [(tokens, touched) for tokens in (1, 4, 16, 64) for touched in (2, 4, 8) if touched <= 2 * tokens]
    return {
        **profile(),
        "model": TINY,
        "moe": {
            "tokens": [float(tokens) for tokens, _ in rows],
            "activated_experts": [float(touched) for _, touched in rows],
            "time_us": [10.0 + 6.0 * touched + 0.5 * tokens for tokens, touched in rows],
        },
    }

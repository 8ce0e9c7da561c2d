"""Does a config.json become the parameters that its publishers count, and does a bad one name its field?"""

import pytest

from penstock.kernel.errors import ConfigError
from penstock_lab.engine.timing.known_models import MODELS, known_model, model_named, repository_of
from penstock_lab.engine.timing.model_shape import GATED, shape_of
from penstock_lab.engine.timing.weight_types import BYTES
from tests.lab.engine.models import (
    DEEPSEEK_V3,
    GEMMA2_9B,
    GPT_OSS_120B,
    LLAMA_8B,
    LLAMA_70B,
    MISTRAL_7B,
    MIXTRAL_8X7B,
    QWEN2_7B,
    QWEN3_30B_A3B,
    QWEN3_32B,
)


@pytest.mark.parametrize(
    ("config", "params", "active"),
    [
        (LLAMA_8B, 8_030_261_248, 8_030_261_248),
        (LLAMA_70B, 70_553_706_496, 70_553_706_496),
        (QWEN2_7B, 7_615_616_512, 7_615_616_512),
        (QWEN3_32B, 32_762_123_264, 32_762_123_264),
        (MISTRAL_7B, 7_241_732_096, 7_241_732_096),
        (GEMMA2_9B, 9_241_705_984, 9_241_705_984),
        (MIXTRAL_8X7B, 46_702_792_704, 12_879_925_248),
        (QWEN3_30B_A3B, 30_532_122_624, 3_353_032_704),
        (GPT_OSS_120B, 116_829_156_672, 5_711_982_912),
        (DEEPSEEK_V3, 671_026_419_200, 37_552_297_472),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_parameters_are_those_of_the_published_weights(config: dict, params: int, active: int) -> None:
    """The totals are the sums of the safetensors indexes; the active ones are 12.9e9, 3.3e9, 5.7e9 and 37e9."""
    shape = shape_of(config)
    assert (shape.params, shape.params_active) == (params, active)


def test_a_token_takes_what_its_heads_take_and_a_latent_cache_much_less() -> None:
    assert shape_of(LLAMA_8B).kv_bytes("bf16") == 2 * 32 * 8 * 128 * 2
    assert shape_of(LLAMA_8B).kv_bytes("fp8") == 2 * 32 * 8 * 128
    assert shape_of(DEEPSEEK_V3).kv_bytes("bf16") == 61 * (512 + 64) * 2
    assert shape_of(DEEPSEEK_V3).kv_heads == 1


def test_a_latent_cache_is_read_with_more_operations_than_its_prompts_take() -> None:
    shape = shape_of(DEEPSEEK_V3)
    assert shape.pair_flops == 2 * 128 * (192 + 128)
    assert shape.read_flops == 2 * 128 * (2 * 512 + 64)


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (LLAMA_8B, 0),
        (MIXTRAL_8X7B, 32),
        (QWEN3_30B_A3B, 48),
        ({**QWEN3_30B_A3B, "decoder_sparse_step": 2}, 24),
        ({**QWEN3_30B_A3B, "mlp_only_layers": [0, 1, 47]}, 45),
        (DEEPSEEK_V3, 58),
        ({**DEEPSEEK_V3, "moe_layer_freq": 2}, 29),
    ],
    ids=str,
)
def test_layers_with_experts_are_counted(config: dict, layers: int) -> None:
    shape = shape_of(config)
    assert shape.moe_layers == layers
    assert (shape.params > shape.params_active) == (layers > 0)


@pytest.mark.parametrize(
    ("config", "window", "layers"),
    [
        (LLAMA_8B, None, 0),
        (QWEN3_32B, None, 0),
        (QWEN2_7B, None, 0),  # it names a window and does not use it
        (MISTRAL_7B, 4096, 32),
        (GEMMA2_9B, 4096, 21),
        (GPT_OSS_120B, 128, 18),
        ({**GEMMA2_9B, "model_type": "gemma3_text", "sliding_window_pattern": 6}, 4096, 35),
        ({**QWEN2_7B, "use_sliding_window": True, "max_window_layers": 20}, 131072, 8),
    ],
    ids=str,
)
def test_layers_with_a_window_are_counted(config: dict, window: int | None, layers: int) -> None:
    shape = shape_of(config)
    assert (shape.window, shape.window_layers) == (window, layers)


@pytest.mark.parametrize(
    ("given", "linear", "expert"),
    [
        (None, "bf16", "bf16"),
        ({"quant_method": "fp8"}, "fp8", "fp8"),
        ({"quant_method": "mxfp4"}, "bf16", "mxfp4"),
        ({"quant_method": "awq", "bits": 4}, "int4", "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8", "int8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "fp4", "fp4"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 8}}},
            },
            "fp8",
            "fp8",
        ),
    ],
)
def test_quantised_weights_are_read_from_the_config(given: dict | None, linear: str, expert: str) -> None:
    shape = shape_of({**MIXTRAL_8X7B, "quantization_config": given})
    assert (shape.linear_dtype, shape.expert_dtype, shape.dtype) == (linear, expert, "bf16")


def test_weights_take_their_bytes() -> None:
    assert shape_of(LLAMA_8B).weight_bytes == 2 * 8_030_261_248
    shape = shape_of(DEEPSEEK_V3)
    plain = 2 * 129280 * 7168
    assert shape.weight_bytes == pytest.approx((shape.params - plain) + 2 * plain)


def test_the_text_part_of_a_multimodal_config_counts() -> None:
    text = {**GEMMA2_9B, "model_type": "gemma3_text"}
    del text["torch_dtype"]
    config = {"model_type": "gemma3", "torch_dtype": "float32", "text_config": text}
    assert shape_of(config).dtype == "fp32"
    assert shape_of(config).layers == 42


def test_kinds_with_the_layers_of_another_are_read_as_that() -> None:
    assert shape_of({**QWEN3_32B, "model_type": "qwen3_vl_text"}).params == shape_of(QWEN3_32B).params
    kimi = {**DEEPSEEK_V3, "model_type": "kimi_k2", "n_routed_experts": 384, "num_attention_heads": 64}
    kimi |= {"num_key_value_heads": 64, "first_k_dense_replace": 1, "vocab_size": 163840}
    assert shape_of(kimi).params == pytest.approx(1.026e12, rel=1e-3)


HYBRID = {"hidden_size": 256, "vocab_size": 1000, "num_hidden_layers": 8, "num_attention_heads": 4}
HYBRID |= {"num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512}
DELTA = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
DELTA |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
SHARED = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SHARED |= {"shared_expert_intermediate_size": 64}
MAMBA = {"ssm_state_size": 32, "mamba_num_heads": 8, "mamba_head_dim": 64, "n_groups": 2, "conv_kernel": 4}
MAMBA |= {"n_routed_experts": 8, "moe_intermediate_size": 128, "moe_shared_expert_intermediate_size": 256}
MAMBA |= {"num_experts_per_tok": 2, "hybrid_override_pattern": "MEM*-ME*"}
SPARSE = {"index_topk": 64, "index_head_dim": 32, "index_n_heads": 4}
SMALL_LATENT = {
    "moe_intermediate_size": 64, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 2, "kv_lora_rank": 64, "q_lora_rank": 96, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "num_hidden_layers": 5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "fields", "params"),
    [
        ("qwen3_next", {**DELTA, **SHARED, "decoder_sparse_step": 1}, 9_370_400),
        ("qwen3_5_text", DELTA, 5_796_640),
        ("qwen3_5_moe_text", {**DELTA, **SHARED}, 9_370_400),
        ("nemotron_h", MAMBA, 3_779_784 + 16),
        ("nemotron_h", {**MAMBA, "moe_latent_size": 64}, 3_058_888 + 16),
        ("deepseek_v32", {**SMALL_LATENT, **SPARSE}, 3_306_336 + 24),
        ("glm_moe_dsa", {**SMALL_LATENT, **SPARSE}, 3_306_336 + 24),
    ],
)
def test_hybrid_and_sparse_kinds_have_the_parameters_of_their_classes(kind: str, fields: dict, params: int) -> None:
    """As transformers 5.19 builds them; a router's corrections are no parameters there."""
    assert shape_of({"model_type": kind, "tie_word_embeddings": False, **HYBRID, **fields}).params == params


def test_layers_of_hybrids_are_told_apart() -> None:
    next_, nemotron = (
        shape_of({"model_type": kind, **HYBRID, **fields})
        for kind, fields in (("qwen3_next", {**DELTA, **SHARED}), ("nemotron_h", MAMBA))
    )
    assert (next_.attention_layers, next_.layers, next_.sublayers, next_.moe_layers) == (2, 8, 16, 8)
    assert next_.state_bytes == 6 * (3 * (2 * 4 * 32 + 8 * 32) + 8 * 32 * 32) * 2
    assert (nemotron.attention_layers, nemotron.sublayers, nemotron.moe_layers) == (2, 8, 2)
    assert nemotron.state_bytes == 3 * (3 * (512 + 2 * 2 * 32) * 2 + 512 * 32 * 4), "its memory is in fp32"
    every = shape_of({"model_type": "qwen3_next", **HYBRID, **DELTA, **SHARED, "full_attention_interval": 2})
    assert every.attention_layers == 4
    named = {**MAMBA, "hybrid_override_pattern": None, "layers_block_type": ["mamba", "moe", "attention", "mlp"] * 2}
    assert shape_of({"model_type": "nemotron_h", **HYBRID, **named}).attention_layers == 2


def test_a_nested_config_has_what_its_class_has() -> None:
    """The published config of google/gemma-3-4b-it says no more than this of its language model."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    shape = shape_of({"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text})
    assert shape.params == 3_880_263_168 == shape_of(model_named("google/gemma-3-4b-it")).params
    assert (shape.heads, shape.kv_heads, shape.window, shape.window_layers) == (8, 4, 1024, 29)
    assert shape.context == 131_072, "its length has the factor of the rope in it"


@pytest.mark.parametrize("place", ["text_config", "llm_config", "language_config"])
def test_language_models_are_found_wherever_multimodal_configs_have_them(place: str) -> None:
    inner = {**QWEN2_7B, "architectures": ["Qwen2ForCausalLM"]}
    config = {"model_type": "internvl_chat", "architectures": ["InternVLChatModel"], "vision_config": {}, place: inner}
    shape = shape_of(config)
    assert shape.params == shape_of(QWEN2_7B).params and shape.generates
    assert shape_of({"model_type": "qwen2_5_omni", "thinker_config": {place: QWEN2_7B}}).params == shape.params


def test_flat_configs_of_multimodal_models_are_read_as_they_are() -> None:
    for kind in ("qwen2_vl", "qwen2_5_vl"):
        assert shape_of({**QWEN2_7B, "model_type": kind, "vision_config": {}}).params == shape_of(QWEN2_7B).params


@pytest.mark.parametrize(
    ("change", "context"),
    [
        ({}, None),
        ({"max_position_embeddings": 4096}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131072),
        ({"max_position_embeddings": 40960, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 40960),
        ({"max_position_embeddings": 32768, "rope_parameters": {"rope_type": "default"}}, 32768),
        ({"max_position_embeddings": 4096, "model_max_length": 2048}, 4096),
    ],
)
def test_the_length_that_a_model_is_made_for_is_vllms(change: dict, context: int | None) -> None:
    assert shape_of({**LLAMA_8B, **change}).context == context


def test_models_that_make_no_tokens_are_known() -> None:
    encoder = {"model_type": "bert", "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    encoder |= {"vocab_size": 1000, "num_hidden_layers": 3, "max_position_embeddings": 512, "type_vocab_size": 2}
    shape = shape_of({**encoder, "tokenizer": None, "model_max_length": 256})
    assert shape.params == 2_035_200 - 256 * 257 + 256, "without the pooler, as transformers counts it"
    assert (shape.generates, shape.causal, shape.head, shape.context) == (False, False, 0, 256)
    assert shape_of({**LLAMA_8B}).generates and not shape_of({**LLAMA_8B, "sentence_transformers": True}).generates
    for architecture in ("LlamaForSequenceClassification", "LlamaModel", "Qwen2ForRewardModel"):
        assert not shape_of({**LLAMA_8B, "architectures": [architecture]}).generates
    assert shape_of({**LLAMA_8B, "architectures": ["LlamaForCausalLM"]}).generates


EXPERTS_ONLY = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"type": "int", "num_bits": 4}}},
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head", "model.layers.*.self_attn*"]}


@pytest.mark.parametrize(
    ("given", "attention", "mlp", "expert"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", "fp8", "fp8"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, "bf16", "bf16", "mxfp4"),
        (EXPERTS_ONLY, "bf16", "bf16", "int4"),
        (NVFP4, "bf16", "fp4", "fp4"),
        ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["self_attn"]}, "bf16", "int4", "int4"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*self_attn.*": {}}}, "bf16", "int4", "int4"),
        ({"quant_method": "w4afp8"}, "fp8", "fp8", "int4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4", "int4", "int4"),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {
                    "model.layers.*.mlp.experts": {"quant_algo": "NVFP4"},
                    "model.layers.*.mlp.gate_proj": {"quant_algo": "FP8"},
                    "model.layers.*.mlp.up_proj": {"quant_algo": "FP8"},
                    "model.layers.*.mlp.down_proj": {"quant_algo": "FP8"},
                },
            },
            "bf16",
            "fp8",
            "fp4",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {"targets": ["re:.*self_attn.*"], "weights": {"type": "float", "num_bits": 8}},
                    "group_1": {"targets": ["re:.*mlp.*"], "weights": {"type": "float", "num_bits": 4}},
                },
            },
            "fp8",
            "fp4",
            "fp4",
        ),
    ],
)
def test_what_a_checkpoint_leaves_as_it_was_counts_as_that(given: dict, attention: str, mlp: str, expert: str) -> None:
    small = {"model_type": "deepseek_v3", **HYBRID, **SMALL_LATENT, "n_shared_experts": 0}
    shape = shape_of({**small, "quantization_config": given})
    plain = shape_of(small)
    totals = {each.dtype: each.params for each in shape.linear}
    assert sum(totals.values()) == plain.linear_params and shape.expert_dtype == expert
    dense = 3 * 256 * 512 * 2  # two layers without experts
    expected = {attention: plain.linear_params - dense}
    expected[mlp] = expected.get(mlp, 0) + dense
    # Routers and norms go one way or the other.
    assert all(totals[dtype] == pytest.approx(params, rel=0.06) for dtype, params in expected.items())
    assert shape.weight_bytes < plain.weight_bytes


def test_layers_that_are_left_out_one_by_one_are_counted_one_by_one() -> None:
    names = [f"model.layers.{layer}.mlp.{each}_proj" for layer in range(8) for each in ("gate", "up", "down")]
    given = {"quant_method": "fp8", "modules_to_not_convert": names}
    shape = shape_of({**LLAMA_8B, "quantization_config": given})
    totals = {each.dtype: each.params for each in shape.linear}
    assert totals["bf16"] == pytest.approx(8 * 3 * 4096 * 14336, rel=1e-3)
    assert shape.linear_dtype == "fp8"


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4"}}, "fp4"),
        ({**EXPERTS_ONLY, "kv_cache_scheme": {"type": "float", "num_bits": 8}}, "fp8"),
        (EXPERTS_ONLY, "bf16"),
    ],
)
def test_the_type_of_the_cache_is_what_the_checkpoint_has_scales_for(given: dict, dtype: str) -> None:
    shape = shape_of({**DEEPSEEK_V3, "quantization_config": given})
    assert shape.kv_dtype == dtype and shape.kv_bytes() == 61 * 576 * BYTES[dtype]


def test_known_models_have_their_owner_their_precision_and_their_length() -> None:
    for name in MODELS:
        shape = shape_of(model_named(name), name)
        assert "/" in name and shape.context and known_model(name.split("/")[1]) == known_model(name)
    assert shape_of(model_named("Llama-2-7b")).context == 4096
    assert (
        shape_of(model_named("Qwen3-4B-Instruct-2507")).context == 262_144 != shape_of(model_named("Qwen3-4B")).context
    )
    assert (
        shape_of(model_named("Kimi-K2.5")).expert_dtype == "int4"
        and shape_of(model_named("Kimi-K2")).expert_dtype == "fp8"
    )
    published = {"Kimi-K2-Thinking": 594e9, "gpt-oss-120b": 65e9, "Qwen3-Next-80B-A3B-Instruct": 159e9}
    for name, size in published.items():
        assert shape_of(model_named(name)).weight_bytes == pytest.approx(size, rel=0.06)


@pytest.mark.parametrize(
    ("name", "repository"),
    [
        ("Qwen3-8B", "Qwen/Qwen3-8B"),
        ("qwen3-8b", "Qwen/Qwen3-8B"),
        ("Qwen3-32B-FP8", "Qwen/Qwen3-32B-FP8"),
        ("Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("Llama-3.3-70B", "meta-llama/Llama-3.3-70B-Instruct"),
        ("Mixtral-8x7B", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
        ("DeepSeek-R1-0528", "deepseek-ai/DeepSeek-R1-0528"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16"),
        ("mine/anything", "mine/anything"),
    ],
)
def test_a_name_becomes_the_repository_that_engines_find(name: str, repository: str) -> None:
    assert repository_of(name) == repository


def test_a_data_type_that_the_owner_does_not_publish_asks_for_the_whole_name() -> None:
    with pytest.raises(ConfigError, match=r"meta-llama is not known.*OWNER/Llama-3.1-8B-FP8"):
        repository_of("Llama-3.1-8B-FP8")
    assert known_model("Llama-3.1-8B-FP8"), "its shape is known all the same"


@pytest.mark.parametrize("field", ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"])
def test_what_is_absent_or_no_count_is_named(field: str) -> None:
    config = {key: value for key, value in LLAMA_8B.items() if key != field}
    with pytest.raises(ConfigError, match=f"llama/config.json: {field} is absent"):
        shape_of(config, "llama/config.json")
    for value in (0, -3, 1.5, "many", True, float("nan")):
        with pytest.raises(ConfigError, match=field):
            shape_of({**LLAMA_8B, field: value})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "llama"),
        ({"model_type": None}, "model_type is absent"),
        ({"num_key_value_heads": 5}, "num_key_value_heads is 5"),
        ({"hidden_size": 4100}, "head_dim is absent"),
        ({"torch_dtype": "posit"}, "torch_dtype is 'posit'"),
        ({"quantization_config": {"quant_method": "magic"}}, "weight_dtype"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "config_groups"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP3"}}, "modelopt FP3"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}}, "quantized_layers"),
        ({"quantization_config": {"quant_method": "fp8", "kv_cache_quant_algo": "INT3"}}, "INT3"),
        ({"model_type": "nemotron_h"}, "hybrid_override_pattern is absent"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "MX"}, "hybrid_override_pattern is 'MX'"),
        ({"layer_types": ["full_attention"], "sliding_window": 9}, "layer_types is"),
        ({"model_type": "deepseek_v4"}, "deepseek_v4"),
        ({"quantization_config": "fp8"}, "quantization_config is 'fp8'"),
        ({"model_type": "mixtral", "num_local_experts": 8}, "experts_per_token is absent"),
        ({"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
        ({"model_type": "deepseek_v3"}, "kv_lora_rank is absent"),
    ],
)
def test_a_config_that_is_not_understood_says_why(change: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        shape_of({**LLAMA_8B, **change})


def test_known_kinds_are_told() -> None:
    with pytest.raises(ConfigError) as caught:
        shape_of({"model_type": "rwkv"})
    assert caught.value.hint is not None and all(kind in caught.value.hint for kind in GATED)

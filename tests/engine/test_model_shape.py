"""Does a config.json become the parameters that its publishers count, and does a bad one name its field?"""

import pytest

from penstock.engine.timing.model_shape import GATED, shape_of
from penstock.kernel.errors import ConfigError
from tests.engine.models import (
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

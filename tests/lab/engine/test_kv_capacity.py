"""How many blocks does a GPU hold beside the weights, split as the engine splits them?"""

import pytest

from penstock.kernel.errors import ConfigError
from penstock_lab.engine.engine import Engine
from penstock_lab.engine.kv_capacity import kv_blocks_of, reserved_of, weight_bytes_per_gpu, with_blocks
from penstock_lab.engine.settings import SimSettings, TimingSettings
from penstock_lab.engine.timing.gpus import GIB, named
from penstock_lab.engine.timing.known_models import model_named
from penstock_lab.engine.timing.model_shape import shape_of
from tests.lab.engine.models import DEEPSEEK_V3, GPT_OSS_120B, LLAMA_8B, LLAMA_70B

LLAMA = shape_of(LLAMA_8B)


def test_blocks_are_what_weights_and_reserve_leave() -> None:
    room = 79.5 * GIB * 0.9 - 2 * 8_030_261_248 - 2 * GIB
    blocks = kv_blocks_of(LLAMA, named("h100"), block_size=16, reserved=2 * GIB)
    assert blocks == int(room / 131_072) // 16


def test_narrower_types_and_more_gpus_leave_more() -> None:
    h100 = named("h100")
    plain = kv_blocks_of(LLAMA, h100, block_size=16)
    assert kv_blocks_of(LLAMA, h100, block_size=16, kv_cache_dtype="fp8") == pytest.approx(2 * plain, abs=1)
    assert kv_blocks_of(LLAMA, h100, block_size=16, weight_dtype="fp8") > plain
    assert kv_blocks_of(LLAMA, h100, block_size=16, tensor_parallel_size=2) > 2 * plain
    assert kv_blocks_of(LLAMA, h100, block_size=32) == plain // 2
    assert kv_blocks_of(LLAMA, h100, block_size=16, utilisation=0.8) < plain


def test_layers_with_a_window_keep_little_of_long_sequences() -> None:
    shape, h100 = shape_of(GPT_OSS_120B), named("h100")
    short = kv_blocks_of(shape, h100, block_size=16, length=128, tensor_parallel_size=2)
    long = kv_blocks_of(shape, h100, block_size=16, length=128 * 100, tensor_parallel_size=2)
    assert long == pytest.approx(2 * short / 1.01, rel=1e-3)


@pytest.mark.parametrize(
    ("model", "gpus", "gib"),
    [
        ("gpt-oss-20b", 1, 50.28),
        ("gpt-oss-120b", 1, 3.33),
        ("Llama-3.3-70B-FP8", 2, 32.00),
        ("Qwen/Qwen3-235B-A22B-FP8", 4, 8.11),
    ],
)
def test_what_an_engine_reserves_is_what_vllm_was_seen_to_reserve(model: str, gpus: int, gib: float) -> None:
    """vLLM on H100, as it starts by itself: llm-d-benchmark's profiling runs, and vllm-project/vllm#21348 for the last.

    That report has 178,880 tokens, where weights and activations alone leave 336,720: most of the difference is what
    1,024 sequences take while they are sampled.
    """
    shape = shape_of(model_named(model))
    tokens = kv_blocks_of(shape, named("h100"), block_size=1, tensor_parallel_size=gpus, length=16_000)
    cache = tokens * shape.kv_bytes(length=16_000) / gpus / GIB
    assert cache == pytest.approx(gib, rel=0.1, abs=0.1)


def test_experts_have_work_spaces_that_no_split_of_them_narrows() -> None:
    shape, h200 = shape_of(DEEPSEEK_V3), named("h200")
    one, eight = (reserved_of(shape, h200, 8192, 16, tensor) for tensor in (1, 8))
    rows = 8192 * 8 * 2  # bf16, a row for each expert of a token
    assert eight > rows * (7168 + 7168) and one - eight < rows * 4096
    ranks = reserved_of(shape, h200, 8 * 8192, 16, 1, replicas=8)
    assert ranks > 8 * rows * (7168 + 7168), "tokens of all ranks come to every GPU"
    assert reserved_of(LLAMA, h200, 8192, 16) < one


def test_sampling_takes_the_place_of_activations_and_a_model_without_answers_has_none() -> None:
    h100 = named("h100")
    few, many = (reserved_of(LLAMA, h100, 2048, seqs) for seqs in (16, 1024))
    assert many - few > 3.5 * GIB and reserved_of(LLAMA, h100, 2048, 32) == few
    ranker = shape_of({**LLAMA_8B, "architectures": ["LlamaForSequenceClassification"]})
    assert reserved_of(ranker, h100, 2048, 1024) == few


def test_sparse_attention_keeps_all_and_its_indexers_keys_besides() -> None:
    """vLLM 0.32 keeps 132 bytes of an indexer's key: 128 in fp8 and a scale of fp32."""
    dense, sparse = (shape_of(model_named(name)) for name in ("DeepSeek-V3", "DeepSeek-V3.2"))
    for length in (1.0, 4096.0, 100_000.0):
        assert sparse.kv_bytes(length=length) == dense.kv_bytes(length=length) + 61 * 132
    h200 = named("h200")
    tokens = [kv_blocks_of(each, h200, block_size=64, tensor_parallel_size=8) for each in (dense, sparse)]
    assert tokens[1] < tokens[0]


def test_a_state_counts_once_per_sequence_beside_its_tokens() -> None:
    """Qwen3-Next has 36 layers of linear attention: 48 KiB of convolution and 32 x 128 x 128 values each, in bf16."""
    shape, h200 = shape_of(model_named("Qwen3-Next-80B-A3B-Instruct")), named("h200")
    assert shape.state_bytes == 36 * (3 * 8192 + 32 * 128 * 128) * 2
    assert shape.kv_bytes() == 12 * 2 * 2 * 256 * 2
    assert shape.kv_bytes_with_states(length=1000) == shape.kv_bytes() + shape.state_bytes / 1000
    short, long = (
        kv_blocks_of(shape, h200, block_size=16, tensor_parallel_size=2, length=length) for length in (500, 50_000)
    )
    assert long > 3 * short
    doubled = shape_of({**model_named("Qwen3.5-35B-A3B"), "mamba_ssm_dtype": "bfloat16"}).state_bytes
    assert shape_of(model_named("Qwen3.5-35B-A3B")).state_bytes > 1.9 * doubled, "its memory is in fp32"


def test_a_checkpoint_with_scales_of_a_narrower_cache_holds_more() -> None:
    scheme = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    given, plain = (
        kv_blocks_of(shape_of({**LLAMA_8B, "quantization_config": each}), named("h100"), block_size=16)
        for each in (scheme, {"quant_method": "fp8"})
    )
    assert given == pytest.approx(2 * plain, abs=1)


def test_an_encoder_keeps_one_layer_at_a_time() -> None:
    shape = shape_of(model_named("BAAI/bge-m3"))
    assert shape.kv_bytes() == 2 * 1024 * 4 and not shape.causal


def test_data_parallel_attention_has_a_cache_on_every_gpu() -> None:
    shape, h200 = shape_of(DEEPSEEK_V3), named("h200")
    sliced = kv_blocks_of(shape, h200, block_size=64, tensor_parallel_size=8)
    spread = kv_blocks_of(shape, h200, block_size=64, expert_parallel_size=8)
    assert spread > 4 * sliced  # less than 8 times: each GPU holds all of the attention's weights


def test_stages_share_layers_and_the_largest_one_bounds_the_cache() -> None:
    shape, h100 = shape_of(LLAMA_70B), named("h100")
    with pytest.raises(ConfigError, match="each of 4 h100"):
        kv_blocks_of(shape, h100, block_size=16, tensor_parallel_size=1, pipeline_parallel_size=4, tokens=400_000)
    two, four = (
        kv_blocks_of(shape, h100, block_size=16, tensor_parallel_size=2, pipeline_parallel_size=stages)
        for stages in (2, 4)
    )
    wide = kv_blocks_of(shape, h100, block_size=16, tensor_parallel_size=4)
    assert two == pytest.approx(wide, rel=0.05) and four > 2 * two
    uneven = kv_blocks_of(shape, h100, block_size=16, tensor_parallel_size=2, pipeline_parallel_size=3)
    assert uneven < 3 / 2 * kv_blocks_of(shape, h100, block_size=16, tensor_parallel_size=3, pipeline_parallel_size=2)


def test_weights_that_do_not_fit_are_named_with_the_way_out() -> None:
    shape = shape_of(LLAMA_70B)
    assert weight_bytes_per_gpu(shape, 1, 1, None) == 2 * 70_553_706_496
    with pytest.raises(ConfigError, match=r"131\.4 GiB on each of 1 h100.*tensor_parallel_size"):
        kv_blocks_of(shape, named("h100"), block_size=16)


def test_a_small_gpu_holds_what_a_real_engine_found_on_it() -> None:
    """vLLM 0.19 had 2,588 blocks of 16 on an RTX 4090; a flat reserve of 3 GiB made it 1,864."""
    blocks = kv_blocks_of(LLAMA, named("rtx4090"), block_size=16, tokens=2048, seqs=256)
    assert blocks == pytest.approx(2588, rel=0.03)


TIMING = TimingSettings(kind="roofline", model="llama.json", gpu="rtx4090")


def test_an_engine_on_a_named_gpu_has_the_blocks_of_that_gpu() -> None:
    settings = SimSettings(block_size=16, max_num_batched_tokens=2048, timing=TIMING)
    assert Engine(settings, table={"model": LLAMA_8B}).settings.blocks == pytest.approx(2588, rel=0.03)
    assert SimSettings().blocks == with_blocks(SimSettings(), None).kv_blocks == 16_384


def test_more_blocks_than_the_gpu_can_hold_are_refused() -> None:
    fits = SimSettings(block_size=16, kv_blocks=3000, timing=TIMING)
    assert with_blocks(fits, {"model": LLAMA_8B}) == fits
    with pytest.raises(ConfigError, match=r"kv_blocks is 16,384 .* rtx4090 can hold 4,\d+ at the very most"):
        with_blocks(SimSettings(block_size=16, kv_blocks=16_384, timing=TIMING), {"model": LLAMA_8B})


def test_a_gpu_without_a_model_says_what_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"timing\.model"):
        with_blocks(SimSettings(timing=TimingSettings(gpu="h100")), None)

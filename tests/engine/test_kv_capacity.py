"""How many blocks does a GPU hold beside the weights, split as the engine splits them?"""

import pytest

from penstock.engine.engine import Engine
from penstock.engine.kv_capacity import kv_blocks_of, weight_bytes_per_gpu, with_blocks
from penstock.engine.settings import SimSettings, TimingSettings
from penstock.engine.timing.gpus import GIB, named
from penstock.engine.timing.model_shape import shape_of
from penstock.kernel.errors import ConfigError
from tests.engine.models import DEEPSEEK_V3, GPT_OSS_120B, LLAMA_8B, LLAMA_70B

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

"""How many blocks does a GPU hold beside the weights, split as the engine splits them?"""

import pytest

from penstock.engine.capacity import kv_blocks_of, weight_bytes_per_gpu
from penstock.engine.gpus import GIB, named
from penstock.engine.model_shape import shape_of
from penstock.kernel.errors import ConfigError
from tests.engine.models import DEEPSEEK_V3, GPT_OSS_120B, LLAMA_8B, LLAMA_70B

LLAMA = shape_of(LLAMA_8B)


def test_blocks_are_what_weights_and_reserve_leave() -> None:
    room = 80 * GIB * 0.9 - 2 * 8_030_261_248 - 2 * GIB
    blocks = kv_blocks_of(LLAMA, named("h100"), block_size=16, reserved=2 * GIB)
    assert blocks == int(room / 131_072) // 16


def test_narrower_types_and_more_gpus_leave_more() -> None:
    h100 = named("h100")
    plain = kv_blocks_of(LLAMA, h100, block_size=16)
    assert kv_blocks_of(LLAMA, h100, block_size=16, kv_dtype="fp8") == pytest.approx(2 * plain, abs=1)
    assert kv_blocks_of(LLAMA, h100, block_size=16, weight_dtype="fp8") > plain
    assert kv_blocks_of(LLAMA, h100, block_size=16, tensor_parallel=2) > 2 * plain
    assert kv_blocks_of(LLAMA, h100, block_size=32) == plain // 2
    assert kv_blocks_of(LLAMA, h100, block_size=16, utilisation=0.8) < plain


def test_layers_with_a_window_keep_little_of_long_sequences() -> None:
    shape, h100 = shape_of(GPT_OSS_120B), named("h100")
    short = kv_blocks_of(shape, h100, block_size=16, length=128, tensor_parallel=2)
    long = kv_blocks_of(shape, h100, block_size=16, length=128 * 100, tensor_parallel=2)
    assert long == pytest.approx(2 * short / 1.01, rel=1e-3)


def test_data_parallel_attention_has_a_cache_on_every_gpu() -> None:
    shape, h200 = shape_of(DEEPSEEK_V3), named("h200")
    sliced = kv_blocks_of(shape, h200, block_size=64, tensor_parallel=8)
    spread = kv_blocks_of(shape, h200, block_size=64, expert_parallel=8)
    assert spread > 4 * sliced  # less than 8 times: each GPU holds all of the attention's weights


def test_weights_that_do_not_fit_are_named_with_the_way_out() -> None:
    shape = shape_of(LLAMA_70B)
    assert weight_bytes_per_gpu(shape, 1, 1, None) == 2 * 70_553_706_496
    with pytest.raises(ConfigError, match=r"131\.4 GiB on each of 1 h100.*tensor_parallel"):
        kv_blocks_of(shape, named("h100"), block_size=16)

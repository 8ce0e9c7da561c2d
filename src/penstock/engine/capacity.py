"""How many KV blocks does a GPU have room for? Its memory, less the weights and what the engine needs besides."""

from penstock.engine.gpus import GIB, Gpu
from penstock.engine.model_shape import BYTES, Dtype, ModelShape
from penstock.kernel.errors import ConfigError

RESERVED = 3.0 * GIB
"""Bytes per GPU for activations, CUDA graphs and communication; engines measure theirs when they start."""


def kv_blocks_of(
    shape: ModelShape,
    gpu: Gpu,
    *,
    block_size: int,
    tensor_parallel: int = 1,
    expert_parallel: int = 1,
    weight_dtype: Dtype | None = None,
    kv_dtype: Dtype | None = None,
    utilisation: float = 0.9,
    reserved: float = RESERVED,
    length: int = 4096,
) -> int:
    """Return the blocks of an engine's KV cache.

    Args:
        block_size: tokens per block.
        utilisation: share of the memory that the engine may use.
        reserved: bytes per GPU for anything but weights and cache.
        length: tokens of a typical sequence; layers with a sliding window keep no more than that of each.
    Raises:
        ConfigError: the weights alone don't fit.
    """
    per_gpu = weight_bytes_per_gpu(shape, tensor_parallel, expert_parallel, weight_dtype)
    room = gpu.memory * utilisation - reserved - per_gpu
    if room <= 0:
        raise ConfigError(
            f"{shape.name} takes {per_gpu / GIB:.1f} GiB on each of {max(tensor_parallel, expert_parallel)} "
            f"{gpu.name}, of which {(gpu.memory * utilisation - reserved) / GIB:.1f} GiB can be used",
            hint="raise tensor_parallel or take a narrower weight_dtype",
        )
    far, near = shape.layers - shape.window_layers, shape.window_layers
    layers = far if shape.window is None else far + near * min(1.0, shape.window / length)
    per_token = layers * shape.kv_values * BYTES[kv_dtype or shape.dtype] / min(tensor_parallel, shape.kv_heads)
    replicas = max(tensor_parallel, expert_parallel) // tensor_parallel
    return int(room * replicas / per_token) // block_size


def weight_bytes_per_gpu(
    shape: ModelShape, tensor_parallel: int, expert_parallel: int, weight_dtype: Dtype | None
) -> float:
    """Return the bytes of weights on each GPU: layers and projections split by tensor, experts over all GPUs."""
    linear = shape.linear * BYTES[weight_dtype or shape.linear_dtype]
    plain = (shape.embedding + (0 if shape.tied else shape.head)) * BYTES[shape.dtype]
    experts = shape.moe_layers * shape.experts * shape.expert * BYTES[weight_dtype or shape.expert_dtype]
    return (linear + plain) / tensor_parallel + experts / max(tensor_parallel, expert_parallel)

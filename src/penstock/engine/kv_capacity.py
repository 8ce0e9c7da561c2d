"""KV blocks that a GPU has room for: its memory, less the weights and what the engine needs besides."""

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.engine.settings import DEFAULT_BLOCKS, SimSettings
from penstock.engine.timing.gpus import GIB, Gpu, gpu_of, named
from penstock.engine.timing.model_shape import BYTES, Dtype, ModelShape, shape_of
from penstock.kernel.errors import ConfigError

DRIVER = 0.5 * GIB
"""Bytes of a GPU that its driver keeps: an RTX 4090 of 24 GiB shows 23.5 to a program, an H100 of 79.6 shows 79.2."""
CONTEXT = 0.75 * GIB
"""Bytes for the CUDA context, work spaces of libraries and CUDA graphs: chosen so that an RTX 4090 comes near."""
LENGTH = 4096
"""Tokens of a typical sequence."""
UTILISATION = 0.9
"""Share of the memory that an engine may use: vLLM's default."""


def kv_blocks_of(
    shape: ModelShape,
    gpu: Gpu,
    *,
    block_size: int,
    tensor_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    weight_dtype: Dtype | None = None,
    kv_cache_dtype: Dtype | None = None,
    utilisation: float = UTILISATION,
    reserved: float | None = None,
    tokens: int = 8192,
    seqs: int = 256,
    length: int = LENGTH,
) -> int:
    """Return the blocks of an engine's KV cache.

    Args:
        block_size: tokens per block.
        utilisation: share of the memory that the engine may use.
        reserved: bytes per GPU for anything but weights and cache; None takes `reserved_of`.
        tokens, seqs: most tokens and sequences of a pass.
        length: tokens of a typical sequence; layers with a sliding window keep no more than that of each.
    Raises:
        ConfigError: the weights alone don't fit.
    """
    stage = max(tensor_parallel_size, expert_parallel_size)
    largest = math.ceil(shape.layers / pipeline_parallel_size) / shape.layers
    """Share of the layers that the stage with most of them has."""
    per_gpu = weight_bytes_per_gpu(shape, tensor_parallel_size, expert_parallel_size, weight_dtype, largest)
    other = reserved_of(shape, tokens, seqs, tensor_parallel_size) if reserved is None else reserved
    usable = (gpu.memory - DRIVER) * utilisation - other
    room = usable - per_gpu
    if room <= 0:
        raise ConfigError(
            f"{shape.name} takes {per_gpu / GIB:.1f} GiB on each of "
            f"{stage * pipeline_parallel_size} {gpu.name}, of which {usable / GIB:.1f} GiB can be used",
            hint="raise tensor_parallel_size or take a narrower weight_dtype",
        )
    per_token = largest * _kv_bytes(shape, kv_cache_dtype, length) / min(tensor_parallel_size, shape.kv_heads)
    replicas = stage // tensor_parallel_size
    return int(room * replicas / per_token) // block_size


def reserved_of(shape: ModelShape, tokens: int, seqs: int, tensor_parallel_size: int = 1) -> float:
    """Return the bytes per GPU that the largest pass takes besides weights and cache.

    One layer's activations at a time: of a token what goes in and out, the residual, and the MLP's columns (gate, up
    and their product); the logits of all sequences, in fp32, and their copy that is sampled from.
    """
    each = 4 * shape.hidden + 3 * shape.columns / tensor_parallel_size
    return CONTEXT + tokens * each * BYTES[shape.dtype] + 8.0 * seqs * shape.head / shape.hidden


def with_blocks(settings: SimSettings, table: Mapping[str, Any] | None) -> SimSettings:
    """Return the settings with a number in place of ``kv_blocks: auto``.

    Args:
        table: as `penstock.config.files.timing_files.load_timing` returns it, with the model and, if given, the GPU.
    Raises:
        ConfigError: the GPU that timing names has no room for the weights or for that many blocks, or no model is
            named.
    """
    timing, auto = settings.timing, settings.kv_blocks == "auto"
    if timing.gpu is None:
        return msgspec.structs.replace(settings, kv_blocks=DEFAULT_BLOCKS) if auto else settings
    if table is None or "model" not in table:
        if not auto:
            return settings
        raise ConfigError(
            f"kv_blocks is auto and timing.gpu is {timing.gpu}, but the model's shape is not known",
            hint="set timing.model to a config.json or a known name, or kv_blocks to a number",
        )
    gpu = gpu_of(table["gpu"], timing.gpu) if "gpu" in table else named(timing.gpu)
    shape = shape_of(table["model"], timing.model or "config.json")

    def blocks(utilisation: float, reserved: float | None) -> int:
        return kv_blocks_of(
            shape,
            gpu,
            block_size=settings.block_size,
            tensor_parallel_size=timing.tensor_parallel_size,
            expert_parallel_size=timing.expert_parallel_size,
            pipeline_parallel_size=timing.pipeline_parallel_size,
            weight_dtype=timing.weight_dtype,
            kv_cache_dtype=timing.kv_cache_dtype,
            utilisation=utilisation,
            reserved=reserved,
            tokens=settings.max_num_batched_tokens,
            seqs=settings.max_num_seqs,
        )

    if auto:
        return msgspec.structs.replace(settings, kv_blocks=blocks(UTILISATION, None))
    most = blocks(1.0, 0.0)
    if settings.blocks > most:
        raise ConfigError(
            f"kv_blocks is {settings.blocks:,} of {settings.block_size} tokens; beside the weights of {shape.name} "
            f"{timing.gpus} {gpu.name} can hold {most:,} at the very most",
            hint="set kv_blocks to auto, which leaves what engines leave for activations",
        )
    return settings


def kv_bytes_per_token(settings: SimSettings, table: Mapping[str, Any] | None) -> int:
    """Return the KV bytes of one token, all layers and GPUs together: the model's where it is known, else as set.

    Args:
        table: as for `with_blocks`.
    """
    if table is None or "model" not in table:
        return settings.transfer.kv_bytes_per_token
    shape = shape_of(table["model"], settings.timing.model or "config.json")
    return round(_kv_bytes(shape, settings.timing.kv_cache_dtype, LENGTH))


def _kv_bytes(shape: ModelShape, kv_cache_dtype: Dtype | None, length: int) -> float:
    far, near = shape.layers - shape.window_layers, shape.window_layers
    layers = far if shape.window is None else far + near * min(1.0, shape.window / length)
    return layers * shape.kv_values * BYTES[kv_cache_dtype or shape.dtype]


def weight_bytes_per_gpu(
    shape: ModelShape,
    tensor_parallel_size: int,
    expert_parallel_size: int,
    weight_dtype: Dtype | None,
    layers: float = 1.0,
) -> float:
    """Return the bytes of weights on each GPU: layers and projections split by tensor, experts over all GPUs.

    Args:
        layers: share of the layers on these GPUs; below 1 the embedding is at one end of a pipeline, the head at the
            other.
    """
    linear = shape.linear * BYTES[weight_dtype or shape.linear_dtype]
    head = 0 if shape.tied else shape.head
    plain = (shape.embedding + head if layers == 1.0 else max(shape.embedding, shape.head)) * BYTES[shape.dtype]
    experts = shape.moe_layers * shape.experts * shape.expert * BYTES[weight_dtype or shape.expert_dtype]
    stage = max(tensor_parallel_size, expert_parallel_size)
    return (layers * linear + plain) / tensor_parallel_size + layers * experts / stage

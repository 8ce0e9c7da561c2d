"""KV blocks that a GPU has room for: its memory, less the weights and what the engine needs besides."""

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.kernel.errors import ConfigError
from penstock_lab.engine.settings import DEFAULT_BLOCKS, SimSettings
from penstock_lab.engine.timing.gpus import GIB, Gpu, gpu_of, named
from penstock_lab.engine.timing.model_shape import ModelShape, shape_of
from penstock_lab.engine.timing.weight_types import BYTES, Dtype

DRIVER = 0.5 * GIB
"""Bytes of a GPU that its driver keeps: an RTX 4090 of 24 GiB shows 23.5 to a program, an H100 of 79.6 shows 79.2."""
CONTEXT = 0.75 * GIB
"""Bytes for work spaces of libraries, compiled code and CUDA graphs, beside a pass's activations."""
COLLECTIVES = 2.1 * GIB
"""Bytes that NCCL and custom all-reduces take on each GPU with NVLink, once there are several: vLLM 0.19 on H100 by
llm-d's measurements. Cards on PCIe take a tenth: 0.2 GiB in public logs of RTX 3090."""
SAMPLED = 38.5
"""Bytes per sequence and token of the vocabulary while one is sampled: logits, their copies in fp32, sorted values and
indices. vLLM's measured peak on H100 (llm-d-benchmark) is that of Llama-3.1-8B, Qwen3-0.6B and gpt-oss-20b alike,
4.76, 5.56 and 7.38 GiB at 1,024 sequences; vLLM 0.19 needs less than half, and starts as well."""
LENGTH = 4096
"""Tokens of a typical sequence."""
SEQS = 1024
"""Most sequences of a pass where vLLM is not told: its default on GPUs of 70 GiB and more."""
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
    seqs: int = SEQS,
    length: float = LENGTH,
) -> int:
    """Return the blocks of an engine's KV cache.

    Args:
        block_size: tokens per block.
        utilisation: share of the memory that the engine may use.
        reserved: bytes per GPU for anything but weights and cache; None takes `reserved_of`.
        tokens, seqs: most tokens and sequences of a pass, of all ranks of the attention together.
        length: tokens of a typical sequence: layers with a sliding window keep no more than that of each, and its
            states count once.
    Raises:
        ConfigError: the weights alone don't fit.
    """
    stage = max(tensor_parallel_size, expert_parallel_size)
    largest = math.ceil(shape.layers / pipeline_parallel_size) / shape.layers
    """Share of the layers that the stage with most of them has."""
    per_gpu = weight_bytes_per_gpu(shape, tensor_parallel_size, expert_parallel_size, weight_dtype, largest)
    replicas = stage // tensor_parallel_size
    if reserved is None:
        reserved = reserved_of(shape, gpu, tokens, seqs, tensor_parallel_size, replicas)
    usable = (gpu.memory - DRIVER) * utilisation - reserved
    room = usable - per_gpu
    if room <= 0:
        raise ConfigError(
            f"{shape.name} takes {per_gpu / GIB:.1f} GiB on each of "
            f"{stage * pipeline_parallel_size} {gpu.name}, of which {usable / GIB:.1f} GiB can be used",
            hint="raise tensor_parallel_size or take a narrower weight_dtype",
        )
    # Heads of the cache are split as far as there are some; states are, by their own heads.
    split = min(tensor_parallel_size, shape.kv_heads)
    per_token = shape.kv_bytes(kv_cache_dtype, length) / split + shape.state_bytes / length / tensor_parallel_size
    return int(room * replicas / (largest * per_token)) // block_size


def reserved_of(
    shape: ModelShape, gpu: Gpu, tokens: int, seqs: int, tensor_parallel_size: int = 1, replicas: int = 1
) -> float:
    """Return the bytes per GPU that the largest pass takes besides weights and cache.

    One layer's activations at a time: of a token what goes in and out, the residual, and the MLP's columns (gate, up
    and their product). Experts have work spaces besides, of a row per token and expert that it goes to, which are as
    wide as the model on every GPU; with ``replicas`` of the attention the tokens of all ranks are in each. Sampling
    comes after the layers, takes their place, and where it needs more leaves room for the rest.
    """
    each = 4 * shape.hidden + 3 * shape.columns / tensor_parallel_size
    if shape.experts:
        columns = shape.expert_columns / tensor_parallel_size
        rows = max(shape.hidden, columns) + max(shape.hidden, 2 * columns)
        each = 4 * shape.hidden + replicas * shape.experts_per_token * rows
    activations = tokens / replicas * each * BYTES[shape.dtype]
    sampling = SAMPLED * seqs / replicas * shape.vocabulary
    several = tensor_parallel_size * replicas > 1
    collectives = COLLECTIVES * (0.1 if gpu.gddr else 1.0) if several else 0.0
    return collectives + max(CONTEXT + activations, sampling)


def with_blocks(settings: SimSettings, table: Mapping[str, Any] | None, length: float = LENGTH) -> SimSettings:
    """Return the settings with a number in place of ``kv_blocks: auto``.

    Args:
        length: tokens of a typical sequence, as for `kv_blocks_of`.
        table: as `penstock_lab.config.timing_files.load_timing` returns it, with the model and, if given, the GPU.
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

    def blocks(utilisation: float, reserved: float | None, length: float) -> int:
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
            length=length,
        )

    if auto:
        return msgspec.structs.replace(settings, kv_blocks=blocks(UTILISATION, None, length))
    most = blocks(1.0, 0.0, settings.max_model_len)  # long sequences take least per token
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
    return round(shape.kv_bytes_with_states(settings.timing.kv_cache_dtype, LENGTH))


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
    linear = shape.linear_bytes(weight_dtype)
    head = 0 if shape.tied else shape.head
    plain = (shape.embedding + head if layers == 1.0 else max(shape.embedding, shape.head)) * BYTES[shape.dtype]
    experts = shape.moe_layers * shape.experts * shape.expert * BYTES[weight_dtype or shape.expert_dtype]
    stage = max(tensor_parallel_size, expert_parallel_size)
    return (layers * linear + plain) / tensor_parallel_size + layers * experts / stage

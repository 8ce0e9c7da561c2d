"""`ParallelMapping`: how the GPUs of one engine share a model; enumerates those that a link domain and memory allow."""

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.engine.kv_capacity import DRIVER, UTILISATION, reserved_of, weight_bytes_per_gpu
from penstock.engine.settings import Calibration
from penstock.engine.timing.gpus import Gpu
from penstock.engine.timing.model_shape import ModelShape
from penstock.engine.timing.roofline import Roofline
from penstock.engine.timing.weight_types import Dtype

GPUS_MAX = 64
"""GPUs of one engine at most."""
STAGES_MAX = 8
"""Stages of a pipeline at most: more of them only make a prompt's way longer."""
RANK_TOKENS = 16_384
"""Tokens of a pass at most, per rank of the attention: memory for their activations is set aside."""
RANK_SEQS = 256
"""Sequences of it at most."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model on a kind of GPU: what every mapping of it has in common."""

    shape: ModelShape
    gpu: Gpu
    weight_dtype: Dtype
    kv_cache_dtype: Dtype
    calibration: Calibration = Calibration()


@dataclass(frozen=True, slots=True)
class ParallelMapping:
    """How GPUs share a model.

    ``tensor``: GPUs of one rank of the attention; ``replicas``: its ranks, each with sequences of its own
    (data-parallel attention), whose GPUs hold the experts together; ``stages``: of the pipeline.
    """

    tensor: int
    replicas: int = 1
    stages: int = 1

    @property
    def gpus(self) -> int:
        """GPUs of one engine."""
        return self.tensor * self.replicas * self.stages

    @property
    def experts(self) -> int:
        """GPUs that whole experts are spread over, as ``expert_parallel_size`` has it."""
        return self.tensor * self.replicas if self.replicas > 1 else 1

    def __str__(self) -> str:
        parts = [f"TP{self.tensor}"]
        parts += [f"DP{self.replicas} EP{self.experts}"] if self.replicas > 1 else []
        return " ".join(parts + ([f"PP{self.stages}"] if self.stages > 1 else []))

    def roofline(self, served: ServedModel) -> Roofline:
        """Return the timing of passes under this mapping."""
        return Roofline(
            served.shape,
            served.gpu,
            served.calibration,
            tensor_parallel_size=self.tensor,
            expert_parallel_size=self.experts,
            pipeline_parallel_size=self.stages,
            weight_dtype=served.weight_dtype,
            kv_cache_dtype=served.kv_cache_dtype,
        )

    def kv_tokens(self, served: ServedModel) -> float:
        """Return the tokens that the engine's KV cache holds: 0 or less where the weights alone don't fit."""
        shape, gpu = served.shape, served.gpu
        weights = weight_bytes_per_gpu(shape, self.tensor, self.experts, served.weight_dtype) / self.stages
        reserved = reserved_of(shape, gpu, RANK_TOKENS, RANK_SEQS, self.tensor)
        room = (gpu.memory - DRIVER) * UTILISATION - reserved - weights
        per_token = shape.kv_bytes(served.kv_cache_dtype) / self.stages
        return room * self.replicas / (per_token / min(self.tensor, shape.kv_heads))


def mappings_of(served: ServedModel, tokens: int) -> Iterator[ParallelMapping]:
    """Enumerate the mappings under which an engine holds ``tokens`` tokens of KV at least.

    The GPUs of a stage are in one link domain; stages may be in several, joined by the network.
    """
    shape = served.shape
    domain = min(served.gpu.link_gpus, GPUS_MAX)
    for tensor in _powers(domain):
        if shape.heads % tensor:
            continue
        for replicas in _powers(domain // tensor) if shape.experts else (1,):
            if replicas > 1 and shape.experts % (tensor * replicas):
                continue
            for stages in _powers(min(STAGES_MAX, GPUS_MAX // (tensor * replicas), shape.layers)):
                mapping = ParallelMapping(tensor, replicas, stages)
                if mapping.kv_tokens(served) >= tokens * replicas:
                    yield mapping


def _powers(most: int) -> Iterator[int]:
    """Return the powers of two up to ``most``."""
    for exponent in range(most.bit_length()):
        yield 1 << exponent

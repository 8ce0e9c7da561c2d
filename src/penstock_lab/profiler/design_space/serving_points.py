"""Operating points of engines, as columns: their mappings onto GPUs, and what each does by the roofline.

Every point, of context engines, generation engines or co-located ones, is a steady state without a queue: as many
requests begin as end. The TTFT is that of the passes that a prompt is in, and what waits before them is left to
simulation. Costs are the roofline's own (`PassCosts`); only the sum over the parts of a pass is written again, for
numpy. A test holds both sums to be equal.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.kernel.values import RequestShape
from penstock_lab.engine.kv_capacity import DRIVER, UTILISATION, reserved_of, weight_bytes_per_gpu
from penstock_lab.engine.settings import Calibration
from penstock_lab.engine.timing.decode_steps import Array
from penstock_lab.engine.timing.gpus import Gpu
from penstock_lab.engine.timing.model_shape import ModelShape
from penstock_lab.engine.timing.roofline import PassCosts, Roofline
from penstock_lab.engine.timing.weight_types import Dtype

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
    for tensor in _powers_of_two(domain):
        if shape.heads % tensor:
            continue
        for replicas in _powers_of_two(domain // tensor) if shape.experts else (1,):
            if replicas > 1 and shape.experts % (tensor * replicas):
                continue
            for stages in _powers_of_two(min(STAGES_MAX, GPUS_MAX // (tensor * replicas), shape.layers)):
                mapping = ParallelMapping(tensor, replicas, stages)
                if mapping.kv_tokens(served) >= tokens * replicas:
                    yield mapping


def _powers_of_two(most: int) -> Iterator[int]:
    """Return the powers of two up to ``most``."""
    for exponent in range(most.bit_length()):
        yield 1 << exponent


class RooflineGrid:
    """Passes of one model under several mappings.

    Args:
        rooflines: one for each mapping; they become the first axis of all arrays.
        axes: how many more axes the arrays have.
    """

    def __init__(self, shape: ModelShape, rooflines: Sequence[Roofline], axes: int) -> None:
        def column(values: Sequence[float]) -> Array:
            return np.array(values, dtype=np.float64).reshape(-1, *[1] * axes)

        self._shape = shape
        names = [field.name for field in fields(PassCosts)]
        costs = {name: column([getattr(each.costs, name) for each in rooflines]) for name in names}
        self._costs = SimpleNamespace(**costs)
        self.replicas = column([each.replicas for each in rooflines])

    def seconds(
        self,
        *,
        seqs: Array | float = 0.0,
        kv: Array | float = 0.0,
        prompts: Array | float = 0.0,
        past: Array | float = 0.0,
        new: Array | float = 0.0,
    ) -> Array:
        """Return how long passes take; all arguments are arrays that broadcast to (mappings, ...).

        Args:
            seqs: sequences that decode; ``kv``: tokens that all of them read together.
            prompts: prompts in the pass, which are equally long; ``past``, ``new``: tokens of each before, and now.
        """
        shape, costs = self._shape, self._costs
        new_all, outputs = prompts * new, seqs + prompts
        tokens = seqs + new_all
        # The rank of the attention with the most prompts: all others wait for it.
        uneven = self.replicas * np.ceil(prompts / self.replicas) / np.maximum(prompts, 1.0)
        own = new_all * uneven + seqs
        time = costs.fixed + costs.output * outputs
        time = time + np.maximum(costs.linear_read, costs.linear_token * own)
        time = time + np.maximum(costs.head_read, costs.head_token * outputs)
        if shape.experts:
            touched = shape.experts * (1.0 - (1.0 - shape.experts_per_token / shape.experts) ** tokens)
            time = time + np.maximum(costs.expert_read * touched, costs.expert_token * tokens)
        time = time + costs.other_token * own + costs.exchange_token * tokens
        near, far = shape.near_layers, shape.attention_layers - shape.near_layers
        pairs, reads = prompts * new * (past + (new + 1) / 2), prompts * (past + new)
        time = time + shape.index_layers * (costs.index_pair * pairs * uneven + costs.index * kv)
        if far:
            attention = np.maximum(costs.pair * pairs + costs.past * prompts * past, costs.context * reads)
            time = time + far * (attention * uneven + costs.kv * kv)
        if near and shape.reads is not None:
            window = float(shape.reads)
            growing = np.minimum(new, np.maximum(0.0, window - past))
            pairs = prompts * (growing * (past + (growing + 1) / 2) + (new - growing) * window)
            reads = prompts * (np.minimum(past, window) + new)
            attention = np.maximum(costs.pair * pairs + costs.past * (reads - new_all), costs.context * reads)
            time = time + near * (attention * uneven + costs.kv * np.minimum(kv, window * seqs))
        return np.asarray(time, dtype=np.float64)


Chosen = npt.NDArray[Any]
"""Numbers of points, or a mask over them."""
SEQUENCES = np.unique(np.round(2.0 ** (np.arange(0, 45) / 4)))
"""Sequences that decode at once per rank of the attention: 1 to 2,048, four steps to a doubling."""
PROMPTS = 2.0 ** np.arange(0, 7)
"""Prompts of one pass per rank."""
CHUNKS = 2.0 ** (np.arange(12, 29) / 2)
"""Tokens of a prompt that one pass computes: 64 to 16,384, two steps to a doubling."""


@dataclass(frozen=True, slots=True)
class ServingPoints:
    """Points as columns, shape (points,).

    ``mapping``: number of the mapping; ``batch``: prompts of a pass, or sequences that decode, of the whole engine;
    ``chunk``: tokens of each prompt in a pass, 0 where prompts are computed whole; ``ttft``, ``tpot``: seconds, 0 of
    the phase that the engine does not have; ``rate``: requests per second of one engine of ``gpus`` GPUs.
    """

    mapping: Chosen
    batch: Array
    chunk: Array
    ttft: Array
    tpot: Array
    rate: Array
    gpus: Array

    def take(self, chosen: Chosen) -> "ServingPoints":
        """Return some of the points, by their numbers or by a mask."""
        return ServingPoints(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def and_also(self, other: "ServingPoints") -> "ServingPoints":
        """Return the points of both."""
        return ServingPoints(
            *(np.concatenate([getattr(self, field.name), getattr(other, field.name)]) for field in fields(self))
        )


class EnginePoints:
    """All points of one model for requests of one length.

    Args:
        mappings: those that are tried.
        request: tokens of every prompt and of every answer.
    """

    def __init__(self, served: ServedModel, mappings: Sequence[ParallelMapping], request: RequestShape[int]) -> None:
        self.mappings = mappings
        self._isl, self._osl = float(request.isl), float(request.osl)
        self._read = self._isl + self._osl / 2
        self._shape = served.shape
        self._rooflines = [mapping.roofline(served) for mapping in mappings]
        self._columns = np.array(
            [(each.replicas, each.stages, each.gpus, each.kv_tokens(served)) for each in mappings], dtype=np.float64
        )

    def context(self) -> ServingPoints:
        """Return points of engines that compute prompts: whole ones in batches, and in chunks through a pipeline."""
        replicas, stages, _, kv = self._axes(1)
        grid = RooflineGrid(self._shape, self._rooflines, 1)
        prompts = PROMPTS * replicas
        whole = grid.seconds(prompts=prompts, new=self._isl)
        fits = ((PROMPTS == 1) | (PROMPTS * self._isl <= RANK_TOKENS)) & (prompts * stages * self._isl <= kv)
        # One pass is in each stage: as many are under way as there are stages.
        points = self._points(fits, prompts, 0.0, whole, 0.0, prompts * stages / whole)
        parts, new = self._chunks()
        middle = grid.seconds(prompts=replicas, past=(self._isl - new) / 2, new=new) / stages
        last = grid.seconds(prompts=replicas, past=self._isl - new, new=new) / stages
        ttft = parts * middle + (stages - 1) * last
        fits = (stages > 1) & (parts > 1) & (replicas * stages * self._isl <= kv)
        return points.and_also(self._points(fits, replicas, new, ttft, 0.0, replicas / (parts * middle)))

    def generation(self) -> ServingPoints:
        """Return points of engines that only decode."""
        replicas, stages, _, kv = self._axes(1)
        micro = SEQUENCES * replicas
        step = RooflineGrid(self._shape, self._rooflines, 1).seconds(seqs=micro, kv=micro * self._read)
        batch = micro * stages
        return self._points(batch * self._read <= kv, batch, 0.0, 0.0, step, batch / (self._osl * step))

    def colocated(self) -> ServingPoints:
        """Return points of engines that compute whole prompts between the steps of decoding.

        A sequence waits for the prompts of the others: its mean TPOT is a step, and its share of their passes.
        """
        replicas, stages, _, kv = self._axes(2)
        grid = RooflineGrid(self._shape, self._rooflines, 2)
        micro, prompts = SEQUENCES[:, None] * replicas, PROMPTS * replicas
        step = grid.seconds(seqs=micro, kv=micro * self._read)
        whole = grid.seconds(prompts=prompts, new=self._isl)
        batch = micro * stages
        tpot = step + batch / (self._osl * prompts * stages) * whole
        fits = (PROMPTS == 1) | (PROMPTS * self._isl <= RANK_TOKENS)
        fits = fits & (batch * self._read + prompts * self._isl <= kv) & (prompts <= batch)
        return self._points(fits, batch, 0.0, step + whole, tpot, batch / (self._osl * tpot))

    def piggybacked(self) -> ServingPoints:
        """Return points of engines whose passes have a chunk of a prompt beside the sequences that decode."""
        replicas, stages, _, kv = self._axes(2)
        grid = RooflineGrid(self._shape, self._rooflines, 2)
        micro = SEQUENCES[:, None] * replicas
        parts, new = self._chunks()
        read = micro * self._read
        step = grid.seconds(seqs=micro, kv=read)
        mixed = grid.seconds(seqs=micro, kv=read, prompts=replicas, past=(self._isl - new) / 2, new=new)
        # Of a sequence's steps so many have a chunk beside them; more than all of them can't.
        share = micro * parts / (self._osl * replicas)
        tpot = step + share * (mixed - step)
        batch = micro * stages
        ttft = (parts + stages - 1) * mixed / stages
        fits = (share <= 1.0) & (batch * self._read + replicas * self._isl <= kv)
        return self._points(fits, batch, new, ttft, tpot, batch / (self._osl * tpot))

    def _axes(self, axes: int) -> tuple[Array, Array, Array, Array]:
        """Return the mappings' replicas, stages, GPUs and KV tokens, with as many axes after the first."""
        first, second, third, fourth = (column.reshape(-1, *[1] * axes) for column in self._columns.T)
        return first, second, third, fourth

    def _chunks(self) -> tuple[Array, Array]:
        """Return in how many parts a prompt is cut, and the tokens of each."""
        parts = np.unique(np.ceil(self._isl / CHUNKS))
        return parts, self._isl / parts

    def _points(self, fits: Chosen, *columns: Array | float) -> ServingPoints:
        """Return the points that fit; ``columns``: batch, chunk, ttft, tpot, rate."""
        axes = self._axes(max(np.ndim(column) for column in columns) - 1)
        number = np.arange(len(self.mappings)).reshape(axes[2].shape)
        fits, number, *rest = np.broadcast_arrays(fits, number, *columns, axes[2])
        batch, chunk, ttft, tpot, rate, gpus = (each[fits] for each in rest)
        return ServingPoints(number[fits], batch, chunk, ttft, tpot, rate, gpus)

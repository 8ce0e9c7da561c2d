"""Roofline timing: a pass on a GPU without measurements: what it must read, compute and send, over the GPU's rates.

Kernels run one after another, so each group of them takes the longer of its memory time and its arithmetic time, and
the groups add up: linear layers, routed experts, output projection, attention of prompts, attention of decoding,
activations, collectives, and what the host and the launches add per layer and pass.

Tensor parallelism splits weights, heads and KV cache; with more GPUs of experts than of tensors the attention is
data-parallel, and tokens go to their experts and back by all-to-all. Pipeline parallelism splits the layers: a pass
goes through all stages, which takes as long as before plus the way between them, while other passes are in the other
stages.
Source: rooflines as in Dynamo's planner; the split by groups, sliding windows and calibration are ours.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import log2

import numpy as np
import numpy.typing as npt

from penstock.kernel.errors import ConfigError
from penstock.kernel.machine import SECOND
from penstock_lab.engine.settings import Calibration
from penstock_lab.engine.timing.collectives import Link, collectives, link_of
from penstock_lab.engine.timing.decode_steps import DecodeSteps, PiecewiseSteps, QuadraticSteps, TabulatedSteps
from penstock_lab.engine.timing.gpus import Gpu
from penstock_lab.engine.timing.model_shape import ModelShape
from penstock_lab.engine.timing.weight_types import BYTES, Dtype

MILLISECONDS = 1e-3
REQUEST_OVERHEAD = {"vllm": 0.025, "trtllm": 0.044, "sglang": 0.025}
"""Seconds that a request takes in an engine beside its passes, before its first token: by how much the TTFT of up to
four clients exceeds the simulated one in the median (`bench/roofline/run.py`). SGLang was measured with one model only,
whose TTFT is as much longer on TensorRT-LLM, so vLLM's stands for it."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one pass has to do, in tokens.

    ``tokens``: all that are computed; ``outputs``: rows of the output projection; ``pairs``: (new token, token that it
    attends to) of prompts, ``context``: tokens of KV that prompts read; ``kv``: tokens of KV that decoding reads. The
    last three again for layers with a sliding window.
    """

    tokens: int
    outputs: int
    seqs: int
    pairs: float = 0.0
    context: float = 0.0
    kv: float = 0.0
    pairs_windowed: float = 0.0
    context_windowed: float = 0.0
    kv_windowed: float = 0.0
    uneven: float = 1.0
    """By how much the fullest of the attention's ranks has more prompt tokens than an even share."""


def work_of(chunks: Iterable[tuple[int, int]], kv: int, seqs: int, window: int | None, replicas: int = 1) -> Work:
    """Return the work of a pass.

    Args:
        chunks: per prompt (tokens before, new tokens).
        kv: tokens that all sequences that decode read together; ``seqs``: how many they are.
        replicas: ranks of the attention; a prompt is computed by one of them, and the others wait.
        window: sliding window in tokens. Sequences count as equally long there.
    """
    tokens = requests = 0
    pairs = context = near_pairs = near_context = 0
    ranks = [0] * replicas
    if replicas > 1:
        chunks = sorted(chunks, key=lambda chunk: -chunk[1])
    for past, new in chunks:
        tokens += new
        ranks[ranks.index(min(ranks))] += new
        requests += 1
        pairs += new * past + new * (new + 1) // 2
        context += past + new
        if window is not None:
            # Token i reads min(past + i, window): the first `growing` of them read more and more, the rest all of it.
            growing = min(new, max(0, window - past))
            near_pairs += growing * past + growing * (growing + 1) // 2 + (new - growing) * window
            near_context += min(past + new, window + new)
    near = kv if window is None else min(kv, window * seqs)
    uneven = replicas * max(ranks) / tokens if tokens else 1.0
    return Work(tokens + seqs, requests + seqs, seqs, pairs, context, kv, near_pairs, near_context, near, uneven)


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Seconds that the parts of a pass cost: what a roofline comes down to for one model, GPU and parallelism.

    ``read`` of a part is once per pass, for its weights; ``token`` per token. ``pair``, ``past`` and ``context`` are
    per layer, for a prompt's pairs, for a token that it reads from the cache, and for any that it reads; ``kv`` is per
    layer and token that decoding reads. ``index_pair`` and ``index`` are that of pairs and tokens that an indexer looks
    at. ``output``: per row of the output projection, on the host, and for the states of its sequence.
    """

    fixed: float
    output: float
    linear_read: float
    linear_token: float
    expert_read: float
    expert_token: float
    head_read: float
    head_token: float
    other_token: float
    exchange_token: float
    pair: float
    past: float
    context: float
    kv: float
    index_pair: float
    index: float


class Roofline:
    """Seconds of a pass of one model on one kind of GPU.

    Args:
        tensor_parallel_size: GPUs that share each layer.
        pipeline_parallel_size: stages of the layers, each with as many GPUs as the two others ask for. A pass goes
            through one after another, so up to this many passes can be under way.
        expert_parallel_size: GPUs that whole experts are spread over; 1 slices each expert as the layers are sliced.
        weight_dtype, kv_cache_dtype: None takes what the config says of the weights, and the model's own for the cache.
        link: what collectives reach; None takes the table's.
    Raises:
        ConfigError: the GPUs don't divide the heads or the experts, or there are more stages than layers.
    """

    def __init__(
        self,
        shape: ModelShape,
        gpu: Gpu,
        calibration: Calibration,
        *,
        tensor_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        weight_dtype: Dtype | None = None,
        kv_cache_dtype: Dtype | None = None,
        link: Link | None = None,
    ) -> None:
        check_parallel(shape, tensor_parallel_size, expert_parallel_size, pipeline_parallel_size)
        self.shape = shape
        stage = max(tensor_parallel_size, expert_parallel_size)
        self.gpus = stage * pipeline_parallel_size
        replicas = self.replicas = stage // tensor_parallel_size
        linear, expert_dtype = shape.weights(weight_dtype), weight_dtype or shape.expert_dtype
        kv = shape.kv_values * BYTES[kv_cache_dtype or shape.kv_dtype]
        reached = calibration.gddr_efficiency if gpu.gddr else calibration.bandwidth_efficiency
        bandwidth = gpu.bandwidth * reached
        widened = {True: bandwidth * calibration.widening_efficiency, False: bandwidth}

        def rate(dtype: Dtype) -> float:
            doublings = max(0.0, log2(gpu.flops(dtype) / gpu.flops("bf16")))
            return gpu.flops(dtype) * float(calibration.compute_efficiency * calibration.narrow_efficiency**doublings)

        per_token = 2.0 * shape.moe_layers * shape.experts_per_token * shape.expert
        expert_rate = rate(expert_dtype) * calibration.expert_efficiency
        split = min(tensor_parallel_size, shape.kv_heads) * replicas
        flops = rate(shape.dtype) * stage
        indexing = rate("fp8") * replicas
        self._near_layers = shape.near_layers
        self._far_layers = shape.attention_layers - shape.near_layers
        self._index_layers = shape.index_layers
        looked_at = shape.index_bytes / replicas / bandwidth  # each GPU of a rank has its indexer and keys whole
        context = kv / split / bandwidth
        within, across, along = (
            link or link_of(gpu, gpus, calibration) for gpus in (tensor_parallel_size, stage, self.gpus)
        )
        self.collectives = collectives(shape, within, across, tensor_parallel_size, replicas)
        hops = pipeline_parallel_size - 1
        host = calibration.layer_overhead_ms * shape.sublayers / 2 + calibration.pass_overhead_ms
        host += calibration.expert_layer_overhead_ms * shape.moe_layers
        self.costs = PassCosts(
            fixed=MILLISECONDS * host + self.collectives.fixed + hops * along.latency,
            # A state is read and written whole for each sequence of a pass.
            output=MILLISECONDS * calibration.sequence_overhead_ms + 2.0 * shape.state_bytes / stage / bandwidth,
            linear_read=sum(each.params * BYTES[each.dtype] / widened[gpu.widens(each.dtype)] for each in linear)
            / tensor_parallel_size,
            linear_token=sum(2.0 * each.params / rate(each.dtype) for each in linear) / stage,
            expert_read=shape.moe_layers
            * shape.expert
            * BYTES[expert_dtype]
            / stage
            / widened[gpu.widens(expert_dtype)],
            expert_token=per_token / stage / expert_rate,
            head_read=shape.head * BYTES[shape.dtype] / tensor_parallel_size / bandwidth,
            head_token=2.0 * shape.head / stage / rate(shape.dtype),
            other_token=shape.activations * BYTES[shape.dtype] / stage / bandwidth,
            # Each GPU of a stage sends its share of what comes out of the stage.
            exchange_token=self.collectives.token + hops * shape.hidden * BYTES[shape.dtype] / stage / along.rate,
            pair=shape.pair_flops / flops,
            past=shape.past_flops / flops,
            context=context,
            kv=max(context, shape.read_flops / flops),
            index_pair=shape.index_flops / indexing,
            index=max(looked_at, shape.index_flops / indexing),
        )

    def seconds(self, work: Work) -> float:
        """Return how long a pass takes. Cost: about 2 us."""
        return self.without_decode_attention(work) + self.decode_attention(work)

    def decode_attention(self, work: Work) -> float:
        """Return the part that grows with the KV tokens that decoding reads: linear in them, two lines in a window."""
        attention = self.costs.kv * (self._far_layers * work.kv + self._near_layers * work.kv_windowed)
        return attention + self.costs.index * self._index_layers * work.kv

    def without_decode_attention(self, work: Work) -> float:
        """Return the rest, in which KV tokens of decoding don't matter."""
        costs, tokens = self.costs, work.tokens
        new = tokens - work.seqs
        own = new * work.uneven + work.seqs
        time = costs.fixed + costs.output * work.outputs
        time += max(costs.linear_read, costs.linear_token * own)
        time += max(costs.head_read, costs.head_token * work.outputs)
        if self.shape.experts:
            touched = experts_touched(self.shape.experts, self.shape.experts_per_token, tokens)
            time += max(costs.expert_read * touched, costs.expert_token * tokens)
        time += costs.other_token * own + costs.exchange_token * tokens
        far, near = costs.past * (work.context - new), costs.past * (work.context_windowed - new)
        prompts = self._far_layers * max(costs.pair * work.pairs + far, costs.context * work.context)
        if self._near_layers:
            prompts += self._near_layers * max(
                costs.pair * work.pairs_windowed + near, costs.context * work.context_windowed
            )
        prompts += self._index_layers * costs.index_pair * work.pairs
        time += prompts * work.uneven
        return time

    def read_seconds(self) -> tuple[float, float]:
        """Return seconds per KV token of a decode step: in layers that see all, and in those that read a part."""
        far = self.costs.kv * self._far_layers + self.costs.index * self._index_layers
        return far, self.costs.kv * self._near_layers


class RooflineTiming:
    """A roofline as a timing model of the engine. Nothing is looked up, so nothing is extrapolated."""

    def __init__(self, roofline: Roofline, speed_up: float = 1.0) -> None:
        self.lookups = self.extrapolated = 0
        self.uneven = False
        self._roofline = roofline
        self._scale = SECOND / speed_up
        self._window = roofline.shape.reads
        far, near = roofline.read_seconds()
        self._far, self._near = far * self._scale, near * self._scale
        self._bases: dict[int, float] = {}

    def prefill(self, tokens: int) -> float:
        return self.mixed(tokens, [(0, tokens)], 0, 0) if tokens else 0.0

    def mixed(self, tokens: int, chunks: Iterable[tuple[int, int]], kv: int, seqs: int, longest: int = 0) -> float:
        return self._scale * self._roofline.seconds(work_of(chunks, kv, seqs, self._window, self._roofline.replicas))

    def decode(self, kv: int, seqs: int) -> float:
        if not seqs:
            return 0.0
        near = kv if self._window is None else min(kv, self._window * seqs)
        return self._base(seqs) + self._far * kv + self._near * near

    def run(self, kv: int, seqs: int, steps: int, longest: int = 0) -> DecodeSteps:
        slope, rise = self._far + self._near, self._far * seqs
        if self._window is None:
            return QuadraticSteps(self._base(seqs) + slope * kv, slope * seqs, 0.0, steps, steps)
        # The step that first fills the window of all, and all after it, read no more in the layers that have one.
        bend = min(steps, max(0, -((kv - self._window * seqs) // seqs)))
        growing = QuadraticSteps(self._base(seqs) + slope * kv, slope * seqs, 0.0, bend, bend)
        if bend == steps:
            return growing
        full = QuadraticSteps(self.decode(kv + bend * seqs, seqs), rise, 0.0, steps - bend, steps - bend)
        return PiecewiseSteps(growing, bend, full) if bend else full

    def over(self, kv: npt.NDArray[np.int64], seqs: int) -> DecodeSteps:
        near = kv if self._window is None else np.minimum(kv, self._window * seqs)
        return TabulatedSteps.of(self._base(seqs) + self._far * kv + self._near * near)

    def _base(self, seqs: int) -> float:
        """Return what a decode step of so many sequences takes before it reads KV; there are max_num_seqs of these."""
        base = self._bases.get(seqs)
        if base is None:
            base = self._bases[seqs] = self._scale * self._roofline.without_decode_attention(Work(seqs, seqs, seqs))
        return base


def experts_touched(experts: int, per_token: int, tokens: int) -> float:
    """Return how many different experts of a layer a pass of so many tokens is expected to read, choices being even."""
    return experts * (1.0 - (1.0 - per_token / experts) ** tokens)


def check_parallel(
    shape: ModelShape, tensor_parallel_size: int, expert_parallel_size: int, pipeline_parallel_size: int = 1
) -> None:
    """Raise `ConfigError` where so many GPUs can't share a model's layers, heads or experts."""
    if pipeline_parallel_size > shape.layers:
        raise ConfigError(
            f"pipeline_parallel_size is {pipeline_parallel_size}, but {shape.name} has {shape.layers} layers",
            hint="give each stage a layer at least",
        )
    if shape.heads % tensor_parallel_size:
        raise ConfigError(
            f"tensor_parallel_size is {tensor_parallel_size}, which does not divide the "
            f"{shape.heads} heads of {shape.name}",
            hint="take a power of two",
        )
    if expert_parallel_size == 1:
        return
    if not shape.experts:
        raise ConfigError(
            f"expert_parallel_size is {expert_parallel_size}, but {shape.name} has no experts", hint="leave it at 1"
        )
    if shape.experts % expert_parallel_size or (
        expert_parallel_size % tensor_parallel_size and tensor_parallel_size % expert_parallel_size
    ):
        raise ConfigError(
            f"expert_parallel_size is {expert_parallel_size}; {shape.name} has {shape.experts} experts, and "
            f"tensor_parallel_size is {tensor_parallel_size}",
            hint="it must divide the experts, and be a multiple of tensor_parallel_size or divide it",
        )

"""`DesignCase`: a model, a GPU and a kind of traffic; its frontiers, what a split gains, and the KV it moves.

Source: "Beyond the Buzz" (arXiv 2506.05508): tokens per second and GPU against tokens per second and user, for
disaggregated engines after rate matching, and for co-located ones with and without piggybacked prompts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from penstock.engine.timing.decode_steps import Array
from penstock.engine.timing.gpus import Gpu
from penstock.engine.timing.known_models import model_named
from penstock.engine.timing.model_shape import shape_of
from penstock.engine.timing.weight_types import Dtype
from penstock.kernel.values import RequestShape
from penstock.profiler.design_space.parallel_mappings import ParallelMapping, ServedModel, mappings_of
from penstock.profiler.design_space.rate_matching import ENGINES_MAX, Deployments, alone, matched
from penstock.profiler.design_space.serving_points import EnginePoints, ServingPoints

MODELS = ("Llama-3.1-8B", "Llama-3.1-70B", "Llama-3.1-405B", "DeepSeek-R1")
K = 1024
TRAFFIC = {
    "16k/2k": RequestShape(16 * K, 2 * K),
    "8k/1k": RequestShape(8 * K, K),
    "4k/4k": RequestShape(4 * K, 4 * K),
    "1k/1k": RequestShape(K, K),
    "1k/8k": RequestShape(K, 8 * K),
}
"""Prompts and answers, from prefill-heavy to generation-heavy."""
PREFILL_HEAVY, BALANCED, GENERATION_HEAVY = "16k/2k", "4k/4k", "1k/8k"
SLOWEST = 20.0
"""Tokens per second of one user below which nobody wants an answer: 50 ms per token."""
STEPS = 48
"""Speeds at which two frontiers are compared."""
FIXED_RATIOS = (3.5, 2.0, 1.0, 0.5)
"""GPUs of context per GPU of generation that are held fixed; the first and the last are those of the source."""
DOMAINS = (4, 8, 16, 32, 64)
"""GPUs of a link domain."""


@dataclass(frozen=True, slots=True)
class DesignCase:
    """One search. ``domain``: GPUs of a link domain; ``ttft``: seconds that the passes of a prompt may take."""

    model: str
    traffic: str
    gpu: Gpu
    domain: int
    ttft: float

    @property
    def request(self) -> RequestShape[int]:
        """Tokens of prompts and answers."""
        return TRAFFIC[self.traffic]

    def served(self) -> ServedModel:
        """Return the model on GPUs whose links reach over the domain, in the narrowest weights that they compute in."""
        gpu = msgspec.structs.replace(self.gpu, link_gpus=self.domain)
        weights: Dtype = "bf16" if gpu.fp8_tflops is None else "fp8" if gpu.fp4_tflops is None else "fp4"
        return ServedModel(
            shape_of(model_named(self.model), self.model), gpu, weights, "bf16" if weights == "bf16" else "fp8"
        )


class DesignSpace:
    """All points of one case, and the frontiers of its deployments."""

    def __init__(self, case: DesignCase) -> None:
        self.case = case
        request, served = case.request, case.served()
        self.served = served
        self.mappings: Sequence[ParallelMapping] = list(mappings_of(served, request.isl + request.osl))
        engines = EnginePoints(served, self.mappings, request)
        self.context, self.generation = engines.context(), engines.generation()
        self.plain, self.mixed = engines.colocated(), engines.piggybacked()
        both = self.plain.and_also(self.mixed)
        self.colocated_points = both
        self.disaggregated = self.fixed(None)
        self.without_piggyback = self._alone(self.plain)
        self.with_piggyback = self._alone(self.mixed)
        self.colocated = self._alone(both)

    def fixed(self, ratio: float | None) -> Deployments:
        """Return the frontier of disaggregated deployments with a ratio of GPUs; None takes the best for each."""
        request = self.case.request
        return matched(self.context, self.generation, self.case.ttft, request.osl, ratio).frontier()

    def _alone(self, points: ServingPoints) -> Deployments:
        return alone(points, self.case.ttft, self.case.request.osl).frontier()

    @property
    def size(self) -> int:
        """Deployments that were compared: co-located points, and pairs of whole numbers of engines for every other."""
        pairs = len(self.generation.rate) * 2 * ENGINES_MAX
        return pairs + len(self.context.rate) + len(self.colocated_points.rate)

    def speeds(self) -> Array:
        """Return the speeds at which both kinds are compared: from `SLOWEST` to where the first of them ends."""
        ends = [float(kind.speed.max()) for kind in (self.disaggregated, self.colocated) if len(kind.speed)]
        if len(ends) < 2 or min(ends) <= SLOWEST:
            return np.zeros(0)
        return np.geomspace(SLOWEST, min(ends), STEPS)

    def gains(self) -> Array:
        """Return, at each of `speeds`, the tokens per second and GPU of a split over those of co-located engines."""
        at = self.speeds()
        return self.disaggregated.density_at(at) / self.colocated.density_at(at)

    @property
    def gain(self) -> float | None:
        """The geometric mean of `gains`; None where there is nothing to compare."""
        gains = self.gains()
        return float(np.exp(np.log(gains).mean())) if len(gains) else None

    def at(self, kind: Deployments, speed: float) -> int | None:
        """Return the number of the deployment of a frontier that serves a speed with the fewest GPUs; None for none."""
        fast = np.flatnonzero(kind.speed >= speed)
        return int(fast[-1]) if len(fast) else None

    def ratio_at(self, speed: float) -> float | None:
        """Return the GPUs of context per GPU of generation of the best split at a speed."""
        number = self.at(self.disaggregated, speed)
        return None if number is None else float(self.disaggregated.ratio[number])

    def transfer_at(self, speed: float) -> tuple[float, float] | None:
        """Return bytes of KV per second that leave a GPU of context and reach one of generation, at a speed."""
        number = self.at(self.disaggregated, speed)
        if number is None:
            return None
        one = self.disaggregated.take(np.array([number]))
        gpus = self.context.gpus[one.context] * one.context_engines
        generating = self.generation.gpus[one.point] * one.generation_engines
        request = self.case.request
        rate = one.density * (gpus + generating) / request.osl
        moved = rate * request.isl * self.served.shape.kv_bytes(self.served.kv_cache_dtype)
        return float((moved / gpus)[0]), float((moved / generating)[0])

    def layout_of(self, kind: Deployments, number: int) -> str:
        """Describe one deployment: engines, their mappings, batches and chunks."""
        point, context = int(kind.point[number]), int(kind.context[number])
        if context < 0:
            points = {id(self.without_piggyback): self.plain, id(self.with_piggyback): self.mixed}
            return self._engine(points.get(id(kind), self.colocated_points), point)
        engines = int(kind.context_engines[number]), int(kind.generation_engines[number])
        before, after = self._engine(self.context, context), self._engine(self.generation, point)
        return f"{engines[0]} x {before} -> {engines[1]} x {after}"

    def _engine(self, points: ServingPoints, number: int) -> str:
        chunk = int(points.chunk[number])
        text = f"{self.mappings[int(points.mapping[number])]} b{int(points.batch[number])}"
        return f"{text} chunk {chunk}" if chunk else text


def cases(
    gpu: Gpu, models: Sequence[str] = MODELS, traffic: Sequence[str] = tuple(TRAFFIC), ttft: float = 2.0
) -> Iterator[DesignCase]:
    """Return a case for each model and kind of traffic, with the GPU's own link domain."""
    for model in models:
        for name in traffic:
            yield DesignCase(model, name, gpu, min(gpu.link_gpus, DOMAINS[-1]), ttft)

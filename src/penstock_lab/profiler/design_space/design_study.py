"""`DesignCase`: a model, a GPU and a kind of traffic; its frontiers, what a split gains, and the KV it moves.

Source: "Beyond the Buzz" (arXiv 2506.05508): tokens per second and GPU against tokens per second and user, for
disaggregated engines after rate matching, and for co-located ones with and without piggybacked prompts. It gives no
absolute numbers: of the captions of its figures 6 to 11 only the orders can be compared, each as a `StudyFinding`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import msgspec
import numpy as np

from penstock.kernel.values import RequestShape
from penstock_lab.engine.timing.decode_steps import Array
from penstock_lab.engine.timing.gpus import Gpu
from penstock_lab.engine.timing.known_models import model_named
from penstock_lab.engine.timing.model_shape import shape_of
from penstock_lab.engine.timing.weight_types import Dtype
from penstock_lab.profiler.design_space.rate_matching import ENGINES_MAX, Deployments, alone, matched
from penstock_lab.profiler.design_space.serving_points import (
    EnginePoints,
    ParallelMapping,
    ServedModel,
    ServingPoints,
    mappings_of,
)

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


ALMOST_NONE = 1.1
"""A gain below this is almost none."""
LOST = 0.9
"""A fixed ratio loses where it gives less than this share of the best."""
SMALL = 10e9
"""Parameters below which the source sees nothing to gain from a split."""
SMALL_DOMAIN = 8
"""GPUs of a link domain that a larger one is compared with."""
HELPED = 1.05
"""By how much a larger domain must help."""


@dataclass(frozen=True, slots=True)
class StudyFinding:
    """One order. ``numbers``: what it is judged by, for a reader."""

    name: str
    holds: bool
    numbers: str


def findings(spaces: Sequence[DesignSpace]) -> list[StudyFinding]:
    """Return what can be said of these cases; an order for which a model or traffic is missing is left out."""
    by_place = {(space.case.model, space.case.traffic): space for space in spaces}
    models = list(dict.fromkeys(space.case.model for space in spaces))
    heavy = [by_place[model, PREFILL_HEAVY] for model in models if (model, PREFILL_HEAVY) in by_place]
    parts = [
        _by_envelope(heavy),
        _by_size(heavy),
        _by_traffic(by_place, models),
        _by_ratio(heavy),
        _fixed_ratio(heavy),
    ]
    return [part for part in [*parts, *_by_domain(heavy)] if part is not None]


def _by_envelope(spaces: Sequence[DesignSpace]) -> StudyFinding | None:
    """Figure 6: co-located engines are the envelope of both of their kinds, and a split is above it in the middle."""
    if not spaces:
        return None
    kept, texts = True, []
    for space in spaces:
        at, gains = space.speeds(), space.gains()
        parts = (space.without_piggyback, space.with_piggyback)
        upper = np.maximum(*(part.density_at(at) for part in parts))
        middle = float(gains[len(gains) // 2]) if len(gains) else 0.0
        kept = kept and np.allclose(space.colocated.density_at(at), upper)
        kept = kept and (middle > 1.0 or space.served.shape.params < SMALL)
        texts.append(f"{space.case.model} {middle:.2f} at {at[len(at) // 2]:.0f} tokens/s" if len(at) else "nothing")
    return StudyFinding(
        "6: over 10 billion parameters a split is above co-located engines, the envelope of both kinds, in the middle",
        kept,
        _join_texts(texts),
    )


def _by_size(spaces: Sequence[DesignSpace]) -> StudyFinding | None:
    """Figure 7: what a split gains grows with the model."""
    sized = sorted((space.served.shape.params_active, space.gain or 0.0, space.case.model) for space in spaces)
    if len(sized) < 2:
        return None
    dense = [gain for _, gain, model in sized if not _has_experts(spaces, model)]
    kept = all(one < other for one, other in pairwise(dense))
    # A model with many experts is large by all of its weights, not by those that one token passes.
    if dense and len(dense) < len(sized):
        kept = kept and all(gain > dense[0] for _, gain, model in sized if _has_experts(spaces, model))
    texts = [f"{model} {gain:.2f}" for _, gain, model in sized]
    return StudyFinding("7: the gain grows with the model", kept, _join_texts(texts))


def _has_experts(spaces: Sequence[DesignSpace], model: str) -> bool:
    return any(space.case.model == model and space.served.shape.experts > 0 for space in spaces)


def _by_traffic(spaces: dict[tuple[str, str], DesignSpace], models: Sequence[str]) -> StudyFinding | None:
    """Figure 8: prefill-heavy traffic gains most, generation-heavy traffic almost nothing."""
    order = (PREFILL_HEAVY, BALANCED, GENERATION_HEAVY)
    rows = [(model, [spaces[model, name].gain or 0.0 for name in order if (model, name) in spaces]) for model in models]
    rows = [(model, gains) for model, gains in rows if len(gains) == len(order)]
    if not rows:
        return None
    kept = all(one > two > three and three < ALMOST_NONE for _, (one, two, three) in rows)
    texts = [f"{model} {one:.2f} > {two:.2f} > {three:.2f}" for model, (one, two, three) in rows]
    return StudyFinding(f"8: {' > '.join(order)}, the last almost none", kept, _join_texts(texts))


def _by_ratio(spaces: Sequence[DesignSpace]) -> StudyFinding | None:
    """Figure 9: the best ratio of GPUs moves with the model and with the speed that is asked for."""
    if len(spaces) < 2:
        return None
    ends = [
        (space.case.model, space.ratio_at(SLOWEST) or 0.0, space.ratio_at(_fast_at(space)) or 0.0) for space in spaces
    ]
    slow = [one for _, one, _ in ends]
    kept = all(one > other for _, one, other in ends) and max(slow) > 1.5 * min(slow)
    texts = [f"{model} {one:.2f} to {other:.2f}" for model, one, other in ends]
    return StudyFinding(
        f"9: the best ratio moves with the model, and falls from {SLOWEST:g} tokens/s on", kept, _join_texts(texts)
    )


def _fixed_ratio(spaces: Sequence[DesignSpace]) -> StudyFinding | None:
    """Figure 10: a ratio that is best at one end of the speeds loses at the other, and the best one is the envelope."""
    if not spaces:
        return None
    kept, texts = True, []
    for space in spaces:
        ends = (SLOWEST, _fast_at(space))
        best = [float(space.disaggregated.density_at(np.array(speed))) for speed in ends]
        shares = []
        for speed in ends:
            fixed = space.fixed(space.ratio_at(speed))
            shares += [float(fixed.density_at(np.array(end))) / most for end, most in zip(ends, best, strict=True)]
        relaxed_there, relaxed_elsewhere, tight_elsewhere, tight_there = shares
        kept = kept and max(relaxed_elsewhere, tight_elsewhere) < LOST < min(relaxed_there, tight_there)
        texts.append(f"{space.case.model} {relaxed_elsewhere:.0%} and {tight_elsewhere:.0%}")
    return StudyFinding(
        "10: a fixed ratio loses at the end that it was not made for; it gives there", kept, _join_texts(texts)
    )


def _by_domain(spaces: Sequence[DesignSpace]) -> list[StudyFinding]:
    """Figure 11: a larger link domain helps models with experts at medium speed, and dense ones at the fast end."""
    found = []
    for space in spaces:
        if space.case.domain <= SMALL_DOMAIN or space.served.shape.params < SMALL:
            continue
        small = DesignSpace(replace(space.case, domain=SMALL_DOMAIN))
        if space.served.shape.experts:
            at = space.speeds()
            middle = at[len(at) // 4 : len(at) * 3 // 4]
            ratio = space.disaggregated.density_at(middle) / small.disaggregated.density_at(middle)
            helped, what = float(np.nanmax(ratio)), "tokens/s per GPU at medium speed"
        else:
            helped = float(space.disaggregated.speed.max() / small.disaggregated.speed.max())
            what = "the fastest speed"
        name = f"11: {space.case.domain} GPUs of a link domain over {SMALL_DOMAIN} help {space.case.model}"
        found.append(StudyFinding(name, helped > HELPED, f"{what} x {helped:.2f}"))
    return found


def _fast_at(space: DesignSpace) -> float:
    """Return a speed near the fast end that both kinds of deployment reach."""
    at = space.speeds()
    return float(at[len(at) * 7 // 8]) if len(at) else SLOWEST


def _join_texts(texts: Sequence[str]) -> str:
    return "; ".join(texts)

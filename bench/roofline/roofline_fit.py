"""Fits the roofline's calibration to measured operating points: least squares on logarithms.

A measured point is a closed loop: so many clients, each with one ``request`` at a time. Its TPOT is a decode step over
the batch that fits, plus the prompts of the others that come between two tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from penstock.kernel.errors import ConfigError
from penstock.kernel.values import RequestShape
from penstock_lab.engine.kv_capacity import SEQS, kv_blocks_of
from penstock_lab.engine.settings import Calibration
from penstock_lab.engine.timing.decode_steps import Array
from penstock_lab.engine.timing.gpus import Gpu
from penstock_lab.engine.timing.model_shape import ModelShape
from penstock_lab.engine.timing.roofline import Roofline, work_of
from penstock_lab.engine.timing.weight_types import Dtype

START = Calibration(
    bandwidth_efficiency=0.85,
    compute_efficiency=0.6,
    narrow_efficiency=0.85,
    expert_efficiency=0.5,
    widening_efficiency=0.7,
    link_efficiency=0.6,
    link_latency_ms=0.008,
    layer_overhead_ms=0.02,
    expert_layer_overhead_ms=0.02,
    pass_overhead_ms=0.7,
    sequence_overhead_ms=0.003,
)
"""Where a fit begins, and what it keeps to by its ``prior``: what kernels and links reach alone. Large matrices run at
0.6 to 0.7 of bf16's rate and at a smaller share of fp8's, an all-reduce over NVLink at 0.6 of its rate after 8 us, a
decoder layer's dozen kernels leave gaps of 1 to 2 us in a CUDA graph."""
NAMES = tuple(field.name for field in msgspec.structs.fields(Calibration) if field.name != "gddr_efficiency")
"""What is fitted. The one for GDDR comes from profiles: the measured points are of GPUs with HBM."""
LEAST, MOST = 1e-6, 1e3
BANDWIDTH = 0.92
"""No DRAM streams faster than this share of its data sheet, refresh and turn-arounds counted."""
OUTLIER = 0.2
"""Errors beyond this (22 %) weigh less, so that points whose set-up is not what they say don't bend the rest."""
ROUNDS = 50
TTFT_WEIGHT = 0.5
"""Errors of the TTFT beside those of the TPOT: load generators differ in how they begin, which is most of it."""
MEASURED_UTILISATION = 0.95
"""Share of a GPU's memory that the measured engines may use: some of them did not fit into vLLM's 0.9."""


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """One operating point of one engine.

    ``prefill_first``: the engine computes prompts before any more tokens, so that requests that began together end
    together, and a request waits for half of the others' prompts; else for those of all others. ``tpot`` and ``ttft``:
    seconds; a fit looks at the second only where it is there.
    """

    shape: ModelShape
    gpu: Gpu
    tensor_parallel_size: int
    expert_parallel_size: int
    weight_dtype: Dtype | None
    kv_cache_dtype: Dtype | None
    request: RequestShape[int]
    concurrency: int
    prefill_first: bool
    tpot: float
    ttft: float | None = None
    beside: float = 0.0
    """Seconds of a request before its first token that are no part of a pass."""


class PredictedPoint(NamedTuple):
    """What the closed form gives a point, in seconds; queueing is no part of ``prompt``."""

    tpot: float
    prompt: float


def predicted_tpot(point: MeasuredPoint, calibration: Calibration) -> float:
    """Return the TPOT that the roofline gives a point, in seconds; as `predicted`."""
    return predicted(point, calibration).tpot


def predicted(point: MeasuredPoint, calibration: Calibration) -> PredictedPoint:
    """Return the TPOT that the roofline gives a point, and the pass that its prompt is in.

    Raises:
        ConfigError: the point's GPUs don't divide the model, or don't hold it.
    """
    shape = point.shape
    roofline = Roofline(
        shape,
        point.gpu,
        calibration,
        tensor_parallel_size=point.tensor_parallel_size,
        expert_parallel_size=point.expert_parallel_size,
        weight_dtype=point.weight_dtype,
        kv_cache_dtype=point.kv_cache_dtype,
    )
    length = point.request.isl + point.request.osl // 2
    batch = _running(point, length)
    kv = batch * length
    step = roofline.seconds(work_of((), kv, batch, shape.reads))
    prompt = roofline.seconds(work_of(((0, point.request.isl),), kv, batch, shape.reads, roofline.replicas)) - step
    share = 0.5 if point.prefill_first else 1.0
    return PredictedPoint(step + share * (batch - 1) / point.request.osl * prompt, step + prompt)


def _running(point: MeasuredPoint, length: int) -> int:
    """Return how many of the clients' requests run at once: all, unless the cache is too small."""
    tokens = kv_blocks_of(
        point.shape,
        point.gpu,
        block_size=1,
        tensor_parallel_size=point.tensor_parallel_size,
        expert_parallel_size=point.expert_parallel_size,
        weight_dtype=point.weight_dtype,
        kv_cache_dtype=point.kv_cache_dtype,
        utilisation=MEASURED_UTILISATION,
        seqs=min(SEQS, point.concurrency),
        length=length,
    )
    return max(1, min(point.concurrency, tokens // length))


def fit(
    points: Sequence[MeasuredPoint],
    start: Calibration = START,
    scale: Sequence[PredictedPoint] | None = None,
    prior: float = 0.0,
) -> Calibration:
    """Return the calibration under which what is predicted is nearest to what was measured.

    Args:
        scale: by what each prediction is multiplied: what the engine, simulated, makes of a point over `predicted`.
            Only with it is the TTFT looked at, since the closed form knows of no queue.
        points: at least as many as there are constants, and of more than one batch size, or nothing tells them apart.
        start: where to begin; its values must be above 0.
        prior: what a constant's distance from ``start`` (in logarithms) weighs, as an error of that many points does.
            Constants that the points do not tell apart stay near it then, also those that only a model not seen shows.
    Raises:
        ConfigError: as `predicted_tpot`, or there are too few points.
    Cost: some 20 rounds of 9 predictions of each point, 30 us each.
    """
    if len(points) < len(NAMES):
        raise ConfigError(
            f"{len(points)} measured points can't tell {len(NAMES)} constants apart", hint="measure more of them"
        )
    measured = np.log([point.tpot for point in points])
    queued = [i for i, point in enumerate(points) if scale is not None and point.ttft is not None]
    if scale is not None:
        measured = measured - np.log([each.tpot for each in scale])
        measured = np.concatenate([measured, np.log([points[i].ttft or 1.0 for i in queued])])
    at = np.log([getattr(start, name) for name in NAMES])
    begin = at
    most = np.log([BANDWIDTH if name == "bandwidth_efficiency" else _most(name) for name in NAMES])

    def errors(where: Array) -> Array:
        calibration = _calibration(where)
        each = [predicted(point, calibration) for point in points]
        made = [one.tpot for one in each] + [
            each[i].prompt * scale[i].prompt + points[i].beside for i in queued if scale is not None
        ]
        residuals: Array = np.log(made) - measured
        residuals[len(points) :] *= TTFT_WEIGHT
        return np.concatenate([residuals, prior * (where - begin)])

    damping, error = 1e-2, errors(at)
    for _ in range(ROUNDS):
        weight = np.where(np.abs(error) < OUTLIER, 1.0, OUTLIER / np.maximum(np.abs(error), OUTLIER))
        slopes = np.stack([(errors(at + nudge) - error) / 1e-4 for nudge in 1e-4 * np.eye(len(at))], axis=1)
        normal, gradient = slopes.T @ (weight[:, None] * slopes), slopes.T @ (weight * error)
        before = _loss(error)
        while damping < 1e6:  # Levenberg-Marquardt: shorter steps until one is better
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -gradient)
            there = np.clip(at + step, np.log(LEAST), most)
            error_there = errors(there)
            if _loss(error_there) < before:
                break
            damping *= 4.0
        else:
            return _calibration(at)
        at, error, damping = there, error_there, max(damping / 5.0, 1e-7)
        if before - _loss(error) < 1e-6 * before:
            break
    return _calibration(at)


def _most(name: str) -> float:
    return 1.0 if name.endswith("efficiency") else MOST


def _calibration(where: Array) -> Calibration:
    return Calibration(**dict(zip(NAMES, np.exp(where).tolist(), strict=True)))


def _loss(error: Array) -> float:
    """Huber's: squares near 0, lines beyond `OUTLIER`."""
    size = np.abs(error)
    return float(np.where(size < OUTLIER, 0.5 * size * size, OUTLIER * (size - 0.5 * OUTLIER)).sum())

"""Which calibration makes the roofline agree with measurements? Least squares on the logarithm of the TPOT.

A measured point is a closed loop: so many clients, each with one request at a time of ``isl`` prompt and ``osl`` output
tokens. Its TPOT is a decode step over the batch that fits, plus the prompts of the others that come between two tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from penstock.engine.capacity import kv_blocks_of
from penstock.engine.gpus import Gpu
from penstock.engine.model_shape import Dtype, ModelShape
from penstock.engine.roofline import Roofline, work_of
from penstock.engine.runs import Array
from penstock.engine.settings import Calibration
from penstock.kernel.errors import ConfigError

START = Calibration(widening_efficiency=0.8, pass_overhead_ms=0.5, sequence_overhead_ms=0.005)
"""Where a fit begins: the field's usual values, and something to grow from where those are 0."""
NAMES = tuple(field.name for field in msgspec.structs.fields(Calibration))
LEAST, MOST = 1e-6, 1e3
OUTLIER = 0.2
"""Errors beyond this (22 %) weigh less, so that points whose set-up is not what they say don't bend the rest."""
ROUNDS = 50


@dataclass(frozen=True, slots=True)
class Measured:
    """One operating point of one engine.

    ``prefill_first``: the engine computes prompts before any more tokens, so that requests that began together end
    together, and a request waits for half of the others' prompts; else for those of all others. ``tpot``: seconds.
    """

    shape: ModelShape
    gpu: Gpu
    tensor_parallel: int
    expert_parallel: int
    weight_dtype: Dtype | None
    kv_dtype: Dtype | None
    isl: int
    osl: int
    concurrency: int
    prefill_first: bool
    tpot: float


def predicted_tpot(point: Measured, calibration: Calibration) -> float:
    """Return the TPOT that the roofline gives a point, in seconds.

    Raises:
        ConfigError: the point's GPUs don't divide the model, or don't hold it.
    """
    shape = point.shape
    roofline = Roofline(
        shape,
        point.gpu,
        calibration,
        tensor_parallel=point.tensor_parallel,
        expert_parallel=point.expert_parallel,
        weight_dtype=point.weight_dtype,
        kv_dtype=point.kv_dtype,
    )
    length = point.isl + point.osl // 2
    batch = _running(point, length)
    kv = batch * length
    step = roofline.seconds(work_of((), kv, batch, shape.window))
    prompt = roofline.seconds(work_of(((0, point.isl),), kv, batch, shape.window)) - step
    share = 0.5 if point.prefill_first else 1.0
    return step + share * (batch - 1) / point.osl * prompt


def _running(point: Measured, length: int) -> int:
    """Return how many of the clients' requests run at once: all, unless the cache is too small."""
    tokens = kv_blocks_of(
        point.shape,
        point.gpu,
        block_size=1,
        tensor_parallel=point.tensor_parallel,
        expert_parallel=point.expert_parallel,
        weight_dtype=point.weight_dtype,
        kv_dtype=point.kv_dtype,
        length=length,
    )
    return max(1, min(point.concurrency, tokens // length))


def fit(points: Sequence[Measured], start: Calibration = START) -> Calibration:
    """Return the calibration under which the predicted TPOT is nearest to the measured ones.

    Args:
        points: at least as many as there are constants, and of more than one batch size, or nothing tells them apart.
        start: where to begin; its values must be above 0.
    Raises:
        ConfigError: as `predicted_tpot`, or there are too few points.
    Cost: some 20 rounds of 9 predictions of each point, 30 us each.
    """
    if len(points) < len(NAMES):
        raise ConfigError(
            f"{len(points)} measured points can't tell {len(NAMES)} constants apart", hint="measure more of them"
        )
    measured = np.log([point.tpot for point in points])
    at = np.log([getattr(start, name) for name in NAMES])
    most = np.log([1.0 if name.endswith("efficiency") else MOST for name in NAMES])

    def errors(where: Array) -> Array:
        calibration = _calibration(where)
        found: Array = np.log([predicted_tpot(point, calibration) for point in points]) - measured
        return found

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


def _calibration(where: Array) -> Calibration:
    return Calibration(**dict(zip(NAMES, np.exp(where).tolist(), strict=True)))


def _loss(error: Array) -> float:
    """Huber's: squares near 0, lines beyond `OUTLIER`."""
    size = np.abs(error)
    return float(np.where(size < OUTLIER, 0.5 * size * size, OUTLIER * (size - 0.5 * OUTLIER)).sum())

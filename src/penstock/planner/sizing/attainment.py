"""Attainment model: the share of requests within the service level, by rate and workers, from waiting and service time.

Closed forms, so that a whole table of rates and fleets takes milliseconds:

- An engine that prefills and decodes makes passes. A decode step takes ``D(N, K)`` and prompts add their own seconds,
  so a token takes ``D / (1 - rho)``, where ``rho`` is the share of time that prefill takes, and ``N = rate x output x
  token time`` sequences decode (Little's law): a fixed point.
- A request's mean ITL is ``D`` and its part of the prefill seconds of others that fall into its life: a compound
  Poisson sum in a busy period, taken as a gamma distribution of the same mean and variance.
- Its TTFT is waiting, half a pass, and its own prefill. Waiting is that of M/G/c in Sakasegawa's approximation, with an
  exponential tail.

Where these err, `penstock.planner.sizing.load_correction` learns the error from observed attainment.
"""

import math
from copy import copy
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.kernel.values import EngineLimits, LatencyTargets, Role
from penstock.planner.performance.performance_model import PerformanceModel
from penstock.planner.sizing.workload_mix import WorkloadMix

Floats = npt.NDArray[np.float64]

FRESH_KINDS, OUTPUT_KINDS = 16, 4
"""Kinds of prompts and of outputs that a mix is reduced to before any computation. Prompts are divided
more finely: the longest ones miss their TTFT by themselves."""
TURNS = 40
"""Iterations of the fixed point; each halves the error."""
POOLING = 0.6
"""Share of the advantage of one common queue that a router has which sends each request on at once: 0 none, 1 all."""
SWING = 0.5
"""Share of the swing of the number of sequences that affects a request's whole life; the rest averages out in it."""
TAIL = 0.002
"""Share that is missed at any load: misses that no number of workers prevents are no reason to add workers."""


def coarse(shapes: WorkloadMix) -> WorkloadMix:
    """Return a mix of few kinds with the same means: neighbours are joined."""
    if len(shapes.weight) <= FRESH_KINDS * OUTPUT_KINDS:
        return shapes

    def place(values: Floats, kinds: int) -> npt.NDArray[np.int64]:
        values = np.log2(values)
        low, width = float(values.min()), max(1e-9, float(np.ptp(values)))
        return np.minimum(kinds - 1, ((values - low) / width * kinds).astype(np.int64))

    osl = np.maximum(1.0, shapes.osl)
    _, kind = np.unique(place(shapes.fresh, FRESH_KINDS) * OUTPUT_KINDS + place(osl, OUTPUT_KINDS), return_inverse=True)
    weight = np.bincount(kind, shapes.weight).astype(np.float64)

    def mean(values: Floats) -> Floats:
        return np.asarray(np.bincount(kind, values * shapes.weight) / weight)

    isl = mean(shapes.isl)
    return WorkloadMix(isl, mean(osl), 1.0 - mean(shapes.fresh) / isl, weight)


class Attainment(NamedTuple):
    """Shares of requests, 0..1, shape (rates,) each: that keep TTFT, that keep ITL, and that keep both."""

    ttft: Floats
    itl: Floats

    @property
    def both(self) -> Floats:
        return np.asarray(self.ttft * self.itl * (1.0 - TAIL))


class AttainmentModel:
    """One mix of requests on one kind of engine.

    Args:
        extra: seconds of TTFT beyond waiting and prefill, such as those of a hand-off.
        accept: tokens that a decode step makes per sequence, above 1 with speculation.
    """

    def __init__(
        self,
        speed: PerformanceModel,
        limits: EngineLimits[int],
        shapes: WorkloadMix,
        service: LatencyTargets,
        *,
        extra: float = 0.0,
        accept: float = 1.0,
    ) -> None:
        shapes = coarse(shapes)
        self.shapes = shapes
        self.service = service
        self._speed, self._limits, self._extra = speed, limits, extra
        self._prefill = speed.prefill(shapes.fresh)
        weight = shapes.weight
        self._steps = np.maximum(1.0, shapes.osl / accept)
        """Decode steps of each kind."""
        self._p1 = float(np.dot(weight, self._prefill))
        self._p2 = float(np.dot(weight, self._prefill**2))
        self._out = float(np.dot(weight, self._steps))
        self._context = float(np.dot(weight, (shapes.isl + shapes.osl / 2.0) * shapes.osl)) / float(
            np.dot(weight, shapes.osl)
        )
        self._passes = np.ceil(shapes.fresh / limits.max_num_batched_tokens)
        self._seqs_max = max(1.0, min(limits.max_num_seqs, limits.kv_tokens / max(1.0, self._context)))

    def relaxed(self, factor: float) -> "AttainmentModel":
        """Return the same mix on the same engine with a TTFT target that many times as long, and no ITL target."""
        relaxed = copy(self)
        relaxed.service = LatencyTargets(None if self.service.ttft is None else self.service.ttft * factor, None)
        return relaxed

    def least(self, role: Role) -> float:
        """Return the seconds of one worker that a request takes at full capacity: no rate is higher."""
        full = np.array([self._seqs_max])
        step = float(self._speed.decode(full, full * self._context)[0]) * self._out / self._seqs_max
        if role == "prefill":
            return self._p1
        return step if role == "decode" else self._p1 + step

    def attainment(self, role: Role, rates: Floats, workers: Floats) -> Attainment:
        """Return the attainment of workers of a role.

        Args:
            rates: requests per second of all of them together, shape (m,).
            workers: how many there are, shape (m,), each 1 or more.
        """
        each = rates / workers
        if role == "prefill":
            return Attainment(self._waits(each, workers, self._prefill, np.zeros_like(each)), np.ones_like(each))
        if role == "decode":
            step, seqs, full = self._decoding(each, np.zeros_like(each))
            return Attainment(1.0 - full, self._gaps(each, workers, step, seqs, np.zeros_like(each)) * (1.0 - full))
        busy = np.minimum(0.999, each * self._p1)
        step, seqs, full = self._decoding(each, busy)
        over = each * self._p1 >= 0.999
        itl = self._gaps(each, workers, step, seqs, busy)
        service = self._prefill[None, :] + step[:, None] * self._passes[None, :]
        ttft = self._waits(each, workers, service, step)
        bad = np.maximum(full, over.astype(np.float64))
        return Attainment(ttft * (1.0 - bad), itl * (1.0 - bad))

    # --- parts -------------------------------------------------------------------------------------------------------

    def _decoding(self, each: Floats, busy: Floats) -> tuple[Floats, Floats, Floats]:
        """Return seconds of a decode step, decoding sequences, and 1 where they exceed the capacity, else 0."""
        low = np.zeros_like(each)
        high = np.full_like(each, self._seqs_max)
        for _ in range(TURNS):
            # More sequences make longer steps, which keep more of them: the smallest self-consistent number counts.
            middle = (low + high) / 2.0
            sustained = each * self._out * self._speed.decode(middle, middle * self._context) / (1.0 - busy)
            more = sustained > middle
            low, high = np.where(more, middle, low), np.where(more, high, middle)
        seqs = high
        step = self._speed.decode(np.maximum(seqs, 1e-3), seqs * self._context)
        full = np.clip((seqs / self._seqs_max - 0.97) / 0.03, 0.0, 1.0)
        return step, seqs, full

    def _gaps(self, each: Floats, workers: Floats, step: Floats, seqs: Floats, busy: Floats) -> Floats:
        """Return the share whose mean ITL is within the target."""
        if self.service.itl is None:
            return np.ones_like(each)
        steps = self._steps[None, :]
        idle = (1.0 - busy)[:, None]
        mean = steps * step[:, None] * busy[:, None] / idle
        # A router that sends requests to the least loaded worker makes each worker's bursts smaller than by chance.
        calm = np.sqrt(_pooled(workers))[:, None]
        variance = steps * (step * each)[:, None] * self._p2 / idle**3 / calm
        more = self._speed.decode(seqs + 1.0, (seqs + 1.0) * self._context) - step
        # A router that balances leaves each worker its share of the swing of all of them together.
        spread = SWING * more**2 * np.maximum(seqs, 1.0) / _pooled(workers)
        variance = variance + steps**2 * spread[:, None] / idle**2
        accept = steps / self.shapes.osl[None, :]
        room = steps * (self.service.itl / accept - step[:, None])
        return np.asarray(_gamma_below(room, mean, variance) @ self.shapes.weight)

    def _waits(self, each: Floats, workers: Floats, service: Floats, step: Floats) -> Floats:
        """Return the share whose TTFT is within the target. ``service``: seconds per kind, or per rate and kind."""
        if self.service.ttft is None:
            return np.ones_like(each)
        if service.ndim == 1:
            service = np.broadcast_to(service, (len(each), len(service)))
        weight = self.shapes.weight
        first = service @ weight
        second = service**2 @ weight
        busy = each * first
        swing = (1.0 + np.maximum(0.0, second / np.maximum(first, 1e-12) ** 2 - 1.0)) / 2.0
        servers = _pooled(workers)
        tight = np.minimum(busy, 0.999)
        waiting = tight ** (np.sqrt(2.0 * (servers + 1.0)) - 1.0)
        scale = first * swing / (servers * (1.0 - tight))
        room = self.service.ttft - self._extra - service - step[:, None] / 2.0
        late = waiting[:, None] * np.exp(-np.maximum(0.0, room) / scale[:, None])
        share = np.where(room >= 0.0, 1.0 - late, 0.0) @ weight
        return np.asarray(np.where(busy >= 0.999, 0.0, share))


def _pooled(workers: Floats) -> Floats:
    """Return how many servers of one common queue the workers equal."""
    return np.asarray(1.0 + (workers - 1.0) * POOLING)


def _below(z: Floats) -> Floats:
    """Return the standard normal distribution function, to 2e-4 (Page 1977)."""
    z = np.clip(z, -8.0, 8.0)
    return np.asarray(0.5 * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (z + 0.044715 * z**3))))


def _gamma_below(x: Floats, mean: Floats, variance: Floats) -> Floats:
    """Return the chance that a gamma variable of this mean and variance is below x (Wilson and Hilferty 1931)."""
    mean = np.maximum(mean, 1e-9)
    shape = np.maximum(mean**2 / np.maximum(variance, 1e-18), 1e-3)
    ninth = 1.0 / (9.0 * shape)
    root = np.cbrt(np.maximum(x, 0.0) / mean)
    return np.asarray(np.where(x < 0.0, 0.0, _below((root - (1.0 - ninth)) / np.sqrt(ninth))))

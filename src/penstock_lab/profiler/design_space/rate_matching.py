"""Rate matching: whole numbers of context and generation engines whose rates meet, and the Pareto frontier of all.

Source: the two-step search of "Beyond the Buzz" (arXiv 2506.05508): the best context mapping within the TTFT, then for
every generation point the engines of both kinds that waste least.
"""

from dataclasses import dataclass, fields

import numpy as np

from penstock_lab.engine.timing.decode_steps import Array
from penstock_lab.profiler.design_space.serving_points import Chosen, ServingPoints

ENGINES_MAX = 32
"""Engines of one kind at most."""
RATIO_TOLERANCE = 0.1
"""By how much a fixed ratio of GPUs may be missed, so that whole engines can have it."""


@dataclass(frozen=True, slots=True)
class Deployments:
    """Deployments as columns: ``speed`` tokens/s of one user, ``density`` tokens/s per GPU; which points they are made
    of (``context`` is -1 where one engine does both); engines of both kinds, and the GPUs of context per GPU of
    generation."""

    speed: Array
    density: Array
    point: Chosen
    context: Chosen
    context_engines: Array
    generation_engines: Array
    ratio: Array

    def take(self, chosen: Chosen) -> "Deployments":
        """Return some of the deployments, by their numbers or by a mask."""
        return Deployments(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def frontier(self) -> "Deployments":
        """Return those that no other beats in speed and density, by falling speed."""
        order = np.lexsort((-self.density, -self.speed))
        best = np.maximum.accumulate(self.density[order])
        first = np.concatenate([[True], best[1:] > best[:-1]]) if len(order) else np.zeros(0, dtype=bool)
        return self.take(order[first])

    def density_at(self, speed: Array) -> Array:
        """Return the most that this frontier gives at a speed or above; 0 beyond its end."""
        place = np.searchsorted(-self.speed, -np.asarray(speed), side="right")
        return np.concatenate([[0.0], self.density])[place]


def best_context(points: ServingPoints, ttft: float) -> int | None:
    """Return the number of the point with the most requests per second and GPU within a TTFT; None without any."""
    per_gpu = np.where(points.ttft <= ttft, points.rate / points.gpus, 0.0)
    return int(np.argmax(per_gpu)) if per_gpu.any() else None


def matched(
    context: ServingPoints, generation: ServingPoints, ttft: float, osl: int, ratio: float | None = None
) -> Deployments:
    """Return, for every generation point, the numbers of engines with the most tokens per second and GPU.

    Args:
        ratio: GPUs of context per GPU of generation; None takes the best.
    """
    chosen = best_context(context, ttft)
    if chosen is None:
        generation = generation.take(np.zeros(0, dtype=np.int64))
        chosen = -1
    rate, gpus = (context.rate[chosen], context.gpus[chosen]) if chosen >= 0 else (1.0, 1.0)
    best = np.zeros((3, len(generation.rate)))
    for engines in range(1, ENGINES_MAX + 1):
        exact = engines * generation.rate / rate if ratio is None else ratio * engines * generation.gpus / gpus
        # More context engines than the whole number above the exact one would only wait, fewer would starve the rest.
        for count in np.clip((np.floor(exact), np.ceil(exact)), 1, ENGINES_MAX):
            total = count * gpus + engines * generation.gpus
            density = osl * np.minimum(count * rate, engines * generation.rate) / total
            allowed = np.ones(len(count), dtype=bool)
            if ratio is not None:
                allowed = np.abs(count * gpus / (engines * generation.gpus) / ratio - 1.0) <= RATIO_TOLERANCE
            best = np.where(
                allowed & (density > best[0]), np.stack([density, count, np.full_like(count, engines)]), best
            )
    density, counts, engines_of = best
    share = counts * gpus / np.maximum(engines_of * generation.gpus, 1.0)
    everything = Deployments(
        1.0 / generation.tpot,
        density,
        np.arange(len(density)),
        np.full(len(density), chosen),
        counts,
        engines_of,
        share,
    )
    return everything.take(density > 0)


def alone(points: ServingPoints, ttft: float, osl: int) -> Deployments:
    """Return deployments of co-located engines within a TTFT."""
    numbers = np.flatnonzero(points.ttft <= ttft)
    kept, none = points.take(numbers), np.zeros(len(numbers))
    return Deployments(1.0 / kept.tpot, osl * kept.rate / kept.gpus, numbers, none - 1, none, none + 1, none)

"""Sweep grid: which prompt lengths, contexts and numbers in flight may be measured, and which comes next."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from penstock.kernel.values import EngineLimits, RequestShape

ISL_MIN = 100
PREFILL_SPARE, DECODE_SPARE = 512, 500
"""Tokens below the longest context that Dynamo's sweeps leave to the output: the grids are the same."""
COARSE = 4
"""Points of a line that are measured in any case; the others only where the line between them is uncertain."""
FLIGHTS = 9
"""Numbers in flight that a context may be measured at, from 1 to what fits, each a like factor above the one before."""
CONTEXT_MAX = 32_768
"""Longest context of a sweep where none is given: beyond it a sweep takes hours, and most traffic is shorter."""
TOLERANCE = 0.03
"""Relative uncertainty up to which a point need not be measured: below what traffic itself varies by."""


def prompt_lengths(longest: int, granularity: int, target: int) -> list[int]:
    """Return the prompt lengths of prefill: some ``granularity``, evenly, as Dynamo's profiler has them, and the
    target."""
    step = max(1, (longest - PREFILL_SPARE - ISL_MIN) // granularity)
    grid = set(range(ISL_MIN, max(ISL_MIN + 1, longest - PREFILL_SPARE), step)) | {target}
    return sorted(tokens for tokens in grid if 0 < tokens < longest)


def contexts(longest: int, granularity: int, target: int) -> list[int]:
    """Return the contexts of decode, evenly, and the target."""
    step = max(1, (longest - DECODE_SPARE) // granularity)
    grid = set(range(ISL_MIN, max(ISL_MIN + 1, longest - DECODE_SPARE), step)) | {target}
    return sorted(tokens for tokens in grid if 0 < tokens < longest)


def flights(most: int) -> list[int]:
    """Return the numbers in flight from 1 to ``most``."""
    return sorted({round(each) for each in np.geomspace(1, max(1, most), FLIGHTS)})


def in_flight_max(limits: EngineLimits[int | None], context: int, output: int) -> int:
    """Return how many sequences the KV cache holds; 1 where the engine does not say what it has room for."""
    if limits.kv_tokens is None:
        return 1
    most = limits.kv_tokens // (context + output)
    return max(1, most if limits.max_num_seqs is None else min(most, limits.max_num_seqs))


def longest_context(limits: EngineLimits[int | None], given: int | None, shape: RequestShape[float]) -> int:
    """Return the longest context to be measured: as given, else the engine's own or `CONTEXT_MAX`."""
    known = [limit for limit in (limits.max_model_len, limits.kv_tokens) if limit is not None]
    wanted = given if given is not None else max(CONTEXT_MAX, round(2 * (shape.isl + shape.osl)))
    return min([wanted, *known])


def first_of(grid: Sequence[int]) -> list[int]:
    """Return the points of a line that are measured in any case, its ends among them."""
    if len(grid) <= COARSE:
        return list(grid)
    return [grid[round(place)] for place in np.linspace(0, len(grid) - 1, COARSE)]


def most_uncertain(grid: Sequence[int], measured: Mapping[int, tuple[float, float]]) -> int | None:
    """Return the point that a line through measured ones predicts worst; None where all are within `TOLERANCE`.

    The uncertainty of a point is what the line between its neighbours and the lines beyond either of them disagree
    by, and how much its neighbours vary, relative to the value.

    Args:
        measured: point -> (mean, standard error) in seconds.
    """
    at = sorted(measured)
    worst, place = TOLERANCE, None
    for point in grid:
        right = int(np.searchsorted(at, point))
        if point in measured or not 0 < right < len(at):
            continue
        low, high = at[right - 1], at[right]
        between = _line(point, low, high, measured)
        guesses = []
        if right >= 2:
            guesses.append(_line(point, at[right - 2], low, measured))
        if right + 1 < len(at):
            guesses.append(_line(point, high, at[right + 1], measured))
        apart = max((abs(guess - between) for guess in guesses), default=math.inf)
        # Near a measured point the line is near its value, whatever the slopes are.
        share = 4.0 * (point - low) * (high - point) / (high - low) ** 2
        error = (apart * share + max(measured[low][1], measured[high][1])) / max(between, 1e-9)
        if error > worst:
            worst, place = error, point
    return place


def crossing_of(measured: Mapping[int, tuple[float, float]], target: float | None) -> int | None:
    """Return the point where the line between measured ones meets the target; None where it is known well enough.

    Args:
        measured: point -> (mean, standard error) in seconds.
    """
    for low, high in pairwise(sorted(measured)):
        first, last = measured[low][0], measured[high][0]
        if target is not None and first <= target < last and high - low > max(1.0, TOLERANCE * high):
            at = round(low + (high - low) * (target - first) / (last - first))
            return min(high - 1, max(low + 1, at))
    return None


def _line(point: int, low: int, high: int, measured: Mapping[int, tuple[float, float]]) -> float:
    (first, _), (last, _) = measured[low], measured[high]
    return first + (last - first) * (point - low) / (high - low)

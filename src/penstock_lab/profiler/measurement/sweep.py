"""Sweep of one engine: which points are measured, how often each, and when time is up.

Most important points come first: the target prompt, ITL at the target context, then the curves. A point is repeated
until it is steady; outliers are left out, counted and repeated. What is known already is not measured again.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import msgspec
import numpy as np

from penstock.config.files.profile_manifest import PointKind, ProfilePoint
from penstock.kernel.errors import EngineError
from penstock.kernel.values import EngineLimits, RequestShape
from penstock_lab.profiler.measurement.engine_probe import EngineProbe, PointKey, ProbeSample

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
        between = _line_between(point, low, high, measured)
        guesses = []
        if right >= 2:
            guesses.append(_line_between(point, at[right - 2], low, measured))
        if right + 1 < len(at):
            guesses.append(_line_between(point, high, at[right + 1], measured))
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


def _line_between(point: int, low: int, high: int, measured: Mapping[int, tuple[float, float]]) -> float:
    (first, _), (last, _) = measured[low], measured[high]
    return first + (last - first) * (point - low) / (high - low)


WARM_UPS = 3
"""Prompts before anything counts: kernels are compiled and graphs captured by them."""
REPEATS, REPEATS_MAX = 3, 7
STEADY = 0.05
"""Relative standard deviation up to which a point is not repeated any more."""
OUTLIER = 4.0
"""Times the usual distance from the median beyond which a measurement does not count."""
OUTPUT = 96
"""Tokens per sequence that a decode measurement leaves room for in the cache."""
MIXED = (1.0, 0.25)
"""Prompt tokens of mixed passes, as shares of a pass's budget or of the target prompt."""
TRANSFERS = 3
"""Prompt lengths at which a transfer is measured."""


class MeasuringBudget(Protocol):
    """When a sweep must end."""

    def over(self) -> bool: ...


class SweepOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is swept. ``longest``: context in tokens; None goes by the engine. ``mixed``: passes with both, too.
    ``ttft``, ``itl``: seconds around which the lines are measured more finely; None is nowhere."""

    shape: RequestShape[float]
    prefill_granularity: int = 16
    decode_granularity: int = 6
    longest: int | None = None
    mixed: bool = True
    transfer: bool = False
    ttft: float | None = None
    itl: float | None = None

    @property
    def isl(self) -> int:
        return round(self.shape.isl)

    @property
    def context(self) -> int:
        """Tokens of a sequence half way through its output."""
        return round(self.shape.isl + self.shape.osl / 2)


class Sweep:
    """The sweep of one engine.

    Args:
        done: points that are known from an earlier run; what is measured is added.
        record: called with each new point, so that an interrupted sweep goes on where it was.
        begun: called with each point before it is measured, for the progress bar.
    """

    def __init__(
        self,
        probe: EngineProbe,
        tp: int,
        options: SweepOptions,
        done: dict[PointKey, ProfilePoint],
        budget: MeasuringBudget,
        *,
        record: Callable[[PointKey, ProfilePoint], None],
        begun: Callable[[PointKey], None] = lambda key: None,
    ) -> None:
        self.left_out: list[str] = []
        self._probe = probe
        self._tp = tp
        self._options = options
        self._done = done
        self._budget = budget
        self._record = record
        self._begun = begun
        self._warm = False
        self._longest = longest_context(probe.limits, options.longest, options.shape)

    async def run(self) -> None:
        """Measure until nothing is uncertain any more, or time is up."""
        options = self._options
        await self._point(self._key("prefill", tokens=options.isl))
        await self._decode(options.context)
        await self._measure_line(
            prompt_lengths(self._longest, options.prefill_granularity, options.isl), self._prompt, options.ttft
        )
        for context in contexts(self._longest, options.decode_granularity, options.context):
            if context != options.context:
                await self._decode(context)
        if options.mixed:
            for key in self._mixed():
                await self._point(key)
        if options.transfer:
            for tokens in first_of(prompt_lengths(self._longest, TRANSFERS, options.isl)):
                await self._point(self._key("transfer", tokens=tokens))

    async def _decode(self, context: int) -> None:
        most = in_flight_max(self._probe.limits, context, OUTPUT)
        target = self._options.itl if context == self._options.context else None
        await self._measure_line(flights(most), lambda seqs: self._key("decode", seqs=seqs, context=context), target)

    async def _measure_line(self, grid: list[int], key: Callable[[int], PointKey], target: float | None) -> None:
        """Measure some points of a line, then where it is most uncertain, then where it crosses the target."""
        measured: dict[int, tuple[float, float]] = {}
        ahead = first_of(grid)
        while ahead:
            place = ahead.pop(0)
            point = await self._point(key(place))
            if point is None:  # nor will it be possible to measure a longer prompt, or more in flight
                grid, ahead = ([each for each in places if each < place] for places in (grid, ahead))
                target = None
                if grid and not self._budget.over():
                    ahead.append(grid[-1])  # what the engine can at most is what a planner counts on
            else:
                measured[place] = (point.mean, point.sd / point.repeats**0.5)
            if not ahead and (worst := most_uncertain(grid, measured)) is not None:
                ahead.append(worst)
            elif not ahead and (crossing := crossing_of(measured, target)) is not None:
                ahead.append(crossing)

    async def _point(self, key: PointKey) -> ProfilePoint | None:
        """Measure one point; None where time is up or the engine can't."""
        if key in self._done:
            return self._done[key]
        if self._budget.over():
            self.left_out.append(f"{key}: time was up")
            return None
        self._begun(key)
        samples: list[ProbeSample] = []
        try:
            while not self._warm:
                for _ in range(WARM_UPS):
                    await self._probe.measure(self._prompt(self._options.isl))
                self._warm = True
            while not steady(samples) and len(samples) < REPEATS_MAX and not (samples and self._budget.over()):
                samples.append(await self._probe.measure(key))
        except EngineError as error:
            self.left_out.append(f"{key}: {error}")
            return None
        point = self._done[key] = point_of(key, samples)
        self._record(key, point)
        return point

    def _mixed(self) -> Iterator[PointKey]:
        limits, context = self._probe.limits, self._options.context
        most = in_flight_max(limits, context, OUTPUT)
        for seqs in sorted({1, max(1, most // 4), max(1, most // 2)}):
            budget = (limits.max_num_batched_tokens or self._options.isl) - seqs
            for share in MIXED:
                tokens = round(share * min(budget, self._options.isl))
                if tokens > 0 and seqs * (context + OUTPUT) + tokens <= (limits.kv_tokens or 0):
                    yield self._key("mixed", tokens=tokens, seqs=seqs, context=context)

    def _prompt(self, tokens: int) -> PointKey:
        return self._key("prefill", tokens=tokens)

    def _key(self, kind: PointKind, *, tokens: int = 0, seqs: int = 0, context: int = 0) -> PointKey:
        return PointKey(kind, self._tp, tokens, seqs, context)


def without_outliers(samples: list[ProbeSample]) -> list[ProbeSample]:
    """Return the measurements that are near the median, as far as three or more say what is near."""
    if len(samples) < REPEATS:
        return samples
    middle = statistics.median(sample.seconds for sample in samples)
    usual = 1.4826 * statistics.median(abs(sample.seconds - middle) for sample in samples)
    near = OUTLIER * max(usual, 0.01 * middle)
    return [sample for sample in samples if abs(sample.seconds - middle) <= near]


def steady(samples: list[ProbeSample]) -> bool:
    """Return whether a point needs no more measurements: enough of them, alike, without the outliers."""
    kept = [sample.seconds for sample in without_outliers(samples)]
    return len(kept) >= REPEATS and statistics.stdev(kept) <= STEADY * statistics.fmean(kept)


def point_of(key: PointKey, samples: list[ProbeSample]) -> ProfilePoint:
    """Return the point that measurements make."""
    near = without_outliers(samples)
    seconds = [sample.seconds for sample in near]
    means: Mapping[str, float | None] = {
        name: statistics.fmean(known) if (known := [v for s in near if (v := getattr(s, name)) is not None]) else None
        for name in ("inside", "tpot", "context")
    }
    return ProfilePoint(
        kind=key.kind,
        tp=key.tp,
        tokens=key.tokens,
        seqs=key.seqs,
        context=float(key.context) if means["context"] is None else means["context"],
        mean=statistics.fmean(seconds),
        sd=statistics.stdev(seconds) if len(seconds) > 1 else 0.0,
        repeats=len(seconds),
        outliers=len(samples) - len(near),
        inside=means["inside"],
        tpot=means["tpot"],
    )

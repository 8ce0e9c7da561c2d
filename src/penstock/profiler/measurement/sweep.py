"""Sweep of one engine: which points are measured, how often each, and when time is up.

Most important points come first: the target prompt, ITL at the target context, then the curves. A point is repeated
until it is steady; outliers are left out, counted and repeated. What is known already is not measured again.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import msgspec

from penstock.config.files.profile_manifest import PointKind, ProfilePoint
from penstock.kernel.errors import EngineError
from penstock.kernel.values import RequestShape
from penstock.profiler.measurement.engine_probe import EngineProbe, PointKey, ProbeSample
from penstock.profiler.measurement.sweep_grid import (
    contexts,
    crossing_of,
    first_of,
    flights,
    in_flight_max,
    longest_context,
    most_uncertain,
    prompt_lengths,
)

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
        await self._line(
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
        await self._line(flights(most), lambda seqs: self._key("decode", seqs=seqs, context=context), target)

    async def _line(self, grid: list[int], key: Callable[[int], PointKey], target: float | None) -> None:
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

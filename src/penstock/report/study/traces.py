"""Which traffic are policies judged on? Shapes of demand of our own, from seeds, and public traces where they are."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.kernel.errors import ConfigError
from penstock.traffic import slices
from penstock.traffic.azure import AzureTrace
from penstock.traffic.lengths import Lognormal
from penstock.traffic.mooncake import MooncakeTrace
from penstock.traffic.request import TrafficRequest
from penstock.traffic.shapes import Pieces, follow
from penstock.traffic.workloads import Plain, plain

STEP = 5.0
"""Seconds for which a rate stays level, where a curve is drawn from it."""
LENGTHS = Plain(prompt=Lognormal(6000, 0.6, 64, 16_000), answer=Lognormal(600, 0.6, 8, 3000))
LONGEST = 30_000
"""Tokens of prompt and output above which a request of a public trace is left out."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """One kind of traffic.

    Args:
        seconds: how long it lasts.
        rate: requests per second at a second of it; None where a file says when they arrive.
        tuning: whether defaults were chosen on it; a claim counts on the others.
        stretch: second from which prompts are so many times as long.
        file: in the traces' folder.
    """

    name: str
    seconds: float
    rate: Callable[[float], float] | None = None
    tuning: bool = False
    stretch: tuple[float, float] | None = None
    file: str | None = None

    def requests(self, seed: int, folder: Path | None = None) -> list[TrafficRequest]:
        """Return the requests of one seed, in the order of arrival.

        Raises:
            ConfigError: it needs a file that is not there.
        """
        if self.file is not None:
            return _of_file(self, seed, folder)
        assert self.rate is not None
        rng = random.Random(f"{self.name} {seed}")
        levels = [self.rate(step * STEP) for step in range(int(self.seconds / STEP))]
        shape = Pieces([step * STEP for step in range(len(levels))], levels)

        def starts(rate: float) -> Iterator[float]:
            return follow(shape, rate, rng)

        found = []
        for request in plain(1.0, rng, starts=starts, shape=LENGTHS, kind=self.name):
            if request.at >= self.seconds:
                break
            if self.stretch is not None and request.at >= self.stretch[0]:
                longer = min(LONGEST - request.osl, round(request.isl * self.stretch[1]))
                request = TrafficRequest(at=request.at, isl=longer, osl=request.osl)
            found.append(TrafficRequest(at=request.at, isl=request.isl, osl=request.osl))
        return found


def _wave(low: float, high: float, period: float) -> Callable[[float], float]:
    return lambda at: (low + high) / 2.0 - (high - low) / 2.0 * math.cos(2.0 * math.pi * at / period)


def _burst(base: Callable[[float], float], start: float, seconds: float, rate: float) -> Callable[[float], float]:
    return lambda at: rate if start <= at < start + seconds else base(at)


def _levels(levels: Sequence[float], each: float) -> Callable[[float], float]:
    return lambda at: levels[min(len(levels) - 1, int(at / each))]


OWN: tuple[Traffic, ...] = (
    Traffic("waves", 3600.0, _wave(1.0, 7.0, 1800.0), tuning=True),
    Traffic("waves and a burst", 3600.0, _burst(_wave(1.0, 6.0, 1800.0), 2000.0, 120.0, 10.0), tuning=True),
    Traffic("steady", 3600.0, lambda at: 4.0, tuning=True),
    Traffic("a slow wave and a burst", 3600.0, _burst(_wave(1.0, 7.0, 3600.0), 900.0, 120.0, 8.0)),
    Traffic("steps", 3600.0, _levels((1.5, 4.5, 2.5, 6.5, 2.0, 4.0), 600.0)),
    Traffic("ramps", 3600.0, lambda at: 1.5 + 5.0 * (1.0 - abs((at / 600.0 % 2.0) - 1.0))),
    Traffic("six-fold spike", 2400.0, _burst(lambda at: 1.2, 1200.0, 90.0, 7.2)),
    Traffic("longer prompts", 2400.0, lambda at: 3.0, stretch=(1200.0, 2.5)),
)
PUBLIC: tuple[Traffic, ...] = (
    Traffic("conversation", 1800.0, file="mooncake_conversation_first6000.jsonl"),
    Traffic("azure conversation", 3480.0, file="azure_llm_2023_conv.csv"),
)
ALL = {traffic.name: traffic for traffic in (*OWN, *PUBLIC)}


def _of_file(traffic: Traffic, seed: int, folder: Path | None) -> list[TrafficRequest]:
    """Return the requests of a public trace; the seed shifts where it begins, so that runs differ."""
    assert traffic.file is not None
    path = None if folder is None else folder / traffic.file
    if path is None or not path.is_file():
        raise ConfigError(
            f"traffic {traffic.name!r} needs the file {traffic.file}",
            hint="say with --traces in which folder it is, or leave this traffic out",
        )
    with path.open("rb") as lines:
        rows = list(AzureTrace(lines) if path.suffix == ".csv" else MooncakeTrace(lines))
    fits = [one for one in slices.spread_ties(rows) if one.isl + one.osl <= LONGEST]
    first = (seed - 1) * 60.0
    return list(slices.rebase(slices.by_time(fits, first, first + traffic.seconds), first))


def rate_over_time(requests: Sequence[TrafficRequest], seconds: float, width: float) -> list[float]:
    """Return requests per second in windows of ``width`` seconds."""
    counts = [0] * max(1, math.ceil(seconds / width))
    for request in requests:
        if request.at < seconds:
            counts[int(request.at / width)] += 1
    return [count / width for count in counts]

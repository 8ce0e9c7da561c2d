"""Traffic of the study: our own demand shapes, from seeds, and public traces where their files exist."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.kernel.errors import ConfigError
from penstock_lab.traffic import trace_slices
from penstock_lab.traffic.formats.mooncake import MooncakeTrace
from penstock_lab.traffic.formats.trace_format import reader
from penstock_lab.traffic.lengths import Lognormal
from penstock_lab.traffic.rate_profiles import PiecewiseProfile, follow
from penstock_lab.traffic.traffic_request import TrafficRequest
from penstock_lab.traffic.workloads import Plain, plain

STEP = 5.0
"""Seconds for which a rate stays level, where a curve is drawn from it."""
LENGTHS = Plain(prompt=Lognormal(6000, 0.6, 64, 16_000), answer=Lognormal(600, 0.6, 8, 3000))
LONGEST = 30_000
"""Tokens of prompt and output above which a request of a public trace is left out."""


@dataclass(frozen=True, slots=True)
class StudyTraffic:
    """One kind of traffic.

    Args:
        seconds: how long it lasts.
        rate: requests per second at a second of it; None where a file has the arrivals.
        tuning: whether defaults were chosen on it; claims rest on the others.
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
            ConfigError: it needs a file that does not exist.
        """
        if self.file is not None:
            return _of_file(self, seed, folder)
        assert self.rate is not None
        rng = random.Random(f"{self.name} {seed}")
        levels = [self.rate(step * STEP) for step in range(int(self.seconds / STEP))]
        shape = PiecewiseProfile([step * STEP for step in range(len(levels))], levels)

        def starts(rate: float) -> Iterator[float]:
            return follow(shape, rate, rng)

        requests = []
        for request in plain(1.0, rng, starts=starts, shape=LENGTHS, kind=self.name):
            if request.at >= self.seconds:
                break
            if self.stretch is not None and request.at >= self.stretch[0]:
                longer = min(LONGEST - request.osl, round(request.isl * self.stretch[1]))
                request = TrafficRequest(at=request.at, isl=longer, osl=request.osl)
            requests.append(TrafficRequest(at=request.at, isl=request.isl, osl=request.osl))
        return requests


def _wave(low: float, high: float, period: float) -> Callable[[float], float]:
    return lambda at: (low + high) / 2.0 - (high - low) / 2.0 * math.cos(2.0 * math.pi * at / period)


def _burst(base: Callable[[float], float], start: float, seconds: float, rate: float) -> Callable[[float], float]:
    return lambda at: rate if start <= at < start + seconds else base(at)


def _beat(base: Callable[[float], float], every: float, seconds: float, more: float) -> Callable[[float], float]:
    """Return a rate with so much more for some seconds at the end of each period."""
    return lambda at: base(at) + (more if at % every >= every - seconds else 0.0)


def _levels(levels: Sequence[float], each: float) -> Callable[[float], float]:
    return lambda at: levels[min(len(levels) - 1, int(at / each))]


def _bursts(name: str, base: float, seconds: float) -> Callable[[float], float]:
    """Return a rate that jumps for a minute or two, some minutes apart; ``name`` seeds the times and heights."""
    dice, at = random.Random(name), 0.0
    bursts: list[tuple[float, float, float]] = []
    while at < seconds:
        start = at + dice.expovariate(1.0 / 200.0)
        at = start + dice.uniform(40.0, 150.0)
        bursts.append((start, at, base * dice.uniform(2.0, 3.5)))
    return lambda at: next((rate for start, end, rate in bursts if start <= at < end), base)


OWN: tuple[StudyTraffic, ...] = (
    StudyTraffic("waves", 3600.0, _wave(1.0, 7.0, 1800.0), tuning=True),
    StudyTraffic("waves and a burst", 3600.0, _burst(_wave(1.0, 6.0, 1800.0), 2000.0, 120.0, 10.0), tuning=True),
    StudyTraffic("steady", 3600.0, lambda at: 4.0, tuning=True),
    StudyTraffic("a slow wave and a burst", 3600.0, _burst(_wave(1.0, 7.0, 3600.0), 900.0, 120.0, 8.0)),
    StudyTraffic("steps", 3600.0, _levels((1.5, 4.5, 2.5, 6.5, 2.0, 4.0), 600.0)),
    StudyTraffic("ramps", 3600.0, lambda at: 1.5 + 5.0 * (1.0 - abs((at / 600.0 % 2.0) - 1.0))),
    StudyTraffic("six-fold spike", 2400.0, _burst(lambda at: 1.2, 1200.0, 90.0, 7.2)),
    StudyTraffic("bursts", 3600.0, _bursts("bursts", 2.0, 3600.0)),
    StudyTraffic("a beat on a slow wave", 10800.0, _beat(_wave(1.5, 4.0, 7200.0), 900.0, 180.0, 4.0)),
    StudyTraffic("longer prompts", 2400.0, lambda at: 3.0, stretch=(1200.0, 2.5)),
)
PUBLIC: tuple[StudyTraffic, ...] = (
    StudyTraffic("conversation", 1800.0, file="mooncake_conversation_first6000.jsonl"),
    StudyTraffic("azure conversation", 3480.0, file="azure_llm_2023_conv.csv"),
)
ALL = {traffic.name: traffic for traffic in (*OWN, *PUBLIC)}


def _of_file(traffic: StudyTraffic, seed: int, folder: Path | None) -> list[TrafficRequest]:
    """Return the requests of a public trace; the seed shifts its start, so that runs differ."""
    assert traffic.file is not None
    path = None if folder is None else folder / traffic.file
    if path is None or not path.is_file():
        raise ConfigError(
            f"traffic {traffic.name!r} needs the file {traffic.file}",
            hint="say with --traces in which folder it is, or leave this traffic out",
        )
    with path.open("rb") as lines:
        rows = list(reader("azure", lines) if path.suffix == ".csv" else MooncakeTrace(lines))
    fits = [one for one in trace_slices.spread_ties(rows) if one.isl + one.osl <= LONGEST]
    first = (seed - 1) * 60.0
    return list(trace_slices.rebase(trace_slices.by_time(fits, first, first + traffic.seconds), first))


def rate_over_time(requests: Sequence[TrafficRequest], seconds: float, width: float) -> list[float]:
    """Return requests per second in windows of ``width`` seconds."""
    counts = [0] * max(1, math.ceil(seconds / width))
    for request in requests:
        if request.at < seconds:
            counts[int(request.at / width)] += 1
    return [count / width for count in counts]

"""By what share is the simulated engine off? Latencies of two runs of the same requests, compared.

TTFT is first token minus arrival, TPOT (last - first) / (tokens - 1), absent below two tokens; seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

import numpy as np

LATENCIES = ("TTFT", "TPOT", "end to end")
POINTS = ("mean", "p50", "p90", "p99")


@dataclass(frozen=True, slots=True)
class Served:
    """What became of a request: seconds since the start of the run, and its output tokens."""

    at: float
    first: float
    last: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of both runs: ``real`` and ``ours`` in seconds (or tokens per second), ``requests``: the median of the
    sizes of each request's own error, as a share; None for what a request has none of."""

    name: str
    point: str
    real: float
    ours: float
    requests: float | None = None

    @property
    def error(self) -> float:
        """By what share ours is above the real one."""
        return self.ours / self.real - 1.0


def latency(name: str, request: Served) -> float | None:
    """Return one latency of a request; None where it has none."""
    if name == "TTFT":
        return request.first - request.at
    if name == "end to end":
        return request.last - request.at
    return (request.last - request.first) / (request.tokens - 1) if request.tokens > 1 else None


def compare(real: Sequence[Served], ours: Sequence[Served]) -> list[Compared]:
    """Return every figure of two runs of the same requests, in the same order.

    Raises:
        ValueError: they are not the same requests, so that their errors would mean nothing.
    """
    if [request.tokens for request in real] != [request.tokens for request in ours]:
        raise ValueError(f"runs of {len(real)} and {len(ours)} requests are not of the same requests")
    found = []
    for name in LATENCIES:
        pairs = [
            (theirs, mine)
            for theirs, mine in zip((latency(name, r) for r in real), (latency(name, o) for o in ours), strict=True)
            if theirs is not None and mine is not None
        ]
        each = median(abs(mine / theirs - 1.0) for theirs, mine in pairs)
        for point in POINTS:
            theirs, mine = (figure(point, side) for side in zip(*pairs, strict=True))
            found.append(Compared(name, point, theirs, mine, each if point == "mean" else None))
    return [*found, Compared("throughput", "mean", throughput(real), throughput(ours))]


def between(one: Sequence[Compared], other: Sequence[Compared]) -> list[Compared]:
    """Return what ours is beside the mean of two real runs, from the comparisons with each."""
    return [
        Compared(
            a.name,
            a.point,
            (a.real + b.real) / 2,
            a.ours,
            None if a.requests is None or b.requests is None else (a.requests + b.requests) / 2,
        )
        for a, b in zip(one, other, strict=True)
    ]


def figure(point: str, values: Sequence[float]) -> float:
    """Return the mean, or a percentile with lines between the values."""
    return mean(values) if point == "mean" else float(np.percentile(values, float(point.removeprefix("p"))))


def throughput(run: Sequence[Served]) -> float:
    """Return output tokens per second from the first arrival to the last token."""
    return sum(request.tokens for request in run) / (max(r.last for r in run) - min(r.at for r in run))

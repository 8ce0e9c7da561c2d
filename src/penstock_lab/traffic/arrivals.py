"""Arrival processes: endless streams of ascending times, in seconds, from a generator that is handed in."""

import random
from collections.abc import Iterator

Arrivals = Iterator[float]


def poisson(rate: float, rng: random.Random) -> Arrivals:
    """Independent arrivals, ``rate`` per second."""
    _check_positive("rate", rate)
    at = 0.0
    while True:
        at += rng.expovariate(rate)
        yield at


def gamma(rate: float, cv: float, rng: random.Random) -> Arrivals:
    """Gamma-distributed gaps of mean 1/rate; ``cv`` is their deviation over their mean: above 1 is bursty, 1 Poisson.

    Source: the renewal model that ServeGen (arXiv 2505.09999) fits to production clients.
    """
    _check_positive("rate", rate)
    _check_positive("cv", cv)
    shape = 1.0 / (cv * cv)
    scale = 1.0 / (rate * shape)
    at = 0.0
    while True:
        at += rng.gammavariate(shape, scale)
        yield at


def constant(rate: float) -> Arrivals:
    """One arrival every 1/rate seconds, the first at 0."""
    _check_positive("rate", rate)
    count = 0
    while True:
        yield count / rate
        count += 1


def bursts(rate: float, rng: random.Random, *, on: float = 5.0, off: float = 15.0, quiet: float = 0.1) -> Arrivals:
    """Poisson arrivals whose rate switches between busy and quiet spells; ``rate`` is the mean over both.

    Args:
        on, off: mean length of a busy and of a quiet spell in seconds (exponential).
        quiet: rate in a quiet spell as a share of that in a busy one, 0..1.
    """
    _check_positive("rate", rate)
    _check_positive("on", on)
    _check_positive("off", off)
    busy_rate = rate * (on + off) / (on + off * quiet)
    at, busy = 0.0, True
    end = rng.expovariate(1.0 / on)
    while True:
        now = busy_rate if busy else busy_rate * quiet
        step = rng.expovariate(now) if now > 0.0 else float("inf")
        if at + step <= end:
            at += step
            yield at
        else:  # the exponential has no memory: start anew in the next spell
            at = end
            busy = not busy
            end = at + rng.expovariate(1.0 / (on if busy else off))


def _check_positive(name: str, value: float) -> None:
    if not value > 0.0:
        raise ValueError(f"{name} must be above 0, not {value}")

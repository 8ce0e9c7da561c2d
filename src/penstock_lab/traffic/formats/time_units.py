"""Unit of a trace's times: by a column's name, by the size of epochs, by durations beside tokens, or by the rate.

Milliseconds that are read as seconds are a thousandth of the rate, and nothing else of a trace looks wrong. So a unit
is only taken where something in the rows speaks for it, the trace says what was taken and why, and the rest is refused.
"""

import re
from collections.abc import Sequence
from statistics import median
from typing import Literal, NamedTuple

from penstock.kernel.errors import ConfigError

TimeUnit = Literal["s", "ms", "us", "ns"]
PER_SECOND: dict[TimeUnit, int] = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
UNIT_WORDS: dict[TimeUnit, str] = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
FLAG = "--trace-time-unit"
EPOCHS = (9e8, 5e9)
"""Seconds since 1970 of the years 1998 to 2128: where a trace's least time is in between, it is a date."""
TOKEN_SECONDS = (0.0005, 1.0)
"""Seconds of a request per token of its answer, from a draft model on a large GPU to a first token that waits."""
ROWS_LEAST = 8
"""Rows without which a rate is no evidence."""
RATE_MOST = 1_000.0
"""Requests per second that no trace of one service has on average."""
TOKENS_MOST = 5e6
"""Tokens per second, prompts and answers, that no trace of one service has on average."""
GAP_MOST = 3_600.0
"""Seconds between requests beyond which nobody keeps a trace."""
RATE_USUAL = 50.0
"""Requests per second above which times with decimals are seconds: no clock of milliseconds has any."""
DOCUMENTED = "as the format documents"
RATE_DOUBTED = 10.0
"""Requests per second above which milliseconds that only the documentation says are said aloud."""
_SUFFIXES: dict[str, TimeUnit] = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), "s"),
    **dict.fromkeys(("ms", "msec", "millis", "millisecond", "milliseconds"), "ms"),
    **dict.fromkeys(("us", "usec", "micros", "microsecond", "microseconds"), "us"),
    **dict.fromkeys(("ns", "nsec", "nano", "nanos", "nanosecond", "nanoseconds"), "ns"),
}


class TraceClock(NamedTuple):
    """The unit of a trace's times, and why. ``sure``: whether the format, a name or the user says it."""

    unit: TimeUnit
    why: str
    sure: bool = True

    def __str__(self) -> str:
        return f"{UNIT_WORDS[self.unit]}, {self.why}"


class ClockEvidence(NamedTuple):
    """What a trace's first rows say of its times, in the unknown unit.

    Args:
        times: of arrivals. durations: (duration, tokens of the answer) of requests, on the same clock.
        tokens: mean tokens of a request, prompt and answer.
    """

    times: Sequence[float]
    durations: Sequence[tuple[float, int]]
    tokens: float

    @property
    def gap(self) -> float:
        """Mean gap between arrivals."""
        return (max(self.times) - min(self.times)) / max(1, len(self.times) - 1)

    @property
    def decimal(self) -> bool:
        """Whether most times have decimals."""
        return sum(not float(time).is_integer() for time in self.times) * 2 > len(self.times)


def plain_name(name: str) -> str:
    """Return a column's name in small letters, with underscores between its words."""
    apart = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name.strip())
    return re.sub(r"[^a-z0-9.]+", "_", apart.lower()).strip("_")


def split_unit(name: str) -> tuple[str, TimeUnit | None]:
    """Return a plain name without the unit at its end, and that unit; ``start_time_unix_nano`` has ns."""
    stem, _, last = name.rpartition("_")
    unit = _SUFFIXES.get(last) if stem else None
    return (name, None) if unit is None else (stem, unit)


def unit_of_epoch(least: float) -> TimeUnit | None:
    """Return the unit in which the least time of a trace is a date of our times; None where it is in none."""
    low, high = EPOCHS
    return next((unit for unit, per_second in PER_SECOND.items() if low <= least / per_second < high), None)


def unit_of_durations(durations: Sequence[tuple[float, int]]) -> TimeUnit | None:
    """Return the only unit in which an answer's tokens take as long as tokens take; None where there are several."""
    usual = [duration / tokens for duration, tokens in durations if tokens > 0 and duration > 0]
    if not usual:
        return None
    low, high = TOKEN_SECONDS
    middle = median(usual)
    fits = [unit for unit, per_second in PER_SECOND.items() if low <= middle / per_second <= high]
    return fits[0] if len(fits) == 1 else None


def clock_of(evidence: ClockEvidence, documented: TimeUnit | None, name: str | None) -> TraceClock:
    """Decide the unit of a trace's times.

    Args:
        documented: the unit that its format has by its documentation; None where it has none.
        name: of the trace, for errors.
    Raises:
        ConfigError: nothing in the rows says the unit; names the flag that does.
    """
    epoch = unit_of_epoch(min(evidence.times))
    if epoch is not None:
        return TraceClock(epoch, "since only so the times are dates of our years", sure=epoch == documented)
    by_durations = unit_of_durations(evidence.durations)
    if by_durations is not None:
        return TraceClock(by_durations, "since only so the answers' tokens take as long as tokens take", sure=False)
    gap = evidence.gap
    if gap == 0.0:
        return TraceClock(documented or "s", "and all requests come at one time")
    by_rate = _unit_of_rate(evidence)
    if documented is not None and by_rate in (None, documented):
        return TraceClock(documented, DOCUMENTED)
    if by_rate is not None:
        other: TimeUnit = "ms" if by_rate == "s" else "s"
        return TraceClock(by_rate, f"since {_rate_text(evidence, other)}", sure=False)
    rates = f"{_rate_text(evidence, 's')}, {_rate_text(evidence, 'ms')}"
    raise ConfigError(
        f"{name or 'the trace'} does not say the unit of its times: {rates}",
        hint=f"say {FLAG} s or ms, or write one that says it: penstock trace convert FILE OUT {FLAG} s",
    )


def doubt(clock: TraceClock, evidence: ClockEvidence) -> str | None:
    """Return what is to be said of a clock aloud; None where nobody can doubt it."""
    if not clock.sure:
        return f"times are read as {clock}; {FLAG} says another unit"
    fast = 0.0 < evidence.gap < PER_SECOND["ms"] / RATE_DOUBTED
    if clock.unit == "ms" and clock.why == DOCUMENTED and (fast or evidence.decimal):
        return f"times are read as {clock}: {_rate_text(evidence, 'ms')}; {FLAG} s reads seconds"
    return None


def _unit_of_rate(evidence: ClockEvidence) -> TimeUnit | None:
    """Return seconds or milliseconds where the other one makes no rate that a trace can have."""
    if len(evidence.times) < ROWS_LEAST:
        return None
    rates: dict[TimeUnit, float] = {unit: PER_SECOND[unit] / evidence.gap for unit in ("s", "ms")}
    if evidence.decimal and rates["ms"] > RATE_USUAL and rates["s"] <= RATE_MOST:
        return "s"
    fits = [
        unit
        for unit, rate in rates.items()
        if 1.0 / GAP_MOST <= rate <= RATE_MOST and rate * evidence.tokens <= TOKENS_MOST
    ]
    return fits[0] if len(fits) == 1 else None


def _rate_text(evidence: ClockEvidence, unit: TimeUnit) -> str:
    rate = PER_SECOND[unit] / evidence.gap
    return f"in {UNIT_WORDS[unit]} they are {rate:,.4g} requests/s of {rate * evidence.tokens:,.4g} tokens/s"

"""Arrival patterns: the kinds of ``--arrivals``, each with its settings and its stream of times."""

import random
from typing import Annotated

import msgspec

from penstock.kernel.errors import ConfigError
from penstock.kernel.settings import Knob
from penstock_lab.traffic import arrivals, inline_spec, rate_profiles
from penstock_lab.traffic.arrivals import Arrivals
from penstock_lab.traffic.rate_profiles import DelayedProfile, RateProfile, follow

_CV = Knob("Deviation of the gaps between arrivals over their mean: 1 is Poisson, more is burstier, 0 even.", ge=0)


class ArrivalPattern(msgspec.Struct, frozen=True, kw_only=True):
    """A way in which requests arrive."""

    def stream(self, rate: float, rng: random.Random, *, lead: float = 0.0) -> Arrivals:
        """Return ascending times in seconds, ``rate`` per second on average; a shape multiplies the rate.

        Args:
            lead: seconds before a shape begins, at the rate that it begins with: what a workload of sessions leaves
                out at its start (`workloads.SETTLE`), so that the shape keeps the time of what is left.
        """
        raise NotImplementedError


class PoissonArrivals(ArrivalPattern, frozen=True, kw_only=True):
    """Independent arrivals."""

    def stream(self, rate: float, rng: random.Random, *, lead: float = 0.0) -> Arrivals:
        """Return ascending times in seconds."""
        return arrivals.poisson(rate, rng)


class GammaArrivals(ArrivalPattern, frozen=True, kw_only=True):
    """Gamma-distributed gaps."""

    cv: Annotated[float, Knob("Deviation of the gaps over their mean: above 1 is bursty, 1 Poisson.", gt=0)] = 2.0

    def stream(self, rate: float, rng: random.Random, *, lead: float = 0.0) -> Arrivals:
        """Return ascending times in seconds."""
        return arrivals.gamma(rate, self.cv, rng)


class ConstantArrivals(ArrivalPattern, frozen=True, kw_only=True):
    """Even gaps."""

    def stream(self, rate: float, rng: random.Random, *, lead: float = 0.0) -> Arrivals:
        """Return ascending times in seconds."""
        return arrivals.constant(rate)


class BurstArrivals(ArrivalPattern, frozen=True, kw_only=True):
    """Poisson arrivals in busy and quiet spells of random length."""

    on: Annotated[float, Knob("Mean length of a busy spell.", unit="s", gt=0)] = 5.0
    off: Annotated[float, Knob("Mean length of a quiet spell.", unit="s", gt=0)] = 15.0
    quiet: Annotated[float, Knob("Rate in a quiet spell over that in a busy one.", unit="ratio", ge=0, le=1)] = 0.1

    def stream(self, rate: float, rng: random.Random, *, lead: float = 0.0) -> Arrivals:
        """Return ascending times in seconds."""
        return arrivals.bursts(rate, rng, on=self.on, off=self.off, quiet=self.quiet)


class ShapedArrivals(ArrivalPattern, frozen=True, kw_only=True):
    """Arrivals whose rate changes over time as a shape says."""

    cv: Annotated[float, _CV] = 1.0

    def shape(self) -> RateProfile:
        """Return by what the rate is multiplied at each second."""
        raise NotImplementedError

    def stream(self, rate: float, rng: random.Random, *, lead: float = 0.0) -> Arrivals:
        """Return ascending times in seconds; ends where the rate falls to 0 for good."""
        return follow(DelayedProfile(self.shape(), lead) if lead else self.shape(), rate, rng, cv=self.cv)


class SinusoidArrivals(ShapedArrivals, frozen=True, kw_only=True):
    """A wave around the mean rate."""

    amplitude: Annotated[float, Knob("How far it swings, as a share of the mean rate.", unit="ratio", ge=0, le=1)] = 0.5
    period: Annotated[float, Knob("Length of a wave.", unit="s", gt=0)] = 3600.0
    start: Annotated[
        float, Knob("Where on the wave it begins: 0 at the mean, 0.75 at the trough.", unit="ratio", ge=0, lt=1)
    ] = 0.0

    def shape(self) -> RateProfile:
        """Return by what the rate is multiplied at each second."""
        return rate_profiles.SineProfile(self.amplitude, self.period, self.start)


class RampArrivals(ShapedArrivals, frozen=True, kw_only=True):
    """An even climb (or fall) to a level that stays."""

    first: Annotated[float, Knob("What the rate is multiplied by at the start.", ge=0)] = 0.0
    last: Annotated[float, Knob("What the rate is multiplied by from the end of the ramp on.", ge=0)] = 1.0
    over: Annotated[float, Knob("Length of the ramp.", unit="s", gt=0)] = 600.0

    def shape(self) -> RateProfile:
        """Return by what the rate is multiplied at each second."""
        return rate_profiles.SlopeProfile(self.first, self.last, self.over)


class StepArrivals(ShapedArrivals, frozen=True, kw_only=True):
    """Another rate from one moment on."""

    at: Annotated[float, Knob("When the rate changes.", unit="s", gt=0)] = 300.0
    to: Annotated[float, Knob("What the rate is multiplied by from then on.", ge=0)] = 2.0

    def shape(self) -> RateProfile:
        """Return by what the rate is multiplied at each second."""
        return rate_profiles.PiecewiseProfile([0.0, self.at], [1.0, self.to])


class SpikeArrivals(ShapedArrivals, frozen=True, kw_only=True):
    """Another rate for a while, once or again and again."""

    at: Annotated[float, Knob("When the spike begins.", unit="s", gt=0)] = 300.0
    width: Annotated[float, Knob("How long it lasts.", unit="s", gt=0)] = 30.0
    height: Annotated[float, Knob("What the rate is multiplied by in it.", ge=0)] = 5.0
    every: Annotated[
        float, Knob("Length of a cycle, after which all begins anew; 0 is one spike only.", unit="s", ge=0)
    ] = 0.0

    def shape(self) -> RateProfile:
        """Return by what the rate is multiplied at each second."""
        return rate_profiles.PiecewiseProfile(
            [0.0, self.at, self.at + self.width], [1.0, self.height, 1.0], self.every or None
        )


class WeeklyArrivals(ShapedArrivals, frozen=True, kw_only=True):
    """A wave per day and quieter weekends; the mean over a week is the requested rate."""

    peak: Annotated[float, Knob("Time of day of the highest rate.", unit="s", ge=0, lt=rate_profiles.DAY)] = 15 * 3600.0
    trough: Annotated[
        float, Knob("Rate at the quietest time of a day over that at its peak.", unit="ratio", ge=0, le=1)
    ] = 0.4
    weekend: Annotated[float, Knob("Rate on Saturday and Sunday over that of other days.", unit="ratio", ge=0)] = 0.6
    start: Annotated[
        float,
        Knob("Time of the week, from Monday midnight, at which it begins.", unit="s", ge=0, lt=rate_profiles.WEEK),
    ] = 0.0

    def shape(self) -> RateProfile:
        """Return by what the rate is multiplied at each second."""
        return rate_profiles.WeeklyProfile(self.peak, self.trough, self.weekend, self.start)


PATTERNS: dict[str, type[ArrivalPattern]] = {
    "poisson": PoissonArrivals,
    "gamma": GammaArrivals,
    "constant": ConstantArrivals,
    "bursts": BurstArrivals,
    "sinusoid": SinusoidArrivals,
    "ramp": RampArrivals,
    "step": StepArrivals,
    "spike": SpikeArrivals,
    "weekly": WeeklyArrivals,
}


def parse_arrivals(text: str, number: inline_spec.ReadNumber, *, what: str = "--arrivals") -> ArrivalPattern:
    """Read a pattern such as ``spike:at=5m,height=10``.

    Args:
        number: reads a number with a unit, as `penstock.config.reading.units.parse_number` does.
        what: the option that the text is the value of, for errors.

    Raises:
        ConfigError: names the setting, its value and what would be right.
    """
    pattern: ArrivalPattern = inline_spec.parse(what, text, PATTERNS, number)
    if isinstance(pattern, SpikeArrivals) and 0.0 < pattern.every <= pattern.at + pattern.width:
        raise ConfigError(
            f"{what} {text!r}: every={pattern.every:g} ends before the spike does",
            hint=f"above {pattern.at + pattern.width:g} s, or 0 for one spike",
        )
    return pattern

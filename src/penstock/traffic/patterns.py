"""Which arrivals can be asked for by name? The kinds of ``--arrivals``, each with its settings, and their streams."""

import random
from typing import Annotated

import msgspec

from penstock.kernel.errors import ConfigError
from penstock.kernel.settings import Knob
from penstock.traffic import arrivals, shapes, spec
from penstock.traffic.arrivals import Arrivals
from penstock.traffic.shapes import Delayed, Shape, follow

_CV = Knob("Deviation of the gaps between arrivals over their mean: 1 is Poisson, more is burstier, 0 even.", ge=0)


class Pattern(msgspec.Struct, frozen=True, kw_only=True):
    """A way in which requests arrive."""

    def stream(self, rate: float, rng: random.Random, *, lead: float = 0.0) -> Arrivals:
        """Return ascending times in seconds, ``rate`` per second on average; of a shape, times what it says.

        Args:
            lead: seconds before a shape begins, at the rate that it begins with: what a workload of sessions leaves
                out at its start (`workloads.SETTLE`), so that the shape keeps the time of what is left.
        """
        raise NotImplementedError


class Poisson(Pattern, frozen=True, kw_only=True):
    """Independent arrivals."""

    def stream(self, rate: float, rng: random.Random, *, lead: float = 0.0) -> Arrivals:
        """Return ascending times in seconds."""
        return arrivals.poisson(rate, rng)


class Gamma(Pattern, frozen=True, kw_only=True):
    """Gamma-distributed gaps."""

    cv: Annotated[float, Knob("Deviation of the gaps over their mean: above 1 is bursty, 1 Poisson.", gt=0)] = 2.0

    def stream(self, rate: float, rng: random.Random, *, lead: float = 0.0) -> Arrivals:
        """Return ascending times in seconds."""
        return arrivals.gamma(rate, self.cv, rng)


class Constant(Pattern, frozen=True, kw_only=True):
    """Even gaps."""

    def stream(self, rate: float, rng: random.Random, *, lead: float = 0.0) -> Arrivals:
        """Return ascending times in seconds."""
        return arrivals.constant(rate)


class Bursts(Pattern, frozen=True, kw_only=True):
    """Poisson arrivals in busy and quiet spells of random length."""

    on: Annotated[float, Knob("Mean length of a busy spell.", unit="s", gt=0)] = 5.0
    off: Annotated[float, Knob("Mean length of a quiet spell.", unit="s", gt=0)] = 15.0
    quiet: Annotated[float, Knob("Rate in a quiet spell over that in a busy one.", unit="ratio", ge=0, le=1)] = 0.1

    def stream(self, rate: float, rng: random.Random, *, lead: float = 0.0) -> Arrivals:
        """Return ascending times in seconds."""
        return arrivals.bursts(rate, rng, on=self.on, off=self.off, quiet=self.quiet)


class Shaped(Pattern, frozen=True, kw_only=True):
    """Arrivals whose rate changes over time as a shape says."""

    cv: Annotated[float, _CV] = 1.0

    def shape(self) -> Shape:
        """Return by what the rate is multiplied at each second."""
        raise NotImplementedError

    def stream(self, rate: float, rng: random.Random, *, lead: float = 0.0) -> Arrivals:
        """Return ascending times in seconds; ends where the rate falls to 0 for good."""
        return follow(Delayed(self.shape(), lead) if lead else self.shape(), rate, rng, cv=self.cv)


class Sinusoid(Shaped, frozen=True, kw_only=True):
    """A wave around the mean rate."""

    amplitude: Annotated[float, Knob("How far it swings, as a share of the mean rate.", unit="ratio", ge=0, le=1)] = 0.5
    period: Annotated[float, Knob("Length of a wave.", unit="s", gt=0)] = 3600.0

    def shape(self) -> Shape:
        """Return by what the rate is multiplied at each second."""
        return shapes.Sine(self.amplitude, self.period)


class Ramp(Shaped, frozen=True, kw_only=True):
    """An even climb (or fall) to a level that stays."""

    first: Annotated[float, Knob("What the rate is multiplied by at the start.", ge=0)] = 0.0
    last: Annotated[float, Knob("What the rate is multiplied by from the end of the ramp on.", ge=0)] = 1.0
    over: Annotated[float, Knob("Length of the ramp.", unit="s", gt=0)] = 600.0

    def shape(self) -> Shape:
        """Return by what the rate is multiplied at each second."""
        return shapes.Slope(self.first, self.last, self.over)


class Step(Shaped, frozen=True, kw_only=True):
    """Another rate from one moment on."""

    at: Annotated[float, Knob("When the rate changes.", unit="s", gt=0)] = 300.0
    to: Annotated[float, Knob("What the rate is multiplied by from then on.", ge=0)] = 2.0

    def shape(self) -> Shape:
        """Return by what the rate is multiplied at each second."""
        return shapes.Pieces([0.0, self.at], [1.0, self.to])


class Spike(Shaped, frozen=True, kw_only=True):
    """Another rate for a while, once or again and again."""

    at: Annotated[float, Knob("When the spike begins.", unit="s", gt=0)] = 300.0
    width: Annotated[float, Knob("How long it lasts.", unit="s", gt=0)] = 30.0
    height: Annotated[float, Knob("What the rate is multiplied by in it.", ge=0)] = 5.0
    every: Annotated[
        float, Knob("Length of a cycle, after which all begins anew; 0 is one spike only.", unit="s", ge=0)
    ] = 0.0

    def shape(self) -> Shape:
        """Return by what the rate is multiplied at each second."""
        return shapes.Pieces([0.0, self.at, self.at + self.width], [1.0, self.height, 1.0], self.every or None)


class Weekly(Shaped, frozen=True, kw_only=True):
    """A wave per day and quieter weekends; the mean over a week is the rate asked for."""

    peak: Annotated[float, Knob("Time of day of the highest rate.", unit="s", ge=0, lt=shapes.DAY)] = 15 * 3600.0
    trough: Annotated[
        float, Knob("Rate at the quietest time of a day over that at its peak.", unit="ratio", ge=0, le=1)
    ] = 0.4
    weekend: Annotated[float, Knob("Rate on Saturday and Sunday over that of other days.", unit="ratio", ge=0)] = 0.6
    start: Annotated[
        float, Knob("Time of the week, from Monday midnight, at which it begins.", unit="s", ge=0, lt=shapes.WEEK)
    ] = 0.0

    def shape(self) -> Shape:
        """Return by what the rate is multiplied at each second."""
        return shapes.Days(self.peak, self.trough, self.weekend, self.start)


PATTERNS: dict[str, type[Pattern]] = {
    "poisson": Poisson,
    "gamma": Gamma,
    "constant": Constant,
    "bursts": Bursts,
    "sinusoid": Sinusoid,
    "ramp": Ramp,
    "step": Step,
    "spike": Spike,
    "weekly": Weekly,
}


def parse_arrivals(text: str, number: spec.ReadNumber, *, what: str = "--arrivals") -> Pattern:
    """Read a pattern such as ``spike:at=5m,height=10``.

    Args:
        number: reads a number with a unit, as `penstock.config.units.parse_number` does.
        what: the option that the text is the value of, for errors.

    Raises:
        ConfigError: names the setting, its value and what would be right.
    """
    pattern: Pattern = spec.parse(what, text, PATTERNS, number)
    if isinstance(pattern, Spike) and 0.0 < pattern.every <= pattern.at + pattern.width:
        raise ConfigError(
            f"{what} {text!r}: every={pattern.every:g} ends before the spike does",
            hint=f"above {pattern.at + pattern.width:g} s, or 0 for one spike",
        )
    return pattern

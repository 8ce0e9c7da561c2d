"""Ensemble forecast of the arrival rate: experts weighted by their errors, quantiles from its own errors.

For every horizon each expert's forecast is compared with the actual rate. Experts with smaller errors weigh more
(multiplicative weights over a fading loss); the errors of the mixture itself at that horizon give the quantiles (split
conformal, with forgetting). The noise of counting is removed from the spread: the forecast is of the rate, and the
sizing that uses it accounts for random arrivals.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.planner.forecast.experts import Expert, SeasonalExpert, usual
from penstock.planner.remembering import Remembering

Floats = npt.NDArray[np.float64]

RANKS: tuple[float, ...] = (0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 0.995)
"""Ranks of the forecast, ascending."""
AHEAD: tuple[int, ...] = (1, 2, 4, 8, 12, 20, 30, 40)
"""Bins ahead that are learnt; horizons between them are interpolated."""
FADE = 0.985
"""Share of an old error that is left after one bin: half after 46 bins."""
SHARPNESS = 8.0
"""How strongly a lower loss is preferred; 0 is a plain mean."""
BORROWED = 2.0
"""Weight of the errors over the next shorter horizon, in errors."""
JUST_NOW, JUST_FADE, JUST_SHARP = 1, 0.7, 4.0
"""Extra weight of the last few bins: place in `AHEAD` of the horizon, share of an error left from bin to bin, and
strength. A trend that overshoots at this moment must not be followed until its far forecasts come due."""
JUMP, YOUNGEST, OFF_OVER = 5.0, 4, 60
"""Standard deviations from which a bin is a jump; bins before which there is none; bins over which these are learnt."""
LAG_OVER, LAG_SURE = 8, 3.0
"""Most bins whose errors together may show that the mixture lags behind a ramp, and standard deviations that chance
explains; with 2.5 a fleet at its threshold flapped under a steady load."""
OUTLIER = 2.0
"""Standard deviations beyond which an error adds no more to them: a jump must not hide itself."""
PAIR = 1
"""Place in `AHEAD` of the horizon of two bins."""
RESIDUALS = 160
"""Errors kept per horizon."""
PRIOR = 12
"""Weight of the assumed spread at the start, in errors."""
REACH = 1.5
"""Most that an expert's forecast rises above the present rate, as a factor: trends do not go on for ever. One that
continues a pattern has seen how far it goes."""
BEYOND, ABOVE = 1.1, 1.2
"""How far the upper ranks may go: above the highest rate observed, or above the middle where that is more. Without it,
errors made on the way up, added to a rate at its peak, would forecast that it doubles again."""
YOUNG, YOUTH = 0.8, 80.0
"""How much further they may go above the middle at the very start, when the highest observed rate means little; bins
after which a third of that is left."""
HIGHEST_FADE = 0.9998
"""Share of the highest rate that is left after one bin: half after 14 hours."""
ASSUMED = 0.25
"""Relative spread of a rate that is assumed over `AHEAD`'s longest horizon before anything is learnt."""


class RateForecast(Remembering):
    """Forecasts the rate of one stream of arrivals.

    Args:
        width: seconds of a bin.
        experts: the forecasts to mix; by default `penstock.planner.forecast.experts.usual`.
    """

    width: float
    experts: list[Expert]
    _open: float
    """Arrivals of the open bin..."""
    _filled: float
    """... and its seconds."""
    _bins: int
    _rate: float
    _recent: list[float]
    """Rates of the last bins..."""
    _highest: float
    """... and their highest mean so far, fading."""
    _loss: Floats
    _judged: Floats
    _next: float
    """The mixture's forecast for the next bin..."""
    _lags: list[float]
    """... its errors in the last bins..."""
    _off: float
    """... and the variance of its errors beside that of counting; of the square root, as everywhere here."""
    _just: Floats
    """Each expert's loss of the last few bins."""
    _pending: list[list[tuple[int, list[float], float]]]
    """Per horizon: (bin it is for, each expert's value or NaN, the mixture's)."""
    _errors: list[list[float]]
    _jumped: int
    """Bin of the last jump."""

    def __init__(self, width: float = 15.0, experts: Sequence[Expert] | None = None) -> None:
        self.width = width
        self.experts = list(usual() if experts is None else experts)
        self._open = 0.0
        self._filled = 0.0
        self._bins = 0
        self._rate = 0.0
        self._recent = []
        self._highest = 0.0
        self._loss = np.zeros((len(AHEAD), len(self.experts)))
        self._judged = np.zeros((len(AHEAD), len(self.experts)))
        self._next = 0.0
        self._lags = []
        self._off = 0.0
        self._just = np.zeros(len(self.experts))
        self._pending = [[] for _ in AHEAD]
        self._errors = [[] for _ in AHEAD]
        self._jumped = 0

    @property
    def bins(self) -> int:
        """Full bins so far."""
        return self._bins

    @property
    def rate(self) -> float:
        """Requests per second of the last full bin, or of the open one while there is none."""
        if self._bins:
            return self._rate
        return self._open / self._filled if self._filled else 0.0

    def add(self, arrived: float, seconds: float) -> None:
        """Add arrivals of the last ``seconds``; they are spread evenly over the bins that these touch."""
        if seconds <= 0.0:
            return
        rate = arrived / seconds
        while seconds > 1e-9:
            part = min(seconds, self.width - self._filled)
            self._open += rate * part
            self._filled += part
            seconds -= part
            if self._filled >= self.width - 1e-9:
                self._close(self._open / self._filled)
                self._open = self._filled = 0.0

    def quantiles(self, horizons: Sequence[float], ranks: Sequence[float] = RANKS) -> Floats:
        """Return rates (requests/s), shape (len(ranks), len(horizons)), ascending in rank; horizons in seconds."""
        if not self._bins:
            return np.full((len(ranks), len(horizons)), self.rate)
        middle = np.array([self._mixed(number) for number in range(len(AHEAD))])
        spread = np.array([self._spread(number, ranks) for number in range(len(AHEAD))])  # (ahead, ranks)
        ahead = np.array(AHEAD) * self.width
        wanted = np.asarray(horizons, dtype=np.float64)
        # Horizon 0 is the present; the spread of the first bin ahead tells how well that is known.
        points = np.concatenate(([0.0], ahead))
        centre = np.concatenate(([middle[0]], middle))
        rates = np.empty((len(ranks), len(wanted)))
        middles = np.interp(wanted, points, centre)
        above = ABOVE + YOUNG * math.exp(-self._bins / YOUTH)
        most = np.maximum(above * middles**2, BEYOND * max(self._highest, 2.0 / self.width))
        for place in range(len(ranks)):
            line = np.concatenate(([spread[0, place]], spread[:, place]))
            root = middles + np.interp(wanted, points, line)
            rates[place] = np.minimum(np.maximum(0.0, root) ** 2, most)
        return rates

    def weights(self) -> dict[str, float]:
        """Return each expert's weight at the middle horizon; together they are 1."""
        number = len(AHEAD) // 2
        return {
            expert.name: round(float(weight), 4)
            for expert, weight in zip(self.experts, self._weights(number), strict=True)
        }

    def pattern(self) -> tuple[float, float] | None:
        """Return the period in seconds that most of the mixture follows, and the share of the error that this saves.

        The errors are those at the middle horizon of forecasts made before, so none was made of what it is held to.
        """
        number = len(AHEAD) // 2
        follows = [isinstance(expert, SeasonalExpert) for expert in self.experts]
        weights = np.where(follows, self._weights(number), 0.0)
        best = self.experts[int(np.argmax(weights))]
        if weights.sum() < 0.5 or not isinstance(best, SeasonalExpert) or best.period is None:
            return None
        mean = self._loss[number] / np.maximum(self._judged[number], 1e-9)
        with_it, without = mean[int(np.argmax(weights))], float(np.min(mean[~np.asarray(follows)]))
        return best.period * self.width, round(float(max(0.0, 1.0 - with_it / max(without, 1e-9))), 3)

    # --- learning -----------------------------------------------------------------------------------------------------

    def _close(self, rate: float) -> None:
        """Learn from a full bin, then forecast again."""
        root = math.sqrt(rate)
        self._bins += 1
        self._rate = rate
        self._recent = [*self._recent[-3:], rate]
        self._highest = max(self._highest * HIGHEST_FADE, sum(self._recent) / len(self._recent))
        self._lags = [*self._lags[1 - LAG_OVER :], root - self._next] if self._bins > 1 else []
        jump = self._jump(root)
        if jump:
            self._lags = []
        cut = not jump and self._cut_jump()
        if jump or cut:
            self._jumped = self._bins
        if cut:  # its first half was counted as an error of the bin before
            for learnt in self._errors:
                del learnt[-1:]
        for number in range(len(AHEAD)):
            pending = self._pending[number]
            while pending and pending[0][0] <= self._bins:
                _, values, mixed = pending.pop(0)
                errors = np.abs(np.array(values) - root)
                known = ~np.isnan(errors)
                self._loss[number] *= FADE
                self._judged[number] *= FADE
                self._loss[number][known] += errors[known]
                self._judged[number][known] += 1.0
                if number == JUST_NOW:
                    self._just = JUST_FADE * self._just + np.where(
                        known, errors, float(np.max(errors[known], initial=0.0))
                    )
                # An unforeseeable jump means nothing for the errors of forecasts where nothing jumps.
                if self._bins - AHEAD[number] >= self._jumped:
                    self._errors[number].append(root - mixed)
                    del self._errors[number][:-RESIDUALS]
        for expert in self.experts:
            if jump:
                expert.shift(jump)
            expert.add(root)
        now = sum(self._recent) / len(self._recent)
        # Where hardly anything has arrived so far, a little more is no evidence.
        most = math.sqrt(max(REACH * now, 2.0 / self.width))
        paths = [expert.path(AHEAD) for expert in self.experts]
        paths = [
            path if path is None or isinstance(expert, SeasonalExpert) else np.minimum(path, most)
            for expert, path in zip(self.experts, paths, strict=True)
        ]
        lag = self._lag()
        for number, ahead in enumerate(AHEAD):
            values = [math.nan if path is None else float(path[number]) for path in paths]
            middle = self._mix(number, values)
            if not number:
                self._next = middle
            self._pending[number].append((self._bins + ahead, values, max(0.0, middle + lag)))

    def _jump(self, root: float) -> float:
        """Return how far a bin jumped off its forecast; 0 where it did not.

        A jump taken for a slope would be forecast to keep rising.
        """
        off = root - self._next
        noise = 0.25 / self.width + self._off
        jumped = self._bins > YOUNGEST and off * off > JUMP * JUMP * noise
        if self._bins > 1 and not jumped:
            usual = min(off * off, OUTLIER * OUTLIER * noise)
            self._off += (usual - 0.25 / self.width - self._off) / min(self._bins, OFF_OVER)
            self._off = max(0.0, self._off)
        return off if jumped else 0.0

    def _lag(self) -> float:
        """Return how far the mixture lies behind what the last bins show together, shrunk by what chance explains."""
        noise = 0.25 / self.width + self._off
        best, lag = LAG_SURE * LAG_SURE, 0.0
        for bins in range(1, len(self._lags) + 1):
            mean = sum(self._lags[-bins:]) / bins
            if (surprise := bins * mean * mean / noise) > best:
                best, lag = surprise, mean * (1.0 - LAG_SURE * LAG_SURE / surprise)
        return lag

    def _cut_jump(self) -> bool:
        """Return whether the last two bins jumped together: the end of a bin may cut a jump in two."""
        if self._bins <= YOUNGEST:
            return False
        off = math.sqrt(sum(self._recent[-2:]) / 2.0) - self._pending[PAIR][0][2]
        return off * off > JUMP * JUMP * (0.125 / self.width + self._off)

    def _weights(self, number: int) -> Floats:
        # Far forecasts come due late: until then, errors over the shorter horizons decide.
        mean = np.full(len(self.experts), np.nan)
        for loss, count in zip(self._loss[: number + 1], self._judged[: number + 1], strict=True):
            borrowed = np.where(np.isnan(mean), 0.0, BORROWED)
            judged = count + borrowed > 0.0
            total = loss + borrowed * np.nan_to_num(mean)
            mean = np.where(judged, total / np.maximum(count + borrowed, 1e-9), np.nan)
        if np.isnan(mean).all():
            return np.full(len(self.experts), 1.0 / len(self.experts))
        # An expert without errors yet counts like the worst, so that it has to earn its weight.
        mean = np.where(np.isnan(mean), np.nanmax(mean), mean)
        scale = max(float(mean.min()), 1e-6)
        just = self._just - float(self._just.min())
        # Errors of counting alone mean nothing: they are the scale for the last bins.
        noise = 0.5 / math.sqrt(self.width) / (1.0 - JUST_FADE)
        weight = np.exp(-SHARPNESS * (mean / scale - 1.0) - JUST_SHARP * just / noise)
        return np.asarray(weight / weight.sum())

    def _mix(self, number: int, values: Sequence[float]) -> float:
        forecasts = np.asarray(values)
        weight = np.where(np.isnan(forecasts), 0.0, self._weights(number))
        total = float(weight.sum())
        if total <= 0.0:
            return float(np.nanmean(forecasts))
        return float(np.nansum(forecasts * weight) / total)

    def _mixed(self, number: int) -> float:
        """Return the mixture's newest forecast for a horizon, of the square root."""
        return self._pending[number][-1][2]

    def _spread(self, number: int, ranks: Sequence[float]) -> list[float]:
        """Return how far from the mixture each rank lies, of the square root."""
        errors = self._errors[number]
        middle = max(self._mixed(number), 0.05)
        # d(sqrt r) = dr / (2 sqrt r): a relative spread s of the rate is s sqrt(r) / 2 of its root.
        assumed = ASSUMED * math.sqrt(AHEAD[number] / AHEAD[-1]) * middle
        counted = 1.0 / (4.0 * self.width)
        if errors:
            ordered = np.sort(np.asarray(errors))
            variance = float(np.mean(ordered**2))
            # The square root of a count over its time has this variance at any rate.
            real = math.sqrt(max(0.0, 1.0 - counted / variance)) if variance > 0.0 else 0.0
        guess = assumed * np.array([_normal(rank) for rank in ranks])
        if errors:
            learnt = np.interp(np.asarray(ranks) * (len(ordered) - 1), np.arange(len(ordered)), ordered) * real
            share = len(errors) / (len(errors) + PRIOR)
            guess = share * learnt + (1.0 - share) * guess
        return list(np.maximum.accumulate(guess))

    # --- state --------------------------------------------------------------------------------------------------------


def _normal(rank: float) -> float:
    """Return the standard normal quantile, to 3e-3 (Hastings 1955, 26.2.22 of Abramowitz and Stegun)."""
    if rank == 0.5:
        return 0.0
    tail = min(rank, 1.0 - rank)
    t = math.sqrt(-2.0 * math.log(tail))
    z = t - (2.30753 + 0.27061 * t) / (1.0 + 0.99229 * t + 0.04481 * t * t)
    return z if rank > 0.5 else -z

"""How high will the rate of arrivals be, and how sure is that? Experts weighed by their errors; quantiles by ours.

For every horizon each expert's forecast is held against what came. Experts that erred less weigh more (multiplicative
weights over a fading loss); how far the mixture itself was off at that horizon gives the quantiles (split conformal,
with forgetting). The noise of counting is taken out of the spread: what is wanted is the rate, and who sizes by it
accounts for random arrivals.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.planner.forecast.experts import Expert, usual

Floats = npt.NDArray[np.float64]

RANKS: tuple[float, ...] = (0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 0.995)
"""Ranks that are told, ascending."""
AHEAD: tuple[int, ...] = (1, 2, 4, 8, 12, 20, 30, 40)
"""Bins ahead that are learnt; what is between is read off the line."""
FADE = 0.985
"""What is left of an old error from one bin to the next: half after 46 bins."""
SHARPNESS = 8.0
"""How strongly a lower loss weighs; 0 is a plain mean."""
JUST_NOW, JUST_FADE, JUST_SHARP = 1, 0.7, 2.0
"""How the last few bins count beside: place in `AHEAD` of the horizon, what is left of an error from bin to bin, and
how strongly it weighs. A trend that overshoots at this moment must not be followed until its far forecasts come due."""
JUMP, YOUNGEST, OFF_OVER = 5.0, 4, 60
"""Standard deviations from which a bin is a jump; bins before which nothing is; bins over which these are learnt."""
RESIDUALS = 160
"""Errors kept per horizon."""
PRIOR = 12
"""Errors that what is assumed at the start counts for."""
REACH = 1.5
"""Most that the middle of a forecast rises above the present rate, as a factor: trends are not followed for ever."""
BEYOND, ABOVE = 1.1, 1.2
"""How far the upper ranks may go: above the highest rate that was ever seen, or above the middle where that is more.
Errors made on the way up, added to a rate that is at its peak, would say that it doubles again."""
YOUNG, YOUTH = 0.8, 80.0
"""How much further they may go above the middle at the very start, when the highest rate seen says little, and bins
after which a third of that is left."""
HIGHEST_FADE = 0.9998
"""What is left of the highest rate from one bin to the next: half after 14 hours."""
ASSUMED = 0.25
"""Relative spread of a rate that is assumed over `AHEAD`'s longest horizon before anything was learnt."""


class RateForecast:
    """Forecast the rate of one stream of arrivals.

    Args:
        width: seconds of a bin.
        experts: who is asked; by default `penstock.planner.forecast.experts.usual`.
    """

    def __init__(self, width: float = 15.0, experts: Sequence[Expert] | None = None) -> None:
        self.width = width
        self.experts = list(usual() if experts is None else experts)
        self._open = 0.0
        """Arrivals of the bin that is not full yet..."""
        self._filled = 0.0
        """... and its seconds."""
        self._bins = 0
        self._rate = 0.0
        self._recent: list[float] = []
        """Rates of the last bins..."""
        self._highest = 0.0
        """... and the highest mean of these that was seen, fading."""
        self._loss = np.zeros((len(AHEAD), len(self.experts)))
        self._seen = np.zeros((len(AHEAD), len(self.experts)))
        self._next = 0.0
        """The mixture's forecast for the next bin..."""
        self._off = 0.0
        """... and the variance of its errors beside that of counting; of the square root, as all here."""
        self._just = np.zeros(len(self.experts))
        """Each expert's loss of the last few bins."""
        self._pending: list[list[tuple[int, list[float], float]]] = [[] for _ in AHEAD]
        """Per horizon: (bin it is about, each expert's value or NaN, the mixture's)."""
        self._errors: list[list[float]] = [[] for _ in AHEAD]

    @property
    def bins(self) -> int:
        """Full bins that were taken in."""
        return self._bins

    @property
    def rate(self) -> float:
        """Requests per second of the last full bin, or of the open one while there is none."""
        if self._bins:
            return self._rate
        return self._open / self._filled if self._filled else 0.0

    def add(self, arrived: float, seconds: float) -> None:
        """Take in arrivals of the last ``seconds``; they are spread evenly over the bins that these touch."""
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
        # At horizon 0 it is what it is now; the first bin ahead says how well that is known.
        points = np.concatenate(([0.0], ahead))
        centre = np.concatenate(([middle[0]], middle))
        found = np.empty((len(ranks), len(wanted)))
        now = sum(self._recent) / len(self._recent)
        # Where hardly anything has come so far, a little more is no sign of anything.
        middles = np.minimum(np.interp(wanted, points, centre), math.sqrt(max(REACH * now, 2.0 / self.width)))
        above = ABOVE + YOUNG * math.exp(-self._bins / YOUTH)
        most = np.maximum(above * middles**2, BEYOND * max(self._highest, 2.0 / self.width))
        for place in range(len(ranks)):
            line = np.concatenate(([spread[0, place]], spread[:, place]))
            root = middles + np.interp(wanted, points, line)
            found[place] = np.minimum(np.maximum(0.0, root) ** 2, most)
        return found

    def weights(self) -> dict[str, float]:
        """Return each expert's weight at the middle horizon; together they are 1."""
        number = len(AHEAD) // 2
        return {
            expert.name: round(float(weight), 4)
            for expert, weight in zip(self.experts, self._weights(number), strict=True)
        }

    # --- learning -----------------------------------------------------------------------------------------------------

    def _close(self, rate: float) -> None:
        """A bin is full: learn from what it was, then look ahead again."""
        root = math.sqrt(rate)
        self._bins += 1
        self._rate = rate
        self._recent = [*self._recent[-3:], rate]
        self._highest = max(self._highest * HIGHEST_FADE, sum(self._recent) / len(self._recent))
        for number in range(len(AHEAD)):
            pending = self._pending[number]
            while pending and pending[0][0] <= self._bins:
                _, values, mixed = pending.pop(0)
                errors = np.abs(np.array(values) - root)
                known = ~np.isnan(errors)
                self._loss[number] *= FADE
                self._seen[number] *= FADE
                self._loss[number][known] += errors[known]
                self._seen[number][known] += 1.0
                if number == JUST_NOW:
                    self._just = JUST_FADE * self._just + np.where(
                        known, errors, float(np.max(errors[known], initial=0.0))
                    )
                self._errors[number].append(root - mixed)
                del self._errors[number][:-RESIDUALS]
        jump = self._jump(root)
        for expert in self.experts:
            if jump:
                expert.shift(jump)
            expert.add(root)
        paths = [expert.path(AHEAD) for expert in self.experts]
        for number, ahead in enumerate(AHEAD):
            values = [math.nan if path is None else float(path[number]) for path in paths]
            self._pending[number].append((self._bins + ahead, values, self._mix(number, values)))
        self._next = self._pending[0][-1][2]

    def _jump(self, root: float) -> float:
        """Return by how much a bin jumped off all that was expected of it; 0 where it did not.

        A jump taken for a slope would be forecast to go on rising.
        """
        off = root - self._next
        noise = 0.25 / self.width + self._off
        jumped = self._bins > YOUNGEST and off * off > JUMP * JUMP * noise
        if self._bins > 1 and not jumped:
            self._off += (off * off - 0.25 / self.width - self._off) / min(self._bins, OFF_OVER)
            self._off = max(0.0, self._off)
        return off if jumped else 0.0

    def _weights(self, number: int) -> Floats:
        seen = self._seen[number]
        mean = np.where(seen > 0.0, self._loss[number] / np.maximum(seen, 1e-9), np.nan)
        if np.isnan(mean).all():
            return np.full(len(self.experts), 1.0 / len(self.experts))
        # Who has not been judged yet counts like the worst, so that it has to earn its weight.
        mean = np.where(np.isnan(mean), np.nanmax(mean), mean)
        scale = max(float(mean.min()), 1e-6)
        just = self._just - float(self._just.min())
        # Errors of counting alone say nothing: against them the last bins are held.
        noise = 0.5 / math.sqrt(self.width) / (1.0 - JUST_FADE)
        weight = np.exp(-SHARPNESS * (mean / scale - 1.0) - JUST_SHARP * just / noise)
        return np.asarray(weight / weight.sum())

    def _mix(self, number: int, values: Sequence[float]) -> float:
        found = np.asarray(values)
        weight = np.where(np.isnan(found), 0.0, self._weights(number))
        total = float(weight.sum())
        if total <= 0.0:
            return float(np.nanmean(found))
        return float(np.nansum(found * weight) / total)

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

    def snapshot(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return {
            "width": self.width,
            "open": self._open,
            "filled": self._filled,
            "bins": self._bins,
            "rate": self._rate,
            "recent": list(self._recent),
            "highest": self._highest,
            "loss": self._loss.tolist(),
            "seen": self._seen.tolist(),
            "just": self._just.tolist(),
            "next": self._next,
            "off": self._off,
            "pending": [[list(entry) for entry in pending] for pending in self._pending],
            "errors": [list(errors) for errors in self._errors],
            "experts": {expert.name: expert.snapshot() for expert in self.experts},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Become what wrote ``state``; its experts must be the same."""
        self.width, self._open, self._filled = state["width"], state["open"], state["filled"]
        self._bins, self._rate = state["bins"], state["rate"]
        self._recent, self._highest = list(state["recent"]), state["highest"]
        self._loss, self._seen = np.array(state["loss"]), np.array(state["seen"])
        self._just = np.array(state["just"])
        self._next, self._off = state["next"], state["off"]
        self._pending = [[(at, list(values), mixed) for at, values, mixed in entry] for entry in state["pending"]]
        self._errors = [list(errors) for errors in state["errors"]]
        for expert in self.experts:
            expert.restore(state["experts"][expert.name])


def _normal(rank: float) -> float:
    """Return the standard normal quantile, to 3e-3 (Hastings 1955, 26.2.22 of Abramowitz and Stegun)."""
    if rank == 0.5:
        return 0.0
    tail = min(rank, 1.0 - rank)
    t = math.sqrt(-2.0 * math.log(tail))
    z = t - (2.30753 + 0.27061 * t) / (1.0 + 0.99229 * t + 0.04481 * t * t)
    return z if rank > 0.5 else -z

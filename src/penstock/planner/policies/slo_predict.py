"""How much will arrive? The default's PREDICT step: the rate's quantiles at several horizons, and the mix as it is."""

from typing import Any

from penstock.planner.context import Context
from penstock.planner.forecast.ensemble import RANKS, RateForecast
from penstock.planner.plugins import Spec
from penstock.planner.proposals import Predicted, Prediction, Result

HORIZONS: tuple[float, ...] = (0.0, 15.0, 30.0, 60.0, 90.0, 120.0, 150.0, 180.0, 240.0, 300.0, 420.0, 600.0)
"""Seconds from now that are told."""


class SloPredict:
    """Forecast one model's arrivals.

    Args:
        model: whose.
        width: seconds of a bin of the forecast.
    """

    def __init__(self, model: str, width: float = 15.0) -> None:
        self.spec = Spec(id=f"slo_predict:{model}", stage="predict", needs=("traffic",))
        self.forecast = RateForecast(width)
        self._model = model
        self._last: dict[str, float | None] = {}

    def evaluate(self, context: Context) -> Result:
        """Return the prediction; without any traffic read so far there is none."""
        seen = context.model(self._model)
        if seen is not None and seen.traffic is not None:
            traffic = seen.traffic
            # Looks that could not be read are skipped: their arrivals are unknown, not none.
            self.forecast.add(traffic.arrived, traffic.seconds)
            for name in ("isl", "osl", "hit_rate", "accept_length"):
                value = getattr(traffic, name)
                if value is not None:
                    self._last[name] = value
        if not self.forecast.bins:
            return Predicted(models={})
        found = self.forecast.quantiles(HORIZONS, RANKS)
        middle = found[RANKS.index(0.5)]
        seconds = HORIZONS[-1]
        return Predicted(
            models={
                self._model: Prediction(
                    seconds=seconds,
                    requests=float(middle.mean()) * seconds,
                    horizons=HORIZONS,
                    quantiles={
                        rank: tuple(round(float(x), 4) for x in row) for rank, row in zip(RANKS, found, strict=True)
                    },
                    source="ensemble",
                    weights=self.forecast.weights(),
                    **self._last,
                )
            }
        )

    def snapshot(self) -> Any:
        return {"forecast": self.forecast.snapshot(), "last": dict(self._last)}

    def restore(self, state: Any) -> None:
        self.forecast.restore(state["forecast"])
        self._last = dict(state["last"])

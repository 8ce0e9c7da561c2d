"""PREDICT step of policy slo: quantiles of the arrival rate at several horizons, and the present mix."""

from penstock.kernel.values import UNKNOWN_SHAPE, RequestShape
from penstock.planner.forecast.ensemble import RANKS, RateForecast
from penstock.planner.plugins.plugin_context import PluginContext
from penstock.planner.plugins.plugin_registry import PluginSpec
from penstock.planner.plugins.proposals import Predicted, Prediction, Result
from penstock.planner.remembering import Remembering

HORIZONS: tuple[float, ...] = (0.0, 15.0, 30.0, 60.0, 90.0, 120.0, 150.0, 180.0, 240.0, 300.0, 420.0, 600.0)
"""Horizons of the forecast in seconds from now."""


class SloPredict(Remembering):
    """Forecasts one model's arrivals.

    Args:
        model: its name.
        width: seconds of a bin of the forecast.
    """

    forecast: RateForecast
    _shape: RequestShape[float | None]
    """The mean request, each value the last one that was known."""

    def __init__(self, model: str, width: float = 15.0) -> None:
        self.spec = PluginSpec(id=f"slo_predict:{model}", stage="predict", needs=("traffic",))
        self.forecast = RateForecast(width)
        self._model = model
        self._shape = UNKNOWN_SHAPE

    def evaluate(self, context: PluginContext) -> Result:
        """Return the prediction; without any traffic read so far there is none."""
        observed = context.model(self._model)
        if observed is not None and observed.traffic is not None:
            traffic = observed.traffic
            # Observations that could not be read are skipped: their arrivals are unknown, not zero.
            self.forecast.add(traffic.arrived, traffic.seconds)
            self._shape = traffic.shape.filled(self._shape)
        if not self.forecast.bins:
            return Predicted(models={})
        quantiles = self.forecast.quantiles(HORIZONS, RANKS)
        period, saved = self.forecast.pattern() or (None, 0.0)
        middle = quantiles[RANKS.index(0.5)]
        seconds = HORIZONS[-1]
        return Predicted(
            models={
                self._model: Prediction(
                    seconds=seconds,
                    requests=float(middle.mean()) * seconds,
                    shape=self._shape,
                    horizons=HORIZONS,
                    quantiles={
                        rank: tuple(round(float(x), 4) for x in row) for rank, row in zip(RANKS, quantiles, strict=True)
                    },
                    source="ensemble",
                    weights=self.forecast.weights(),
                    period=period,
                    saved=saved,
                )
            }
        )

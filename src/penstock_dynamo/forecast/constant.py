"""Constant predictor: the last value, for steady traffic and long intervals."""

from penstock.planner.forecast.predictor import PredictionSeries


class ConstantPredictor(PredictionSeries):
    """The next value is the last one; 0 before any."""

    name = "constant"

    def __init__(self) -> None:
        super().__init__(values_max=1)

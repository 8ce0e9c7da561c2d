"""Will it stay as it is? The last value, for steady traffic and long intervals."""

from penstock.planner.forecast.base import Series


class Constant(Series):
    """The next value is the last one; 0 before any."""

    name = "constant"

    def __init__(self) -> None:
        super().__init__(kept=1)

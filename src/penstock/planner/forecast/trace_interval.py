"""`TraceInterval`: one request of an earlier trace, as predictors begin with it."""

from typing import NamedTuple

from penstock.kernel.values import RequestShape


class TraceInterval(NamedTuple):
    """One request of a trace. ``arrival``: seconds."""

    arrival: float
    shape: RequestShape[int]

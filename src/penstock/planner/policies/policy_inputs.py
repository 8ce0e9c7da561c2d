"""Inputs of a policy beside settings and observations: known speeds of the engines, and an earlier trace."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.kernel.values import Role, Slo
from penstock.planner.forecast.trace_interval import TraceInterval
from penstock.planner.performance.speed_sources import KnownSpeeds


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """Data that is set, read or measured elsewhere, as plain data.

    Args:
        slo: the cluster's.
        speeds: by model and role, known speeds of an engine before it serves; model "" stands for all others.
        traces: by model, requests of an earlier time, for predictors to begin with; "" likewise.
    """

    slo: Slo = Slo()
    speeds: Mapping[str, Mapping[Role, KnownSpeeds]] = field(default_factory=dict)
    traces: Mapping[str, Sequence[TraceInterval]] = field(default_factory=dict)

    @property
    def ttft(self) -> float:
        """Seconds of TTFT that are kept."""
        return self.slo.planned[0]

    @property
    def itl(self) -> float:
        """Seconds of mean ITL that are kept."""
        return self.slo.planned[1]

    def of(self, model: str) -> Mapping[Role, KnownSpeeds]:
        """Return the known speeds of a model's engines."""
        return self.speeds.get(model, self.speeds.get("", {}))

    def trace(self, model: str) -> Sequence[TraceInterval]:
        """Return a model's earlier requests."""
        return self.traces.get(model, self.traces.get("", ()))

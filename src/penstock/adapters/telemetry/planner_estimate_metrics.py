"""Planner metrics from tick evidence and plugins: estimates, capacities and power, under Dynamo's names.

Only the policies over forward passes report estimates and capacities; other policies have no sample of these.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.adapters.telemetry.prometheus_text import MetricRegistry
from penstock.planner.observation import Observation
from penstock.planner.plugins.plugin_registry import PluginSlot
from penstock.planner.tick_record import TickRecord

CIRCUITS = {"closed": 0.0, "half_open": 1.0, "open": 2.0}
DURATIONS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class PlannerEstimateMetrics:
    """Families that `PlannerMetrics` shows beside its own.

    Args:
        new: makes them; its names begin with the planner's prefix.
        watts: power limit, in watts; None has no sample of power.
    """

    def __init__(self, new: MetricRegistry, watts: float | None = None) -> None:
        self._watts = watts
        self._drawn: dict[str, float | None] = {}
        """Pool -> watts of one replica."""
        self.estimated = {
            name: new.gauge(f"estimated_{name}_ms", f"Highest {name.upper()} estimated of an engine.", "model")
            for name in ("ttft", "itl")
        }
        self.capacity = {
            role: new.gauge(f"engine_{role}_capacity_requests_per_second", f"That one {role} engine bears.", "model")
            for role in ("prefill", "decode")
        }
        self.power_budget = new.gauge("power_budget_total_watts", "Ceiling of power.")
        self.power = new.gauge("power_projected_watts", "Power of the replicas that there should be.")
        self.power_share = new.gauge("power_budget_utilization", "That over the ceiling.")
        self.circuit = new.gauge(
            "plugin_circuit_state", "0 asked as ever, 1 on trial, 2 left alone for failing.", "plugin"
        )
        self.latency = new.gauge("plugin_latency_seconds", "That a plugin outside last took.", "plugin")
        self.age = new.gauge("plugin_cache_age_seconds", "Age of the answer that counts between two calls.", "plugin")
        self.duration = new.histogram("tick_duration_seconds", "From a tick's begin to its record.", DURATIONS)
        if watts is not None:
            self.power_budget.set(to=watts)

    def saw(self, observation: Observation) -> None:
        """Take over the power that replicas draw."""
        self._drawn = {name: pool.watts for _, name, pool in observation.pools()}

    def ticked(self, record: TickRecord) -> None:
        """Show the evidence of a tick's decisions."""
        for gauge in (*self.estimated.values(), *self.capacity.values()):
            gauge.clear()
        for pool, evidence in _of_pools(record):
            model, role = record.pools[pool].model, "prefill" if record.pools[pool].role == "prefill" else "decode"
            if isinstance(evidence, list):
                for name, gauge in self.estimated.items():
                    known = [_finite_number(one.get(name)) for one in evidence if isinstance(one, dict)]
                    highest = max((value for value in known if value is not None), default=None)
                    if highest is not None:
                        gauge.set(model, to=max(gauge.get(model), 1e3 * highest))
            elif isinstance(evidence, dict) and isinstance(evidence.get("capacity"), dict):
                rate = _finite_number(evidence["capacity"].get("rate"))
                if rate is not None:
                    self.capacity[role].set(model, to=rate)
        drawn = [(self._drawn.get(name), pool.target) for name, pool in record.pools.items()]
        if drawn and all(watts is not None for watts, _ in drawn):
            total = sum(watts * target for watts, target in drawn if watts is not None)
            self.power.set(to=total)
            if self._watts:
                self.power_share.set(to=total / self._watts)

    def seats(self, seats: Mapping[str, PluginSlot], at: float, took: float) -> None:
        """Show the plugins' state at second ``at`` of the run; ``took``: seconds of the finished tick."""
        self.duration.observe(took)
        for gauge in (self.circuit, self.latency, self.age):
            gauge.clear()
        for id, seat in seats.items():
            self.circuit.set(id, to=CIRCUITS[seat.circuit(at)])
            if seat.spec.outside and seat.called is not None:
                self.latency.set(id, to=seat.seconds)
            if seat.standing_override() is not None and seat.called is not None:
                self.age.set(id, to=at - seat.called)


def _finite_number(value: Any) -> float | None:
    """Return a number; evidence may come from an external plugin, and hold anything."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _of_pools(record: TickRecord) -> Iterator[tuple[str, Any]]:
    """Yield (pool, a policy's evidence for it), wherever in the evidence the pool is named."""
    for evidence in record.evidence.values():
        if not isinstance(evidence, dict):
            continue
        for name, pool_evidence in evidence.items():
            if name in record.pools:
                yield name, pool_evidence
            elif name in record.models and isinstance(pool_evidence, dict):
                yield from ((pool, one) for pool, one in pool_evidence.items() if pool in record.pools)

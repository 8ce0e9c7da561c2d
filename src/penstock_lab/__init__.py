"""The lab: the simulated engine, simulations on virtual time, traffic, measurements, plans and their pages.

The names below are what a program needs that simulates clusters; each is imported at its first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock_lab.engine.engine import Engine
    from penstock_lab.engine.settings import SimSettings
    from penstock_lab.simulate.simulated_cluster import SimulatedCluster
    from penstock_lab.simulate.simulation_plan import PoolPlan, SimulationPlan
    from penstock_lab.traffic.traffic_request import TrafficRequest
    from penstock_lab.traffic.workloads import workload

__all__ = ["Engine", "PoolPlan", "SimSettings", "SimulatedCluster", "SimulationPlan", "TrafficRequest", "workload"]

_MODULES = {
    "Engine": "engine.engine",
    "PoolPlan": "simulate.simulation_plan",
    "SimSettings": "engine.settings",
    "SimulatedCluster": "simulate.simulated_cluster",
    "SimulationPlan": "simulate.simulation_plan",
    "TrafficRequest": "traffic.traffic_request",
    "workload": "traffic.workloads",
}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return __all__

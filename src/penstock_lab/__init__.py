"""The lab: the simulated engine, simulations on virtual time, traffic, measurements, plans and their pages.

The names below are what a program needs that simulates clusters; each is imported at its first use.
"""

from typing import TYPE_CHECKING

from penstock import imported_at_use

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


__getattr__ = imported_at_use(__name__, _MODULES)


def __dir__() -> list[str]:
    return __all__

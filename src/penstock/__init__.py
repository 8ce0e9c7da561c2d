"""Penstock: vLLM servers as one OpenAI endpoint, with KV-aware routing, autoscaling to an SLO, and reasons.

The names below are what a program needs that simulates clusters, or that drives router, engine and planner by itself.
Each is imported at its first use, so `import penstock` loads nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.kernel.errors import PenstockError
    from penstock.kernel.request_record import RequestRecord
    from penstock.planner.observation import Observation
    from penstock.planner.planner import Planner
    from penstock.planner.settings import PlannerSettings
    from penstock.router.router import Router
    from penstock.router.settings import RouterSettings
    from penstock_lab.engine.engine import Engine
    from penstock_lab.engine.settings import SimSettings
    from penstock_lab.simulate.simulated_cluster import SimulatedCluster
    from penstock_lab.simulate.simulation_plan import PoolPlan, SimulationPlan
    from penstock_lab.traffic.traffic_request import TrafficRequest
    from penstock_lab.traffic.workloads import workload

__version__ = "0.1.0"

__all__ = [
    "Engine",
    "Observation",
    "PenstockError",
    "Planner",
    "PlannerSettings",
    "PoolPlan",
    "RequestRecord",
    "Router",
    "RouterSettings",
    "SimSettings",
    "SimulatedCluster",
    "SimulationPlan",
    "TrafficRequest",
    "workload",
]

_MODULES = {
    "Engine": "engine.engine",
    "Observation": "planner.observation",
    "PenstockError": "kernel.errors",
    "Planner": "planner.planner",
    "PlannerSettings": "planner.settings",
    "PoolPlan": "simulate.simulation_plan",
    "RequestRecord": "kernel.request_record",
    "Router": "router.router",
    "RouterSettings": "router.settings",
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
    return [*__all__, "__version__"]

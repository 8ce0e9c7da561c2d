"""Penstock: vLLM servers as one OpenAI endpoint, with KV-aware routing, autoscaling to an SLO, and reasons.

The names below are what a program needs that drives router and planner by itself; `penstock_lab` has those for
simulations. Each is imported at its first use, so `import penstock` loads nothing else.
"""

from collections.abc import Callable, Mapping
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

__version__ = "0.1.0"

__all__ = [
    "Observation",
    "PenstockError",
    "Planner",
    "PlannerSettings",
    "RequestRecord",
    "Router",
    "RouterSettings",
]

_MODULES = {
    "Observation": "planner.observation",
    "PenstockError": "kernel.errors",
    "Planner": "planner.planner",
    "PlannerSettings": "planner.settings",
    "RequestRecord": "kernel.request_record",
    "Router": "router.router",
    "RouterSettings": "router.settings",
}


def imported_at_use(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package whose names are imported when they are first used.

    Args:
        modules: name -> the module below the package that has it.
    """

    def attribute(name: str) -> Any:
        module = modules.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{module}"), name)

    return attribute


__getattr__ = imported_at_use(__name__, _MODULES)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

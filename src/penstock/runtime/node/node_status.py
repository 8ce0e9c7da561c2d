"""Node status: a router's status, with what the process around it knows of the cluster."""

from penstock.router.status_rows import RouterStatus
from penstock.runtime.cluster_state.crash_log import CrashStatus
from penstock.runtime.cluster_state.fleet_api import DesiredPool
from penstock.runtime.planning.planner_report import PlannerReport


class NodeStatus(RouterStatus, kw_only=True):
    """State of one frontend's node. ``frontends``: names of all; ``planner``: its last report."""

    pools: list[DesiredPool] = []
    crashes: list[CrashStatus] = []
    frontends: list[str] = []
    planner: PlannerReport | None = None
    router_faults: int = 0

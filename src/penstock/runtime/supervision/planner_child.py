"""Planner child process: started once the cluster is up, and again whenever it ends.

Losing it freezes replica counts, never traffic; the next one continues from its state in the run folder.
"""

import os
from collections.abc import Awaitable
from pathlib import Path

from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.kernel.numeric_threads import ONE_THREAD
from penstock.planner.settings import PlannerSettings
from penstock.runtime.cluster_state.crash_log import CrashBook
from penstock.runtime.supervision.child_process import ChildProcess
from penstock.runtime.supervision.frontend_processes import secrets_of
from penstock.runtime.supervision.restarted_child import RestartedChild


def planner_child(settings: ClusterSettings, run: Path, crashes: CrashBook) -> RestartedChild:
    """Return the planner process of a cluster.

    Args:
        run: the run folder.
        crashes: record of its crashes.
    """

    def start() -> Awaitable[ChildProcess]:
        return ChildProcess.start(
            "planner",
            "penstock.cli.planner_process",
            ["--run", str(run)],
            log_path=run / "logs" / "planner.log",
            env={**ONE_THREAD, **os.environ, **secrets_of(settings)},
        )

    return RestartedChild(
        "the planner",
        "replica counts stay as they are",
        lambda: settings.supervise,
        start,
        crashed=lambda words: crashes.add("planner", "planner", words),
    )


def policy_of(settings: PlannerSettings) -> str:
    """Return the name of the policy that decides."""
    target = settings.optimization_target
    return f"policy {settings.policy}" if target == "sla" else f"thresholds for {target}"

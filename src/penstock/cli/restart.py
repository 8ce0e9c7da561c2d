"""Command ``penstock restart``: rolling restart of every engine and frontend of a running cluster."""

import click
from msgspec.structs import asdict

from penstock.cli.shared.admin_client import AdminClient
from penstock.cli.shared.cluster_options import cluster_options
from penstock.cli.shared.output import json_option, show
from penstock.cli.shared.waiting import NotDone, wait_for, wait_options
from penstock.runtime.cluster_state.desired_state import RestartStatus
from penstock.runtime.cluster_state.fleet_api import DesiredState, RestartBegun, RestartBody

EPILOG = """\b
Examples:
  penstock restart
  penstock restart --no-wait
  penstock restart --force                also a pool whose only engine has the only GPU

No request fails: a successor serves before its forerunner is drained, and a new frontend accepts before the old one
stops to. The settings stay as they are; a changed config takes a stop and a start. Attached servers, and engines that
were added with 'penstock join', are left alone.
"""


@click.command("restart", epilog=EPILOG, short_help="Replace every engine and frontend, without losing a request.")
@click.option("--force", is_flag=True, help="Also where requests are refused while the last engine is replaced.")
@wait_options
@cluster_options
@json_option
def command(client: AdminClient, force: bool, patience: float | None, as_json: bool) -> int:
    """Replace every engine and every frontend of a running cluster: one engine in twenty at a time."""
    accepted, _ = client.post("/admin/restart", RestartBody(force), RestartBegun)
    report: RestartStatus | None = None
    if patience is not None:
        state = wait_for(
            client, "/admin/desired", DesiredState, patience, lambda state: _pending_restart(state, accepted.revision)
        )
        report = state.restart
    text = "The restart goes on by itself." if report is None else f"Replaced: {', '.join(report.done)}."
    show(as_json, {**asdict(accepted), "report": report}, text)
    return 0


def _pending_restart(state: DesiredState, revision: str) -> str | None:
    """Return what a restart still waits for.

    Raises:
        NotDone: the restart stopped.
    """
    report = state.restart
    if report is None or report.revision != revision:
        return "the supervisor has not begun"
    if report.state == "failed":
        done = ", ".join(report.done) or "nothing"
        raise NotDone(f"the restart stopped: {report.problem}; replaced so far: {done}")
    if report.state == "done":
        return None
    return f"{len(report.done)} replaced, {report.left} to go"

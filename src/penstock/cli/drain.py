"""Command ``penstock drain``: takes a worker or a frontend out of service once it is idle, and reports the drain."""

import click
from msgspec.structs import asdict

from penstock.cli.shared.admin_client import AdminClient
from penstock.cli.shared.cluster_names import workers
from penstock.cli.shared.cluster_options import cluster_options
from penstock.cli.shared.output import json_option, show
from penstock.cli.shared.waiting import wait_for, wait_options
from penstock.kernel.plurals import counted
from penstock.runtime.cluster_state.desired_state import DrainStatus
from penstock.runtime.cluster_state.fleet_api import DesiredState, DrainBegun, DrainBody, DrainUndone

EPILOG = """\b
Examples:
  penstock drain main-2                   the engine finishes its requests, then it is ended
  penstock drain main-2 --timeout 300     it may take so many seconds to finish
  penstock drain main-2 --undo            let it in again
  penstock drain attached-0               a server by URL gets no more requests; it runs on
  penstock drain frontend-1               one of several frontends stops to accept and finishes its streams

At the deadline what still runs is cut off there and goes on elsewhere where it can. A drained engine is not started
again until --undo, or until its pool is scaled.
"""


@click.command("drain", epilog=EPILOG, short_help="Take a worker or a frontend out of service.")
@click.argument("name", shell_complete=workers)
@click.option(
    "--timeout",
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="Longest that its requests may take to finish; unset is supervise.drain_timeout.",
)
@click.option("--undo", is_flag=True, help="Let it in again, or start it again.")
@wait_options
@cluster_options
@json_option
def command(
    client: AdminClient, name: str, timeout: float | None, undo: bool, patience: float | None, as_json: bool
) -> int:
    """Take NAME, a worker or a frontend, out of service: nothing new, finish what runs, end it."""
    body = DrainBody(name, timeout, undo)
    if undo:
        undone, _ = client.post("/admin/drain", body, DrainUndone)
        show(as_json, undone, f"{undone.name} is let in again.")
        return 0
    accepted, _ = client.post("/admin/drain", body, DrainBegun)
    report: DrainStatus | None = None
    text = f"{accepted.name} takes no new requests; it is ended once it is idle."
    if patience is not None:
        state = wait_for(client, "/admin/desired", DesiredState, patience, lambda now: _pending_drain(now, accepted))
        report = state.drained.get(accepted.name)
        text = _drain_result(accepted, report)
    show(as_json, {**asdict(accepted), "report": report}, text)
    return 0


def _pending_drain(state: DesiredState, accepted: DrainBegun) -> str | None:
    """Return what a drain still waits for."""
    name = accepted.name
    report = state.drained.get(name)
    done = report is not None and report.state == "done"
    if accepted.kind == "engine":
        if not any(name in pool.ids for pool in state.pools):
            return None
        if done:
            return f"{name} ends"
    elif done:
        return None
    if report is None or report.active is None:
        return f"{name} is to be drained"
    return f"{name} still has {counted(report.active, 'request')}; finished: {report.finished}"


def _drain_result(accepted: DrainBegun, report: DrainStatus | None) -> str:
    name = accepted.name
    end = {
        "engine": "is drained and has ended",
        "server": "is drained; it runs on by itself",
        "frontend": "is drained and has ended",
    }[accepted.kind]
    if report is None:
        return f"{name} {end}; it served nothing."
    text = f"{name} {end} after {report.seconds:.1f} s"
    if report.finished is None:
        return f"{text}."
    text += f": {counted(report.finished, 'request')} finished"
    return text + (f", {report.cut} were cut off there and go on elsewhere where they can." if report.cut else ".")

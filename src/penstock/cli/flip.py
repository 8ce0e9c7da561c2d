"""Command ``penstock flip``: changes a worker's role for requests without restarting the engine."""

import click

from penstock.cli.shared.admin_client import AdminClient
from penstock.cli.shared.cluster_names import workers
from penstock.cli.shared.cluster_options import cluster_options
from penstock.cli.shared.output import json_option, show
from penstock.cli.shared.waiting import wait_for, wait_options
from penstock.frontend.admin.admin_answers import ClusterStatus
from penstock.kernel.plurals import counted
from penstock.runtime.cluster_state.fleet_api import Flipped

EPILOG = """\b
Examples:
  penstock flip decode-1 prefill          it finishes its requests, then it only prefills
  penstock flip decode-1 aggregated       it does all of a request
  penstock flip decode-1 --undo           it does again what its pool is for

The engine runs on and keeps its cache. While it finishes, the others take its share: flip one after the other.
"""


@click.command("flip", epilog=EPILOG, short_help="Change what a worker does: prefill, decode or both.")
@click.argument("worker", shell_complete=workers)
@click.argument("role", required=False, type=click.Choice(["aggregated", "prefill", "decode"]))
@click.option(
    "--timeout",
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="Longest that its requests may take to finish; unset is supervise.drain_timeout.",
)
@click.option("--undo", is_flag=True, help="Let it do again what its pool is for.")
@wait_options
@cluster_options
@json_option
def command(
    client: AdminClient,
    worker: str,
    role: str | None,
    timeout: float | None,
    undo: bool,
    patience: float | None,
    as_json: bool,
) -> int:
    """Give WORKER another ROLE, once it has finished what it has, and wait until it serves in it."""
    if undo == (role is not None):
        raise click.UsageError("say either a role or --undo")
    accepted, _ = client.post("/admin/flip", {"name": worker, "role": role, "timeout": timeout}, Flipped)
    text = f"{worker} becomes {accepted.becomes} once it has finished what it has."
    if patience is not None:
        wait_for(client, "/admin/status", ClusterStatus, patience, lambda status: _pending_flip(status, accepted))
        text = f"{worker} is {accepted.becomes} now, and was {accepted.was}."
    show(as_json, accepted, text)
    return 0


def _pending_flip(status: ClusterStatus, accepted: Flipped) -> str | None:
    """Return what a change of role still waits for."""
    name = accepted.name
    worker = next((one for one in status.workers if one.id == name), None)
    if worker is None:
        return f"{name} is away"
    if worker.role != accepted.becomes:
        return f"{name} is {worker.role} and {worker.state}, with {counted(worker.active_requests, 'request')}"
    return None if worker.state == "ready" else f"{name} is {worker.state}"

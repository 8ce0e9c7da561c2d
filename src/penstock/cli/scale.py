"""Command ``penstock scale``: sets the desired replicas of pools, and waits until they are ready."""

import re
from collections.abc import Mapping

import click
from msgspec.structs import asdict

from penstock.cli.shared.admin_client import AdminClient
from penstock.cli.shared.cluster_names import pools as pools_of
from penstock.cli.shared.cluster_options import cluster_options
from penstock.cli.shared.output import json_option, show
from penstock.cli.shared.waiting import NotDone, wait_for, wait_options
from penstock.cli.shared.worker_tables import replica_text
from penstock.kernel.plurals import counted
from penstock.runtime.cluster_state.desired_state import DrainStatus
from penstock.runtime.cluster_state.fleet_api import DesiredPool, DesiredState, PoolScaled, PoolsScaled, ScaleBody

EPILOG = """\b
Examples:
  penstock scale                          show the pools
  penstock scale main=6
  penstock scale small-main=2 large-main=0 --no-wait

With several models a pool is named MODEL-POOL. Engines that go are drained first: they finish their requests, for at
most supervise.drain_timeout. A pool of servers that were attached by URL can't be scaled; drain takes one out.
"""

_PAIR = re.compile(r"(?P<pool>[^=\s]+)=(?P<replicas>-?\d{1,9})\Z")


@click.command("scale", epilog=EPILOG, short_help="Change how many engines pools have.")
@click.argument("pools", nargs=-1, metavar="[POOL=N]...", shell_complete=pools_of)
@wait_options
@cluster_options
@json_option
def command(client: AdminClient, pools: tuple[str, ...], patience: float | None, as_json: bool) -> int:
    """Change how many engines pools have, and wait until they do. Without arguments it shows the pools."""
    requested = dict(map(_parsed_pool_replicas, pools))
    state = client.get("/admin/desired", DesiredState).pools
    if not pools:
        text = "\n".join(map(line_of, state)) or "No supervisor reports a pool at present; 'penstock status' says more."
        show(as_json, {"pools": state}, text)
        return 0
    before = {pool.name: pool for pool in state}
    accepted, _ = client.post("/admin/scale", ScaleBody(requested), PoolsScaled)
    reached: dict[str, DesiredPool] = {}
    drained: list[DrainStatus] = []
    if patience is not None:
        after = wait_for(
            client, "/admin/desired", DesiredState, patience, lambda state: _late_pools(state, accepted.pools, before)
        )
        reached = {pool.name: pool for pool in after.pools if pool.name in accepted.pools}
        drained = [after.drained[name] for name in sorted(_removed(before, reached)) if name in after.drained]
    now = {name: {**asdict(change), "now": reached.get(name)} for name, change in accepted.pools.items()}
    lines = [drain_line(report) for report in drained]
    for name, change in accepted.pools.items():
        wished = f"pool {name}: {change.was} -> {change.wanted} wished"
        lines.append(f"{line_of(reached[name])} (before: {change.was})" if name in reached else wished)
    show(as_json, {"pools": now, "drained": drained}, "\n".join(lines))
    return 0


def line_of(pool: DesiredPool) -> str:
    """Return the state of a pool in one line."""
    states = [f"{replica.id} is {replica_text(replica)}" for replica in pool.replicas or () if replica.state != "ready"]
    text = f"pool {pool.name} of {pool.model}: {pool.serving} of {pool.desired} ready"
    if pool.problem:
        states.append(pool.problem)
    return text + (f"; {', '.join(states)}" if states else "")


def drain_line(report: DrainStatus) -> str:
    """Return the outcome of a drain in one line."""
    text = f"{report.name} was drained in {report.seconds:.1f} s: {counted(report.finished or 0, 'request')} finished"
    return text + (f", {report.cut} were cut off there and go on elsewhere where they can" if report.cut else "")


def _removed(before: Mapping[str, DesiredPool], after: Mapping[str, DesiredPool]) -> set[str]:
    """Return the replicas of some pools that are no longer there."""
    return {id for name in after for id in before[name].ids} - {id for pool in after.values() for id in pool.ids}


def _parsed_pool_replicas(text: str) -> tuple[str, int]:
    match = _PAIR.match(text)
    if match is None:
        raise click.UsageError(f"{text!r} is not POOL=N, such as main=4")
    return match["pool"], int(match["replicas"])


def _late_pools(
    state: DesiredState, accepted: Mapping[str, PoolScaled], before: Mapping[str, DesiredPool]
) -> str | None:
    """Return which pools have not reached their desired replicas.

    Raises:
        NotDone: a new engine can't be started; the cluster keeps trying.
    """
    pools = {pool.name: pool for pool in state.pools}
    missing = []
    for name, change in accepted.items():
        pool = pools.get(name)
        if pool is None:
            missing.append(f"pool {name} is not reported at present")
            continue
        if pool.problem:
            raise NotDone(f"pool {name}: {pool.problem}")
        known = before[name].ids if name in before else []
        for replica in pool.replicas or ():
            if replica.state == "failed" and replica.id not in known:
                hint = f"it is tried again and again; 'penstock scale {name}={change.was}' ends that"
                raise NotDone(f"{replica.id} does not start: {replica.reason}", hint=hint)
        if pool.revision != change.revision or not pool.settled:
            missing.append(line_of(pool))
    return "; ".join(missing) or None

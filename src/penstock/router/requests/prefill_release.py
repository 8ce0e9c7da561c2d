"""Releases prefill KV that no decode worker will fetch."""

from penstock.kernel.values import Target, WorkerCard, WorkerId
from penstock.router.events import Abort, Release
from penstock.router.model_pool import ModelPool
from penstock.router.requests.routed_request import Remote, RoutedRequest
from penstock.router.requests.stage_graph import AT_ONCE
from penstock.router.router_state import RouterState

OWED_MAX = 1024
"""Most held prefills that wait for a worker to fetch them; the oldest are left to their time-out."""


def source_of(core: RouterState, request: RoutedRequest) -> WorkerCard | None:
    """Return the worker that holds, or makes, a request's KV; None where that worker is gone."""
    remote = request.remote
    worker = None if remote is None else core.roster.get(remote.target.worker)
    return None if worker is None or remote is None or worker.card.incarnation != remote.epoch else worker.card


def let_go(core: RouterState, request: RoutedRequest, pool: ModelPool) -> None:
    """Release KV that a worker holds and that is not needed any more: another worker fetches it and drops it.

    Where no such worker is there, it is done once one comes (`settle`); the engine's own time-out may be sooner.
    """
    remote, source = request.remote, source_of(core, request)
    if remote is None or source is None or remote.stage != "prefill" or remote.protocol in AT_ONCE:
        return
    last = request.target.worker if request.target is not None else None
    taker = _taker(core, pool, last)
    pool.counts.handoffs["released"] += 1
    core.out.append(Release(id=request.id, attempt=remote.attempt, source=source, target=taker))
    if taker is None:
        pool.roles.pending_releases.append((request.id, remote.attempt, source))
        del pool.roles.pending_releases[:-OWED_MAX]
        core.note(
            "kv_stranded",
            f"{source.id} holds KV of request {request.id}, which no request needs, and no worker can fetch it",
            request=request.id,
            worker=source.id,
        )


def settle(core: RouterState, pool: ModelPool) -> None:
    """A worker has come: let it fetch the KV that waits for its release."""
    taker = _taker(core, pool, None) if pool.roles.pending_releases else None
    if taker is None:
        return
    owed, pool.roles.pending_releases = pool.roles.pending_releases, []
    for id, attempt, source in owed:
        holder = core.roster.get(source.id)
        if holder is not None and holder.card.incarnation == source.incarnation:
            core.out.append(Release(id=id, attempt=attempt, source=source, target=taker))


def _taker(core: RouterState, pool: ModelPool, last: WorkerId | None) -> WorkerCard | None:
    """Return a worker that can fetch KV, rather not the one that was ``last`` to try."""
    takers = [
        worker.card
        for worker in core.roster
        if worker.card.model == pool.model and worker.state == "ready" and pool.roles.speaks(worker.card)
    ]
    return min(takers, key=lambda card: (card.id == last, card.role != "decode"), default=None)


def abandon(core: RouterState, request: RoutedRequest, pool: ModelPool, remote: Remote) -> None:
    """A request ends while a worker holds or makes something for it: nothing is to stay held or running."""
    if remote.stage == "encode" or remote.protocol in AT_ONCE:
        abort_remote(core, request, "the request has ended")
    elif not request.on_worker:
        # A prefill that runs is not aborted: if it is done this very moment, the router would not know what it holds.
        let_go(core, request, pool)
    # Where a worker fetches it already, that is not cut before its first token (`Abort`), and then nothing is held.
    core.unstage(request, pool)


def abort_remote(core: RouterState, request: RoutedRequest, reason: str) -> None:
    """Stop a stage before the last."""
    remote = request.remote
    if remote is not None and not remote.done:
        abort(core, request, remote.attempt, remote.target, reason)


def abort(core: RouterState, request: RoutedRequest, attempt: int, target: Target, reason: str) -> None:
    core.out.append(Abort(id=request.id, attempt=attempt, target=target, reason=reason))
    worker = core.roster.get(target.worker)
    if worker is not None:
        worker.breaker.released()

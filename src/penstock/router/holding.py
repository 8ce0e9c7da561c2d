"""Who lets go of what one worker holds for another? KV of a prefill that nobody wants any more."""

from typing import TYPE_CHECKING

from penstock.kernel.values import Target, WorkerCard, WorkerId
from penstock.router.events import Abort, Release
from penstock.router.flow import AT_ONCE
from penstock.router.pool import Pool
from penstock.router.request import Request

if TYPE_CHECKING:
    from penstock.router.core import Core

OWED_MAX = 1024
"""Most held prefills of which is remembered that somebody is to fetch them; the oldest are left to their time-out."""


def source_of(core: "Core", request: Request) -> WorkerCard | None:
    """Return the worker that holds, or makes, a request's KV; None where that is gone."""
    remote = request.remote
    worker = None if remote is None else core.roster.get(remote.target.worker)
    return None if worker is None or remote is None or worker.card.incarnation != remote.epoch else worker.card


def let_go(core: "Core", request: Request, pool: Pool) -> None:
    """See that a worker does not hold KV that nobody wants: another one fetches it and drops it.

    Where no such worker is there, it is done once one comes (`settle`); the engine's own time-out may be sooner.
    """
    remote, source = request.remote, source_of(core, request)
    if remote is None or source is None or remote.stage != "prefill" or remote.protocol in AT_ONCE:
        return
    last = request.target.worker if request.target is not None else None
    taker = _taker(core, pool, last)
    pool.handoffs["released"] += 1
    core.out.append(Release(id=request.id, attempt=remote.attempt, source=source, target=taker))
    if taker is None:
        pool.owed.append((request.id, remote.attempt, source))
        del pool.owed[:-OWED_MAX]
        core.note(
            "kv_stranded",
            f"{source.id} holds KV of request {request.id}, which nobody wants: no worker is there that could fetch it",
            request=request.id,
            worker=source.id,
        )


def settle(core: "Core", pool: Pool) -> None:
    """A worker has come: let it fetch what is held for nobody."""
    taker = _taker(core, pool, None) if pool.owed else None
    if taker is None:
        return
    owed, pool.owed = pool.owed, []
    for id, attempt, source in owed:
        holder = core.roster.get(source.id)
        if holder is not None and holder.card.incarnation == source.incarnation:
            core.out.append(Release(id=id, attempt=attempt, source=source, target=taker))


def _taker(core: "Core", pool: Pool, last: WorkerId | None) -> WorkerCard | None:
    """Return a worker that can fetch KV, rather not the one that was ``last`` to try."""
    takers = [
        worker.card
        for worker in core.roster
        if worker.card.model == pool.model and worker.state == "ready" and pool.speaks(worker.card)
    ]
    return min(takers, key=lambda card: (card.id == last, card.role != "decode"), default=None)


def abandon(core: "Core", request: Request, pool: Pool) -> None:
    """A request ends, whatever its stages are at: nothing is to stay held or running for it."""
    remote = request.remote
    if remote is None:
        return
    if remote.stage == "encode" or remote.protocol in AT_ONCE:
        abort_remote(core, request, "the request has ended")
    elif not request.on_worker:
        # A prefill that runs is not aborted: if it is done this very moment, nobody would know what it holds.
        let_go(core, request, pool)
    # Where a worker fetches it already, that is not cut before its first token (`Abort`), and then nothing is held.
    core.unstage(request, pool)


def abort_remote(core: "Core", request: Request, reason: str) -> None:
    """Stop a stage before the last."""
    remote = request.remote
    if remote is not None and not remote.done:
        abort(core, request, remote.attempt, remote.target, reason)


def abort(core: "Core", request: Request, attempt: int, target: Target, reason: str) -> None:
    core.out.append(Abort(id=request.id, attempt=attempt, target=target, reason=reason))
    worker = core.roster.get(target.worker)
    if worker is not None:
        worker.breaker.released()

"""Who lets go of what one worker holds for another? KV of a prefill that nobody wants any more."""

from typing import TYPE_CHECKING

from penstock.kernel.values import Target, WorkerCard
from penstock.router.events import Abort, Release
from penstock.router.flow import AT_ONCE
from penstock.router.pool import Pool
from penstock.router.request import Request

if TYPE_CHECKING:
    from penstock.router.core import Core


def source_of(core: "Core", request: Request) -> WorkerCard | None:
    """Return the worker that holds, or makes, a request's KV; None where that is gone."""
    remote = request.remote
    worker = None if remote is None else core.roster.get(remote.target.worker)
    return None if worker is None or remote is None or worker.card.epoch != remote.epoch else worker.card


def let_go(core: "Core", request: Request, pool: Pool) -> None:
    """See that a worker does not hold KV that nobody wants: another one fetches it and drops it."""
    remote, source = request.remote, source_of(core, request)
    if remote is None or source is None or remote.stage != "prefill" or remote.protocol in AT_ONCE:
        return
    takers = [
        worker
        for worker in core.roster
        if worker.card.model == pool.model and worker.state == "ready" and pool.speaks(worker.card)
    ]
    last = request.target.worker if request.target is not None else None
    taker = min(takers, key=lambda worker: (worker.card.id == last, worker.card.role != "decode"), default=None)
    pool.handoffs["released"] += 1
    core.out.append(
        Release(id=request.id, attempt=remote.attempt, source=source, target=None if taker is None else taker.card)
    )
    if taker is None:
        core.note(
            "kv_stranded",
            f"{source.id} holds KV of request {request.id}, which nobody wants, until its own time-out: no worker is "
            "there that could fetch it",
            request=request.id,
            worker=source.id,
        )


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

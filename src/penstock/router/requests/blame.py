"""Blame for failed attempts: the worker's, or the request's own where it fails alike on two workers."""

import msgspec

from penstock.kernel.machine import Nanos, nanos, seconds
from penstock.kernel.values import WorkerId
from penstock.router.events import Failed
from penstock.router.requests.routed_request import RoutedRequest, UnprovenFault
from penstock.router.router_state import RouterState
from penstock.router.workers.roster import RosterWorker

NOBODY = WorkerId("")
"""In the place of a worker: such a failure is the request's."""


def blame(
    core: RouterState,
    now: Nanos,
    request: RoutedRequest,
    name: WorkerId,
    placed: Nanos,
    event: Failed,
    *,
    at_fault: bool | None = None,
) -> None:
    """An attempt has failed on a worker: count that, or wait for the request's next attempt to show whose fault it is.

    One prompt can break every engine that gets it, so a failure counts against its worker only once another worker has
    answered the same request, or none can try. Where two fail alike, the request is at fault, not they; where both
    answered with an error, it is tried no further.

    Args:
        placed: when the attempt was sent.
        at_fault: whether the worker may be, where the router knows that better than the event.
    """
    worker = core.roster.get(name)
    if worker is None:
        return
    if not (event.worker_at_fault if at_fault is None else at_fault):
        worker.breaker.released()
        return
    fault = UnprovenFault(name, worker.card.incarnation, placed, event.status, event.reason)
    fetches = request.phase == "prefill" and request.handed
    if not event.received or fetches or (event.status is None and request.phase == "streaming"):
        # No prompt did that: the engine never had it, or could not get its KV, or had answered until its end.
        return _count(core, now, fault)
    earlier, request.unproven = request.unproven, fault
    if earlier is None:
        return
    if earlier.worker == name or earlier.status != event.status:
        return _count(core, now, earlier)
    request.unproven = None
    if event.status is not None:
        request.at_fault = f"it failed alike on {earlier.worker}, so it is tried no further"
    else:  # engines that hang up may have been killed, one after the other: another may try, and counts against nobody
        request.unproven = msgspec.structs.replace(fault, worker=NOBODY)
    worker.breaker.released()
    # Two broken workers look the same as one such request, so the first one is counted where nobody proves it healthy.
    first = core.roster.get(earlier.worker)
    if first is not None:
        answered = first.breaker.answered
        healthy = answered is not None and now - answered <= nanos(core.settings.breaker.open_for)
        if healthy or first.breaker.until is not None:
            first.breaker.released()
        else:
            _count(core, now, earlier)


def settle_blame(core: RouterState, now: Nanos, request: RoutedRequest) -> None:
    """The request was answered elsewhere, or has ended: a failure that was not proven yet is its worker's."""
    fault, request.unproven = request.unproven, None
    if fault is not None:
        _count(core, now, fault)


def works(core: RouterState, now: Nanos, request: RoutedRequest, worker: RosterWorker, placed: Nanos) -> None:
    """A worker has answered a request: that is to its credit, and proves a failure before to be another's."""
    worker.breaker.answered = now
    if request.unproven is not None:
        settle_blame(core, now, request)
    if worker.breaker.recent and worker.breaker.succeeded(placed, core.settings.breaker):
        core.note("breaker_closed", f"worker {worker.card.id} answers again", worker=worker.card.id)


def _count(core: RouterState, now: Nanos, fault: UnprovenFault) -> None:
    """Count a failure against its worker, and open its breaker where that was one too many."""
    worker = core.roster.get(fault.worker)
    if worker is None or worker.card.incarnation != fault.epoch:
        return
    worker.failures += 1
    worker.failed = (now, fault.reason)
    breaker = worker.breaker
    if breaker.failed(now, fault.placed, core.settings.breaker) and breaker.until is not None:
        core.roster.changed()
        core.note(
            "breaker_opened",
            f"worker {fault.worker} takes no requests for {seconds(breaker.until - now):.1f} s: "
            f"{breaker.failures} of its last {len(breaker.recent)} requests failed, the last: {fault.reason}",
            worker=fault.worker,
        )
        core.timer(breaker.until, "kick", worker.card.model)

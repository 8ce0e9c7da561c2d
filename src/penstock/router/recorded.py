"""How is a request that is over written down? `Closed`, and what its answer's tokens told, as a `RequestRecord`."""

from collections.abc import Sequence

from penstock.kernel.machine import Nanos, seconds
from penstock.kernel.records import ItlSummary, RequestLeg, RequestRecord
from penstock.router.events import Closed


def record_of(
    closed: Closed,
    *,
    offset: Nanos = 0,
    blocks: Sequence[int] | None,
    itl: ItlSummary | None,
    ttft: float | None,
    e2e: float | None,
    service_class: str | None,
    osl_wanted: int | None = None,
    turn: int | None = None,
) -> RequestRecord:
    """Write one request down.

    Args:
        offset: nanoseconds from the start of the run to time 0 of this router.
        ttft, e2e: seconds after arrival, for a stream; an unary answer has no first token to see.
        service_class: the request's context_type, the only class that a live request names.
    """

    def at(moment: Nanos | None) -> float | None:
        return None if moment is None else seconds(moment + offset)

    return RequestRecord(
        id=closed.id,
        arrival=seconds(closed.arrived + offset),
        model=closed.model,
        outcome=closed.outcome,
        fault=closed.fault,
        service_class=service_class,
        isl=closed.isl,
        osl=closed.osl,
        osl_wanted=osl_wanted,
        cached=closed.cached,
        expected_cached=closed.expected_cached,
        blocks=blocks,
        legs=[
            RequestLeg(
                role=leg.role,
                worker=str(leg.target),
                dispatched=seconds(leg.dispatched + offset),
                first=at(leg.first),
                last=at(leg.last),
                failure=leg.failure,
            )
            for leg in closed.legs
        ],
        ttft=ttft,
        e2e=e2e,
        itl=itl,
        queued=closed.queued,
        status=closed.status,
        reason=closed.reason,
        attempts=closed.attempts,
        session=closed.session,
        turn=turn,
        program=closed.program,
    )

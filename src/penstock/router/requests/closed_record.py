"""Makes the `RequestRecord` of a request that is over, from its `Closed` and the timing of its answer's tokens."""

from collections.abc import Sequence

from penstock.kernel.machine import Nanos, nanos, seconds
from penstock.kernel.request_record import BlockRange, EndedLeg, ItlSummary, RequestEnd, RequestLeg, RequestRecord
from penstock.router.events import Closed


def record_of(
    closed: Closed,
    *,
    offset: Nanos = 0,
    blocks: Sequence[int | BlockRange] | None,
    itl: ItlSummary | None,
    ttft: float | None,
    e2e: float | None,
    service_class: str | None,
    osl_requested: int | None = None,
    turn: int | None = None,
    cached_by_tier: dict[str, int] | None = None,
    ignored_hints: tuple[str, ...] = (),
    way: str = "",
    name: str | None = None,
    tenant: str | None = None,
    key: str | None = None,
    copy_of: str | None = None,
) -> RequestRecord:
    """Write one request down.

    Args:
        offset: nanoseconds from the start of the run to time 0 of this router.
        ttft, e2e: seconds after arrival, for a stream; an unary answer has no first token to observe.
        service_class: the request's context_type, the only class that a live request names.
    """
    return RequestRecord(
        id=closed.id,
        arrival=seconds(closed.arrived + offset),
        model=closed.model,
        outcome=closed.outcome,
        fault=closed.fault,
        service_class=service_class,
        isl=closed.isl,
        osl=closed.osl,
        osl_requested=osl_requested,
        cached=closed.cached,
        expected_cached=closed.expected_cached,
        cached_by_tier=cached_by_tier,
        blocks=blocks,
        legs=[
            RequestLeg(
                role=leg.role,
                worker=str(leg.target),
                dispatched=seconds(leg.dispatched + offset),
                first=None if leg.first is None else seconds(leg.first + offset),
                last=None if leg.last is None else seconds(leg.last + offset),
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
        ignored_hints=ignored_hints,
        way=way,
        name=name,
        media=closed.media,
        media_cached=closed.media_cached,
        tenant=tenant,
        key=key,
        copy_of=copy_of,
    )


def closed_of(record: RequestRecord) -> RequestEnd:
    """Return a record as a running cluster reports an end: times in nanoseconds since the start of the run."""

    def after(seconds: float | None) -> int | None:
        return None if seconds is None else nanos(record.arrival + seconds)

    return RequestEnd(
        id=record.id,
        model=record.model,
        outcome=record.outcome,
        fault=record.fault,
        status=record.status,
        reason=record.reason,
        arrived=nanos(record.arrival),
        first=after(record.ttft),
        closed=after(record.e2e),
        isl=record.isl,
        osl=record.osl,
        cached=record.cached,
        expected_cached=record.expected_cached,
        queued=record.queued,
        attempts=record.attempts,
        legs=[
            EndedLeg(role=leg.role, target=leg.worker, dispatched=nanos(leg.dispatched), failure=leg.failure)
            for leg in record.legs
        ],
        session=record.session,
        program=record.program,
        ignored_hints=record.ignored_hints,
        way=record.way,
        name=record.name,
        copy_of=record.copy_of,
    )

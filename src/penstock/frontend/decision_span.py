"""Decisions on a request's span: where it went and why, as OpenTelemetry attributes, with an event for each attempt."""

import time
from collections.abc import Mapping

from penstock.adapters.telemetry.request_span import Attribute, RequestSpan
from penstock.router.events import Closed, Decision, Dispatch
from penstock.router.selection.cost import place_of, second_of
from penstock.router.stage_graph import FINAL


def placed(span: RequestSpan, dispatch: Dispatch) -> None:
    """Note an attempt, and its decision as the span's own until another one follows."""
    attributes = _attributes(dispatch.decision)
    stage = {"penstock.attempt": dispatch.attempt, "penstock.stage": dispatch.stage}
    span.event("attempt" if dispatch.stage in FINAL else dispatch.stage, {**stage, **attributes})
    _set_attributes(span, attributes)


def ended(span: RequestSpan, closed: Closed, speaker: Dispatch | None) -> None:
    """End the span of a request; ``speaker``: the attempt that answered it, whose decision is the span's in the end."""
    now = time.time_ns()
    for leg in closed.legs:
        if leg.failure is not None:
            failed = {"penstock.worker": str(leg.target), "penstock.stage": leg.role, "penstock.failure": leg.failure}
            span.event("attempt_failed", failed, now - (closed.closed - (leg.last or closed.closed)))
    if speaker is not None:  # of two that raced the last one placed may have lost
        _set_attributes(span, _attributes(speaker.decision))
    _set_attributes(
        span,
        {
            "penstock.request": closed.id,
            "penstock.outcome": closed.outcome,
            "penstock.attempts": closed.attempts,
            "penstock.migrations": closed.migrations,
            "penstock.queued": closed.queued,
            "penstock.expected_cached_tokens": closed.expected_cached,
            "penstock.cached_tokens": closed.cached,
            "gen_ai.request.model": closed.model,
            "gen_ai.usage.input_tokens": closed.isl,
            "gen_ai.usage.output_tokens": closed.osl,
        },
    )
    span.end(None if closed.outcome == "ok" else closed.reason)


def _set_attributes(span: RequestSpan, attributes: Mapping[str, Attribute]) -> None:
    for name, value in attributes.items():
        span.set(name, value)


def _attributes(decision: Decision) -> dict[str, Attribute]:
    """Return a decision's reason, and what its worker and the next best one would have cost."""
    costs = decision.candidates
    place = place_of(costs, decision.chosen)
    attributes: dict[str, Attribute] = {
        "penstock.worker": str(decision.chosen),
        "penstock.decision.reason": decision.reason,
        "penstock.decision.mode": decision.mode,
        "penstock.decision.candidates": len(costs),
        "penstock.decision.excluded": len(decision.excluded),
    }
    if place is not None:
        mine = costs[place]
        attributes |= {
            "penstock.decision.cost": mine.total,
            "penstock.decision.cost_unit": mine.unit,
            "penstock.decision.overlap_blocks": mine.overlap_blocks,
            "penstock.decision.overlap_tokens": mine.overlap_tokens,
        }
        if len(costs) > 1:
            target, total = second_of(costs, place)
            attributes |= {"penstock.decision.runner_up": str(target), "penstock.decision.runner_up_cost": total}
    return attributes

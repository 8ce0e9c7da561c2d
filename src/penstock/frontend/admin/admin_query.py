"""Query parameters of admin routes: limit, before, worker and scope, checked."""

import math
from dataclasses import dataclass

from aiohttp import web

from penstock.frontend.http.error_responses import rejected
from penstock.kernel.machine import Nanos, nanos

LIMIT_MAX = 1000
SECONDS_MAX = 1e9


@dataclass(frozen=True, slots=True)
class QueryLimits:
    """The newest ``limit`` records until ``before``, a time of the run; for decisions, only those for one worker."""

    limit: int
    before: Nanos | None
    worker: str | None


def limits_of(request: web.Request) -> QueryLimits:
    """Read limit, before and worker.

    Raises:
        ClientError: 400.
    """
    text = request.query.get("limit", "50")
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= LIMIT_MAX or len(text) > 9:
        raise rejected(f"limit must be a whole number 1..{LIMIT_MAX}", "limit")
    before = seconds_of(request, "before")
    return QueryLimits(int(text), None if before is None else nanos(before), request.query.get("worker"))


def seconds_of(request: web.Request, name: str, what: str = "seconds since the start of the run") -> float | None:
    """Read a time of the run, in seconds since its start, or ``what`` else; None where it is not given.

    Raises:
        ClientError: 400.
    """
    text = request.query.get(name)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= SECONDS_MAX:  # NaN is in no range
        raise rejected(f"{name} must be {what}, 0 to {SECONDS_MAX:g}", name)
    return seconds


def of_this_process(request: web.Request) -> bool:
    """Return whether the request is for this frontend process alone, as requests of its peers are."""
    return request.query.get("scope") == "process"

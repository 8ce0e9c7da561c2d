"""What-if replay: what other settings would have decided, request by request, by a router beside the replayed one.

The other router has the same workers, caches and load: each request goes where it really went, so that every decision
is repeated in the state that it was made in. So effects do not add up from one decision to the next; a simulation of
the same requests shows what they would have come to together.
"""

from collections.abc import Sequence

import msgspec

from penstock.kernel.journal_frames import Header
from penstock.kernel.machine import Effect, Event, Nanos
from penstock.kernel.values import RequestId, Slo, Target
from penstock.router.events import (
    Arrived,
    Cancelled,
    Closed,
    Dispatch,
    Failed,
    Finished,
    FirstToken,
    Grown,
    SettingsChanged,
    Staged,
)
from penstock.router.journal import router_of
from penstock.router.requests.scheduling import preview
from penstock.router.routed_request import RoutedRequest
from penstock.router.router import Router
from penstock.router.settings import HedgeSettings, IndexKind, OverloadSettings, RouterSettings

_MANY = 1 << 30


class Other(msgspec.Struct, frozen=True, kw_only=True):
    """One decision as it was, and as it would have been. Tokens; seconds.

    ``cached`` and ``ahead`` (prefill tokens before its first token, its own included) are what the other router
    expects of the worker that was taken, ``other_cached`` and ``other_ahead`` of the one that it would have taken.
    """

    request: RequestId
    attempt: int
    at: Nanos
    was: Target
    would_be: Target
    reason: str
    cached: int
    other_cached: int
    ahead: int
    other_ahead: int
    ttft: float | None
    other_ttft: float | None
    """Predicted from what was ahead, by the line through what was measured so far; None before there is one."""

    @property
    def moved(self) -> bool:
        return self.was != self.would_be


class WhatIf:
    """Follow a router that is replayed, with other settings.

    Args:
        header: of the segment at which the replay begins.
        settings, slo: the other settings. Queues and limits do not hold here: only where to place is decided again.
    """

    def __init__(self, header: Header, settings: RouterSettings, slo: Slo) -> None:
        index = settings.index
        recorded = msgspec.convert(header.made["settings"], RouterSettings)
        if recorded.indexed and not settings.indexed:
            # The caches are looked up, whether or not they would weigh.
            kind: IndexKind = "exact" if recorded.hears_engines else "approximate"
            index = msgspec.structs.replace(index, kind=kind)
        self._router = router_of(
            header,
            msgspec.structs.replace(
                settings,
                index=index,
                queue=msgspec.structs.replace(settings.queue, threshold=None),
                overload=OverloadSettings(),
                hedge=HedgeSettings(),
                inflight_max=_MANY,
            ),
            slo,
        )
        self._first: dict[RequestId, int] = {
            request.id: request.current - 1 for request in self._router.requests.values() if request.on_worker
        }
        """Attempts of each open request before the one that runs here."""

    def follow(self, now: Nanos, event: Event, effects: Sequence[Effect], recorded: Router) -> list[Other]:
        """Take one record of the journal, with what came of it; return what would have been decided.

        Args:
            recorded: the router that is replayed, after the event.
        """
        router, first = self._router, self._first
        if isinstance(event, Staged):
            event = FirstToken(id=event.id, attempt=event.attempt)
        if isinstance(event, (FirstToken, Finished, Grown, Failed)):
            before = first.get(event.id)
            if before is not None and event.attempt == before + 1:
                event = msgspec.structs.replace(event, attempt=1)
                if isinstance(event, Failed):  # it counts against the worker; where it goes next comes as it was
                    event = msgspec.structs.replace(event, retryable=False, resume=None)
                router.handle(now, event)
        elif isinstance(event, Cancelled):
            self._end(now, event.id)
        elif not isinstance(event, (Arrived, SettingsChanged)):
            router.handle(now, event)
        found = []
        for effect in effects:
            if isinstance(effect, Dispatch):
                other = self._ask(now, effect, recorded.requests[effect.id])
                if other is not None:
                    found.append(other)
            elif isinstance(effect, Closed):
                self._end(now, effect.id)
        return found

    def _ask(self, now: Nanos, placed: Dispatch, request: RoutedRequest) -> Other | None:
        router, target, event = self._router, placed.target, request.event
        self._end(now, placed.id)
        asked = preview(router, request, placed, now)
        wish = msgspec.structs.replace(event.preferences, worker=target.worker, rank=target.rank, allowed=None)
        # Each stage stands there by itself, for as long as it lasts: where it went is not to be decided again.
        router.handle(
            now, msgspec.structs.replace(event, prompt=request.prompt, preferences=wish, deadline=None, whole=True)
        )
        if placed.id in router.requests:
            self._first[placed.id] = placed.attempt - 1
        if asked is None:
            return None
        choice, was = asked
        line = router.pools[event.model].speeds.fit.line()

        def ttft(ahead: int) -> float | None:
            return None if line is None else line[0] + line[1] * ahead

        would = choice.cost
        isl = request.prompt.isl
        ahead = was.active_prefill_tokens + isl - was.overlap_tokens
        other_ahead = would.active_prefill_tokens + isl - would.overlap_tokens
        return Other(
            request=placed.id,
            attempt=placed.attempt,
            at=now,
            was=target,
            would_be=would.target,
            reason=choice.reason,
            cached=was.overlap_tokens,
            other_cached=would.overlap_tokens,
            ahead=ahead,
            other_ahead=other_ahead,
            ttft=ttft(ahead),
            other_ttft=ttft(other_ahead),
        )

    def _end(self, now: Nanos, request: RequestId) -> None:
        self._first.pop(request, None)
        if request in self._router.requests:
            self._router.handle(now, Cancelled(id=request))

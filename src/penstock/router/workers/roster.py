"""Roster of workers, from joining to gone: readiness, drain and cordons by a table of transitions, circuit breakers."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Literal, NamedTuple

import msgspec

from penstock.kernel.errors import InvariantError
from penstock.kernel.machine import Nanos, nanos, state_of, take_state
from penstock.kernel.values import Target, WorkerCard, WorkerId
from penstock.router.events import Excluded
from penstock.router.settings import OPEN_MAX, BreakerSettings

BreakerState = Literal["closed", "open", "half_open"]


class CircuitBreaker(msgspec.Struct):
    """Closed lets all through; open none until a time; half-open exactly one, whose end decides.

    The wait doubles with each failed try up to `OPEN_MAX` and is forgotten at the first success.
    """

    recent: list[bool] = []
    """Of its last requests, twice as many failures as open it, whether each failed; it begins with one that did."""
    answered: Nanos | None = None
    """When it last gave a request its first token."""
    opened: int = 0
    """Times in a row that it opened."""
    until: Nanos | None = None
    """Open before this time; None when closed."""
    trying: bool = False
    """The one request of the half-open state is on its way."""

    @property
    def failures(self) -> int:
        """Failures among its last requests."""
        return sum(self.recent)

    def state(self, now: Nanos) -> BreakerState:
        if self.until is None:
            return "closed"
        return "open" if now < self.until else "half_open"

    def allows(self, now: Nanos) -> bool:
        """Tell whether a request may go there now."""
        return self.until is None or (now >= self.until and not self.trying)

    def dispatched(self, now: Nanos) -> None:
        """A request goes there although it is not closed: the one that tries, unless it is still open."""
        self.trying = self.trying or self.state(now) == "half_open"

    def succeeded(self, placed: Nanos, settings: BreakerSettings) -> bool:
        """A request that was placed at ``placed`` got its first token; return True where that closes the breaker."""
        if self.until is None:
            self._record(False, settings)
            return False
        if placed < self.until:
            return False  # sent before the wait was over: it says nothing about the time since
        self.recent, self.opened, self.until, self.trying = [], 0, None, False
        return True

    def released(self) -> None:
        """A request ended without a verdict (its client left): let another try."""
        self.trying = False

    def failed(self, now: Nanos, placed: Nanos, settings: BreakerSettings) -> bool:
        """A request that was placed at ``placed`` failed by the worker's fault; return True where that opens it."""
        if self.until is None:
            self._record(True, settings)
            if self.failures < settings.failures:
                return False
        elif placed < self.until:
            return False
        self.until = now + nanos(min(OPEN_MAX, settings.open_for * 2.0**self.opened))
        self.opened += 1
        self.trying = False
        return True

    def _record(self, failure: bool, settings: BreakerSettings) -> None:
        self.recent.append(failure)
        del self.recent[: -2 * settings.failures]
        while self.recent and not self.recent[0]:
            del self.recent[0]


State = Literal["joined", "ready", "draining"]
Move = Literal["ready", "drain"]

TRANSITIONS: Mapping[tuple[State, Move], State] = {
    ("joined", "ready"): "ready",
    ("joined", "drain"): "draining",
    ("ready", "ready"): "ready",
    ("ready", "drain"): "draining",
    ("draining", "drain"): "draining",
    # A draining worker does not come back: it rejoins with a newer epoch.
}
"""State and move -> state. Leaving is possible from every state; cordons and breakers lie across all of them."""


class RosterWorker(msgspec.Struct):
    """One worker as the router knows it."""

    card: WorkerCard
    state: State
    since: Nanos
    cordons: list[str] = []
    """Reasons that keep it out of the candidates, an operator's or a canary's."""
    doubts: list[str] = []
    """Reasons that keep it out while another worker is left, as an open breaker does: it is silent, and may be busy."""
    breaker: CircuitBreaker = msgspec.field(default_factory=CircuitBreaker)
    requests: int = 0
    failures: int = 0
    failed: tuple[Nanos, str] | None = None
    """When a request last failed by its fault, and why."""
    speed: tuple[float, float, float, float] | None = None
    """(prefill intercept s, prefill s/token, decode base s, decode s/KV block), as it measured itself."""

    @property
    def targets(self) -> tuple[Target, ...]:
        return _targets(self.card.id, self.card.ranks)

    def why_not(self, now: Nanos, *, doubts: bool = True) -> str | None:
        """Return why it is no candidate now, None where it is one. ``doubts``: whether those about its health count."""
        if self.state != "ready":
            return f"is {self.state}"
        if self.cordons:
            return f"is cordoned: {self.cordons[0]}"
        if doubts and self.doubts:
            return self.doubts[0]
        breaker = self.breaker
        if doubts and breaker.until is not None and not breaker.allows(now):
            return (
                f"breaker is {breaker.state(now)}: {breaker.failures} of its last {len(breaker.recent)} requests failed"
            )
        return None


@lru_cache(maxsize=4096)
def _targets(worker: WorkerId, ranks: int) -> tuple[Target, ...]:
    """Return a worker's targets; they are needed with every request, for every worker."""
    return tuple(Target(worker, rank) for rank in range(ranks))


def _candidates_of(worker: RosterWorker) -> tuple[RosterWorker, list[tuple[Target, RosterWorker]]]:
    return worker, [(target, worker) for target in worker.targets]


class RosterState(msgspec.Struct):
    """State of a `Roster`."""

    workers: dict[WorkerId, RosterWorker]
    epochs: dict[WorkerId, int]
    stale: int


class UsualCandidates(NamedTuple):
    """What a request without wishes finds of a model: candidates, and those excluded by their state.

    ``isl_max``: the least maximum context length of the candidates; a longer prompt has to look at each.
    """

    targets: list[tuple[Target, RosterWorker]]
    excluded: list[Excluded]
    isl_max: float


class Roster:
    """All workers by id. An event about an epoch that is not the present one is ignored and counted."""

    def __init__(self) -> None:
        self.workers: dict[WorkerId, RosterWorker] = {}
        self.places: dict[WorkerId, tuple[RosterWorker, list[tuple[Target, RosterWorker]]]] = {}
        """The same, each with its targets as candidates: all of the fleet is looked at with every request."""
        self.epochs: dict[WorkerId, int] = {}
        """Last known epoch of every worker, gone ones included, so that a late event of theirs is known as late."""
        self.stale = 0
        self.changes = 0
        """How often `changed` was called."""
        self._usual: dict[str, UsualCandidates] = {}
        """By model, until anything about a worker changes."""

    def __iter__(self) -> Iterator[RosterWorker]:
        return iter(self.workers.values())

    def get(self, worker: WorkerId) -> RosterWorker | None:
        return self.workers.get(worker)

    def changed(self) -> None:
        """What makes a worker a candidate has changed: its state, its cordons, its breaker or its card."""
        self.changes += 1
        self._usual.clear()

    def usual(self, model: str) -> UsualCandidates | None:
        """Return the candidates of a model for a request without wishes; None while a breaker makes it depend on time.

        Cost: constant, but for the first call after a change.
        """
        known = self._usual.get(model)
        if known is None:
            places = [place for place in self.places.values() if place[0].card.model == model]
            if any(worker.breaker.until is not None for worker, _ in places):
                return None
            known = self._usual[model] = UsualCandidates([], [], float("inf"))
            for worker, targets in places:
                reason = worker.why_not(0)
                if reason is None:
                    known.targets.extend(targets)
                else:
                    known.excluded.extend([Excluded(target=target, reason=reason) for target, _ in targets])
            lengths = [
                worker.card.max_model_len for _, worker in known.targets if worker.card.max_model_len is not None
            ]
            known = self._usual[model] = known._replace(isl_max=min(lengths, default=known.isl_max))
        return known

    def join(self, card: WorkerCard, ready: bool, now: Nanos) -> RosterWorker | None:
        """Take a worker in; return it where it is new (or came back with a newer epoch), None where it is known.

        The same epoch again can only make a joined worker ready; an older one is stale.
        """
        known = self.workers.get(card.id)
        last = self.epochs.get(card.id)
        if last is not None and (card.epoch < last or (known is None and card.epoch == last)):
            self.stale += 1
            return None
        if known is not None and known.card.epoch == card.epoch:
            if ready and known.state == "joined":
                self.move(card.id, card.epoch, "ready", now)
            return None
        self.changed()
        worker = RosterWorker(card, "ready" if ready else "joined", now)
        self.workers[card.id] = worker
        self.places[card.id] = _candidates_of(worker)
        self.epochs[card.id] = card.epoch
        return worker

    def renew(self, card: WorkerCard, ready: bool, now: Nanos) -> None:
        """The engine of a worker that is known goes on under a newer epoch; what it has counted stays."""
        self.changed()
        worker = self.workers[card.id]
        worker.card, worker.state, worker.since = card, "ready" if ready else "joined", now
        self.places[card.id] = _candidates_of(worker)
        self.epochs[card.id] = card.epoch

    def move(self, worker: WorkerId, epoch: int, move: Move, now: Nanos) -> bool:
        """Carry out one transition; return False where it is stale, unknown or not in the table."""
        found = self.workers.get(worker)
        if found is None or found.card.epoch != epoch:
            self.stale += 1
            return False
        state = TRANSITIONS.get((found.state, move))
        if state is None:
            self.stale += 1
            return False
        if state != found.state:
            found.state = state
            found.since = now
            self.changed()
        return True

    def leave(self, worker: WorkerId, epoch: int) -> RosterWorker | None:
        """Take a worker out; return it, or None where the event is stale."""
        found = self.workers.get(worker)
        if found is None or found.card.epoch != epoch:
            self.stale += 1
            return None
        self.changed()
        del self.workers[worker], self.places[worker]
        return found

    def snapshot(self) -> RosterState:
        return state_of(self, RosterState)

    def restore(self, state: RosterState) -> None:
        take_state(self, state)
        self.places = {id: _candidates_of(worker) for id, worker in self.workers.items()}
        self.changed()

    def check(self) -> None:
        known = dict(self._usual)
        self.changed()
        if known != {model: self.usual(model) for model in known}:
            raise InvariantError("the usual candidates are not those that a fresh look finds")
        if [worker for worker, _ in self.places.values()] != list(self.workers.values()):
            raise InvariantError("the candidates are not the workers")
        for worker, entry in self.workers.items():
            if entry.card.id != worker or self.epochs.get(worker) != entry.card.epoch:
                raise InvariantError(f"worker {worker} stands in the roster with another id or epoch")
